"""Offloaded activations leave the device, come back as they were, and change no bit of any gradient."""

from __future__ import annotations

import functools
import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.parallel import nn, offload
from hp_dtensor.parallel.offload import ActivationOffload
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.platform.autograd import AutogradInterface

WIDTH, BLOCKS = 64, 4
# More rows than weights have, so that gradients of weights do not make the peak.
VALUES = np.random.default_rng(0).standard_normal((512, WIDTH)).astype(np.float32)


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        for seed, (_, weight) in enumerate(self.platform.named_parameters(self)):
            values = np.random.default_rng([index, seed]).standard_normal(tuple(weight.shape)) / 8
            with self.platform.no_grad():
                self.platform.copy_(weight, self.platform.from_numpy(values.astype(np.float32)))

    def forward(self, x):
        hidden = self.ops.silu(self.up(x))
        return self.ops.add(x, self.down(self.ops.mul(hidden, hidden)))


def counted_bytes(platform):
    """Count live bytes. MindSpore does not report when a tensor is freed."""
    if platform.name != "torch":
        return nullcontext(SimpleNamespace(now=0, peak=0))
    from hp_platform_torch.trainer import counted_step

    return counted_step.counted_bytes()


def one_step(platform, call):
    """Return the gradients of a step, and the bytes on the device between forward and backward, and at most."""
    with nn.building(platform):
        blocks = [Block(index) for index in range(BLOCKS)]
    x = platform.from_numpy(VALUES)
    platform.set_requires_grad(x, True)
    with counted_bytes(platform) as live:
        y = x
        for block in blocks:
            y = call(block, y)
        saved = live.now
        platform.backward(platform.ops.sum(y))
    parameters = [weight for block in blocks for _, weight in platform.named_parameters(block)]
    return [platform.to_numpy(platform.get_grad(each)) for each in (x, *parameters)], saved, live.peak


def plainly(block, x):
    return block(x)


@pytest.fixture
def fetched(monkeypatch):
    """Entries that were brought back from the host."""
    found = []
    fetch = offload._OffloadedStorage.fetch
    monkeypatch.setattr(offload._OffloadedStorage, "fetch", lambda self: (found.append(self), fetch(self)))
    return found


def test_a_platform_that_cannot_says_so(hp_platform):
    with pytest.raises(CapabilityError, match="cannot offload activations"):
        AutogradInterface.host_copies(hp_platform)


def test_all_blocks_but_the_last_leave_the_device(hp_platform, fetched):
    offloaded = ActivationOffload(hp_platform)
    expected, saved, peak = one_step(hp_platform, plainly)
    grads, saved_here, peak_here = one_step(hp_platform, offloaded)
    for one, other in zip(grads, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(fetched) >= 2 * (BLOCKS - 1)
    # The result and what the loss needs aside, one block of four.
    if saved:
        assert saved_here < 0.35 * saved
        assert peak_here < peak


def test_the_device_holds_no_two_blocks(hp_platform):
    """Of two that come one after the other, one leaves or comes back as the other needs room or gives it."""
    if hp_platform.name != "torch":
        pytest.skip("bytes are counted on torch")
    _, saved, peak = one_step(hp_platform, plainly)
    _, _, peak_here = one_step(hp_platform, ActivationOffload(hp_platform))
    assert peak_here < 1.5 * saved / BLOCKS + (peak - saved)


@pytest.mark.parametrize("staying", [(1,), (0, 2), (0, 1)])
def test_blocks_that_stay_among_others_that_leave(hp_platform, fetched, staying):
    offloaded, order = ActivationOffload(hp_platform), iter(range(BLOCKS))

    def call(block, x):
        return (offloaded.staying if next(order) in staying else offloaded)(block, x)

    expected, saved, _ = one_step(hp_platform, plainly)
    grads, saved_here, _ = one_step(hp_platform, call)
    for one, other in zip(grads, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    # A block that leaves is brought back when backward comes to the one behind it, which may stay.
    behind = {index + 1 for index in range(BLOCKS - 1) if index not in staying}
    assert len({entry._block for entry in fetched if not entry._sources}) == len(behind)
    if saved:
        stay = len(staying) + (BLOCKS - 1 not in staying)
        assert saved_here == pytest.approx(saved * stay / BLOCKS, rel=0.3)


def test_the_block_in_front_is_fetched_while_backward_is_in_one_that_stays(hp_platform, fetched):
    offloaded, ops, seen = ActivationOffload(hp_platform), hp_platform.ops, []
    x = hp_platform.from_numpy(VALUES)
    hp_platform.set_requires_grad(x, True)

    def noted(grad):
        seen.append(len(fetched))
        return grad

    y = offloaded(ops.silu, ops.mul(x, 2.0))
    y = hp_platform.custom_function(lambda y: ops.mul(y, 1.0), noted, y)
    y = offloaded.staying(ops.silu, y)
    hp_platform.backward(ops.sum(y))
    assert seen == [1], "before backward has left the block that stays"


def test_of_a_recomputed_block_its_input_leaves(hp_platform, fetched):
    offloaded = ActivationOffload(hp_platform)

    def again(block, x):
        return checkpoint(block, x, platform=hp_platform)

    expected, saved, _ = one_step(hp_platform, again)
    grads, saved_here, _ = one_step(hp_platform, lambda block, x: offloaded(lambda x: again(block, x), x))
    for one, other in zip(grads, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(fetched) >= BLOCKS - 2
    # Inputs of blocks 1 to 3 were saved besides the result; that of the last stays.
    if saved:
        assert (saved, saved_here) == (BLOCKS * VALUES.nbytes, 2 * VALUES.nbytes)


def test_a_backward_that_keeps_its_graph_can_be_repeated(hp_platform):
    offloaded, ops = ActivationOffload(hp_platform), hp_platform.ops
    x = hp_platform.from_numpy(VALUES)
    hp_platform.set_requires_grad(x, True)
    y = x
    for _ in range(3):
        y = offloaded(lambda x: ops.mul(ops.silu(x), 2.0), y)
    loss = ops.sum(y)
    hp_platform.backward(loss, retain_graph=True)
    once = hp_platform.to_numpy(hp_platform.get_grad(x)).copy()
    hp_platform.backward(loss)
    np.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.get_grad(x)), 2 * once)


@pytest.mark.parametrize("where", ["in the last block", "in the first block"])
def test_a_tensor_that_is_written_before_it_has_left_is_an_error(hp_platform, where):
    if hp_platform.name != "torch":
        pytest.skip("MindSpore does not count such a write")
    offloaded, ops = ActivationOffload(hp_platform), hp_platform.ops
    x = hp_platform.from_numpy(VALUES)
    hp_platform.set_requires_grad(x, True)

    def writing(x):
        hidden = ops.mul(x, 2.0)
        result = ops.silu(hidden)
        with hp_platform.no_grad():
            hidden.add_(1.0)
        return result

    def harmless(x):
        return ops.silu(x)

    y = x
    for block in (harmless, writing) if where == "in the last block" else (writing, harmless):
        y = offloaded(block, y)
    with pytest.raises(RuntimeError, match="modified in place"):
        hp_platform.backward(ops.sum(y))


def over_one_memory(platform, function):
    """Return the gradient of a weight by which a block multiplies one of two tensors that count their writes alone."""
    if platform.name != "torch":
        pytest.skip("MindSpore does not count such a write")
    weight, x = platform.from_numpy(VALUES), platform.from_numpy(VALUES)
    for leaf in (weight, x):
        platform.set_requires_grad(leaf, True)
    ops, offloaded = platform.ops, ActivationOffload(platform)

    def block(x):
        hidden = ops.mul(x, 2.0)
        return function(weight, hidden, hidden.data)

    platform.backward(ops.sum(offloaded(block, x)))
    return platform.to_numpy(platform.get_grad(weight))


def test_a_write_through_another_tensor_over_the_same_memory_is_an_error(hp_platform):
    ops = hp_platform.ops

    def function(weight, hidden, other):
        result = ops.add(ops.silu(hidden), ops.mul(weight, other))
        other.add_(1.0)
        return result

    with pytest.raises(RuntimeError, match="modified in place"):
        over_one_memory(hp_platform, function)


def test_a_tensor_that_is_saved_after_a_write_has_a_copy_of_its_own(hp_platform):
    ops, alive = hp_platform.ops, []

    def function(weight, hidden, other):
        alive.append(ops.silu(hidden))
        with hp_platform.no_grad():
            hidden.add_(1.0)
        return ops.mul(weight, other)

    np.testing.assert_array_equal(over_one_memory(hp_platform, function), 2 * VALUES + 1)


def test_a_backward_waits_for_copies_to_the_host_itself(hp_platform, monkeypatch):
    """It may run on another stream than the forward, which has waited too."""
    kind, waits = type(hp_platform.host_copies()), []
    to_host = kind.to_host

    def noted(copies, memory):
        host, wait = to_host(copies, memory)
        return host, lambda: (waits.append(host), wait())

    monkeypatch.setattr(kind, "to_host", noted)
    offloaded, y = ActivationOffload(hp_platform), hp_platform.from_numpy(VALUES)
    hp_platform.set_requires_grad(y, True)
    for _ in range(3):
        y = offloaded(hp_platform.ops.silu, y)
    (first,) = waits
    hp_platform.backward(hp_platform.ops.sum(y))
    assert len(waits) == 2
    assert waits[1] is first


def test_copies_and_waits_come_in_an_order_in_which_they_are_hidden(hp_platform, monkeypatch):
    """Events as a stream beside the computation sees them: each copy has a block's time before it is waited for."""
    ops, kind, events, names = hp_platform.ops, type(hp_platform.host_copies()), [], {}
    to_host, to_device = kind.to_host, kind.to_device

    def noted_to_host(copies, memory):
        host, wait = to_host(copies, memory)
        block = names[id(host)] = len(names)
        events.append(f"{block} leaves")
        return host, lambda: (events.append(f"{block} has left"), wait())

    def noted_to_device(copies, host):
        memory, wait = to_device(copies, host)
        block = names[id(host)]
        events.append(f"{block} comes")
        return memory, lambda: (events.append(f"{block} is needed"), wait())

    monkeypatch.setattr(kind, "to_host", noted_to_host)
    monkeypatch.setattr(kind, "to_device", noted_to_device)

    def block(index):
        def noted(grad):
            events.append(f"backward enters {index}")
            return grad

        def run(x):
            events.append(f"forward of {index}")
            return hp_platform.custom_function(lambda y: ops.mul(y, 1.0), noted, ops.silu(x))

        return run

    x = hp_platform.from_numpy(VALUES)
    hp_platform.set_requires_grad(x, True)
    offloaded, y = ActivationOffload(hp_platform), ops.mul(x, 2.0)
    for index in range(3):
        y = offloaded(block(index), y)
    hp_platform.backward(ops.sum(y))
    forward = ["forward of 0", "0 leaves", "forward of 1", "1 leaves", "0 has left", "forward of 2", "2 leaves"]
    # The last block's copy is never waited for, nor brought back: its tensors are still there.
    backward = [
        "1 has left",
        "backward enters 2",
        "1 has left",
        "1 comes",
        "backward enters 1",
        "0 has left",
        "0 comes",
    ]
    assert events == [*forward, *backward, "1 is needed", "backward enters 0", "0 is needed"]


def test_memories_leave_one_by_one_and_come_back_in_the_second_half_of_the_block_behind(hp_platform, monkeypatch):
    """Four of a block: each is freed for one of the next block, and vice versa in backward."""
    events, ops, finish, fetch = [], hp_platform.ops, offload._OffloadedStorage.finish, offload._OffloadedStorage.fetch
    order = {}

    def noted(what, run):
        def call(entry):
            if what == "frees" or (not entry._sources and entry._fetched is None):
                events.append(f"{what} {order[entry]}")
            run(entry)

        return call

    take, made = offload._OffloadedStorage.take, offload._OffloadedStorage.__init__
    monkeypatch.setattr(offload._OffloadedStorage, "finish", noted("frees", finish))
    monkeypatch.setattr(offload._OffloadedStorage, "fetch", noted("brings", fetch))
    monkeypatch.setattr(
        offload._OffloadedStorage, "take", lambda entry: (events.append(f"takes {order[entry]}"), take(entry))[1]
    )

    def numbered(entry, *args):
        order[entry] = len(order)
        events.append(f"saves {order[entry]}")
        made(entry, *args)

    monkeypatch.setattr(offload._OffloadedStorage, "__init__", numbered)
    x = hp_platform.from_numpy(VALUES)
    hp_platform.set_requires_grad(x, True)
    offloaded, y = ActivationOffload(hp_platform), ops.mul(x, 2.0)
    for _ in range(2):
        y = offloaded(lambda x: ops.silu(ops.silu(ops.silu(ops.silu(x)))), y)
    hp_platform.backward(ops.sum(y))
    leaving = [event for number in range(4, 8) for event in (f"saves {number}", f"frees {number - 4}")]
    assert events[:12] == [*(f"saves {number}" for number in range(4)), *leaving]
    behind = ["takes 7", "takes 6", "takes 5", "takes 4", "brings 3", "brings 2", "brings 1", "brings 0"]
    assert events[12:] == [*behind, "takes 3", "takes 2", "takes 1", "takes 0"]


@pytest.mark.parametrize("fails", ["not", "in forward", "in backward"])
def test_nothing_stays_on_the_host_after_a_step_or_an_exception(hp_platform, monkeypatch, fails):
    ops, kind, copies = hp_platform.ops, type(hp_platform.host_copies()), []
    to_host = kind.to_host

    def noted(self, memory):
        host, wait = to_host(self, memory)
        copies.append(weakref.ref(host))
        return host, wait

    monkeypatch.setattr(kind, "to_host", noted)

    def failing(grad):
        if fails == "in backward":
            raise ArithmeticError("a test's")
        return grad

    def step():
        x = hp_platform.from_numpy(VALUES)
        hp_platform.set_requires_grad(x, True)
        offloaded, y = ActivationOffload(hp_platform), ops.mul(x, 2.0)
        for index in range(3):
            y = offloaded(ops.silu, y)
            if index == 0:
                y = hp_platform.custom_function(lambda y: ops.mul(y, 1.0), failing, y)
        if fails == "in forward":
            raise ArithmeticError("a test's")
        hp_platform.backward(ops.sum(y))

    if fails == "not":
        step()
    else:
        with pytest.raises((ArithmeticError, RuntimeError), match="a test's"):
            step()
    gc.collect()
    assert len(copies) >= 2
    assert [each() for each in copies] == [None] * len(copies)


def test_frozen_weights_stay_also_where_a_checkpoint_is_a_plain_call(hp_platform, monkeypatch):
    kind, sizes = type(hp_platform.host_copies()), []
    to_host = kind.to_host
    monkeypatch.setattr(kind, "to_host", lambda self, x: (sizes.append(x.nbytes), to_host(self, x))[1])
    with nn.building(hp_platform):
        block = Block(0)
    for _, weight in hp_platform.named_parameters(block.down):
        hp_platform.set_requires_grad(weight, False)
    # Nothing is recomputed of a block whose input needs no gradient.
    recomputed = functools.partial(checkpoint, block, platform=hp_platform)
    ActivationOffload(hp_platform)(recomputed, hp_platform.from_numpy(VALUES))
    assert sizes
    assert 2 * WIDTH * WIDTH * 4 not in sizes
