"""The trainer as a library: `python examples/notebooks/trainer_alone.py`, or cell by cell in an editor.

Needs hp-trainer and a platform. The command `hp-train` does all of this from a YAML file.
"""

# %% A layout of many ranks, checked without processes
import tempfile
from pathlib import Path

from hp_dtensor.platform.selection import get_platform
from hp_dtensor.testing import run_ranks
from hp_trainer import ParallelDims
from hp_trainer.config import parse_config
from hp_trainer.metrics import read_metrics
from hp_trainer.plugins import registries
from hp_trainer.run import create_run
from hp_trainer.training import Trainer

dims = ParallelDims(dp_shard=-1, tp=8, pp=4, world_size=1024)
print("of 1024 ranks:", dims.summary())

# %% A configuration, and a run of it on two simulated ranks
platform = get_platform()
folder = Path(tempfile.mkdtemp())
(folder / "text.txt").write_text("what a small model reads, again and again. " * 200)
SETTINGS = f"""
model: {{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 8,
        intermediate_size: 32}}
data: {{path: {folder / "text.txt"}}}
training: {{steps: 8, global_batch_size: 4, sequence_length: 32}}
optimizer: {{lr: 1.0e-2}}
metrics: {{trackers: [jsonl]}}
generate: {{prompts: []}}
"""
config = parse_config(SETTINGS, [], registered=registries()).config
run = create_run(folder / "run", config)


def train():
    Trainer(run, config, platform).run()


run_ranks(train, 2, platform)

# %% The files of the run
losses = [event["loss"] for event in read_metrics(run.metrics_file) if event["event"] == "step"]
print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f};", sorted(path.name for path in run.path.iterdir()))
assert losses[-1] < losses[0]
