"""Plans of published training jobs against the published speed and memory (published.yaml).

Goals: speed within a fifth, memory within 15 %. Jobs that miss them are listed with the ratio of plan to published, and
a test fails if such a ratio changes. Run as a program, this file prints all ratios; with `fit`, it fits the constants
of devices.yaml to half of the jobs and prints them first (a minute).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hp_trainer.config import TrainerConfig, parse_config
from hp_trainer.parallel import ParallelDims
from hp_trainer.planning import StepPlan, find_device, plan_step
from hp_trainer.plugins import plugin_manager
from hp_trainer.registries import fill_registries

TABLE: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text())
REGISTERED = fill_registries(plugin_manager())
# What software of a job hides, and hp-train does not: products between which exchanges of `tp` are split, and chunks of
# tokens for experts on processors of their own. The shares of `tp` and `ep` are set by hand; CONSTANTS has the others.
UNFUSED_ATTENTION = 0.084
HIDDEN = {"tp": {"tp": 0.25}, "userbuffers": {"tp": 0.95}, "ep": {"ep": 0.95}}


@dataclasses.dataclass(frozen=True)
class Job:
    """A published job.

    Attributes:
        speed: published tokens per second and device.
        memory: published GiB of the fullest device, or of a device in which the job fitted; None: not published.
    """

    name: str
    given: dict[str, Any]
    device_name: str
    speed: float
    memory: float | None

    @property
    def fitted(self) -> bool:
        return bool(self.given.get("fitted"))

    @property
    def checks(self) -> bool:
        """Return whether no constant was chosen by this job."""
        return not (self.fitted or self.given.get("by_hand"))

    def config(self) -> TrainerConfig:
        given = self.given
        settings = {f"parallel.{name}": value for name, value in given.get("degrees", {}).items()}
        settings |= {f"model.{name}": value for name, value in model_of(given).items()}
        settings |= {
            "training.global_batch_size": given["batch"],
            "training.micro_batch_size": given["micro"],
            "training.sequence_length": given.get("length", 2048),
            "training.dtype": "bfloat16",
            "training.recompute": given.get("recompute", "full"),
        }
        if settings["training.recompute"] == "selective":
            # torchtitan saves every second product of a block; here every second block saves all of them.
            settings |= {"training.recompute_keep": "[attention, collectives]", "training.recompute_every": 2}
        if "gpt" in given:
            ranks, degrees = given["ranks"], given.get("degrees", {})
            settings["parallel.dp_replicate"] = ranks // (degrees.get("tp", 1) * degrees.get("pp", 1))
        if "cp" in given.get("degrees", {}):
            settings["parallel.cp_method"] = "all_gather"
        if "stages" in given:
            settings |= {"pipeline.schedule": "interleaved_1f1b", "pipeline.stages_per_rank": given["stages"]}
        if "layers" in given:
            first, inner, last = given["layers"]
            settings["pipeline.layers"] = [first, *[1] * inner, last]
        if "schedule" in given:
            settings["pipeline.schedule"] = given["schedule"]
        if "dispatcher" in given:
            settings |= {"parallel.ep_dispatcher": given["dispatcher"], "parallel.ep_node_size": 8}
        texts = [(name, str(value)) for name, value in settings.items()]
        config = parse_config("data: {path: none.txt}\ntraining: {steps: 1}\n", texts, registered=REGISTERED).config
        # hp-train compiles no tensor parallel blocks, so the setting is not checked with the others.
        training = dataclasses.replace(config.training, compile="compiled" in self.software)
        return dataclasses.replace(config, training=training)

    @property
    def software(self) -> list[str]:
        # Megatron-LM had no fused attention in 2021 and 2022.
        return self.given.get("software", ["unfused"] if "gpt" in self.given else [])

    @functools.cached_property
    def plan(self) -> StepPlan:
        config, device = self.config(), find_device(self.device_name)
        for name in HIDDEN.keys() & self.software:
            device = dataclasses.replace(device, hidden=device.hidden | HIDDEN[name])
        if "unfused" in self.software:
            device = dataclasses.replace(device, attention_efficiency=UNFUSED_ATTENTION)
        if "float8" in self.software:
            device = dataclasses.replace(device, products_dtype="float8")
        experts = getattr(config.model.options, "num_experts", None)
        dims = ParallelDims.from_config(config.parallel, self.given["ranks"], experts)
        if "ep" in self.software:
            # In hp-train, two levels do not send chunks.
            config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, ep_chunks=8))
        return plan_step(config, dims, device)

    @property
    def planned_memory(self) -> float:
        """GiB that the allocator of the job's software reserves on the fullest device."""
        peak = self.plan.memory[self.plan.peak_rank]
        # The bytes of `loss` are two float32 tensors of the logits' size.
        return (peak.total + self.given["reserves_logits"] * peak.loss / 4) / 2**30


def model_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a job's model."""
    if "model" in given:
        return TABLE["models"][given["model"]]
    heads, hidden, layers = given["gpt"]
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": round(8 * hidden / 3 / 64) * 64}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": hidden // heads}
    return {"vocab_size": 51200, **sizes, **heads_of}


def speed_of(given: dict[str, Any]) -> float:
    """Return the published tokens per second and device."""
    if "speed" in given:
        return float(given["speed"])
    length = given.get("length", 2048)
    if "seconds" in given:
        return given["batch"] * length / given["seconds"] / given["ranks"]
    sizes = model_of(given)
    hidden, layers, vocab = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["vocab_size"]
    if "gpt" in given:
        per_token = 96 * layers * hidden**2 * (1 + length / 6 / hidden + vocab / 16 / layers / hidden)
    else:
        per_token = 6 * 405.8e9 + 12 * layers * hidden * length
    return given["tflops"] * 1e12 / per_token


def jobs() -> Iterator[Job]:
    """Yield the jobs of all sources."""
    for source in TABLE["sources"].values():
        for given in source["jobs"]:
            given = {"reserves_logits": source.get("reserves_logits", False), **given}
            yield Job(given["name"], given, source["device"], speed_of(given), given.get("memory", given.get("most")))


SPEED, MEMORY = 0.2, 0.15
JOBS = {job.name: job for job in jobs()}
MISSED_SPEED = {
    # The published gain of the interleaved schedule, 28 %, is more than twice the idle time that it saves.
    "405B on 512": 1.20,
    # Half of the planned time is for rows sent to other nodes. The benchmark's gate is a fake one, which may choose
    # experts on fewer nodes.
    "DeepSeek-V3 on 256": 0.72,
}
MISSED_MEMORY = {
    # With exchanges of `tp` that overlap with products, 4.3 GiB less are published.
    "70B on 256": 0.83,
    # The interleaved schedule has more micro-batches in flight, yet 72.7 GiB are published for it.
    "405B on 512": 0.73,
    # The job fitted into 80 GB: it frees tensors that backward does not need.
    "Llama 3 405B on 8192": 1.31,
    "Llama 3 405B on 16384": 1.20,
    # Compiled blocks save less than single operations.
    "8B on 128 compiled": 1.22,
    "8B on 128 float8": 1.23,
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_speed_is_within_a_fifth(job: Job) -> None:
    plan = job.plan
    ratio = plan.tokens_per_second / plan.shape.dims.world_size / job.speed
    if job.name in MISSED_SPEED:
        assert abs(ratio - 1) > SPEED, f"{job.name} is within {SPEED:.0%} now: remove it from MISSED_SPEED"
        assert ratio == pytest.approx(MISSED_SPEED[job.name], abs=0.01)
    else:
        assert ratio == pytest.approx(1, abs=SPEED)


@pytest.mark.parametrize(
    "job", [job for job in JOBS.values() if job.memory], ids=[n for n, j in JOBS.items() if j.memory]
)
def test_memory_is_within_15_percent(job: Job) -> None:
    assert job.memory is not None
    ratio = job.planned_memory / job.memory
    if job.name in MISSED_MEMORY:
        assert abs(ratio - 1) > MEMORY, f"{job.name} is within {MEMORY:.0%} now: remove it from MISSED_MEMORY"
        assert ratio == pytest.approx(MISSED_MEMORY[job.name], abs=0.01)
    else:
        assert ratio == pytest.approx(1, abs=MEMORY)


def test_half_of_the_jobs_check_the_constants() -> None:
    checks = sum(job.checks for job in JOBS.values())
    assert len(JOBS) >= 40
    assert checks >= len(JOBS) / 2 - 2


def test_what_the_software_of_a_checking_job_hides_is_chosen_by_other_jobs() -> None:
    for job in JOBS.values():
        others = {name for other in JOBS.values() if other.fitted for name in other.software}
        assert not job.checks or HIDDEN.keys() & job.software <= others, job.name


# Fitting -------------------------------------------------------------------------------------------------

# Each constant with its least and greatest value; those of a device apply to its jobs alone.
CONSTANTS = {
    ("H100", "efficiency"): (0.4, 0.9),
    ("H100", "attention_efficiency"): (0.1, 0.65),
    ("H100-96GB", "efficiency"): (0.4, 0.9),
    ("H100-96GB", "attention_efficiency"): (0.1, 0.65),
    ("A100", "efficiency"): (0.4, 0.9),
    ("", "float8"): (1e15, 2e15),
    ("", "ring_efficiency"): (0.3, 1.0),
    ("", "traffic"): (2.0, 30.0),
    ("", "compiled_traffic"): (2.0, 15.0),
    ("", "weights"): (0.3, 1.0),
    ("", "userbuffers"): (0.2, 0.95),
    ("", "unfused"): (0.05, 0.5),
}


def with_constants(job: Job, plan: StepPlan, values: dict[tuple[str, str], float]) -> StepPlan:
    """Return a job's plan with other constants."""
    device, changed = plan.device, {}
    where = "H100" if job.device_name == "H800" else job.device_name
    for (name, field), value in values.items():
        if field == "float8":
            changed["flops"] = {**device.flops, **({"float8": value} if "float8" in device.flops else {})}
        elif field == "weights" or (field == "userbuffers" and field in job.software):
            hidden = changed.get("hidden", device.hidden)
            changed["hidden"] = {**hidden, {"weights": "weights", "userbuffers": "tp"}[field]: value}
        elif field == "unfused" and field in job.software:
            changed["attention_efficiency"] = value
        elif field not in ("userbuffers", "unfused") and name in ("", where):
            changed[field] = value
    return dataclasses.replace(plan, device=dataclasses.replace(device, **changed))


def fit(plans: dict[str, StepPlan], rounds: int = 12) -> dict[tuple[str, str], float]:
    """Return the constants with the least squared logarithms of plan to published, over the jobs marked `fitted`."""

    def loss(values: dict[tuple[str, str], float]) -> float:
        total = 0.0
        for job in JOBS.values():
            if job.fitted:
                plan = with_constants(job, plans[job.name], values)
                error = abs(math.log(plan.tokens_per_second / plan.shape.dims.world_size / job.speed))
                # A job that some mechanism is missing for should not bend the constants of all.
                total += error**2 if error < 0.5 else error - 0.25
        return total

    values = {key: (least * most) ** 0.5 for key, (least, most) in CONSTANTS.items()}
    best, steps = loss(values), dict.fromkeys(values, 0.2)
    for _ in range(rounds):
        for key, (least, most) in CONSTANTS.items():
            for factor in (1 + steps[key], 1 / (1 + steps[key])):
                tried = values | {key: min(max(values[key] * factor, least), most)}
                if (found := loss(tried)) < best:
                    best, values = found, tried
                    break
            else:
                steps[key] /= 2
    return values


if __name__ == "__main__":
    every = {job.name: job.plan for job in JOBS.values()}
    if "fit" in sys.argv:
        constants = fit(every)
        print("\n".join(f"{' '.join(key):32}{value:.4g}" for key, value in constants.items()))
        every = {name: with_constants(JOBS[name], plan, constants) for name, plan in every.items()}
    for name, each in every.items():
        speed = each.tokens_per_second / each.shape.dims.world_size
        memory = JOBS[name].memory
        ratio = f"{JOBS[name].planned_memory:6.1f} / {memory}" if memory else ""
        print(
            f"{'*' if JOBS[name].fitted else ' '} {name:32}{speed:7.0f} /{JOBS[name].speed:7.0f} = "
            f"{speed / JOBS[name].speed:.2f}  {ratio}"
        )
