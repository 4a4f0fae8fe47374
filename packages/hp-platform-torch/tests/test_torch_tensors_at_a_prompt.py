"""Everyday uses of tensors and modules: printing, copying, membership, devices, torch.nn."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from two_simulated_ranks import FULL, on_ranks

from hp_dtensor import (
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    clip_grad_norm_,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from hp_dtensor.exceptions import MixedOperandsError, ShardingRuleError
from hp_dtensor.testing import run_ranks


def test_what_a_print_shows():
    def rank(mesh, x):
        parameter = nn.Parameter(x)
        return repr(x), repr(parameter), repr(parameter * 2)

    for plain, parameter, result in on_ranks(rank):
        assert plain.startswith("DTensor([5, 3], torch.float32, (dp:S(0)) on mesh (dp=2), local=tensor([[")
        assert "requires_grad" not in plain
        assert parameter.startswith("Parameter of DTensor(")
        assert parameter.endswith(", requires_grad=True)")
        assert result.endswith(", grad_fn=<MulBackward0>)")


def test_membership_comparison_with_anything_and_reversal():
    def rank(mesh, x):
        assert 3.0 in x
        assert 14.0 in x
        assert 99.0 not in x
        assert (x is None) is False
        assert (x is not None) is True
        assert None not in [x]
        for call in (lambda: x + None, lambda: x + "a", lambda: x < None):
            with pytest.raises(TypeError, match=r"not supported|unsupported"):
                call()
        assert "placements" in dir(x)
        assert "sum" in dir(x)
        return torch.stack(list(reversed(x))).full_tensor()

    assert all(torch.equal(rows, FULL.flip(0)) for rows in on_ranks(rank))


def test_clipping_plain_and_distributed_parameters_by_torch_says_what_takes_both():
    def rank(mesh, x):
        parameters = [nn.Parameter(x), nn.Parameter(torch.ones(3))]
        (parameters[0].sum().full_tensor() + parameters[1].sum()).backward()
        with pytest.raises(MixedOperandsError, match=r"hp_dtensor\.clip_grad_norm_ takes plain and distributed"):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert clip_grad_norm_(parameters, 1.0) == pytest.approx((15 + 3) ** 0.5)

    on_ranks(rank)


def test_shallow_copies_share_the_data():
    def rank(mesh, x):
        parameter = nn.Parameter(x)
        twin = copy.copy(parameter)
        assert isinstance(twin, nn.Parameter)
        assert twin.requires_grad
        assert twin.is_leaf
        assert twin is not parameter
        assert twin.spec is parameter.spec
        assert twin.to_local().data_ptr() == parameter.to_local().data_ptr()
        assert not copy.copy(x).requires_grad

    on_ranks(rank)


def test_the_address_of_a_shard_is_not_that_of_the_full_tensor():
    """safetensors reads the full number of elements from it, and wrote the memory after the shard."""

    def rank(mesh, x):
        for placement in (Shard(0), Partial()):
            placed = distribute_tensor(FULL, mesh, [placement])
            with pytest.raises(ShardingRuleError, match=r"data_ptr of .*get_model_state_dict\(model"):
                placed.data_ptr()
        unsharded = x.redistribute(placements=[Replicate()])
        assert unsharded.data_ptr() == unsharded.to_local().data_ptr()

    on_ranks(rank)


def test_types_devices_and_sizes():
    def rank(mesh, x):
        assert x.cpu().spec is x.spec
        assert nn.Linear(3, 4).cpu() is not None
        assert x.type() == "torch.FloatTensor"
        assert x.type(torch.float64).dtype is torch.float64
        assert torch.result_type(x, 1.0) is torch.float32
        assert torch.result_type(x, x.double()) is torch.float64
        assert x.nbytes == 60
        assert x.itemsize == 4
        model = distribute_module(nn.Linear(3, 4), mesh).half().to("cpu").cpu().double()
        assert all(p.spec.dtype is torch.float64 and isinstance(p, nn.Parameter) for p in model.parameters())
        with pytest.raises(ShardingRuleError, match=r"x\.data = another DTensor"):
            x.set_(x.redistribute(placements=[Shard(1)]))

    on_ranks(rank)


def test_results_of_composed_functions_into_a_given_tensor():
    def rank(mesh, x):
        out = torch.zeros_like(x)
        assert F.normalize(x, dim=0, out=out) is out
        return out.full_tensor()

    for got in on_ranks(rank):
        torch.testing.assert_close(got, F.normalize(FULL, dim=0), rtol=1e-6, atol=0)  # summed in another order


INITIALIZERS = {
    "normal_": lambda x: nn.init.normal_(x, 1.0, 0.02),
    "uniform_": lambda x: nn.init.uniform_(x, -1.0, 2.0),
    "constant_": lambda x: nn.init.constant_(x, 3.0),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=0.02),
    "xavier_normal_": nn.init.xavier_normal_,
    "xavier_uniform_": lambda x: nn.init.xavier_uniform_(x, gain=2.0),
    "kaiming_normal_": lambda x: nn.init.kaiming_normal_(x, mode="fan_out"),
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "eye_": nn.init.eye_,
    "by a generator": lambda x: nn.init.normal_(x, generator=torch.Generator().manual_seed(5)),
}
PLACES = [
    (Replicate(), Shard(0)),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (RaggedShard(0, (4, 1)), Shard(1)),
]


@pytest.mark.parametrize("initialize", INITIALIZERS.values(), ids=INITIALIZERS)
def test_initializers_give_the_single_device_numbers(initialize):
    """Bit for bit, in every layout; the generator is left as one device leaves it."""
    torch.manual_seed(7)
    expected, following = initialize(torch.zeros(5, 4)), torch.rand(2)

    def rank():
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in PLACES:
            torch.manual_seed(7)
            parameter = nn.Parameter(distribute_tensor(torch.zeros(5, 4), mesh, placements))
            assert initialize(parameter) is parameter
            assert torch.equal(parameter.detach().full_tensor(), expected), placements
            assert torch.equal(torch.rand(2), following), placements

    run_ranks(rank, 4, "torch")


def test_strided_parameters_are_written_in_place():
    """Also by optimizers that take one parameter at a time."""
    unsharded = torch.arange(21.0).view(7, 3)

    def step(x):
        parameter = nn.Parameter(x)
        optimizer = torch.optim.AdamW([parameter], lr=0.5, foreach=False)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            (parameter * parameter).sum().backward()
            optimizer.step()
        with torch.no_grad():
            parameter.mul_(2).clamp_(min=1).add_(parameter)
        return parameter.detach(), nn.init.zeros_(parameter).detach()

    expected = step(unsharded.clone())

    def rank():
        mesh = init_device_mesh("cpu", (2, 2))
        return [x.full_tensor() for x in step(distribute_tensor(unsharded, mesh, (StridedShard(0, 2), Shard(0))))]

    for found in run_ranks(rank, 4, "torch"):
        assert all(torch.equal(got, wanted) for got, wanted in zip(found, expected, strict=True))


# Modules -------------------------------------------------------------------------------------------------


def test_distributed_modules_have_the_values_of_the_first_rank():
    """Models are made before they are distributed, and ranks may have drawn different numbers."""

    def rank(mesh, x):
        model = nn.BatchNorm1d(3)
        for value in (model.weight.data, model.bias.data, model.running_mean):
            value.fill_(7.0 + mesh.get_coordinate()[0])
        distribute_module(model, mesh)
        return [value.to_local() for value in (model.weight, model.bias, model.running_mean)]

    for values in on_ranks(rank):
        assert all(torch.equal(value, torch.full((3,), 7.0)) for value in values)


MODULES = {
    "batch norm": lambda: nn.BatchNorm1d(3),
    "synchronised batch norm": lambda: nn.SyncBatchNorm(3),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "weight norm, older": lambda: nn.utils.weight_norm(nn.Linear(3, 4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    "spectral norm, older": lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.ChannelShuffle(2)
    ),
    "bilinear": lambda: Twice(nn.Bilinear(3, 3, 2)),
}


class Attention(nn.Module):
    """Self-attention over rows of 6 features, heads of 3."""

    def __init__(self, need_weights, dropout=0.0, mask=None):
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, dropout=dropout, batch_first=True)
        self.need_weights = need_weights
        self.register_buffer("mask", mask)

    def forward(self, x):
        output, shares = self.inner(x, x, x, need_weights=self.need_weights, attn_mask=self.mask)
        return output if shares is None else output.mean() + shares.pow(2).mean()


def encoder_layer(norm_first=False, activation="relu"):
    return nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, norm_first=norm_first, activation=activation)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Transformer(6, 2, 1, 1, 8, 0.0, batch_first=True)

    def forward(self, x):
        return self.inner(x, x.flip(1))


ATTENTION = {
    "attention": lambda: Attention(False),
    "with weights": lambda: Attention(True),
    "dropout": lambda: Attention(False, 0.3),
    "dropout with weights": lambda: Attention(True, 0.3),
    "mask": lambda: Attention(False, mask=torch.ones(4, 4).triu(1).bool()),
    "mask of numbers with weights": lambda: Attention(True, mask=-torch.arange(16.0).view(4, 4)),
    "encoder layer": encoder_layer,
    "encoder layer, norm first": lambda: encoder_layer(True, "gelu"),
    "encoder": lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False),
    "transformer": Transformer,
}


@pytest.mark.parametrize("make", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2)], ids=str)
def test_attention_layers_of_torch(make, placement):
    """Two steps of training, dropout of the attention included, and evaluation; 3 sequences of 4 rows."""
    unsharded = torch.arange(72.0, dtype=torch.float64).view(3, 4, 6).cos()

    def train(mesh=None):
        torch.manual_seed(0)
        model, x = make().double(), unsharded
        if mesh is not None:
            distribute_module(model, mesh)
            x = distribute_tensor(x, mesh, [placement])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
        with torch.no_grad():
            return {**model.state_dict(), "evaluated": model.eval()(x)}

    expected = train()
    for got in on_ranks(lambda mesh, _: {name: x.full_tensor() for name, x in train(mesh).items()}):
        for name, value in got.items():  # sums over ranks, in another order
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_training_equals_one_device(make, placement):
    """Three steps; parameters, buffers and evaluation afterwards."""

    def train(mesh=None):
        torch.manual_seed(0)
        model, x = make(), FULL / 15
        if mesh is not None:
            distribute_module(model, mesh)
            x = distribute_tensor(x, mesh, [placement])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) ** 2).sum().backward()
            optimizer.step()
        state = model.state_dict()
        return {**state, "evaluated": model.eval()(x).detach()}

    expected = train()
    for got in on_ranks(lambda mesh, _: {name: x.full_tensor() for name, x in train(mesh).items()}):
        assert got.keys() == expected.keys()
        for name, value in got.items():  # sums over ranks, in another order
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_print_of_freed_memory_says_so():
    def rank(mesh, x):
        x.to_local().untyped_storage().resize_(0)
        return repr(x)

    assert all("local=<freed>" in text for text in on_ranks(rank))
