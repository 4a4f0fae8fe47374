"""The choice of the state to go on from after a death, and settings of recovery that are refused."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

import hp_dtensor.launch
from hp_dtensor.comm.world import World
from hp_dtensor.exceptions import CollectiveError
from hp_trainer._coordination import Alone
from hp_trainer.checkpoint import LocalStorage
from hp_trainer.config import TrainerConfig, parse_config
from hp_trainer.launch import job, preflight
from hp_trainer.registries import Registries
from hp_trainer.training import recovery
from hp_trainer.training.checkpoints import Choice, TrainingCheckpoints
from hp_trainer.training.recovery import (
    Snapshot,
    Sources,
    StateCopies,
    _Exchange,
    _LastingSnapshot,
    choose_sources,
    partner_of,
    with_fewer_replicas,
)
from hp_trainer.training.setup import RankSetup

Fact = dict[str, object]


def fact(own: Sequence[int] = (), held: dict[int, list[int]] | None = None, replicas: Sequence[int] = ()) -> Fact:
    # The keys of JSON are text.
    by_rank = {str(rank): numbers for rank, numbers in (held or {}).items()}
    steps = [10 * number for number in own]
    return {"own": list(own), "own_steps": steps, "held": by_rank, "replicas": list(replicas)}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        # A new job: none has anything.
        ([fact(), fact()], None),
        # Rank 1 died while the second snapshot was sent: rank 2 has the first one of it.
        (
            [fact([1, 2], {2: [1]}), fact(), fact([1, 2], {1: [1]})],
            Sources(1, {1: (2, 1)}, 10),
        ),
        # It had been sent when the rank died.
        (
            [fact([1, 2], {2: [1]}), fact(), fact([1, 2], {1: [1, 2]})],
            Sources(2, {1: (2, 1)}, 20),
        ),
        # A survivor died on the way to its snapshot 2.
        ([fact([1], {1: [1, 2]}), fact([1, 2])], Sources(1, {}, 10)),
        # A rank and its partner have died.
        ([fact([1], {2: [1]}), fact(), fact()], None),
        # Their replicas are left.
        (
            [fact([3], replicas=[2]), fact([3], replicas=[3]), fact(replicas=[0]), fact(replicas=[1])],
            Sources(3, {2: (0, None), 3: (1, None)}, 30),
        ),
        # Both replicas have died.
        ([fact([3], replicas=[2]), fact(replicas=[3]), fact([3], replicas=[0]), fact(replicas=[1])], None),
    ],
)
def test_sources(facts: list[Fact], expected: Sources | None) -> None:
    assert choose_sources(facts, range(len(facts))) == expected


def test_copies_of_ranks_that_are_numbered_again() -> None:
    # Slot 2 is rank 0 now, and slot 5 has died.
    facts = [fact([4], {5: [4], 0: [4]}), fact([4], {2: [4]}), fact()]
    assert choose_sources(facts, (2, 3, 5)) == Sources(4, {2: (0, 5)}, 40)
    assert choose_sources(facts, (2, 3, 4)) is None


def test_copies_of_other_ranks_are_dropped_when_all_that_go_on_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = hp_dtensor.launch.Generation(1, slots=(2, 3), local_size=4)
    monkeypatch.setattr(hp_dtensor.launch, "current_generation", lambda: generation)
    copies = StateCopies(partner=True, interval=2)
    header = json.dumps({"values": {"step": 40}}).encode()
    copies._own[4] = snapshot = Snapshot(4, header, np.zeros(1, np.uint8))
    for slot in (1, 3):
        copies.hold(slot, snapshot)

    def dies(data: bytes) -> list[bytes]:
        raise CollectiveError("a rank has died")

    def meets(data: bytes) -> list[bytes]:
        return [data, json.dumps(json.loads(data) | {"own": [], "own_steps": [], "held": {}}).encode()]

    # Without the other rank, the ranks that have left come back, and need their copies.
    for gather, slots in ((dies, [1, 3]), (meets, [3])):
        world = cast(World, SimpleNamespace(rank=0, all=SimpleNamespace(all_gather_bytes=gather)))
        with pytest.raises(CollectiveError) if gather is dies else contextlib.nullcontext():
            assert copies.meet(world, []) == Sources(4, {1: (0, 3)}, 40)
        assert sorted(copies._held) == slots
        copies.leave()


@pytest.mark.parametrize(
    ("machines", "partners"),
    [
        ([0, 0, 0, 0], [1, 2, 3, 0]),
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 0, 1, 1, 2, 2], [2, 3, 4, 5, 0, 1]),
        # Two pipeline stages on four machines, of which the second replica is left.
        ([1, 1, 3, 3], [2, 3, 0, 1]),
        # Some have no partner on another machine.
        ([0, 0, 0, 1], [1, 2, 3, 0]),
        ([0], [0]),
    ],
)
def test_partners(machines: list[int], partners: list[int]) -> None:
    assert [partner_of(rank, machines) for rank in range(len(machines))] == partners


CHECKPOINTS = ("step-00000100", "step-00000200")


@pytest.mark.parametrize(
    ("start", "sources", "expected"),
    [
        # Before this job's first checkpoint, the one it was started from is loaded again as the user has asked.
        ((CHECKPOINTS[1], "without optimizer"), None, (None, (CHECKPOINTS[1], "without optimizer"))),
        ((CHECKPOINTS[1], "exactly"), None, (None, (CHECKPOINTS[1], "exactly"))),
        # Later the newest one of this job.
        ((CHECKPOINTS[0], "without optimizer"), None, (None, (CHECKPOINTS[1], "newest that fits"))),
        ((None, "newest that fits"), None, (None, (CHECKPOINTS[1], "newest that fits"))),
        # Copies of an earlier step than the newest checkpoint, of the same, and of a later one.
        ((None, "newest that fits"), Sources(1, {}, 199), (None, (CHECKPOINTS[1], "newest that fits"))),
        ((None, "exactly"), Sources(1, {}, 200), (Sources(1, {}, 200), (None, "exactly"))),
        ((None, "exactly"), Sources(1, {}, 201), (Sources(1, {}, 201), (None, "exactly"))),
    ],
)
def test_copies_or_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: tuple[str | None, Choice],
    sources: Sources | None,
    expected: object,
) -> None:
    for name in CHECKPOINTS:
        (tmp_path / name).mkdir()
    newest = SimpleNamespace(folder=CHECKPOINTS[1], step=200)
    monkeypatch.setattr(job, "find_latest", lambda storage: SimpleNamespace(checkpoint=newest))
    assert job.newest_state(Alone(), LocalStorage(tmp_path), start, sources) == expected


def test_a_damaged_checkpoint_after_the_copies_is_not_one_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    for name in CHECKPOINTS:
        (tmp_path / name).mkdir()
    sound = SimpleNamespace(folder=CHECKPOINTS[0], step=100)
    monkeypatch.setattr(job, "find_latest", lambda storage: SimpleNamespace(checkpoint=sound))
    copies = Sources(1, {}, 150)
    start: tuple[str | None, Choice] = (None, "newest that fits")
    assert job.newest_state(Alone(), storage, start, copies) == (copies, start)
    # Or no checkpoint would be written until step 200.
    checkpoints = cast(TrainingCheckpoints, SimpleNamespace(_storage=storage))
    assert TrainingCheckpoints.newest_step(checkpoints, 150) == 100
    assert TrainingCheckpoints.newest_step(checkpoints, 99) is None


def test_a_snapshot_holds_one_copy_of_a_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors of a device, copies of all of them beside the snapshot would double its memory."""
    tensors = {"a": np.arange(7, dtype=np.float32), "b": np.zeros((0, 3), np.uint16), "c": np.full((2, 3), True)}
    copies: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    def to_numpy(x: np.ndarray) -> np.ndarray:
        alive.append(sum(ref() is not None for ref in copies))
        copies.append(weakref.ref(copy := x.copy()))
        return copy

    platform = SimpleNamespace(to_numpy=to_numpy, itemsize=lambda dtype: dtype.itemsize, dtype_name=str)
    setup = cast(RankSetup, SimpleNamespace(platform=platform))
    monkeypatch.setattr(recovery, "_state", lambda setup: iter(tensors.items()))
    snapshot = Snapshot.take(setup, 1, {"step": 3}, lambda size: np.empty(size, np.uint8))
    assert max(alive) <= 1
    assert (snapshot.step, snapshot.data.nbytes) == (3, 128)
    for name, _, _, dtype, shape, offset in json.loads(snapshot.header)["tensors"]:
        found = snapshot.data[offset : offset + tensors[name].nbytes].view(dtype).reshape(shape)
        np.testing.assert_array_equal(found, tensors[name])


class Short(StateCopies):
    """Copies of a rank that has no memory for the first one that it shall hold."""

    has_failed = False

    def memory_for(self, rank: int, number: int, size: int) -> np.ndarray:
        if not self.has_failed:
            self.has_failed = True
            raise MemoryError("no memory")
        return super().memory_for(rank, number, size)


@pytest.fixture
def pair() -> Iterator[tuple[_Exchange, _Exchange]]:
    """The exchanges of two ranks, of which the second one has no memory at first."""
    kinds = (StateCopies, Short)
    found = tuple(_Exchange(kind(partner=True, interval=2), "127.0.0.1", slot) for slot, kind in enumerate(kinds))
    for rank, each in enumerate(found):
        each.connect(rank, 1 - rank, [other.address for other in found])
    yield found
    for each in found:
        each.close()


def test_a_copy_is_sent_again_after_a_failure(
    pair: tuple[_Exchange, _Exchange], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recovery, "_RETRY_SECONDS", 0.01)
    sent = [threading.Event(), threading.Event()]
    for number, event in enumerate(sent, start=1):
        pair[0].send(1, Snapshot(number, b"{}", np.arange(64, dtype=np.uint8)), "held", event.set)
    assert all(event.wait(60) for event in sent)
    assert sorted(pair[1]._copies._held[0]) == [1, 2]
    assert capfd.readouterr().err == (
        "hp-train: rank 1 could not take a copy of another rank's state: MemoryError: no memory\n"
    )
    # Sent again, the last one does not replace the one before it, which other ranks may need.
    pair[1]._copies.memory_for(0, 2, 64)
    assert sorted(pair[1]._copies._held[0]) == [1, 2]


def test_a_machine_that_does_not_answer_does_not_delay_the_next_generation(
    pair: tuple[_Exchange, _Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_CONNECT_SECONDS", 0.2)
    # A server whose queue of connections is full does not answer further ones, like a machine that has died.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, contextlib.ExitStack() as queued:
        for _ in range(8):
            waiting = queued.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        pair[0]._peers[1] = ("127.0.0.1", silent.getsockname()[1], b"")
        started, connect = threading.Event(), pair[0]._connect
        monkeypatch.setattr(pair[0], "_connect", lambda rank: started.set() or connect(rank))
        pair[0].send(1, Snapshot(1, b"{}", np.zeros(8, np.uint8)), "held")
        assert started.wait(60)
        closing = threading.Thread(target=pair[0].close)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()


def test_a_newcomer_does_not_wait_for_a_rank_that_has_died(
    pair: tuple[_Exchange, _Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CollectiveError, match=r"^rank 0 has not sent this rank its state in 0.01 s$"):
        pair[1].receive(1, 0, 0.01)
    monkeypatch.setattr(hp_dtensor.launch, "generation_has_ended", lambda: True)
    with pytest.raises(CollectiveError, match=r"^a rank has died while rank 0 sent this rank its state$"):
        pair[1].receive(1, 0, 1e6)


def test_copies_that_never_become_complete_are_reported(
    pair: tuple[_Exchange, _Exchange], capfd: pytest.CaptureFixture[str]
) -> None:
    for each in pair:
        each._copies._exchange = each
        for each._copies.step in range(1, 150):
            each._copies.agree(everywhere=False)
    pair[0]._copies.agree(everywhere=True)
    assert capfd.readouterr().err.splitlines() == [
        f"hp-train: rank {rank}: the copies of step 0 are not complete after 100 steps, which a death would repeat: "
        f"that of this rank is not in the memory of rank {1 - rank}"
        for rank in range(2)
    ]


@pytest.fixture
def memory() -> Iterator[list[str]]:
    """Files in memory, as a rank gets them from its parent."""
    numbers = [os.memfd_create("state of a rank") for _ in range(2)]
    yield [f"/proc/self/fd/{number}" for number in numbers]
    for number in numbers:
        os.close(number)


def take(copies: StateCopies, monkeypatch: pytest.MonkeyPatch, step: int, size: int) -> None:
    """Take a snapshot of a step, whose data are its number."""

    def taken(setup: object, number: int, values: dict[str, object], memory: Callable[[int], np.ndarray]) -> Snapshot:
        data = memory(size)
        data[:] = number
        return Snapshot(number, json.dumps({"values": values, "length": "x" * number}).encode(), data)

    monkeypatch.setattr(Snapshot, "take", taken)
    copies.take(cast(RankSetup, None), step, {})


def test_the_next_process_of_a_rank_has_its_last_two_snapshots(
    memory: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def restarted() -> StateCopies:
        copies = StateCopies(partner=True, interval=2, memory=memory)
        found = {number: (each.step, each.data.tolist()) for number, each in copies._own.items()}
        assert found == {number: (2 * number, [number] * size) for number, size in expected.items()}
        return copies

    expected: dict[int, int] = {}
    copies = restarted()
    # Of other sizes too, as when the optimizer gets states.
    for number, size in enumerate([0, 64, 64, 640, 64, 64], start=1):
        take(copies, monkeypatch, 2 * number, size)
        assert copies.is_complete, "the partner needs none"
        expected = {each: length for each, length in [*expected.items(), (number, size)] if each >= number - 1}
        restarted()
    # Numbers continue, so that the new snapshots are not taken for those of the process before.
    copies = restarted()
    take(copies, monkeypatch, 14, 64)
    expected = {6: 64, 7: 64}
    restarted()


def test_a_process_that_dies_while_it_takes_a_snapshot_leaves_the_one_before(
    memory: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = StateCopies(partner=False, interval=2, memory=memory)
    for number in (1, 2):
        take(copies, monkeypatch, 2 * number, 64)

    def die(lasting: _LastingSnapshot, snapshot: Snapshot) -> None:
        raise KeyboardInterrupt

    # Of the same size, and of another one.
    for size in (64, 128):
        with monkeypatch.context() as patched:
            patched.setattr(_LastingSnapshot, "complete", die)
            with pytest.raises(KeyboardInterrupt):
                take(copies, patched, 6, size)
        copies = StateCopies(partner=False, interval=2, memory=memory)
        assert {number: each.data.tolist() for number, each in copies._own.items()} == {2: [2] * 64}
    # The incomplete one is replaced.
    take(copies, monkeypatch, 6, 64)
    copies = StateCopies(partner=False, interval=2, memory=memory)
    assert sorted(copies._own) == [2, 3]


def test_after_a_rollback_the_snapshot_that_all_ranks_have_is_not_replaced(
    memory: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = StateCopies(partner=False, interval=2, memory=memory)
    for number in (1, 2):
        take(copies, monkeypatch, 2 * number, 64)
    # The others have the first one only.
    copies._own.pop(2)
    take(copies, monkeypatch, 4, 64)
    assert sorted(StateCopies(partner=False, interval=2, memory=memory)._own) == [1, 3]


RUN = """\
platform: torch
model: {name: decoder}
data: {path: corpus.txt}
training: {steps: 1, global_batch_size: 8}
"""


@pytest.mark.parametrize(
    ("settings", "world_size", "messages"),
    [
        ([("fault_tolerance.copies", "1")], 2, []),
        ([("fault_tolerance.copies", "1")], 1, ["fault_tolerance.copies: a single rank has no partner"]),
        (
            [("fault_tolerance.copies", "0")],
            2,
            [
                "fault_tolerance.copies: without copies, the state of a dead rank is only in its replicas, and there "
                "are none; fault_tolerance.copies=1"
            ],
        ),
        (
            [("fault_tolerance.copies", "1"), ("parallel.ep_move_interval", "2")],
            2,
            [
                "parallel.ep_move_interval: experts that move have other places in each copy, which cannot be "
                "restored; parallel.ep_move_interval=null"
            ],
        ),
    ],
)
def test_settings(
    installed: Registries,
    settings: list[tuple[str, str]],
    world_size: int,
    messages: list[str],
) -> None:
    config = parse_config(RUN, settings, registered=installed).config
    found = [
        f"{each.path}: {each.what}" + (f"; {each.hint}" if each.hint else "")
        for each in preflight.recovery_problems(config, world_size)
    ]
    assert found == messages


def job_of(installed: Registries, **settings: str) -> TrainerConfig:
    asked = [(name.replace("__", "."), value) for name, value in settings.items()]
    return parse_config(RUN, [("fault_tolerance.copies", "1"), *asked], registered=installed).config


@pytest.mark.parametrize(
    ("settings", "first_size", "dead", "expected"),
    [
        ({"parallel__dp_replicate": "2"}, 2, [0], [1]),
        ({"parallel__dp_replicate": "2"}, 2, [0, 1], []),
        ({"parallel__dp_replicate": "2"}, 4, [1], [2, 3]),
        ({"parallel__dp_replicate": "2"}, 4, [1, 2], []),
        ({"parallel__dp_shard": "4"}, 4, [1], []),
        # Pipeline stages are outermost, so a replica's ranks are not neighbours.
        ({"parallel__dp_replicate": "2", "parallel__pp": "2", "model__num_hidden_layers": "2"}, 8, [5], [2, 3, 6, 7]),
        # Eight samples are not split over three replicas.
        ({"parallel__dp_replicate": "4"}, 4, [0], [1, 2]),
        ({"parallel__dp_replicate": "4", "training__global_batch_size": "12"}, 4, [0], [1, 2, 3]),
    ],
)
def test_the_replicas_that_go_on(
    installed: Registries, settings: dict[str, str], first_size: int, dead: list[int], expected: list[int]
) -> None:
    config = job_of(installed, **settings)
    assert job.remaining_ranks(config, first_size, first_size, dead) == expected


def test_replicas_are_lost_one_after_the_other(installed: Registries) -> None:
    config = job_of(installed, parallel__dp_replicate="4", training__global_batch_size="24")
    assert job.remaining_ranks(config, 8, 8, [2]) == [0, 1, 4, 5, 6, 7]
    assert job.remaining_ranks(config, 8, 6, [0]) == [2, 3, 4, 5]
    assert job.remaining_ranks(config, 8, 4, [3]) == [0, 1]
    assert job.remaining_ranks(config, 8, 2, [1]) == []


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        # The samples of a rank at once, 6 of 24; three replicas have 8 each, two have 12.
        ({}, [4, 6, 6]),
        ({"training__micro_batch_size": "2"}, [2, 2, 2]),
        ({"training__micro_batch_tokens": "768"}, [2, 3, 3]),
        ({"parallel__pp": "2", "pipeline__microbatches": "2", "model__num_hidden_layers": "2"}, [2, 3, 3]),
    ],
)
def test_micro_batches_of_fewer_replicas_are_no_larger(
    installed: Registries, settings: dict[str, str], sizes: list[int]
) -> None:
    config = job_of(installed, parallel__dp_replicate="4", training__global_batch_size="24", **settings)
    of_replica = config.parallel.pp
    assert with_fewer_replicas(config, 4 * of_replica, 4 * of_replica) is config
    for replicas, size in zip((3, 2, 1), sizes, strict=True):
        found = with_fewer_replicas(config, replicas * of_replica, 4 * of_replica)
        assert (found.parallel.dp_replicate, found.training.micro_batch_size) == (replicas, size)
        assert found.training.global_batch_size == 24
        assert found.pipeline.microbatches is None
