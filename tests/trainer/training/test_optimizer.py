"""Offload of the optimizer's state changes where it waits, and nothing that is computed or saved."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from training_runs import FOUR_RANKS, Lab, events, losses, tensors

from hp_fsdp.plugins import get_storage
from hp_fsdp.storage import ParameterStorage
from hp_trainer import cli
from hp_trainer.checkpoint import Box
from hp_trainer.exceptions import TrainingError
from hp_trainer.launch.step_checks import find_memory_problems
from hp_trainer.models.hugging_face import ModelDirectory
from hp_trainer.optimizers import offload
from hp_trainer.parallel import ParallelDims
from hp_trainer.training.optimizer import WeightAverage

OPTIMIZERS = {
    "adamw": {"parameter_groups": "[{match: ['*norm*'], weight_decay: 0}]"},
    "lion": {"optimizer": "{name: lion, lr: 1.0e-3}"},
    "adafactor": {"optimizer": "{name: adafactor}"},
    "muon": {"optimizer": "{name: muon, lr: 5.0e-3}"},
}


@pytest.fixture
def copies(hp_platform, monkeypatch):
    """A device that is played by the host: the elements of each copy, and buckets that several parameters share."""
    if hp_platform.name != "torch":
        pytest.skip("this platform keeps no shards of a device on the host, and says so before a run")
    storage, found = get_storage(hp_platform), {"to device": [], "to host": []}

    def copy(direction, target, source):
        found[direction].append(source.shape[0])
        return getattr(ParameterStorage, direction.replace(" ", "_"))(storage, target, source)

    played = {
        "is_host": lambda kind: False,
        "check_offload": lambda kind: None,
        "host_buffer": lambda numel, dtype, pin_memory: hp_platform.zeros((numel,), dtype),
        "copy_stream": contextlib.nullcontext,
        "finish_reading": lambda copying: None,
        "to_device": lambda target, host: copy("to device", target, host),
        "to_host": lambda host, source: copy("to host", host, source),
    }
    for name, function in played.items():
        monkeypatch.setattr(storage, name, function)
    monkeypatch.setattr(offload.build_on_host, "__defaults__", (600,))
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_weights_and_saved_state_are_bitwise_the_same(lab, copies, name):
    degrees = {"dp_shard": 2, "tp": 2}
    # Two steps after the checkpoint: weights that the loaded state has updated show in the loss of the second.
    settings = {"training__steps": 5, **OPTIMIZERS[name]}
    plain = lab.run("plain", degrees, 4, **settings)
    assert not copies["to device"]
    away = lab.run("away", degrees, 4, training__offload_optimizer="true", **settings)
    assert len(copies["to device"]) > 5 * 4
    assert losses(away) == losses(plain)
    expected, found = tensors(plain), tensors(away)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[each], expected[each]) for each in found)
    again = lab.resume(lab.interrupted_copy(plain, "again"), degrees, 4, training__offload_optimizer="true", **settings)
    assert losses(again) == losses(plain)


def test_state_is_on_the_device_for_three_buckets_at_most(hp_platform, copies):
    storage, kind = get_storage(hp_platform), hp_platform.dtype("float32")
    named = [(str(n), hp_platform.zeros((20, 20), kind)) for n in range(6)]

    class Momentum:
        num_steps = 0

        def __init__(self, some):
            self.slots = {name: {"momentum": hp_platform.zeros((20, 20), kind)} for name, _ in some}

        def step(self, learning_rate):
            self.num_steps += 1
            held.append(sum(storage.held_bytes(slot.on_device) for b in optimizer._buckets for slot in b._slots))
            for slots in self.slots.values():
                hp_platform.copy_(slots["momentum"], hp_platform.ops.add(slots["momentum"], learning_rate))

        def state(self):
            return self.slots

    held = []
    optimizer = offload.build_on_host(named, Momentum, hp_platform)
    for _ in range(2):
        optimizer.step(0.5)
    assert len(held) == 2 * 6
    assert max(held) == 3 * 400 * 4
    assert sum(storage.held_bytes(slot.on_device) for b in optimizer._buckets for slot in b._slots) == 0
    values = [hp_platform.to_numpy(slots["momentum"]) for slots in optimizer.state().values()]
    assert len(values) == 6
    assert all((value == 1.0).all() for value in values)


def test_an_optimizer_whose_state_has_a_form_of_its_own_is_refused(lab):
    config = lab.config(training__offload_optimizer="true", optimizer="{name: adamw_8bit}")
    (problem,) = find_memory_problems(ParallelDims(world_size=1), config, lab.platform.name)
    assert problem.path == "training.offload_optimizer"
    assert "the state of optimizer adamw_8bit is not plain tensors, and cannot be offloaded" in str(problem)


def test_states_that_are_parts_of_one_tensor_are_refused(hp_platform, copies):
    """Each would be freed with the others."""
    kind = hp_platform.dtype("float32")

    class Together:
        num_steps = 0

        def __init__(self, some):
            memory = hp_platform.zeros((2, 3), kind)
            self.slots = {name: {"momentum": memory[place]} for place, (name, _) in enumerate(some)}

        def state(self):
            return self.slots

    named = [(str(n), hp_platform.zeros((3,), kind)) for n in range(2)]
    with pytest.raises(TrainingError, match="state of Together cannot be offloaded, because it is not dense"):
        offload.build_on_host(named, Together, hp_platform)


def test_a_platform_that_keeps_nothing_on_the_host_says_so_before_a_run(lab, monkeypatch):
    if lab.platform.name == "torch":
        pytest.skip("torch can, on any accelerator")
    monkeypatch.setattr(get_storage(lab.platform), "is_host", lambda kind: False)
    config = lab.config(training__offload_optimizer="true")
    (problem,) = find_memory_problems(ParallelDims(world_size=1), config, lab.platform.name)
    assert problem.path == "training.offload_optimizer"
    assert "cannot keep shards" in str(problem)


def test_states_that_wait_on_the_host_do_not_move_with_experts(lab):
    config = lab.config({"ep_move_interval": 5}, training__offload_optimizer="true")
    problems = find_memory_problems(ParallelDims(), config, lab.platform.name)
    assert "parallel.ep_move_interval" in [problem.path for problem in problems]


SETTINGS = {"training__ema__decay": 0.9, "training__eval_interval": 3, "training__eval_batches": 1}


def averages(run) -> dict[str, np.ndarray]:
    return {name.removeprefix("ema."): value for name, value in tensors(run, ("ema.",)).items()}


def test_the_average_forgets_its_beginning_and_then_keeps_the_share_asked_for(hp_platform):
    weight = hp_platform.Parameter(hp_platform.from_numpy(np.array([4.0, -8.0], np.float32)))
    average = WeightAverage([("x", weight)], 0.5, hp_platform)
    expected = np.array([4.0, -8.0])
    for step, decay in ((1, 2 / 11), (2, 3 / 12), (3, 4 / 13), (14, 0.5), (15, 0.5)):
        values = np.array([step, 2.0], np.float32)
        with hp_platform.no_grad():
            hp_platform.copy_(hp_platform.detach(weight), hp_platform.from_numpy(values))
        average.update(step)
        expected = decay * expected + (1 - decay) * values
        np.testing.assert_allclose(hp_platform.to_numpy(average.state()["x"]), expected, rtol=1e-6)
    with average.in_place():
        np.testing.assert_allclose(hp_platform.to_numpy(hp_platform.detach(weight)), expected, rtol=1e-6)
    np.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.detach(weight)), values)


def test_averages_of_half_precision_weights_are_float32(hp_platform):
    half = hp_platform.dtype("bfloat16")
    weight = hp_platform.Parameter(hp_platform.ops.cast(hp_platform.from_numpy(np.ones(3, np.float32)), half))
    average = WeightAverage([("x", weight)], 0.999, hp_platform)
    with hp_platform.no_grad():
        values = hp_platform.ops.cast(hp_platform.from_numpy(np.full(3, 2.0, np.float32)), half)
        hp_platform.copy_(hp_platform.detach(weight), values)
    for _ in range(10):
        average.update(10**6)
    expected = 2 - 0.999**10
    np.testing.assert_allclose(hp_platform.to_numpy(average.state()["x"]), np.full(3, expected), rtol=1e-6)
    for _ in range(2):
        with average.in_place():
            inside = hp_platform.ops.cast(hp_platform.detach(weight), hp_platform.dtype("float32"))
            # bfloat16 keeps 8 bits.
            np.testing.assert_allclose(hp_platform.to_numpy(inside), expected, rtol=2**-8)
        after = hp_platform.ops.cast(hp_platform.detach(weight), hp_platform.dtype("float32"))
        np.testing.assert_array_equal(hp_platform.to_numpy(after), 2)
    np.testing.assert_allclose(hp_platform.to_numpy(average.state()["x"]), np.full(3, expected), rtol=1e-6)


@pytest.mark.usefixtures("torch_suffices")
def test_every_layout_has_the_same_average_and_goes_on_exactly(lab: Lab):
    full_value = lab.reference("full", **SETTINGS)
    found, weights = averages(full_value), tensors(full_value, ("model.",))
    assert {f"model.{name}" for name in found} == {name for name in weights if "expert_bias" not in name}
    assert not np.array_equal(found["embed.weight"], weights["model.embed.weight"])
    plain = lab.run("plain", training__eval_interval=3, training__eval_batches=1)
    assert losses(plain) == losses(full_value), "evaluation with the average changes no weight"
    # Groups that stay gathered after an evaluation must not be used by the next step.
    parts = lab.run("parts", FOUR_RANKS["folded"] | {"reshard_after_forward": False}, 4, **SETTINGS)
    np.testing.assert_allclose(losses(parts), losses(full_value), rtol=1e-4)
    np.testing.assert_allclose(
        [event["loss"] for event in events(parts, "evaluation")],
        [event["loss"] for event in events(full_value, "evaluation")],
        rtol=1e-4,
    )
    again = lab.resume(lab.interrupted_copy(full_value, "again"), **SETTINGS)
    assert losses(again) == losses(full_value)
    for name, value in averages(again).items():
        np.testing.assert_array_equal(value, found[name])
    moved = lab.resume(lab.interrupted_copy(parts, "moved"), {"dp_shard": 2}, 2, **SETTINGS)
    for name, value in averages(moved).items():
        np.testing.assert_allclose(value, averages(parts)[name], atol=2e-5)


def test_evaluation_uses_the_average_unless_told_not_to(lab: Lab, capsys):
    settings = SETTINGS | {"training__eval_interval": 6, "training__eval_batches": None}
    run = lab.run("run", **settings)
    (averaged,) = events(run, "evaluation")
    other = lab.run("other", training__ema__evaluate=False, **settings)
    (last,) = events(other, "evaluation")
    assert last["loss"] < averaged["loss"] - 1e-3, "six steps are few: the average lags behind"
    for weights, event in (("ema", averaged), ("last", last)):
        assert cli.main(["evaluate", str(run.path), f"--weights={weights}"]) == 0
        assert f"loss {event['loss']:.3f}" in capsys.readouterr().out


def test_a_run_may_begin_to_average_later_and_may_end_it(lab: Lab):
    plain = lab.reference("plain")
    started = lab.resume(lab.interrupted_copy(plain, "started"), **SETTINGS)
    assert losses(started) == losses(plain)
    full_value = lab.reference("full", **SETTINGS)
    assert averages(started).keys() == averages(full_value).keys()
    ended = lab.resume(lab.interrupted_copy(full_value, "ended"))
    assert losses(ended) == losses(plain)
    assert not averages(ended)


def test_weights_that_were_not_averaged_are_refused_by_name(lab: Lab, tmp_path, capsys):
    run = lab.run("run", training__steps=1)
    for command in (["evaluate", str(run.path)], ["export", str(run.path), f"--to={tmp_path / 'out'}"]):
        assert cli.main([*command, "--weights=ema"]) == 2
        assert "has no moving averages of the weights: its run was trained without" in capsys.readouterr().err
    assert cli.main(["evaluate", str(run.path), "--weights=best"]) == 2
    assert "Invalid value for '--weights': 'best' is not one of 'last', 'ema'." in capsys.readouterr().err


def test_a_step_that_overflows_leaves_the_average_alone(lab: Lab, monkeypatch):
    counted = []
    monkeypatch.setattr(WeightAverage, "update", lambda self, num_steps: counted.append(num_steps))
    lab.run("run", training__steps=2, training__dtype="float16", training__loss_scaling__init_scale=1e12, **SETTINGS)
    assert counted == []


def test_the_average_is_the_model_of_an_export(lab: Lab, tmp_path):
    run = lab.run("run", model__num_experts=None, model__qk_norm="none", model__num_dense_layers=0, **SETTINGS)
    assert cli.main(["export", str(run.path), f"--to={tmp_path / 'out'}", "--weights=ema"]) == 0
    directory = ModelDirectory(tmp_path / "out", run.load_config().config.model.options)
    for name, value in averages(run).items():
        np.testing.assert_array_equal(directory.read(name, Box.full(value.shape)), value)
