"""Plans of users' own modules against what torch's allocator gives to real ranks, and what cannot be planned."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from planned_runs import STEPS_COUNTED

from hp_trainer.cli import main
from hp_trainer.exceptions import PlanError
from hp_trainer.parallel import ParallelDims
from hp_trainer.planning.devices import find_device
from hp_trainer.planning.plan import StepPlan, plan_step
from hp_trainer.planning.user_modules import ModuleCounter

own_models = pytest.importorskip("own_models", reason="needs torch", exc_type=ImportError)

HOST = dataclasses.replace(find_device("H100"), is_host=True)
SHORT = {"training__sequence_length": 16}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank": (1, "build", {}),
    "half precision": (1, "build", {"training__dtype": "bfloat16"}),
    "built in half precision": (1, "half", {}),
    "accumulated": (1, "llama", {"training__micro_batch_size": 1}),
    "first blocks frozen": (1, "build", {"training__freeze": "['embed.*', 'blocks.0.*', 'blocks.1.*']"}),
    "parts within parts": (1, "build", {"parallel__fsdp_units": "['blocks.*.up', 'blocks.*']"}),
    "without blocks": (1, "without_blocks", {}),
    "of transformers": (1, "llama", {}),
    "of transformers, a frozen block between": (1, "llama", {"training__freeze": "['*.layers.2.*']"}),
    "shards, the embedding is the head": (2, "tied", SHORT),
    "shards that stay, half precision": (
        2,
        "build",
        {**SHORT, "parallel__reshard_after_forward": False, "training__dtype": "bfloat16"},
    ),
    "shards, reduced after each micro-batch": (
        2,
        "build",
        {**SHORT, "training__micro_batch_size": 1, "parallel__reduce_gradients": "micro_batch"},
    ),
}


@pytest.fixture(autouse=True)
def on_torch(platform) -> None:
    if platform.name != "torch":
        pytest.skip("modules are counted by torch")


def plan_of(build: str, world_size: int = 1, **settings: Any) -> StepPlan:
    config = own_models.config_of(build, **settings)
    dims = ParallelDims.from_config(config.parallel, world_size)
    return plan_step(config, dims, HOST, estimate_model=ModuleCounter(dims, "torch").of(config))


@pytest.mark.real_ranks
@pytest.mark.parametrize("name", list(CASES))
def test_memory_is_within_a_tenth_of_what_is_measured(rank_pool, name: str) -> None:
    world_size, build, settings = CASES[name]
    if build == "llama":
        pytest.importorskip("transformers")
    planned = plan_of(build, world_size, **settings).peak
    for steps in STEPS_COUNTED:
        if world_size == 1:
            measured = own_models.measured_peak(build, settings, steps)
        else:
            measured = max(rank_pool(world_size).run(own_models.measured_peak, build, settings, steps))
        if planned == pytest.approx(measured, rel=0.1):
            return
    pytest.fail(f"planned are {planned} bytes, measured {measured}")


def test_parameters_and_operations_are_those_of_the_module() -> None:
    plan, options = plan_of("build", 2, parallel__dp_shard=2), own_models.Options()
    model = own_models.build(options)
    assert plan.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    # Forward and twice as much in backward for each weight of a product, and attention, of which backward takes
    # five products for forward's two.
    tokens, width = 4 * 128, options.width
    weights = options.layers * 12 * width**2 + width * options.vocab_size
    attention = options.layers * 7 * 2 * 4 * 128 * 128 * width
    assert plan.utilization * plan.time.total * 2 * HOST.flops["float32"] == pytest.approx(
        6 * tokens * weights + attention, rel=1e-6
    )


def test_weights_are_gathered_for_forward_and_backward() -> None:
    plan, model = plan_of("build", 2), own_models.build(own_models.Options())
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    others = sum(parameter.numel() for parameter in model.parameters()) - blocks
    sent = {each.collective: each.bytes for each in plan.traffic}
    assert sent["all_gather"] == pytest.approx(4 * (2 * blocks + others) / 2, rel=1e-3)
    assert sent["reduce_scatter"] == pytest.approx(4 * (blocks + others) / 2, rel=1e-3)


def test_the_order_in_which_parts_are_named_changes_nothing() -> None:
    plans = [plan_of("build", 2, parallel__fsdp_units=f"[{names}]") for names in ("head, blocks.*", "blocks.*, head")]
    assert plans[0].memory == plans[1].memory
    assert plans[0].traffic == plans[1].traffic


def test_parts_are_called_by_their_names() -> None:
    settings = {**SHORT, "training__global_batch_size": 1}
    assert plan_of("build", **settings).memory[0].moment.split(" of ")[1].startswith("blocks.")


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        ("by_values", {}, "cannot be run on tensors without memory"),
        ("lays_itself_out", {}, "has a `parallelize` of its own"),
        ("build", {"training__recompute": "full"}, "leave out training.recompute"),
        ("build", {"parallel__tp": 2, "parallel__tp_plan": "{'*': colwise}"}, "leave out parallel.tp"),
    ],
)
def test_what_cannot_be_planned_is_told(build: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(build, 2, **settings)


def test_the_command_plans_a_module_and_names_settings_that_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f'model: {{name: "{Path(own_models.__file__)}:build", layers: 2}}\ndata: {{path: none.txt}}\n'
        "training: {steps: 1, global_batch_size: 8, sequence_length: 64}\n"
    )
    words = ("plan", str(file), "--world-size=2", "--platform=torch", "--device-memory=7MiB")
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {"training.micro_batch_size": "2"} in [each["settings"] for each in found["would_fit"]]
    assert not [each for each in found["would_fit"] if any("recompute" in path for path in each["settings"])]
    for change in found["would_fit"]:
        assert main([*words, "--json", *(f"--{path}={text}" for path, text in change["settings"].items())]) == 0
        again = json.loads(capsys.readouterr().out)
        assert math.isclose(max(each["total"] for each in again["memory"]), change["memory"])
    # Settings with which the module cannot compute are none.
    small = (*words[:-1], "--device-memory=5MiB", f"--model.name={Path(own_models.__file__)}:one_length")
    assert main([*small, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["would_fit"]
    assert found
    assert not [each for each in found if "training.sequence_length" in each["settings"]]
    assert main([*words[:-1], "--device-memory=1MiB"]) == 1
    assert "no setting or pair of settings makes it fit" in capsys.readouterr().out
