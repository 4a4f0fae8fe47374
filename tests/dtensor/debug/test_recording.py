"""Recordings of a model on simulated ranks, and of torch's own FSDP2 on real ones, against one rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_model import ROWS, make_data, make_model

from hp_dtensor import ColwiseParallel, DeviceMesh, RowwiseParallel, nn, parallelize_module
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.debug import (
    Recorder,
    Recording,
    Rows,
    compare,
    draw,
    measure_growth,
    narrowed,
    perturb_weights,
    recording,
)
from hp_dtensor.debug.comparison import UNITS
from hp_dtensor.exceptions import RecordingError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.recording import recorded as recorded_collectives
from hp_dtensor.tensor.conversions import to_full
from hp_dtensor.testing import run_ranks

Change = Callable[[Any, int], None]


def train(
    platform: Platform, model: Any, x: Any, recorder: Recorder | None, steps: int = 2, change: Any = None
) -> None:
    """Plain gradient descent on the mean of the squares of all outputs, in two micro-batches."""
    ops = platform.ops
    for step in range(1, steps + 1):
        block = recorder.step(step) if recorder else None
        if block is not None:
            block.__enter__()
        loss = ops.mean(ops.square(to_full(model(x))))
        platform.backward(loss)
        if change is not None:
            change(model, step)
        if recorder is not None:
            recorder.gradients()
        with platform.no_grad():
            for _, parameter in platform.named_parameters(model):
                gradient = platform.get_grad(parameter)
                platform.copy_(
                    platform.unwrap(parameter) if hasattr(parameter, "_spec") else parameter,
                    ops.sub(*(platform.unwrap(t) if hasattr(t, "_spec") else t for t in (parameter, gradient))),
                )
                platform.set_grad(parameter, None)
        if block is not None:
            block.__exit__(None, None, None)


def alone(platform: Platform, *, unit: float | None = None, change: Any = None, seed: int = 0) -> Recording:
    model, (x, _) = make_model(platform, seed), make_data(platform)
    if unit is not None:
        perturb_weights(model, unit, platform)
    recorder = Recorder(model, platform, about={"dtypes": ["float32"]})
    train(platform, model, x, recorder, change=change)
    return recorder.recording


def tensor_parallel(platform: Platform, change: Any = None) -> Recording:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    model, (x, _) = make_model(platform), make_data(platform)
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    recorder = Recorder(model, platform, about={"dtypes": ["float32"]})
    recorder.rows = Rows(np.arange(ROWS), ROWS)
    train(platform, model, x, recorder, change=change)
    return recorder.recording


@pytest.fixture(scope="module")
def reference(platform: Platform) -> Recording:
    return measure_growth(alone(platform), alone(platform, unit=UNITS["float32"]))


def test_a_run_equals_itself_and_is_within_rounding_of_tensor_parallel_ranks(
    platform: Platform, reference: Recording
) -> None:
    assert compare(reference, alone(platform)).verdict == "equal"
    other = run_ranks(tensor_parallel, 2, platform, platform)[0]
    found = compare(reference, other)
    assert found.verdict == "within rounding", str(found)
    assert max(each.relative / each.tolerance for each in found.differences) < 0.3
    assert [event.key for event in other.steps[1]] == [event.key for event in reference.steps[1]]


def test_outputs_in_a_dict_or_dataclass_are_recorded(platform: Platform) -> None:
    @dataclass
    class Output:
        logits: Any
        size: int

    class Inner(nn.Module):
        def forward(self, x: Any) -> Any:
            return {"twice": self.ops.mul(x, 2.0), "size": 3}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.inner = nn.Linear(4, 2), Inner()

        def forward(self, x: Any) -> Any:
            return Output(self.inner(self.linear(x))["twice"], 3)

    with nn.building(platform):
        model = Outer()
    recorder = Recorder(model, platform)
    with recorder.step(1):
        platform.backward(platform.ops.sum(model(platform.ops.ones((3, 4), platform.dtype("float32"))).logits))
    outputs = ["linear", "inner[twice]", "(model)[logits]"]
    found = [event.key for event in recorder.recording.steps[1]]
    assert found[:3] == [("forward", name) for name in outputs]
    assert set(found[3:6]) == {("backward", name) for name in outputs}


def test_recording_changes_no_bit(platform: Platform) -> None:
    def weights(recorded: bool) -> list[np.ndarray]:
        model, (x, _) = make_model(platform), make_data(platform)
        train(platform, model, x, Recorder(model, platform) if recorded else None)
        return [platform.to_numpy(p) for _, p in platform.named_parameters(model)]

    for a, b in zip(weights(True), weights(False), strict=True):
        np.testing.assert_array_equal(a, b)


def test_recording_costs_one_collective_and_few_bytes(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    gather = ProcessGroup.all_gather_bytes
    monkeypatch.setattr(
        ProcessGroup, "all_gather_bytes", lambda self, data: sizes.append(len(data)) or gather(self, data)
    )

    def program(recorded: bool) -> tuple[int, int]:
        model, (x, _), world = make_model(platform), make_data(platform), current_world(platform).all
        recorder = Recorder(model, platform)
        sizes.clear()
        before = world.num_calls
        with recorded_collectives({}) as log, recorder.step(1) if recorded else contextlib.nullcontext():
            platform.backward(platform.ops.sum(model(x)))
        return len(log.records), world.num_calls - before

    assert run_ranks(program, 2, platform, False) == [(0, 0)] * 2
    # Of bytes on the host.
    assert run_ranks(program, 2, platform, True) == [(0, 1)] * 2
    # Outputs and their gradients, weights and theirs, with their names.
    assert max(sizes) < (4 + 8) * 400


def test_recording_needs_little_memory(platform: Platform) -> None:
    if platform.name != "torch":
        pytest.skip("only torch counts live bytes")
    from hp_platform_torch.trainer.counted_step import counted_bytes

    ops, width = platform.ops, 256

    def peak(is_recorded: bool) -> int:
        with nn.building(platform):
            layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        x = platform.from_numpy(np.ones((512, width), np.float32))
        with counted_bytes() as live:
            recorder = Recorder(layers, platform) if is_recorded else None
            for step in (1, 2):
                with contextlib.nullcontext() if recorder is None else recorder.step(step):
                    y = x
                    for layer in layers:
                        y = ops.silu(layer(y))
                    platform.backward(ops.mean(ops.square(y)))
        # Made from NumPy arrays, which are not counted.
        vectors = [] if recorder is None else [x for each in recorder._digester._vectors.values() for x in each]
        return live.peak + sum(x.nbytes for x in vectors)

    assert peak(True) <= 1.05 * peak(False)


def test_a_file_is_small_and_loads_back(reference: Recording, tmp_path: Path) -> None:
    path = tmp_path / "digests.gz"
    reference.save(path)
    loaded = Recording.load(path)
    assert loaded.about == reference.about
    assert path.stat().st_size < 400 * sum(map(len, reference.steps.values()))
    for step, events in reference.steps.items():
        for before, after in zip(events, loaded.steps[step], strict=True):
            assert (before.key, before.dtype, before.digest.shape) == (after.key, after.dtype, after.digest.shape)
            np.testing.assert_allclose(after.digest.values, before.digest.values, rtol=1e-6)
            assert after.growth == (before.growth if before.growth is None else pytest.approx(before.growth, rel=1e-6))
    assert compare(loaded, reference).verdict != "different"


def test_a_file_is_unchanged_if_it_cannot_be_replaced(reference: Recording, tmp_path: Path) -> None:
    path = tmp_path / "digests.gz"
    reference.save(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        Recording({"unknown": object()}, reference.steps).save(path)
    assert path.read_bytes() == before


def test_weights_change_by_roundings_of_their_dtype(hp_platform: Platform) -> None:
    for dtype, spacing in (("float64", 2.0**-52), ("float32", 2.0**-23)):
        with nn.building(hp_platform):
            layer = nn.Linear(4, 4)
        before = np.linspace(1, 2, 16, dtype=dtype).reshape(4, 4)
        hp_platform.set_parameter(layer, "weight", hp_platform.Parameter(hp_platform.from_numpy(before.copy())))
        perturb_weights(layer, 0.0, hp_platform)
        change = np.abs(hp_platform.to_numpy(layer.weight) - before)
        assert spacing / 2 <= change.min() <= change.max() <= 2 * spacing


@pytest.mark.parametrize("damage", [b"", b"no gzip", None])
def test_a_damaged_file_is_refused(reference: Recording, tmp_path: Path, damage: bytes | None) -> None:
    path = tmp_path / "digests.gz"
    reference.save(path)
    path.write_bytes(path.read_bytes()[:-20] if damage is None else damage)
    with pytest.raises(RecordingError, match="is not a complete recording"):
        Recording.load(path)


def scaled(name: str, factor: float, step: int, platform: Platform) -> Change:
    def change(model: Any, now: int) -> None:
        found = dict(platform.named_parameters(model))[name]
        if now == step:
            gradient = platform.get_grad(found)
            local = platform.unwrap(gradient) if hasattr(gradient, "_spec") else gradient
            platform.copy_(local, platform.ops.mul(local, factor))

    return change


def test_the_first_difference_is_named_with_its_factor(platform: Platform, reference: Recording) -> None:
    found = compare(reference, alone(platform, change=scaled("down.weight", 2.0, 2, platform)))
    assert found.verdict == "different"
    assert found.first is not None
    assert found.kind is not None
    assert (found.first.step, found.first.pass_, found.first.name) == (2, "gradient", "down.weight")
    assert found.kind.name == "factor"
    assert "different from step 2, gradient of down.weight on" in str(found)
    assert "B is 2 times A" in str(found)


def test_a_gradient_that_one_replica_lacks_names_the_rank(platform: Platform, reference: Recording) -> None:
    def program() -> Recording:
        rank = current_world(platform).rank
        return tensor_parallel(platform, scaled("down.bias", 0.5, 1, platform) if rank == 1 else None)

    found = compare(reference, run_ranks(program, 2, platform)[0])
    assert found.first is not None
    assert found.kind is not None
    assert (found.first.step, found.first.pass_, found.first.name) == (1, "gradient", "down.bias")
    assert found.kind.name == "replicas differ"
    assert "ranks 1 of B" in str(found)


def test_views_are_recorded_in_place_of_a_parameter(platform: Platform) -> None:
    """Two weights that are one, side by side and transposed, have the digests of the two."""
    values = np.random.default_rng(2).standard_normal((2, 3, 4)).astype("float32")

    class Weights(nn.Module):
        def __init__(self, weights: dict[str, np.ndarray]) -> None:
            super().__init__()
            for name, array in weights.items():
                setattr(self, name, self.parameter(array.shape))
                platform.copy_(getattr(self, name), platform.from_numpy(np.ascontiguousarray(array)))

    def recorded(views: Any = None, **weights: np.ndarray) -> Recording:
        with nn.building(platform):
            model = Weights(weights)
        return measure_growth(*[Recorder(model, platform, views=views).recording] * 2)

    def views(name: str, x: Any) -> dict[str, Any]:
        return {each: platform.ops.permute(x[:, 3 * at : 3 * at + 3], (1, 0)) for at, each in enumerate("ab")}

    stored = np.concatenate([values[0].T, values[1].T], 1)
    found = compare(recorded(a=values[0], b=values[1]), recorded(views, both=stored))
    assert found.verdict == "equal", str(found)
    assert [each.name for each in found.differences] == ["a", "b"]


def test_a_split_backward_records_a_gradient_once(platform: Platform) -> None:
    if not platform.splits_backward:
        pytest.skip("this platform does not split a backward")
    ops = platform.ops

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = self.parameter((6,))

        def forward(self, x: Any) -> Any:
            # A node written in Python, which computes both gradients in both parts of the backward.
            return platform.custom_function(
                ops.mul, lambda g: [ops.mul(g, self.weight), ops.sum(ops.mul(g, x), 0)], x, self.weight
            )

    def recorded(splits: bool) -> Recording:
        with nn.building(platform):
            model = nn.ModuleList([Scaled()])
        x = platform.detach(make_data(platform)[0])
        platform.set_requires_grad(x, True)
        recorder = Recorder(model, platform, about={"dtypes": ["float32"]})
        with recorder.step(1):
            # The same output twice is two gradients.
            loss = ops.sum(ops.square(ops.add(model[0](x), model[0](x))))
            if splits:
                platform.split_backward([loss], [None], [x])[1]()
            else:
                platform.backward(loss)
        return recorder.recording

    found = compare(measure_growth(recorded(False), recorded(False)), recorded(True))
    assert found.verdict == "equal", str(found)
    assert [each.pair.b.digest.count for each in found.differences if each.pass_ == "backward"] == [2]


def test_the_operation_is_named_in_which_ranks_part(platform: Platform) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 5)
            self.shift, self.more = 0.0, False

        def forward(self, x: Any) -> Any:
            y = self.ops.silu(self.up(x))
            y = self.ops.mul(y, 1.0) if self.more else y
            return self.down(self.ops.exp(self.ops.add(y, self.shift)))

    def recorded(shift: float = 0.0, more: bool = False, unit: float = 0.0, shards: bool = False) -> Recording:
        with nn.building(platform):
            model = Shifted()
        for index, (_, weight) in enumerate(platform.named_parameters(model)):
            values = np.random.default_rng(index).uniform(-1, 1, tuple(weight.shape)).astype(np.float32)
            platform.copy_(weight, platform.from_numpy(values))
        if unit:
            perturb_weights(model, unit, platform)
        if shards:
            mesh = DeviceMesh("cpu", (2,), platform=platform)
            plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
            parallelize_module(model, mesh, plan, src_data_rank=None)
        recorder = Recorder(model, platform, about={"dtypes": ["float32"]})
        model.shift, model.more, recorder.operations = shift, more, lambda name: True
        with recorder.step(1, Rows(np.arange(ROWS), ROWS)):
            loss = platform.ops.sum(to_full(model(make_data(platform)[0])))
            platform.backward(loss)
        return recorder.recording

    expected = measure_growth(recorded(), recorded(unit=UNITS["float32"]))
    right = compare(expected, run_ranks(lambda: recorded(shards=True), 2, platform)[0])
    assert right.verdict == "within rounding", str(right)
    assert not right.notes
    names = [each.name for each in right.differences if each.pass_ == "forward"]
    last = ["(model): 2 add", "(model): 3 exp", "down: 1 linear", "down", "(model)"]
    assert names == ["up: 1 linear", "up", "(model): 1 silu", *last]
    wrong = compare(expected, run_ranks(lambda: recorded(0.01, shards=True), 2, platform)[0])
    assert narrowed(wrong, wrong).operation == ("(model): 2 add, output; the last that agrees is (model): 1 silu",)
    other = compare(expected, run_ranks(lambda: recorded(0.01, True, shards=True), 2, platform)[0])
    assert narrowed(other, other).operation == (
        "(model): 2 add, output; the last that agrees is (model): 1 silu",
        "(model): after 1 silu A alone runs none, and B alone 2 mul",
    )


def test_not_a_number_is_named_where_it_begins(platform: Platform, reference: Recording) -> None:
    found = compare(reference, alone(platform, change=scaled("up.bias", float("nan"), 1, platform)))
    assert found.first is not None
    assert found.kind is not None
    assert (found.first.pass_, found.first.name, found.kind.name) == ("gradient", "up.bias", "not finite")


def test_other_initial_weights_and_other_models_are_told(platform: Platform, reference: Recording) -> None:
    found = compare(reference, alone(platform, seed=5))
    assert found.kind is not None
    assert found.kind.name == "initial weights"
    other = alone(platform)
    for step, events in other.steps.items():
        other.steps[step] = [event for event in events if event.name != "up.bias"]
    assert any("only A has 2 of its" in note for note in compare(reference, other).notes)
    del other.steps[2]
    assert any("only A has steps 2 to 2" in note for note in compare(reference, other).notes)
    with pytest.raises(RecordingError, match="neither recording knows how rounding grows"):
        compare(other, other)


def test_rows_that_are_missing_are_an_error_on_every_rank(platform: Platform) -> None:
    def program() -> str:
        rank, (x, _) = current_world(platform).rank, make_data(platform)
        model = make_model(platform)
        recorder = Recorder(model, platform)
        with pytest.raises(RecordingError) as error, recorder.step(1, Rows(np.array([rank]), 5)):
            platform.backward(platform.ops.sum(model(platform.ops.narrow(x, 0, rank, 1))))
        return str(error.value)

    for message in run_ranks(program, 2, platform):
        assert "forward of up has 0.4 times the elements of [5, 7]" in message


def test_clocks_of_machines_do_not_order_events(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = platform.to_numpy(platform.detach(make_model(platform).up(make_data(platform)[0])))
    ahead = {0: 1000.0, 1: 0.0}
    clock = time.monotonic
    monkeypatch.setattr(recording.time, "monotonic", lambda: clock() + ahead[current_world(platform).rank])

    def program() -> list[str]:
        rank, (x, _), model = current_world(platform).rank, make_data(platform), make_model(platform)
        recorder = Recorder(model, platform)
        with recorder.step(1, Rows(np.arange(ROWS), ROWS)):
            # Two stages of a pipeline, the second after the first.
            y = model.up(x) if rank == 0 else platform.from_numpy(inner)
            current_world(platform).all.all_gather_bytes(b"")
            if rank == 1:
                model.down(y)
        return [event.name for event in recorder.recording.steps[1] if event.pass_ == "forward"]

    assert run_ranks(program, 2, platform) == [["up", "down"]] * 2


def test_the_output_of_the_model_itself_is_recorded_or_told(platform: Platform) -> None:
    def program() -> tuple[list[str], Any]:
        class Scaled(nn.Module):
            def forward(self, x: Any) -> Any:
                return self.ops.mul(self.ops.sum(x), 3.0)

        with nn.building(platform):
            model = Scaled()
        recorder = Recorder(model, platform)
        with recorder.step(1):
            model(make_data(platform)[0])
        return [event.name for event in recorder.recording.steps[1]], recorder.recording.about.get("unplaced")

    assert program() == (["(model)"], None)
    # A rank's own loss is no replica of that of another one.
    assert run_ranks(program, 2, platform) == [([], ["(model)"])] * 2


def test_the_picture_has_a_panel_for_each_pass(platform: Platform, reference: Recording, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(compare(reference, alone(platform)), tmp_path / "difference.svg")
    assert "<svg" in (tmp_path / "difference.svg").read_text()


def test_fsdp2_of_torch_is_within_rounding_of_one_rank(
    platform: Platform, rank_pool: Any, reference: Recording
) -> None:
    if platform.name != "torch":
        pytest.skip("FSDP2 is torch's")
    data = platform.to_numpy(make_data(platform)[0])
    found = compare(reference, rank_pool(2).run("recorded_programs:torch_fsdp2", data)[0])
    assert found.verdict == "within rounding", str(found)
    assert not found.notes
