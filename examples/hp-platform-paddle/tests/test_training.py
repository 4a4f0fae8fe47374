"""Training on Paddle and on PyTorch from one file gives the same losses, in every layout; checkpoints are exchanged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2]
LLAMA = EXAMPLES / "architectures" / "llama.yaml"
QWEN3_MOE = EXAMPLES / "architectures" / "qwen3_moe.yaml"
MOE_SMALL = EXAMPLES / "moe_small.yaml"
ONE_RANK = ("--launch.local_ranks=1", "--parallel.dp_shard=1", "--parallel.ep=1")
SMALL = ("--training.sequence_length=32", "--training.global_batch_size=4", "--training.eval_interval=null")
STEPS = 20
# Of the loss: sums in float32 in another order differ by some 1e-7.
TOLERANCE = 1e-6

LAYOUTS = [
    (LLAMA, ("--launch.local_ranks=1",)),
    (LLAMA, ("--launch.local_ranks=2", "--parallel.dp_shard=2")),
    (LLAMA, ("--launch.local_ranks=2", "--parallel.tp=2")),
    (LLAMA, ("--launch.local_ranks=4", "--parallel.dp_shard=2", "--parallel.tp=2")),
    (QWEN3_MOE, ONE_RANK),
    (QWEN3_MOE, ("--launch.local_ranks=2", "--parallel.dp_shard=2", "--parallel.ep=2")),
    (QWEN3_MOE, ("--launch.local_ranks=4", "--parallel.dp_shard=2", "--parallel.tp=2", "--parallel.ep=2")),
    (MOE_SMALL, ONE_RANK),
    (MOE_SMALL, ("--launch.local_ranks=4", "--parallel.dp_shard=4", "--parallel.ep=4")),
]


def train(platform, folder, config, layout, steps):
    """Train into a folder, with a checkpoint at the end, and return the losses of all steps there."""
    given = (*SMALL, f"--training.steps={steps}", "--generate.prompts=[]", f"--checkpoint.interval={steps}")
    return run(folder, str(config), f"--platform={platform}", f"--run.folder={folder}", *given, *layout)


def resume(platform, folder, layout, steps):
    """Continue the run in a folder, and return the losses of all its steps."""
    return run(folder, "resume", str(folder), f"--platform={platform}", f"--training.steps={steps}", *layout)


def run(folder, *arguments):
    command = [sys.executable, "-m", "hp_trainer", *arguments]
    # Not in the repository's root, whose modules would be found. The limit is below pytest's, for the output.
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    worst = max(abs(found[step] - expected[step]) / expected[step] for step in found)
    print(f"largest difference, of the loss: {worst:.1e}")
    assert worst < TOLERANCE


def test_two_ranks_train_as_torch_does(tmp_path):
    layout = ("--launch.local_ranks=2", "--parallel.dp_shard=2")
    found = train("paddle", tmp_path / "paddle", LLAMA, layout, 3)
    assert_equal(found, train("torch", tmp_path / "torch", LLAMA, ("--launch.local_ranks=1",), 3))


@pytest.fixture(scope="module")
def on_torch(tmp_path_factory):
    """Return a function that gives the losses of a file on one rank on PyTorch."""
    found = {}

    def losses(config):
        if config not in found:
            found[config] = train("torch", tmp_path_factory.mktemp(config.stem), config, ONE_RANK, STEPS)
        return found[config]

    return losses


@pytest.mark.full
@pytest.mark.parametrize(("config", "layout"), LAYOUTS)
def test_every_layout_trains_as_one_rank_on_torch(tmp_path, on_torch, config, layout):
    assert_equal(train("paddle", tmp_path, config, layout, STEPS), on_torch(config))


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [("paddle", "torch"), ("torch", "paddle")])
def test_a_run_continues_on_the_other_platform(tmp_path, first, second):
    # A schedule that does not depend on the number of steps.
    layout = ("--launch.local_ranks=2", "--parallel.dp_shard=2", "--lr_schedule.kind=constant")
    expected = train("torch", tmp_path / "whole", QWEN3_MOE, layout, STEPS)
    train(first, tmp_path / "run", QWEN3_MOE, layout, STEPS // 2)
    assert_equal(resume(second, tmp_path / "run", ("--launch.local_ranks=1", "--parallel.dp_shard=1"), STEPS), expected)
