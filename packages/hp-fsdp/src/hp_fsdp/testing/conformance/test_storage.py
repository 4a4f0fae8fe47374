"""`ParameterStorage`, method by method: memory of flat buffers, views, gradients of parameters, and autograd nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import SilentWorld, current_world
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Shard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp.plugins import get_storage
from hp_fsdp.storage import ParameterStorage

Tensor = Any
NUMBERS = np.arange(1, 13, dtype=np.float32)


@pytest.fixture
def storage(hp_platform: Platform) -> ParameterStorage:
    """The plugin of the entry-point group `hp_fsdp` must return one from `hp_fsdp_parameter(platform)`."""
    return get_storage(hp_platform)


def values(platform: Platform, x: Tensor) -> list[float]:
    return np.array(platform.to_numpy(platform.detach(x)), np.float64).ravel().tolist()


def filled(storage: ParameterStorage, numbers: np.ndarray = NUMBERS) -> Tensor:
    """Return a buffer that was filled as collectives fill it."""
    platform = storage.platform
    buffer = storage.new_buffer(len(numbers), platform.dtype("float32"), platform.device_types[0])
    platform.copy_(storage.gather_target(buffer), platform.from_numpy(numbers.copy()))
    return buffer


# Memory --------------------------------------------------------------------------------------------------


def test_buffers_are_flat_and_report_their_bytes(storage: ParameterStorage) -> None:
    """Implement `view`: a leaf over part of a buffer, without a copy. `held_bytes` reports allocated memory."""
    buffer = filled(storage)
    assert tuple(buffer.shape) == (12,)
    assert storage.held_bytes(buffer) >= 48
    assert values(storage.platform, buffer) == NUMBERS.tolist()


def test_views_have_the_parameters_shape_in_the_order_of_memory(storage: ParameterStorage) -> None:
    """`view(..., outer_dim)`: that dimension is outermost in memory. Empty views are allowed."""
    buffer = filled(storage)
    matrix = storage.view(buffer, 2, (2, 3))
    assert tuple(matrix.shape) == (2, 3)
    assert values(storage.platform, matrix) == [3, 4, 5, 6, 7, 8]
    columns = storage.view(buffer, 2, (2, 3), 1)
    assert tuple(columns.shape) == (2, 3)
    assert values(storage.platform, columns) == [3, 5, 7, 4, 6, 8]
    assert tuple(storage.view(buffer, 12, (0, 4)).shape) == (0, 4)
    assert values(storage.platform, storage.view(buffer, 4, ())) == [5]


def test_views_see_what_fills_the_buffer(storage: ParameterStorage) -> None:
    """A view shares the buffer's memory: it is made once, before the first gather."""
    platform = storage.platform
    buffer = filled(storage)
    view = storage.view(buffer, 1, (2, 2))
    platform.copy_(storage.gather_target(buffer), platform.from_numpy(10 * NUMBERS))
    assert values(platform, view) == [20, 30, 40, 50]


def test_views_survive_release_and_refill(storage: ParameterStorage) -> None:
    """`release` frees memory and `refill` gives it back. A storage without them keeps all memory and passes too."""
    platform = storage.platform
    buffer = filled(storage)
    view = storage.view(buffer, 1, (2, 2))
    storage.release(buffer)
    if storage.frees_memory:
        assert storage.held_bytes(buffer) == 0
    assert tuple(view.shape) == (2, 2)
    storage.refill(buffer)
    assert storage.held_bytes(buffer) >= 48
    platform.copy_(storage.gather_target(buffer), platform.from_numpy(-NUMBERS))
    assert values(platform, view) == [-2, -3, -4, -5]


def test_a_gather_is_no_write_to_the_parameter(storage: ParameterStorage) -> None:
    """`versions` count a user's writes; the fill by `gather_target` only with `counts_filling`.

    Autograd would otherwise refuse what it has saved before the gather for backward.
    """
    platform = storage.platform
    buffer = filled(storage)
    view = storage.view(buffer, 0, (3,))
    platform.set_requires_grad(view, True)
    before = storage.versions([view])
    squared = platform.ops.sum(platform.ops.mul(view, view))
    platform.copy_(storage.gather_target(buffer), platform.from_numpy(NUMBERS.copy()))
    if not storage.counts_filling:
        assert storage.versions([view]) == before
    platform.backward(squared)
    assert values(platform, platform.get_grad(view)) == [2, 4, 6]


def test_parts_are_written_in_place(storage: ParameterStorage) -> None:
    """`part`, `write`, `add_`, `scale_`, `zero_`: a flat buffer of gradients is written, scaled and zeroed by parts."""
    platform = storage.platform
    buffer = filled(storage)
    part = storage.part(buffer, 2, (2, 2))
    storage.add_(part, platform.from_numpy(np.full((2, 2), 10, np.float32)))
    storage.scale_(part, 2.0)
    assert values(platform, buffer) == [1, 2, 26, 28, 30, 32, 7, 8, 9, 10, 11, 12]
    storage.zero_(part)
    matrix = platform.from_numpy(np.array([[1, 2], [3, 4]], np.float64))
    row_of_four = platform.from_numpy(np.arange(8, 12, dtype=np.float32))
    row = platform.from_numpy(np.array([5, 6, 7], np.float32))
    storage.write(buffer, [(0, 4, 1), (4, 1, 0), (5, 3, 0), (8, 4, 0)], [matrix, None, row, row_of_four])
    assert values(platform, buffer) == [1, 3, 2, 4, 0, 5, 6, 7, 8, 9, 10, 11]
    square = platform.from_numpy(np.array([[6, 5], [4, 3]], np.float32))
    storage.write(buffer, [(0, 4, 0), (4, 4, 0), (8, 1, 0), (9, 3, 0)], [square, row_of_four, None, row])
    assert values(platform, buffer) == [6, 5, 4, 3, 8, 9, 10, 11, 0, 5, 6, 7]


@pytest.mark.dtypes("float16")
def test_sums_are_cast_to_the_target(storage: ParameterStorage) -> None:
    platform = storage.platform
    buffer = filled(storage)
    half = platform.ops.cast(platform.from_numpy(np.ones(2, np.float32)), platform.dtype("float16"))
    storage.add_(storage.part(buffer, 0, (2,)), half)
    assert values(platform, buffer)[:3] == [2, 3, 3]


def test_tensors_are_compared_bit_by_bit(storage: ParameterStorage) -> None:
    """`differ`: NaN equals itself, and 0 differs from -0."""
    platform = storage.platform
    nan, zero, minus = (platform.from_numpy(np.array([x, 1], np.float32)) for x in (np.nan, 0.0, -0.0))
    assert storage.differ([(nan, nan), (zero, minus), (zero, zero)]) == [False, True, False]


def test_scaled_gradients_that_are_not_finite_are_reported(storage: ParameterStorage) -> None:
    """`unscale_`: for loss scaling; the report stays on the device."""
    platform = storage.platform
    good, bad = filled(storage), filled(storage, np.array([1, np.inf], np.float32))
    empty = storage.new_buffer(0, platform.dtype("float32"), platform.device_types[0])
    assert values(platform, storage.unscale_([good, empty], 0.5)) == [0]
    assert values(platform, good) == (NUMBERS / 2).tolist()
    assert values(platform, storage.unscale_([good, bad], 0.5)) == [1]


# Parameters ----------------------------------------------------------------------------------------------


def sharded_parameter(storage: ParameterStorage, buffer: Tensor) -> tuple[Tensor, TensorSpec]:
    platform = storage.platform
    mesh = DeviceMesh(platform.device_types[0], (1,), world=SilentWorld(0, 1, platform))
    spec = TensorSpec(mesh, (Shard(0),), (2, 3), platform.dtype("float32"))
    return storage.parameter(storage.part(buffer, 3, (2, 3)), spec, True), spec


def test_modules_have_the_names_of_state_dicts(storage: ParameterStorage) -> None:
    with nn.building(storage.platform):
        inner, outer = nn.RMSNorm(2), nn.ModuleList()
    for _ in range(2):
        outer.append(inner)
    found = list(storage.named_modules(outer))
    # The default has one of the two.
    assert [name for name, _ in found] in (["", "0"], ["", "0", "1"])
    assert [module for _, module in found] == [outer, *[inner] * (len(found) - 1)]


def test_parameters_share_the_memory_of_the_shard(storage: ParameterStorage) -> None:
    """`parameter`: a DTensor leaf over a part of the flat shard, which an optimizer writes in place; its `address`."""
    platform = storage.platform
    buffer = filled(storage)
    parameter, spec = sharded_parameter(storage, buffer)
    assert isinstance(parameter, DTensor)
    assert parameter.spec is spec
    assert platform.is_leaf(parameter)
    assert platform.requires_grad(parameter)
    platform.copy_(platform.unwrap(parameter), platform.from_numpy(np.zeros((2, 3), np.float32)))
    assert values(platform, buffer) == [1, 2, 3, 0, 0, 0, 0, 0, 0, 10, 11, 12]
    with platform.local_op():
        assert storage.address(parameter) == storage.address(storage.part(buffer, 3, (1,)))
        assert storage.address(parameter) != storage.address(storage.part(buffer, 4, (1,)))
        assert storage.addresses([parameter, buffer]) == [storage.address(parameter), storage.address(buffer)]


def test_gradients_are_set_without_a_copy(storage: ParameterStorage) -> None:
    """`local_grad`, `set_local_grad`, `add_local_grads`: the gradient is a DTensor over the reduced shard."""
    platform = storage.platform
    parameter, spec = sharded_parameter(storage, filled(storage))
    assert storage.local_grad(parameter) is None
    reduced = filled(storage)
    storage.set_local_grad(parameter, storage.part(reduced, 0, (2, 3)), spec)
    gradient = platform.get_grad(parameter)
    assert isinstance(gradient, DTensor)
    assert values(platform, platform.unwrap(gradient)) == [1, 2, 3, 4, 5, 6]
    storage.scale_(reduced, 2.0)
    assert values(platform, storage.local_grad(parameter)) == [2, 4, 6, 8, 10, 12]
    storage.add_local_grads([parameter], [storage.part(filled(storage), 6, (2, 3))])
    assert values(platform, reduced)[:6] == [9, 12, 15, 18, 21, 24]
    storage.set_local_grad(parameter, None, spec)
    assert platform.get_grad(parameter) is None
    storage.add_local_grads([parameter], [storage.part(reduced, 6, (2, 3))])
    storage.scale_(reduced, 0.5)
    assert values(platform, storage.local_grad(parameter)) == [7, 8, 9, 10, 11, 12]


def test_modules_hold_other_parameters(storage: ParameterStorage) -> None:
    """`set_parameters`, `get_parameters`: the tensors that a module computes with replace the optimizer's."""
    platform = storage.platform
    with nn.building(platform):
        module = nn.Linear(3, 2)
    weight = storage.view(filled(storage), 0, (2, 3))
    storage.set_parameters([(module, "weight")], [weight])
    assert module.weight is weight
    assert [x is weight for x in storage.get_parameters([(module, "weight")])] == [True]
    assert storage.get_parameters([(module, "missing")]) == [None]


def test_accumulated_gradients_are_taken(storage: ParameterStorage) -> None:
    """`take_grads`: recomputation may accumulate gradients in the unsharded leaves."""
    platform = storage.platform
    leaf = storage.view(filled(storage), 0, (2,))
    platform.set_requires_grad(leaf, True)
    assert storage.take_grads([leaf]) == [None]
    platform.backward(platform.ops.sum(platform.ops.mul(leaf, 3.0)))
    assert [values(platform, grad) for grad in storage.take_grads([leaf])] == [[3, 3]]
    assert platform.get_grad(leaf) is None


# Autograd ------------------------------------------------------------------------------------------------


class Pass:
    """Two groups gathered one after the other, and the order of what happens in their backward."""

    def __init__(self, storage: ParameterStorage) -> None:
        self.storage, self.events = storage, list[Any]()
        self.token = storage.anchor()

    def gather(self, name: str) -> list[Tensor]:
        storage = self.storage
        buffer = filled(storage)
        views = [storage.view(buffer, 0, (2,)), storage.view(buffer, 2, (3,))]
        for view in views:
            storage.platform.set_requires_grad(view, True)

        def backward(gradients: Any) -> None:
            self.events.append((name, [None if g is None else values(storage.platform, g) for g in gradients]))

        self.token, outputs = storage.gather_node(self.token, views, backward)
        return outputs


def test_a_gather_node_runs_once_all_gradients_are_complete(storage: ParameterStorage) -> None:
    """`gather_node`: its backward gets one gradient or None per parameter, in the reverse order of the gathers."""
    ops = storage.platform.ops
    run = Pass(storage)
    one, two = run.gather("a")
    other, _ = run.gather("b")
    # `one` is used before and after the second group.
    loss = ops.add(ops.sum(ops.mul(ops.mul(one, 2.0), other)), ops.add(ops.sum(two), ops.sum(one)))
    storage.platform.backward(loss)
    assert run.events == [("b", [[2, 4], None]), ("a", [[3, 5], [1, 1, 1]])]


def test_a_group_without_gradients_runs_too(storage: ParameterStorage) -> None:
    """The chain of tokens: `join` has the node of a token run, with None for each parameter."""
    ops, platform = storage.platform.ops, storage.platform
    run = Pass(storage)
    used, _ = run.gather("a")
    run.gather("unused")
    x = platform.from_numpy(np.array([1.0, 2.0], np.float32))
    (y,) = storage.join(run.token, [ops.mul(used, x)])
    platform.backward(ops.sum(y))
    assert run.events == [("unused", [None, None]), ("a", [[1, 2], None])]


def test_hooks_before_backward_run_after_later_nodes(storage: ParameterStorage) -> None:
    """`before_backward`: a group is gathered for backward once the groups used after it have been reduced."""
    ops, platform = storage.platform.ops, storage.platform
    run = Pass(storage)
    first, _ = run.gather("a")
    hidden = ops.mul(first, 2.0)
    (hidden,) = storage.before_backward([hidden], lambda: run.events.append("before a"))
    second, _ = run.gather("b")
    (y,) = storage.join(run.token, [ops.mul(hidden, second)])
    platform.backward(ops.sum(y))
    # The hook may run more than once.
    assert list(dict.fromkeys(map(name_of, run.events))) == ["b", "before a", "a"]


def name_of(event: Any) -> str:
    return event if isinstance(event, str) else event[0]


def test_hooks_on_gradients_run_before_they_go_on(storage: ParameterStorage) -> None:
    """`on_gradient`: called when the gradient of a tensor is known, before the nodes behind it run."""
    ops = storage.platform.ops
    run = Pass(storage)
    first, _ = run.gather("a")
    y = ops.mul(first, 2.0)
    storage.on_gradient(y, lambda: run.events.append("gradient"))
    storage.platform.backward(ops.sum(ops.mul(y, y)))
    assert list(map(name_of, run.events)) == ["gradient", "a"]


def ends(platform: Platform) -> tuple[list[str], list[float]]:
    """Run two backwards that meet other ranks, each with a callback at its end."""
    storage, group = get_storage(platform), current_world(platform).all
    events: list[str] = []

    def node(x: Tensor, name: str) -> Tensor:
        def backward(gradient: Tensor) -> Tensor:
            storage.at_end_of_backward(lambda: events.append(f"end of {name} on {group.rank}"))
            # The other simulated rank runs meanwhile, and adds a callback of its own.
            group.barrier()
            events.append(name)
            return gradient

        return platform.custom_function(lambda each: platform.ops.mul(each, 1.0), backward, x)

    leaf = platform.from_numpy(np.ones(2, np.float32))
    platform.set_requires_grad(leaf, True)
    for name in ("first", "second", "grad"):
        total = platform.ops.sum(node(leaf, name))
        group.barrier()
        if name == "grad":
            platform.grad([total], [leaf])
        else:
            platform.backward(total)
        events.append("returned")
        group.barrier()
    return events, values(platform, platform.get_grad(leaf))


def test_callbacks_run_at_the_end_of_the_backward_of_their_thread(hp_platform: Platform) -> None:
    """`at_end_of_backward`: once, before `backward` or `grad` returns, not at the end of another rank's backward."""
    for rank, (events, gradient) in enumerate(run_ranks(ends, 2, hp_platform, hp_platform)):
        names = ("first", "second", "grad")
        assert events == [each for name in names for each in (name, f"end of {name} on {rank}", "returned")]
        assert gradient == [2, 2]
