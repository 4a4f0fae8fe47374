"""Calls that only an Ascend answers, made to stand-ins that follow MindSpore's documentation of them."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from unittest import mock

import mindspore as ms
import mindspore.mint.distributed as dist
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from hp_dtensor import Shard, distribute_tensor, init_device_mesh
from hp_dtensor.comm.meeting_point import MeetingPoint
from hp_dtensor.exceptions import CapabilityError, PlatformError
from hp_dtensor.parallel.attention import AttentionMask, attention
from hp_dtensor.testing import run_ranks
from hp_platform_mindspore import process_groups, world
from hp_platform_mindspore.ops.cpu_kernels import reductions, shapes
from hp_platform_mindspore.ops.cpu_kernels.products import scaled_dot_product_attention
from hp_platform_mindspore.ops.namespace import build_ops
from hp_platform_mindspore.platform_base import ASCEND, CPU, choose_device
from hp_platform_mindspore.tensor import memory

# The device of a rank ------------------------------------------------------------------------------------


class Devices:
    """Stands in for MindSpore's choice of a device on a machine with four Ascends, and records what is called.

    As `mindspore.set_device` (2.10): the device cannot be changed once it is chosen, and not at all after an operation.
    """

    def __init__(self, monkeypatch):
        self.calls, self.chosen, self.has_run = [], None, False
        ascend = SimpleNamespace(is_available=lambda: True, device_count=lambda: 4)
        monkeypatch.setattr(ms.device_context, "ascend", ascend)
        monkeypatch.setattr(ms, "set_device", self.set_device)
        monkeypatch.setattr(ms, "get_current_device", lambda: SimpleNamespace(device_id=(self.chosen or (0, 0))[1]))
        monkeypatch.setattr(ms, "get_context", lambda name: (self.chosen or ("CPU",))[0])
        signature = inspect.signature(dist.init_process_group)
        monkeypatch.setattr(
            world.dist, "init_process_group", lambda *args, **kwargs: self.join(signature.bind(*args, **kwargs))
        )
        for name in ("HP_DEVICE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MS_ROLE"):
            monkeypatch.delenv(name, raising=False)

    def set_device(self, target, index=0):
        if (self.chosen or (target, index)) != (target, index) or (self.has_run and self.chosen is None):
            raise RuntimeError("The 'mindspore.set_device' can not be modified.")
        self.chosen = target, index
        self.calls.append(("set_device", target, index))

    def join(self, bound):
        # "device_id is ignored, setting is invalid"
        assert "device_id" not in bound.arguments
        self.calls.append(("init_process_group", bound.arguments["backend"], bound.arguments["rank"]))

    def start_rank(self, monkeypatch, local_rank):
        # As `launch` starts it; the address of the rendezvous comes later.
        for name, value in {"RANK": 4 + local_rank, "WORLD_SIZE": 8, "LOCAL_RANK": local_rank}.items():
            monkeypatch.setenv(name, str(value))


def connect(local_rank):
    point = MeetingPoint(4 + local_rank, 8, "127.0.0.1:1", False, 10.0)
    world._connect(SimpleNamespace(capabilities=ASCEND), point, "127.0.0.1", local_rank)


def test_each_rank_sets_its_own_device_before_it_joins(monkeypatch):
    devices = Devices(monkeypatch)
    devices.start_rank(monkeypatch, 2)
    assert choose_device() is ASCEND
    # At once: the first operation, which may come before the ranks are connected, fixes the device.
    assert devices.calls == [("set_device", "Ascend", 2)]
    connect(2)
    assert devices.calls[1:] == [("set_device", "Ascend", 2), ("init_process_group", "hccl", 6)]


def test_a_process_without_a_launcher_uses_the_first_device(monkeypatch):
    devices = Devices(monkeypatch)
    assert choose_device() is ASCEND
    assert devices.calls == [("set_device", "Ascend", 0)]


def test_a_rank_whose_process_uses_the_device_of_another_one_is_refused(monkeypatch):
    devices = Devices(monkeypatch)
    choose_device()
    with pytest.raises(PlatformError, match=r"already runs on device 0 of Ascend, not on 3 .* or set LOCAL_RANK=3"):
        connect(3)
    assert ("init_process_group", "hccl", 7) not in devices.calls
    # What the error advises.
    devices.chosen = None
    monkeypatch.setenv("LOCAL_RANK", "3")
    choose_device()
    connect(3)
    assert devices.chosen == ("Ascend", 3)


def test_a_rank_without_a_device_of_its_own_is_refused(monkeypatch):
    devices = Devices(monkeypatch)
    devices.start_rank(monkeypatch, 4)
    with pytest.raises(PlatformError, match="local rank 4 has no device: its process sees 4"):
        choose_device()


def test_a_program_that_has_run_on_this_device_may_go_on(monkeypatch):
    devices = Devices(monkeypatch)
    devices.has_run, devices.chosen = True, ("Ascend", 0)
    assert choose_device() is ASCEND


# Attention -----------------------------------------------------------------------------------------------

SIGNATURE = inspect.signature(ops.flash_attention_score)


class FlashAttention:
    """Stands in for `ops.flash_attention_score`: checks what its documentation demands, and computes in float32."""

    def __init__(self, monkeypatch):
        self.calls = 0
        monkeypatch.setattr(ops, "flash_attention_score", self)

    def __call__(self, *args, **kwargs):
        bound = SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given = SimpleNamespace(**bound.arguments)
        query, key, value = given.query, given.key, given.value
        assert given.input_layout == "BNSD"
        assert query.dtype == key.dtype == value.dtype
        assert query.dtype in (ms.float16, ms.bfloat16)
        (batch, heads, length, width), (_, key_heads, keys, _) = query.shape, key.shape
        assert key.shape == value.shape == (batch, key_heads, keys, width)
        assert given.head_num == heads
        assert heads % key_heads == 0
        assert width % 16 == 0
        assert width <= 512
        assert given.keep_prob == 1.0
        assert given.drop_mask is None
        unset = ("real_shift", "padding_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen")
        assert all(getattr(given, name) is None for name in unset)
        assert isinstance(given.scalar_value, float)
        if given.sparse_mode == 2:  # leftUpCausal, with the compressed mask
            assert given.attn_mask.shape == (2048, 2048)
            assert given.attn_mask.dtype == ms.bool_
            # 1 indicates discard.
            assert not np.tril(given.attn_mask.asnumpy()).any()
            assert given.attn_mask.asnumpy()[0, 1:].all()
            hidden = np.triu(np.ones((length, keys), np.bool_), 1)
        else:
            assert (given.sparse_mode, given.attn_mask) == (0, None)
            hidden = np.zeros((length, keys), np.bool_)
        self.calls += 1
        query, key, value = (x.astype(ms.float32) for x in (query, key, value))
        shared = (batch, heads, keys, width)
        key, value = (
            mint.reshape(mint.cat([mint.unsqueeze(x, 2)] * (heads // key_heads), 2), shared) for x in (key, value)
        )
        scores = mint.matmul(query, mint.transpose(key, 2, 3)) * given.scalar_value
        weights = mint.nn.functional.softmax(scores.masked_fill(Tensor(hidden), -1e9), -1)
        return mint.matmul(weights, value).astype(given.query.dtype)


@pytest.fixture
def on_ascend(platform, monkeypatch):
    """The platform with the operations of an Ascend; those not under test would need one."""
    monkeypatch.setattr(
        platform, "capabilities", dataclasses.replace(CPU, native_operations=True, bfloat16_operations=None)
    )
    built = build_ops(platform)
    monkeypatch.setattr(platform.ops, "scaled_dot_product_attention", built.scaled_dot_product_attention)
    return platform


def heads(seed, *shape, dtype=np.float16):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def attend(platform, function, arrays, **options):
    """Return the attention and the gradients of queries, keys and values."""
    leaves = [platform.from_numpy(x.copy()) for x in arrays]
    for x in leaves:
        platform.set_requires_grad(x, True)
    y = function(*leaves, **options)
    grads = platform.grad([y], leaves, [platform.from_numpy(heads(9, *y.shape, dtype=arrays[0].dtype))])
    return [platform.to_numpy(platform.detach(x)).astype(np.float32) for x in (y, *grads)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_is_the_fused_kernel_of_cann(on_ascend, monkeypatch, causal, key_heads):
    flash = FlashAttention(monkeypatch)
    arrays = heads(0, 2, 4, 5, 32), heads(1, 2, key_heads, 5, 32), heads(2, 2, key_heads, 5, 32)
    found = attend(on_ascend, attention, arrays, mask=AttentionMask(causal=causal))
    assert flash.calls == 1
    exact = [x.astype(np.float32) for x in arrays]
    expected = attend(on_ascend, scaled_dot_product_attention, exact, is_causal=causal, enable_gqa=True)
    for ours, reference in zip(found, expected, strict=True):
        # The inputs and the results are float16, whose last bit is 2**-11 of the largest value.
        np.testing.assert_allclose(ours, reference, rtol=4e-3, atol=4e-3)


def test_long_sequences_are_one_call_on_ascend(on_ascend, monkeypatch):
    """Elsewhere they are computed in blocks, because all scores would not fit into memory."""
    flash = FlashAttention(monkeypatch)
    q, k, v = (on_ascend.from_numpy(heads(seed, 1, 1, 1100, 16)) for seed in range(3))
    assert on_ascend.has_fused_attention(q, v)
    assert attention(q, k, v, mask=AttentionMask(causal=True)).shape == q.shape
    assert flash.calls == 1


@pytest.mark.parametrize(
    "why", ["float32", "width 24", "wider values", "no rows", "3 dimensions", "keys for all samples"]
)
def test_what_the_kernel_does_not_take_is_computed_by_products(on_ascend, monkeypatch, why):
    flash = FlashAttention(monkeypatch)
    dtype, width = np.float32 if why == "float32" else np.float16, 24 if why == "width 24" else 16
    rows = 0 if why == "no rows" else 3
    arrays = [heads(seed, 1, 2, rows, width, dtype=dtype) for seed in range(3)]
    if why == "wider values":
        arrays[2] = heads(2, 1, 2, rows, 32)
    if why == "3 dimensions":
        arrays = [x[0] for x in arrays]
    if why == "keys for all samples":
        arrays[0] = heads(0, 2, 2, rows, width)
    y = on_ascend.ops.scaled_dot_product_attention(*map(on_ascend.from_numpy, arrays), is_causal=True)
    assert y.shape == (*arrays[0].shape[:-1], arrays[2].shape[-1])
    assert flash.calls == 0


def test_the_kernel_needs_equally_many_query_heads_for_each_key_head(on_ascend):
    query, value = (on_ascend.from_numpy(heads(0, 1, count, 3, 16)) for count in (4, 3))
    assert on_ascend.has_fused_attention(query, query)
    assert not on_ascend.has_fused_attention(query, value)


def test_the_cpu_does_not_call_it(platform, monkeypatch):
    flash = FlashAttention(monkeypatch)
    q, k, v = (platform.from_numpy(heads(seed, 1, 2, 3, 16)) for seed in range(3))
    assert not platform.has_fused_attention(q, v)
    attention(q, k, v, mask=AttentionMask(causal=True))
    assert flash.calls == 0


def test_each_rank_calls_it_with_its_shard(on_ascend, monkeypatch):
    flash = FlashAttention(monkeypatch)
    arrays = [heads(seed, 3, 2, 5, 16) for seed in range(3)]
    expected = on_ascend.to_numpy(on_ascend.ops.scaled_dot_product_attention(*map(on_ascend.from_numpy, arrays)))

    def program():
        mesh = init_device_mesh("cpu", (2,))
        q, k, v = (distribute_tensor(on_ascend.from_numpy(x.copy()), mesh, [Shard(0)]) for x in arrays)
        y = on_ascend.ops.scaled_dot_product_attention(q, k, v)
        assert y.placements == (Shard(0),)
        return y.full_tensor().asnumpy()

    for found in run_ranks(program, 2, on_ascend):
        np.testing.assert_array_equal(found, expected)
    assert flash.calls == 3


# Memory of the device ------------------------------------------------------------------------------------

COMPOSED = {
    "cast": lambda ops, x: ops.cast(x, ms.float16),
    "norm of float16": lambda ops, x: reductions.norm(ops.cast(x, ms.float16)),
    "elements with steps": lambda ops, x: shapes.getitem(x, (slice(None, None, 2), slice(1, 4, 2))),
    "rows": lambda ops, x: shapes.index_select(x, 0, Tensor([2, 0])),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_kernels_that_ascend_shares_do_not_read_the_memory_of_the_device(on_ascend, monkeypatch, name):
    ops = build_ops(on_ascend)

    def call():
        x = on_ascend.from_numpy(np.arange(20, dtype=np.float32).reshape(4, 5))
        on_ascend.set_requires_grad(x, True)
        y = COMPOSED[name](ops, x)
        (gradient,) = on_ascend.grad([y], [x], [Tensor(np.ones(y.shape, y.asnumpy().dtype))])
        return y.asnumpy(), gradient.asnumpy()

    expected = call()
    monkeypatch.setattr(memory, "_device_is_host", lambda: False)
    monkeypatch.setattr(memory, "_Memory", mock.Mock(side_effect=AssertionError("the host read the device's memory")))
    for found, wanted in zip(call(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_an_average_of_integers_is_refused_before_it_is_sent(platform, monkeypatch):
    sent = []
    monkeypatch.setattr(process_groups.dist, "new_group", lambda ranks: "group")
    for name in ("all_reduce", "reduce_scatter_tensor"):
        monkeypatch.setattr(process_groups.dist, name, lambda *args, name=name, **kwargs: sent.append(name))
    group = process_groups.NativeGroup([0, 1], 0, platform)
    x, output = Tensor(np.arange(4)), Tensor(np.arange(2))
    with pytest.raises(CapabilityError, match="needs a floating-point tensor"):
        group._all_reduce(x, "avg", False)
    with pytest.raises(CapabilityError, match="needs a floating-point tensor"):
        group._reduce_scatter_into(output, x, "avg", False)
    assert not sent
