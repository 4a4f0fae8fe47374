"""Collectives by module, forward and backward."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    ColwiseParallel,
    CommDebugMode,
    DeviceMesh,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    nn,
    parallelize_module,
    record_collectives,
)
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.recording import CollectiveLog
from hp_dtensor.testing import run_ranks

ROWS, DIM = 4, 6
"""In float32: all of a row is 24 bytes, a half of the activations 48, all of them 96."""

Message = dict[str, tuple[dict[str, tuple[int, float]], dict[str, tuple[int, float]]]]
"""Module -> (forward, backward), each collective -> (count, bytes)."""

UP = {"all_gather": (1, 48)}, {"reduce_scatter": (1, 48)}
DOWN = {"reduce_scatter": (1, 48)}, {"all_gather": (1, 48)}
LAST = {"all_to_all": (1, 24), "all_reduce": (1, 96)}, {"all_to_all": (1, 24)}
LOSS = {"all_reduce": (1, 4)}, {"all_gather": (1, 48)}
LAYERS = {"first.up": UP, "first.down": DOWN, "second.up": UP, "second.down": DOWN, "last": LAST, "": LOSS}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 8)
        self.down = nn.Linear(8, DIM)

    def forward(self, x: Any) -> Any:
        return self.down(self.ops.silu(self.up(x)))


class Layers(nn.Module):
    """Two blocks that gather and scatter rows, and a layer that sends columns and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Pair()
        self.second = Pair()
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Any, around: Callable[..., Any] = lambda block, x: block(x)) -> Any:
        return self.last(around(self.second, around(self.first, x)))


class SharedLayers(Layers):
    """One block under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.second = self.first


PLAN = {
    "*.up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
    "*.down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    "last": RowwiseParallel(input_layouts=Shard(0), use_local_output=False),
}


def _made(platform: Platform, kind: type = Layers) -> tuple[Any, Any]:
    """A model and its input."""
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=platform)
    with nn.building(platform):
        model = kind()
    rng = np.random.default_rng(0)
    for _, parameter in platform.named_parameters(model):
        platform.copy_(parameter, _tensor(platform, rng, tuple(parameter.shape)))
    x = distribute_tensor(_tensor(platform, rng, (ROWS, DIM)), mesh, (Shard(0),))
    platform.set_requires_grad(x, True)
    return parallelize_module(model, mesh, PLAN), x


def _tensor(platform: Platform, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return platform.from_numpy(rng.uniform(-1, 1, shape).astype(np.float32))


def _loss(platform: Platform, y: Any) -> Any:
    return platform.ops.sum(platform.ops.square(y.redistribute(placements=(Shard(0),)))).full_tensor()


def _told(comm: CommDebugMode) -> Message:
    message: Message = {}
    for module, collectives in comm.to_dict().items():
        message[module] = {}, {}
        for collective, directions in collectives.items():
            for direction, sums in zip(message[module], (directions["forward"], directions["backward"]), strict=True):
                if sums["count"]:
                    direction[collective] = sums["count"], sums["bytes"]
    return message


def _names(log: CollectiveLog) -> list[tuple[str, tuple[int, ...], float]]:
    return [(record.name, record.group, record.wire_bytes) for record in log.records]


def _trained(platform: Platform, is_followed: bool) -> tuple[Any, list[np.ndarray], Message, str]:
    model, x = _made(platform)
    with record_collectives() as log, CommDebugMode(model if is_followed else None, platform) as comm:
        platform.backward(_loss(platform, model(x)))
    assert _names(comm.log) == _names(log)
    leaves = [x, *(p for _, p in platform.named_parameters(model))]
    return _names(log), [platform.to_numpy(platform.get_grad(p).to_local()) for p in leaves], _told(comm), comm.table()


def test_collectives_belong_to_modules_forward_and_backward(hp_platform: Platform) -> None:
    for _, _, message, _ in run_ranks(_trained, 2, hp_platform, hp_platform, True):
        assert message == LAYERS


def test_collectives_and_gradients_are_those_without_modules(hp_platform: Platform) -> None:
    ranks = [run_ranks(_trained, 2, hp_platform, hp_platform, is_followed) for is_followed in (True, False)]
    for (names, grads, _, _), (plain_names, plain_grads, message, _) in zip(*ranks, strict=True):
        assert names == plain_names
        for grad, plain in zip(grads, plain_grads, strict=True):
            np.testing.assert_array_equal(grad, plain)
        assert set(message) == {""}, "no modules are listed"
        assert Counter({k: n for k, (n, _) in message[""][1].items()}) == {
            "reduce_scatter": 2, "all_gather": 3, "all_to_all": 1
        }  # fmt: skip


def test_the_table_has_sums(hp_platform: Platform) -> None:
    lines = run_ranks(_trained, 2, hp_platform, hp_platform, True)[0][-1].splitlines()
    assert lines[0].split() == ["module", "collective", "forward", "bytes", "backward", "bytes"]
    assert lines[1].split() == ["first.up", "all_gather", "1", "48", "0", "0"]
    assert "(no module)  all_reduce            1      4         0      0" in lines
    assert lines[-1].split() == ["total", "7", "316", "6", "264"]


def _shared(platform: Platform) -> Message:
    model, x = _made(platform, SharedLayers)
    with CommDebugMode(model, platform) as comm:
        platform.backward(_loss(platform, model(x)))
    json.dumps(comm.to_dict())
    return _told(comm)


def test_a_module_called_twice_is_told_once(hp_platform: Platform) -> None:
    up = {"all_gather": (2, 96)}, {"reduce_scatter": (2, 96)}
    down = {"reduce_scatter": (2, 96)}, {"all_gather": (2, 96)}
    for message in run_ranks(_shared, 2, hp_platform, hp_platform):
        assert message == {"first.up": up, "first.down": down, "last": LAST, "": LOSS}


def _checkpointed(platform: Platform) -> Message:
    model, x = _made(platform)
    with CommDebugMode(model, platform) as comm:
        y = model(x, lambda block, x: checkpoint(block, x, platform=platform))
        platform.backward(_loss(platform, y))
    return _told(comm)


def test_what_is_computed_again_belongs_to_the_backward_of_its_module(hp_platform: Platform) -> None:
    up, down = (UP[0], {"all_gather": (1, 48), "reduce_scatter": (1, 48)}), DOWN
    if not hp_platform.recomputes_on_unpack:  # else the sums at the end of a block are not sent again
        down = DOWN[0], up[1]
    for message in run_ranks(_checkpointed, 2, hp_platform, hp_platform):
        assert message == {"first.up": up, "first.down": down, "second.up": up, "second.down": down} | {
            "last": LAST, "": LOSS
        }  # fmt: skip


def _nested(platform: Platform) -> tuple[Message, Message]:
    model, x = _made(platform)
    with CommDebugMode(model, platform) as outer:
        with CommDebugMode(model.second, platform) as inner:
            loss = _loss(platform, model(x))
            platform.backward(loss)
        platform.backward(_loss(platform, model(x)))
    return _told(outer), _told(inner)


def test_each_of_two_modes_tells_its_own_modules(hp_platform: Platform) -> None:
    for outer, inner in run_ranks(_nested, 2, hp_platform, hp_platform):
        assert outer == {m: tuple({k: (2 * n, 2 * b) for k, (n, b) in d.items()} for d in LAYERS[m]) for m in LAYERS}
        assert {name: inner[name] for name in ("up", "down")} == {"up": UP, "down": DOWN}
        assert set(inner) == {"up", "down", ""}
        total = {"all_gather": 2, "reduce_scatter": 2, "all_to_all": 1, "all_reduce": 2}
        assert {k: n for k, (n, _) in inner[""][0].items()} == {
            k: n - (k in UP[0]) - (k in DOWN[0]) for k, n in total.items()
        }


def _parts(platform: Platform) -> list[Message]:
    """Only the forward in the block; only the backward; neither, while another one is open."""
    model, x = _made(platform)
    with CommDebugMode(model, platform) as forward:
        loss = _loss(platform, model(x))
    platform.backward(loss)
    loss = _loss(platform, model(x))
    with CommDebugMode(model, platform) as backward:
        platform.backward(loss)
    return [_told(forward), _told(backward)]


def test_only_what_runs_in_the_block_is_told(hp_platform: Platform) -> None:
    for forward, backward in run_ranks(_parts, 2, hp_platform, hp_platform):
        assert forward == {module: (ahead, {}) for module, (ahead, _) in LAYERS.items()}
        assert backward == {"": ({}, {"all_gather": (3, 144), "all_to_all": (1, 24), "reduce_scatter": (2, 96)})}


def _failed(platform: Platform) -> Message:
    model, x = _made(platform)

    def fail(*_: Any) -> None:
        raise ArithmeticError("not today")

    with CommDebugMode(model, platform) as comm:
        handle = platform.add_forward_pre_hook(model.second.down, fail)
        with pytest.raises(ArithmeticError, match="not today"):
            model(x)
        handle.remove()
        x.redistribute(placements=(Replicate(),))
        platform.backward(_loss(platform, model(x)))
    return _told(comm)


def test_a_forward_that_fails_is_left(hp_platform: Platform) -> None:
    up = {"all_gather": (2, 96)}, UP[1]
    loss = {"all_gather": (1, 48), "all_reduce": (1, 4)}, LOSS[1]
    for message in run_ranks(_failed, 2, hp_platform, hp_platform):
        assert message == LAYERS | {"first.up": up, "first.down": ({"reduce_scatter": (2, 96)}, DOWN[1])} | {
            "second.up": up, "": loss
        }  # fmt: skip


class Reduced(nn.Module):
    """Sums over a group of one rank, forward and backward."""

    def forward(self, x: Any) -> Any:
        group = current_world(self.platform).group((0,))

        def reduced(t: Any) -> Any:
            t = self.platform.ops.clone(t)
            group.all_reduce(t)
            return t

        return self.platform.linear_map(x, reduced, reduced)


def test_a_backward_in_another_thread_is_told(hp_platform: Platform) -> None:
    with nn.building(hp_platform):
        model = Reduced()
    x = hp_platform.from_numpy(np.ones(3, np.float32))
    hp_platform.set_requires_grad(x, True)
    with CommDebugMode(model, hp_platform) as comm:
        loss = hp_platform.ops.sum(model(x))
        thread = threading.Thread(target=hp_platform.backward, args=(loss,))
        thread.start()
        thread.join()
    np.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.get_grad(x)), np.ones(3))
    assert _told(comm) == {"Reduced": ({"all_reduce": (1, 0)}, {"all_reduce": (1, 0)})}


def test_what_stays_behind(hp_platform: Platform) -> None:
    with nn.building(hp_platform):
        model = Reduced()
    comm = CommDebugMode(model, hp_platform)
    x = hp_platform.from_numpy(np.ones(3, np.float32))
    with pytest.raises(RuntimeError, match="is in use by an outer block"), comm, comm:
        pass
    model(x)
    assert comm.get_total_counts() == 0, "the block is over, its hooks are removed"
    with comm:
        model(x)
    with comm:
        model(x)
    assert comm.get_total_counts() == 1, "a block starts again"


def _all_gather(*args: Any) -> None:
    """Stands for a framework's function: torch.ops.c10d_functional.all_gather_into_tensor has its name."""


_all_gather.__name__ = "all_gather_into_tensor"


def test_counts_are_found_by_name_and_by_function(hp_platform: Platform, tmp_path: Path) -> None:
    def program() -> None:
        model, x = _made(hp_platform)
        comm = CommDebugMode(model, hp_platform)
        with comm:
            output = model(x)
        counts = comm.get_comm_counts()
        assert counts[_all_gather] == counts["all_gather"] > 0
        assert _all_gather in counts
        assert counts.get(_all_gather) == comm.comm_counts["all_gather"]
        assert counts["broadcast"] == counts[print] == 0
        renamed = {(_all_gather if name == "all_gather" else name): count for name, count in counts.items()}
        assert counts == renamed
        assert sum(counts.values()) == comm.get_total_counts()
        assert comm.get_comm_bytes() == {name: comm.log.wire_bytes(name) for name in counts}
        assert comm.get_comm_bytes()["all_gather"] > 0
        assert comm.get_sharding_info()["first.up.weight"] == (Shard(0),)
        table = comm.generate_comm_debug_tracing_table()
        assert table.startswith(comm.table())
        assert "first.up.weight  [Shard(0)]" in table
        with pytest.raises(CapabilityError, match="noise_level=3 lists operations"):
            comm.generate_comm_debug_tracing_table(noise_level=3)
        if output.device_mesh.get_local_rank() == 0:
            comm.generate_json_dump(str(tmp_path / "counts.json"))
            comm.log_comm_debug_tracing_table_to_file(str(tmp_path / "table.txt"), noise_level=0)
            assert json.loads((tmp_path / "counts.json").read_text()) == comm.to_dict()
            assert (tmp_path / "table.txt").read_text() == comm.table() + "\n"

    run_ranks(program, 2, hp_platform)
