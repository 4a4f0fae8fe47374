"""Offload of the optimizer's state changes where it waits, and nothing that is computed or saved."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from training_runs import losses, tensors

from hp_fsdp.plugins import get_storage
from hp_fsdp.storage import ParameterStorage
from hp_trainer.exceptions import TrainingError
from hp_trainer.launch.step_checks import find_memory_problems
from hp_trainer.optimizers import state
from hp_trainer.parallel import ParallelDims

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
    monkeypatch.setattr(state.build_on_host, "__defaults__", (600,))
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_weights_and_saved_state_are_bitwise_the_same(lab, copies, name):
    degrees = {"dp_shard": 2, "tp": 2}
    plain = lab.run("plain", degrees, 4, **OPTIMIZERS[name])
    assert not copies["to device"]
    away = lab.run("away", degrees, 4, training__offload_optimizer="true", **OPTIMIZERS[name])
    assert len(copies["to device"]) > 6 * 4
    assert losses(away) == losses(plain)
    expected, found = tensors(plain), tensors(away)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[each], expected[each]) for each in found)
    away = {"training__offload_optimizer": "true", **OPTIMIZERS[name]}
    again = lab.resume(lab.interrupted_copy(plain, "again"), degrees, 4, **away)
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
    optimizer = state.build_on_host(named, Momentum, hp_platform)
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
        state.build_on_host(named, Together, hp_platform)


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
