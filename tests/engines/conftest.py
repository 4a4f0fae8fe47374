"""A small configuration, and a plugin that writes down each rank's place and injects faults by files."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Ray reads them when it is imported. Without them it would write a token into the user's home.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

CONFIG = """\
model:
  hidden_size: 16
  num_hidden_layers: 2
  num_dense_layers: 1
  intermediate_size: 24
  num_attention_heads: 2
  num_key_value_heads: 2
  head_dim: 8
  moe_intermediate_size: 12
  num_experts: 4
  num_shared_experts: 1
  initializer_range: 0.1
data: {path: corpus.txt}
training: {steps: 8, global_batch_size: 8, sequence_length: 16}
optimizer: {lr: 5.0e-3, eps: 1.0e-5}
lr_schedule: {kind: constant, warmup_steps: 2}
checkpoint: {interval: 2, keep: null}
metrics: {trackers: [jsonl]}
generate: {prompts: []}
"""

# A file `SIGNAL-RANK-STEP` in the folder `faults` sends the signal to the process of that rank, in the middle of the
# step for the others: they wait for it. A file `slow` adds half a second to each step.
PLUGIN = """\
import os, signal, time
from pathlib import Path

from hp_trainer.plugins import hookimpl

FAULTS = Path(os.environ["HP_TEST_FAULTS"])


@hookimpl
def hp_before_run(record):
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_PROCID")
    place = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    with open(FAULTS / "places", "a") as places:
        places.write(f"{record.world_size} {record.rank} {os.getpid()} {record.first_step} {place}\\n")


@hookimpl
def hp_before_step(record):
    rank = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
    if (FAULTS / "slow").exists():
        time.sleep(0.5)
    for name in ("SIGKILL", "SIGTERM"):
        fault = FAULTS / f"{name}-{rank}-{record.step}"
        if fault.exists():
            fault.unlink()
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(30 if name == "SIGKILL" else 0)
"""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engines_core: run by the session of this name, which is a default one")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of an engine with a configuration and its text, and the plugin where its processes find it."""
    folder = tmp_path_factory.mktemp("engines")
    letters = np.random.default_rng(3).choice(list("abcdefgh \n"), 4000)
    (folder / "corpus.txt").write_text("".join(letters))
    (folder / "run.yaml").write_text(CONFIG)
    metadata = folder / "plugins" / "faults-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[hp_trainer]\nfaults = faults_plugin\n")
    (folder / "plugins" / "faults_plugin.py").write_text(PLUGIN)
    (folder / "faults").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "plugins"), prepend=os.pathsep)
        patch.setenv("HP_TEST_FAULTS", str(folder / "faults"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


@pytest.fixture
def faults(folder: Path) -> Path:
    """The folder of faults, without those and the places of earlier tests."""
    for path in (folder / "faults").iterdir():
        path.unlink()
    return folder / "faults"
