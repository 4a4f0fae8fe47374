"""`context_parallel` shards buffers in place, and attention within is that of the full sequence."""

from __future__ import annotations

import numpy as np
import pytest

from hp_dtensor import (
    AttentionMask,
    SequenceSharding,
    attention,
    context_parallel,
    current_world,
    init_device_mesh,
    nn,
)
from hp_dtensor.exceptions import AttentionError
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks

LENGTH, WIDTH, HEADS, STEPS = 11, 12, 3, 3


class SelfAttention(nn.Module):
    """Attention with learned positions from a buffer `[length, width]`."""

    def __init__(self, causal, positions):
        super().__init__()
        self.causal, self.positions = causal, positions
        self.projection, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        ops = self.ops
        parts = ops.chunk(self.projection(ops.add(x, self.positions)), 3, -1)
        q, k, v = (ops.transpose(ops.reshape(y, (*x.shape[:2], HEADS, WIDTH // HEADS)), 1, 2) for y in parts)
        mixed = ops.reshape(ops.transpose(self.attend(q, k, v), 1, 2), tuple(x.shape))
        return ops.add(x, self.out(mixed))

    def attend(self, q, k, v):
        return attention(q, k, v, mask=AttentionMask(causal=self.causal))


class FrameworksOwn(SelfAttention):
    def attend(self, q, k, v):
        import torch

        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def batch(platform, step):
    random = np.random.default_rng(step)
    return [platform.from_numpy(random.standard_normal((2, LENGTH, WIDTH)).astype(np.float32)) for _ in range(2)]


def train(platform, cls, causal, options, ranks):
    """Return losses, outputs and weights of some steps, on ranks or, with one, without a context."""
    rank = current_world(platform).rank if ranks > 1 else 0
    table = platform.from_numpy(np.random.default_rng(9).standard_normal((LENGTH, WIDTH)).astype(np.float32))
    with nn.building(platform):
        model = cls(causal, table)
    init_parameters(model, lambda name, shape: Normal(0.3), seed=1)
    mesh = init_device_mesh("cpu", (ranks,), platform=platform) if ranks > 1 else None
    found = []

    def step(x, target):
        output = model(x)
        loss = platform.ops.div(
            platform.ops.sum(platform.ops.square(platform.ops.sub(output, target))), 2 * LENGTH * WIDTH
        )
        platform.backward(loss)
        found.append([platform.to_numpy(platform.detach(y)).copy() for y in (loss, output)])

    for number in range(STEPS):
        x, target = batch(platform, number)
        before = [platform.to_numpy(y).copy() for y in (x, target, table)]
        if mesh is None:
            step(x, target)
        else:
            dims = {"buffers": [x, target, table], "buffer_seq_dims": [1, -2, 0], "no_restore_buffers": {target}}
            with context_parallel(mesh, **dims, **options):
                step(x, target)
            kept = platform.to_numpy(target)
            np.testing.assert_array_equal(platform.to_numpy(x), before[0])
            np.testing.assert_array_equal(platform.to_numpy(table), before[2])
            np.testing.assert_array_equal(kept, sharding_of(ranks, options).shard(before[1], rank, 1))
        for _, p in platform.named_parameters(model):
            grad = platform.get_grad(p)
            if mesh is not None:
                grad = platform.contiguous(platform.detach(grad))
                mesh.group_along().all_reduce(grad)
            with platform.no_grad():
                platform.copy_(p, platform.ops.sub(p, platform.ops.mul(grad, 0.5)))
            platform.set_grad(p, None)
    return found, {n: platform.to_numpy(platform.detach(p)).copy() for n, p in platform.named_parameters(model)}


def sharding_of(ranks, options):
    degree = ranks if options.get("method") == "ulysses" else options.get("ulysses_degree", 1)
    return SequenceSharding(length=LENGTH, ranks=ranks, ulysses_degree=degree)


CASES = [
    (2, True, {}),
    (3, True, {"method": "ulysses"}),
    (3, False, {"method": "all_gather"}),
    (4, True, {"ulysses_degree": 2}),
]


@pytest.mark.parametrize("cls", [SelfAttention, FrameworksOwn])
@pytest.mark.parametrize(("ranks", "causal", "options"), CASES)
def test_trains_as_one_device(hp_platform, cls, ranks, causal, options):
    if cls is FrameworksOwn and hp_platform.name != "torch":
        pytest.skip("attention of hp_dtensor alone is routed here")
    expected, weights = train(hp_platform, cls, causal, options, 1)
    ranks_found = run_ranks(train, ranks, hp_platform, hp_platform, cls, causal, options, ranks)
    for number, (loss, output) in enumerate(expected):
        parts = [found[number] for found, _ in ranks_found]
        np.testing.assert_allclose(sum(part[0] for part in parts), loss, rtol=2e-5)
        full = sharding_of(ranks, options).unshard([part[1] for part in parts])
        np.testing.assert_allclose(full, output, rtol=2e-5, atol=2e-5)
    for _, found in ranks_found:
        for name, weight in weights.items():
            np.testing.assert_allclose(found[name], weight, rtol=2e-5, atol=2e-5, err_msg=name)


def test_views_of_a_buffer_are_unchanged(hp_platform):
    """Tokens and targets are often two overlapping views of one tensor; torch's own function overwrites one of them."""

    def program():
        mesh = init_device_mesh("cpu", (2,), platform=hp_platform)
        tokens = hp_platform.from_numpy(np.arange(9, dtype=np.int64)[None])
        x, target = (hp_platform.ops.narrow(tokens, 1, start, 8) for start in (0, 1))
        with context_parallel(mesh, buffers=[x, target], buffer_seq_dims=[1, 1]):
            own = [hp_platform.to_numpy(y).tolist() for y in (x, target, tokens)]
        return own, [hp_platform.to_numpy(y).tolist() for y in (x, target)]

    full = [[*range(8)]], [[*range(1, 9)]]
    for rank, (own, after) in enumerate(run_ranks(program, 2, hp_platform)):
        indices = [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]
        assert own == [[indices], [[i + 1 for i in indices]], [[*range(9)]]]
        assert after == list(full)


def test_backward_after_the_context_is_refused_where_it_needs_a_buffer(hp_platform):
    def program():
        mesh = init_device_mesh("cpu", (2,), platform=hp_platform)
        x, _ = batch(hp_platform, 0)
        with nn.building(hp_platform):
            layer = nn.Linear(WIDTH, WIDTH)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            loss = hp_platform.ops.sum(layer(x))
        with pytest.raises(Exception, match=r"in-?place|inplace|modified"):
            hp_platform.backward(loss)

    run_ranks(program, 2, hp_platform)


def test_without_buffers_ranks_give_shards(hp_platform):
    q = np.random.default_rng(0).standard_normal((1, 2, LENGTH, 4)).astype(np.float32)

    def program():
        mesh = init_device_mesh("cpu", (2,), platform=hp_platform)
        own = hp_platform.from_numpy(SequenceSharding(length=LENGTH, ranks=2).shard(q, mesh.get_local_rank(), 2))
        with context_parallel(mesh):
            found = attention(own, own, own, mask=AttentionMask())
        return hp_platform.to_numpy(found)

    x = hp_platform.from_numpy(q)
    expected = hp_platform.to_numpy(attention(x, x, x, mask=AttentionMask()))
    found = SequenceSharding(length=LENGTH, ranks=2).unshard(run_ranks(program, 2, hp_platform), 2)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_what_cannot_be_is_refused_and_nothing_changed(hp_platform):
    def program():
        mesh = init_device_mesh("cpu", (2,), platform=hp_platform)
        x, target = batch(hp_platform, 0)
        short, weight = hp_platform.ops.narrow(target, 1, 0, 4), hp_platform.zeros((4,), hp_platform.dtype("float32"))
        hp_platform.set_requires_grad(weight, True)
        for message, given in {
            r"expected one of buffer_seq_dims for each of 2 buffers, got 1": ([x, target], [1]),
            r"buffer 0 requires a gradient": ([weight], [0]),
            r"buffer 0 of shape \[2, 11, 12\] has no dimension 3": ([x], [3]),
            r"buffer 1: expected a plain tensor of the full sequence, got list": ([x, [1]], [1, 0]),
            r"dimension 1 of a tensor of shape \[2, 4, 12\] has length 4": ([x, short], [1, 1]),
        }.items():
            with (
                pytest.raises(AttentionError, match=message),
                context_parallel(mesh, buffers=given[0], buffer_seq_dims=given[1]),
            ):
                pass
        given = {"buffers": [x], "buffer_seq_dims": [1], "no_restore_buffers": [target]}
        with pytest.raises(AttentionError, match="only tensors of buffers in"), context_parallel(mesh, **given):
            pass
        assert tuple(x.shape) == (2, LENGTH, WIDTH)
        with pytest.raises(ArithmeticError), context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            raise ArithmeticError
        assert tuple(x.shape) == (2, LENGTH, WIDTH)

    run_ranks(program, 2, hp_platform)


def test_refuses_a_mesh_of_two_dimensions(hp_platform):
    def program():
        mesh = init_device_mesh("cpu", (2, 1), platform=hp_platform)
        with pytest.raises(AttentionError, match="expected a mesh of one dimension"), context_parallel(mesh):
            pass

    run_ranks(program, 2, hp_platform)


@pytest.mark.parametrize("is_training", [True, False])
def test_layers_of_torch_attend_to_the_full_sequence(hp_platform, is_training):
    """Also in evaluation, where torch has kernels for full layers."""
    if hp_platform.name != "torch":
        pytest.skip("attention of hp_dtensor alone is routed here")
    import torch

    def built():
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
        return layer.train(is_training)

    def step(layer, x):
        causal = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        with torch.set_grad_enabled(is_training):
            y = layer(x, src_mask=causal, is_causal=True)
        if is_training:
            y.square().sum().backward()
        return y.detach(), layer.linear1.weight.grad

    def program():
        layer, (x, _) = built(), batch(hp_platform, 0)
        with context_parallel(init_device_mesh("cpu", (2,)), buffers=[x], buffer_seq_dims=[1]):
            with pytest.raises(AttentionError, match="call it with need_weights=False"):
                layer.self_attn(x, x, x)
            return step(layer, x)

    wanted, grad = step(built(), batch(hp_platform, 0)[0])
    found, grads = zip(*run_ranks(program, 2, hp_platform), strict=True)
    full = SequenceSharding(length=LENGTH, ranks=2).unshard(list(found), 1, hp_platform)
    torch.testing.assert_close(full, wanted, rtol=2e-5, atol=2e-5)
    if is_training:
        torch.testing.assert_close(sum(grads), grad, rtol=2e-5, atol=2e-4)


def test_heads_are_shared_only_where_torch_shares_them(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("attention of hp_dtensor alone is routed here")
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k = torch.ones(1, 4, 4, 8), torch.ones(1, 2, 4, 8)

    def program():
        with context_parallel(init_device_mesh("cpu", (2,))):
            with pytest.raises(AttentionError, match="pass enable_gqa=True"):
                sdpa(q, k, k)
            return sdpa(q, k, k, enable_gqa=True).shape, sdpa(q, k[:, :1], k[:, :1]).shape

    assert run_ranks(program, 2, hp_platform) == [(q.shape, q.shape)] * 2
    assert sdpa(q, k[:, :1], k[:, :1]).shape == q.shape
    with pytest.raises(RuntimeError):
        sdpa(q, k, k)


def test_other_names_of_torchs_attention_are_routed(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("attention of hp_dtensor alone is routed here")
    import torch

    q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    named = torch.ops.aten.scaled_dot_product_attention

    def program():
        mesh = init_device_mesh("cpu", (2,))
        own = SequenceSharding(length=4, ranks=2).shard(q, mesh.get_local_rank(), 2, hp_platform)
        with context_parallel(mesh):
            return named(own, own, own, is_causal=True), named.default(own, own, own, is_causal=True)

    for found in zip(*run_ranks(program, 2, hp_platform), strict=True):
        full = SequenceSharding(length=4, ranks=2).unshard(list(found), 2, hp_platform)
        torch.testing.assert_close(full, named(q, q, q, is_causal=True))


def test_masks_and_dropout_of_the_frameworks_attention_are_refused(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("attention of hp_dtensor alone is routed here")
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention

    def program():
        q = torch.ones(1, 2, 4, 8)
        with context_parallel(init_device_mesh("cpu", (2,))):
            for options in ({"attn_mask": torch.ones(4, 4)}, {"dropout_p": 0.1}):
                with pytest.raises(AttentionError, match=r"with an attn_mask or dropout_p.*with an AttentionMask"):
                    sdpa(q, q, q, **options)
        return sdpa(q, q, q, attn_mask=torch.ones(4, 4)).shape

    assert run_ranks(program, 2, hp_platform) == [(1, 2, 4, 8)] * 2
