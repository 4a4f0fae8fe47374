"""Plans of a module that is written once for every platform: counted on torch, refused elsewhere with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_trainer.cli import main

MODEL = """\
from hp_dtensor import nn
from hp_dtensor.tensor.init import Normal


class Bigrams(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)

    def forward(self, ids):
        return self.head(self.embed(ids))

    def initializer(self, name, shape):
        return Normal(0.3)


def build():
    return Bigrams()
"""
CONFIG = """\
model: {name: "own.py:build"}
data: {path: none.txt}
training: {steps: 1, global_batch_size: 4, sequence_length: 16}
"""


def test_a_module_for_every_platform_is_planned_on_torch(
    platform, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(MODEL)
    (tmp_path / "run.yaml").write_text(CONFIG)
    code = main(["plan", str(tmp_path / "run.yaml"), "--world-size=2", f"--platform={platform.name}"])
    message = capsys.readouterr()
    if platform.name == "torch":
        assert (code, message.err) == (0, "")
        assert "model: 4,096 parameters, float32" in message.out
        assert "activations" in message.out
    else:
        assert code == 2
        assert "Plan it on a platform that computes on tensors without memory" in message.err
