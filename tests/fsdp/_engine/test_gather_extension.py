"""Weights of tensor subclasses that define how they are gathered: `fsdp_pre_all_gather`, `fsdp_post_all_gather`."""

from __future__ import annotations

import pytest

from hp_dtensor import Shard, init_device_mesh
from hp_dtensor.testing import run_ranks
from hp_fsdp import FSDPStateError, FullyShardError, MixedPrecisionPolicy, fully_shard, summon_full_params

torch = pytest.importorskip("torch")
pytest.importorskip("hp_platform_torch")

from torch import nn  # noqa: E402

KEPT = "detach", "split", "slice", "new_zeros"


class Int8Weight(torch.Tensor):
    """A weight that is sent as int8 rows with a scale per row."""

    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    def __init__(self, values):
        self._values = values

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        plain = torch.utils._pytree.tree_map_only(cls, lambda x: x._values, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func.overloadpacket.__name__ not in KEPT:
            return result
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, result)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mesh.ndim == 1
        assert isinstance(mp_policy, MixedPrecisionPolicy)
        assert (outer_size, outer_stride) == (module.shape_before, (outer_size[1], 1))
        rows, scale = quantized(self._values)
        return (rows, scale), outer_size

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        rows, scale = all_gather_outputs
        values = (rows * scale).to(param_dtype)
        assert values.shape == metadata
        if out is not None:
            out.copy_(values)
            return None
        return values, (values, rows, scale)


class PaddedWeight(Int8Weight):
    """A weight that pads its last shards to the number of rows of the first one."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        (rows, scale), outer_size = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        missing = -(-outer_size[0] // mesh.size()) - rows.shape[0]
        return tuple(nn.functional.pad(x, (0, 0, 0, missing)) for x in (rows, scale)), outer_size

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        outputs = tuple(x[: metadata[0]] for x in all_gather_outputs)
        return super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)


class TrackedWeight(torch.Tensor):
    """A weight with its own memory, sent and used as bfloat16, with the old signature of the method."""

    def fsdp_pre_all_gather(self, mesh):
        plain = self.as_subclass(torch.Tensor)
        return (plain.to(torch.bfloat16),), self.factor

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        (received,) = all_gather_outputs
        if out is not None:
            out.copy_(received * metadata)
            return None
        made = (received * metadata).to(param_dtype)
        return made, (made,)


def quantized(values):
    scale = values.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (values / scale).round().to(torch.int8), scale


class Rounded(nn.Linear):
    """A linear layer on one device that rounds its weight like a gather in fewer bits."""

    kind = None

    def forward(self, x):
        if self.kind is TrackedWeight:
            sent = (self.weight.to(torch.bfloat16) * 0.5).float()
        else:
            rows, scale = quantized(self.weight)
            sent = rows * scale
        weight = self.weight + (sent - self.weight).detach()
        return nn.functional.linear(x, weight, self.bias)


def build(kind, sizes=(4, 8, 6)):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]), nn.LayerNorm(sizes[2])
    )
    for layer in (model[0], model[2]):
        layer.shape_before = layer.weight.shape
        layer.kind = kind
    return model


def with_weights(model, kind):
    for layer in (model[0], model[2]):
        if kind is TrackedWeight:
            layer.weight = nn.Parameter(layer.weight.detach().as_subclass(TrackedWeight))
            layer.weight.factor = 0.5
        else:
            layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def batch(step, rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model, batches, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        loss = sum(model(x).square().sin().mean() for x in batches(step)) / len(batches(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_one_device(kind, ranks, sizes=(4, 8, 6)):
    model = build(kind, sizes)
    for layer in (model[0], model[2]):
        layer.__class__ = Rounded
    train(model, lambda step: [batch(step, rank) for rank in range(ranks)])
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_trained(model, expected):
    for name, parameter in model.named_parameters():
        # Means over ranks in another order, through three AdamW steps.
        torch.testing.assert_close(parameter.full_tensor().detach(), expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", [Int8Weight, TrackedWeight])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2,), {}),
        ((1,), {}),
        ((2,), {"reshard_after_forward": False}),
        ((2,), {"zero_stage": 1}),
        ((2, 2), {}),
        ((4,), {"sizes": (4, 8, 4), "reshard_after_forward": 2}),
        ((2,), {"zero_stage": 0}),
    ],
)
def test_weights_gathered_in_fewer_bits_train_as_on_one_device(kind, shape, options):
    sizes = options.get("sizes", (4, 8, 6))
    options = {name: value for name, value in options.items() if name != "sizes"}
    ranks = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
    expected = on_one_device(kind, ranks, sizes)

    def rank():
        mesh = init_device_mesh("cpu", shape)
        model = with_weights(build(kind, sizes), kind)
        fully_shard(model[2], mesh, **options)
        fully_shard(model, mesh, **options)
        train(model, lambda step: [batch(step, mesh.world.rank)])
        assert_trained(model, expected)

    run_ranks(rank, ranks, "torch")


def test_a_weight_may_pad_where_rows_do_not_divide():
    expected = on_one_device(PaddedWeight, 3)

    def rank():
        mesh = init_device_mesh("cpu", (3,))
        model = with_weights(build(PaddedWeight), PaddedWeight)
        fully_shard(model, mesh)
        assert model[0].weight.to_local().shape == ((3, 4) if mesh.get_local_rank() < 2 else (2, 4))
        train(model, lambda step: [batch(step, mesh.world.rank)])
        assert_trained(model, expected)

    run_ranks(rank, 3, "torch")


def test_a_weight_that_does_not_pad_is_told_so_on_all_ranks():
    def rank():
        model = with_weights(build(Int8Weight), Int8Weight)
        fully_shard(model, init_device_mesh("cpu", (3,)))
        with pytest.raises(
            FSDPStateError, match=r"0\.weight: .*Int8Weight must return tensors of the same sizes.*pad them"
        ):
            model(batch(0, 0))

    run_ranks(rank, 3, "torch")


def test_unshard_holds_the_gathered_weight_and_reshard_frees_it():
    def rank():
        model = with_weights(build(Int8Weight), Int8Weight)
        before = model[0].weight._values.clone()
        fully_shard(model, init_device_mesh("cpu", (2,)))
        torch.testing.assert_close(model[0].weight.full_tensor().detach(), before)
        for _ in range(2):
            model.unshard()
            rows, scale = quantized(before)
            torch.testing.assert_close(model[0].weight.detach(), rows * scale)
            assert model._fsdp.group.held_bytes
            model.reshard()
            assert not model._fsdp.group.held_bytes
        with summon_full_params(model):
            torch.testing.assert_close(model[0].weight.detach(), before)

    run_ranks(rank, 2, "torch")


def test_a_written_weight_is_gathered_again():
    def rank():
        model = with_weights(build(Int8Weight), Int8Weight)
        fully_shard(model, init_device_mesh("cpu", (2,)), reshard_after_forward=False)
        x = torch.ones(1, 4)
        before = model(x)
        with torch.no_grad():
            parameter = model._fsdp.group.buffers[0].parameters[0].sharded
            parameter.data.mul_(2.0)  # a write that torch does not count
        model(x)
        rows, scale = quantized(parameter.full_tensor().detach())
        torch.testing.assert_close(model._fsdp.group.buffers[0].parameters[0].view.detach(), rows * scale)
        assert not torch.equal(before, model(x))

    run_ranks(rank, 2, "torch")


class HalfWeight(TrackedWeight):
    fsdp_post_all_gather = property()


class OddWeight(TrackedWeight):
    def fsdp_pre_all_gather(self, mesh, more):
        raise NotImplementedError


class FailingWeight(TrackedWeight):
    def fsdp_pre_all_gather(self, mesh):
        if mesh.get_local_rank() == 1:
            raise ValueError("no scale")
        return super().fsdp_pre_all_gather(mesh)


class QuantizedWeight(Int8Weight):
    """A weight that is stored in int8."""

    def __init__(self, values):
        self.rows, self.scale = quantized(values)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        assert func is torch.ops.aten.detach.default
        return cls(args[0].rows * args[0].scale)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (HalfWeight, "weight: HalfWeight .* lacks fsdp_post_all_gather"),
        (OddWeight, r"weight: OddWeight.fsdp_pre_all_gather takes 2 arguments, expected \(mesh\), or"),
    ],
)
def test_half_a_protocol_is_refused(kind, message):
    model = nn.Linear(4, 6)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(kind))

    def rank():
        with pytest.raises(FullyShardError, match=message):
            fully_shard(model, init_device_mesh("cpu", (1,)))

    run_ranks(rank, 1, "torch")


def test_a_weight_that_is_kept_quantized_is_refused():
    model = nn.Linear(4, 6)
    model.weight = nn.Parameter(QuantizedWeight(model.weight.detach()))

    def rank():
        with pytest.raises(
            FullyShardError, match=r"weight: QuantizedWeight does not hold its values in one tensor.*got none"
        ):
            fully_shard(model, init_device_mesh("cpu", (1,)))

    run_ranks(rank, 1, "torch")


def test_another_dimension_is_refused():
    def rank():
        model = with_weights(build(Int8Weight), Int8Weight)
        with pytest.raises(FullyShardError, match=r"weight: .*shards dimension 1, expected 0.*Int8Weight"):
            fully_shard(model[0], init_device_mesh("cpu", (2,)), shard_placement_fn=lambda p: Shard(len(p.shape) - 1))

    run_ranks(rank, 2, "torch")


def test_an_error_of_one_rank_is_told_by_all():
    def rank():
        model = nn.Linear(4, 6)
        model.weight = nn.Parameter(model.weight.detach().as_subclass(FailingWeight))
        model.weight.factor = 1.0
        fully_shard(model, init_device_mesh("cpu", (2,)))
        with pytest.raises(FSDPStateError, match="FailingWeight failed on rank 1: ValueError: no scale"):
            model(batch(0, 0))

    run_ranks(rank, 2, "torch")
