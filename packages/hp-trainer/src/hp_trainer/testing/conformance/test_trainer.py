"""Optimizers against NumPy, and short runs: layouts equal one rank, and a resumed run equals one without a break."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing.simulated import run_ranks
from hp_trainer.checkpoint import open_latest
from hp_trainer.config import AdamWConfig, TrainerConfig, parse_config
from hp_trainer.metrics import read_metrics
from hp_trainer.optimizers import AdamW, AdamW8bitConfig, LionConfig, SGDConfig
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, checkpoint_storage, create_run
from hp_trainer.training import Trainer

Array = np.ndarray[Any, Any]
RATE = 0.1


def updated(platform: Platform, build: Any, options: Any, dtype: str = "float32") -> tuple[Array, list[Array], Array]:
    """Return the start, three gradients, and the weights after an optimizer's steps with them."""
    random = np.random.default_rng(5)
    start, *grads = (random.standard_normal((3, 16)).astype(np.float32) for _ in range(4))

    def tensor(array: Array) -> Any:
        return platform.detach(platform.ops.cast(platform.from_numpy(array.copy()), platform.dtype(dtype)))

    parameter = platform.Parameter(tensor(start), requires_grad=True)
    optimizer = build([("x", parameter)], options, platform)
    for grad in grads:
        platform.set_grad(parameter, tensor(grad))
        optimizer.step(RATE)
        optimizer.zero_grad()
        assert platform.get_grad(parameter) is None
    found = platform.ops.cast(platform.detach(parameter), platform.dtype("float32"))
    return start, grads, np.array(platform.to_numpy(found))


def adamw(x: Array, grads: list[Array], options: AdamWConfig) -> Array:
    mean = square = np.zeros_like(x, np.float64)
    for count, grad in enumerate(grads, 1):
        mean = options.betas[0] * mean + (1 - options.betas[0]) * grad
        square = options.betas[1] * square + (1 - options.betas[1]) * grad**2
        size = np.sqrt(square) / math.sqrt(1 - options.betas[1] ** count) + options.eps
        x = x * (1 - RATE * options.weight_decay) - RATE / (1 - options.betas[0] ** count) * mean / size
    return x


def lion(x: Array, grads: list[Array], options: LionConfig) -> Array:
    mean = np.zeros_like(x)
    for grad in grads:
        sign = np.sign(options.betas[0] * mean + (1 - options.betas[0]) * grad)
        x = x * (1 - RATE * options.weight_decay) - RATE * sign
        mean = options.betas[1] * mean + (1 - options.betas[1]) * grad
    return x


def sgd(x: Array, grads: list[Array], options: SGDConfig) -> Array:
    velocity = np.zeros_like(x)
    for grad in grads:
        velocity = options.momentum * velocity + grad
        x = x - RATE * velocity
    return x


@pytest.mark.parametrize(
    ("name", "options", "reference", "tolerance"),
    [
        ("adamw", AdamWConfig(), adamw, 2e-6),
        # Moments of 8 bits: the step is wrong by the distance of two codes.
        ("adamw_8bit", AdamW8bitConfig(block_size=8, min_elements=8, eps=1e-3), adamw, 0.05),
        ("lion", LionConfig(), lion, 2e-6),
        ("sgd", SGDConfig(), sgd, 2e-6),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_optimizers_have_the_arithmetic_of_their_papers(
    hp_platform: Platform, name: str, options: Any, reference: Any, tolerance: float
) -> None:
    """Those that a platform registers itself (hook `hp_optimizers`), and those composed of `platform.ops`."""
    start, grads, found = updated(hp_platform, registries().optimizers.get(name, hp_platform.name).build, options)
    np.testing.assert_allclose(found, reference(start, grads, options), atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.dtypes("float16"))])
def test_adamw_of_operations_equals_the_platforms_own(hp_platform: Platform, dtype: str) -> None:
    """Half precision is computed in float32 and rounded once per step."""
    start, grads, found = updated(hp_platform, AdamW, AdamWConfig(), dtype)
    np.testing.assert_allclose(found, adamw(start, grads, AdamWConfig()), atol=2e-6 if dtype == "float32" else 1e-2)


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
  initializer_range: 0.1
data: {{path: {text}}}
training: {{steps: 4, global_batch_size: 4, sequence_length: 16}}
optimizer: {{lr: 5.0e-3, eps: 1.0e-5}}
checkpoint: {{interval: 2, keep: null}}
metrics: {{trackers: [jsonl]}}
generate: {{prompts: []}}
"""


class Runs:
    """Runs of four steps in a temporary folder, all on the same text."""

    def __init__(self, folder: Path, platform: Platform) -> None:
        self.folder, self.platform = folder, platform
        letters = np.random.default_rng(7).choice(list("abcdefgh \n"), 4000)
        (folder / "corpus.txt").write_text("".join(letters))

    def train(self, name: str, size: int = 1, **settings: Any) -> RunFolder:
        """Train on simulated ranks."""
        run = create_run(self.folder / name, self.config(**settings))
        run_ranks(train_rank, size, self.platform, run, self.platform, timeout_seconds=900)
        return run

    def config(self, **settings: Any) -> TrainerConfig:
        """Return the configuration. Double underscores in settings stand for dots."""
        given = [(key.replace("__", "."), str(value)) for key, value in settings.items()]
        text = CONFIG.format(text=self.folder / "corpus.txt")
        return parse_config(text, given, registered=registries()).config


def train_rank(run: RunFolder, platform: Platform, resume: str | None = None) -> None:
    trainer = Trainer(run, run.load_config().config, platform, initial_weights=resume is None)
    if resume is not None:
        trainer.resume(resume)
    trainer.run()


def losses(run: RunFolder) -> list[float]:
    return [event["loss"] for event in read_metrics(run.metrics_file) if event["event"] == "step"]


@pytest.fixture
def runs(tmp_path: Path, hp_platform: Platform) -> Runs:
    return Runs(tmp_path, hp_platform)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_shard": (2, {"parallel__dp_shard": 2}),
    "tp": (2, {"parallel__tp": 2}),
    "ep": (2, {"parallel__dp_shard": 2, "parallel__ep": 2}),
    "pp": (2, {"parallel__pp": 2}),
}


def test_layouts_train_alike(runs: Runs) -> None:
    """Needs `ParameterStorage`; tensor parallelism the rules, experts all-to-alls, pipelines `_send` and `_receive`."""
    expected = losses(runs.train("one"))
    assert len(expected) == 4
    assert expected[-1] < expected[0]
    for name, (size, settings) in LAYOUTS.items():
        # float32, sums in another order, through four steps of AdamW.
        np.testing.assert_allclose(losses(runs.train(name, size, **settings)), expected, rtol=1e-4, err_msg=name)


def test_a_resumed_run_equals_one_without_a_break(runs: Runs) -> None:
    """Checkpoints are written from shards, and read by another layout; the optimizer's state included."""
    unbroken = runs.train("unbroken", 2, parallel__dp_shard=2)
    newest = open_latest(checkpoint_storage(unbroken, unbroken.load_config().config))
    slots = {name.rpartition(".")[2] for name in newest.index.tensors if name.startswith("optimizer.")}
    assert slots == {"exp_avg", "exp_avg_sq"}
    broken = RunFolder(shutil.copytree(unbroken.path, runs.folder / "broken"))
    shutil.rmtree(broken.checkpoints / newest.folder)
    broken.write_config(runs.config())
    middle = open_latest(checkpoint_storage(broken, runs.config()))
    assert middle.step == 2
    run_ranks(train_rank, 1, runs.platform, broken, runs.platform, middle.folder)
    np.testing.assert_allclose(losses(broken), losses(unbroken), rtol=1e-4)
