"""Mixtures, packed documents and conversations train alike on any number of ranks, complete or interrupted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from training_runs import FOUR_RANKS, Lab, events, losses, newest, skip_unless_torch_or

from hp_trainer.config import parse_config
from hp_trainer.evaluation import measure_perplexity
from hp_trainer.plugins import registries

# float32 sums in another order, carried through six AdamW steps.
CLOSE = {"rtol": 3e-5, "atol": 0}

TEXT = """
data:
  sources:
    - {{path: {folder}/words.jsonl, weight: 3}}
    - {{path: {folder}/digits.jsonl, field: body, weight: 1}}
  eval: [{{path: {folder}/words.jsonl}}]
  packing: {packing}
"""
CHAT = """
data: {{name: chat, path: {folder}/chat.jsonl, template: plain, packing: {packing}, eval_fraction: 0.2}}
"""
OPTIONS = {
    "windows of documents": (TEXT, "documents"),
    "complete documents": (TEXT, "best_fit"),
    "packed conversations": (CHAT, "best_fit"),
}


def write_data(folder: Path) -> None:
    random = np.random.default_rng(3)
    words = ["".join(random.choice(list("abc "), random.integers(2, 20))) + "e" for _ in range(150)]
    files = {
        "words": [{"text": word} for word in words],
        "digits": [{"body": str(n) * 3} for n in range(40)],
        "chat": [
            {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
            for a, b in zip(words[::2], words[1::2], strict=True)
        ],
    }
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@dataclass(frozen=True)
class DataLab(Lab):
    """Runs on data of the test's own."""

    data: str = ""
    length: int = 16

    def config(self, degrees=None, **overrides):
        given = [(f"parallel.{name}", str(value)) for name, value in (degrees or {}).items()]
        given += [(name.replace("__", "."), str(value)) for name, value in overrides.items()]
        text = f"""
model: {{hidden_size: 16, num_hidden_layers: 2, num_dense_layers: 1, intermediate_size: 24, num_attention_heads: 2,
  num_key_value_heads: 2, head_dim: 8, moe_intermediate_size: 12, num_experts: 4, initializer_range: 0.1}}
training: {{steps: 6, global_batch_size: 8, sequence_length: {self.length}}}
optimizer: {{lr: 5.0e-3, eps: 1.0e-5}}
checkpoint: {{interval: 3, keep: null}}
metrics: {{trackers: [jsonl]}}
generate: {{prompts: []}}
{self.data}"""
        return parse_config(text, given, registered=registries()).config


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS)
def data_lab(request, tmp_path, hp_platform) -> DataLab:
    write_data(tmp_path)
    text, packing = request.param
    skip_unless_torch_or(hp_platform, False)  # data are NumPy's, and documents and targets are in the combinations
    return DataLab(tmp_path, hp_platform, text.format(folder=tmp_path, packing=packing), 40 if text is CHAT else 16)


def test_any_ranks_train_alike_and_go_on_where_others_stopped(data_lab):
    evaluated = {"training__eval_interval": 6, "training__eval_batches": 2}
    full = data_lab.run("full", **evaluated)
    parts = data_lab.run("parts", FOUR_RANKS["folded"], 4, training__micro_batch_size=2, **evaluated)
    np.testing.assert_allclose(losses(parts), losses(full), **CLOSE)
    np.testing.assert_allclose(
        [event["loss"] for event in events(parts, "evaluation")],
        [event["loss"] for event in events(full, "evaluation")],
        **CLOSE,
    )
    same = data_lab.resume(data_lab.interrupted_copy(full, "same"), **evaluated)
    assert losses(same) == losses(full), "in the same layout an interruption leaves no trace"
    other = data_lab.resume(data_lab.interrupted_copy(parts, "other"), {"dp_shard": 2}, 2)
    np.testing.assert_allclose(losses(other), losses(full), **CLOSE)


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize("text", [TEXT, CHAT], ids=["text", "chat"])
def test_documents_in_a_row_are_as_if_each_stood_alone(tmp_path, hp_platform, text):
    write_data(tmp_path)
    labs = {
        packing: DataLab(tmp_path, hp_platform, text.format(folder=tmp_path, packing=packing), 60)
        for packing in ("best_fit", "none")
    }
    run = labs["best_fit"].run("run", training__steps=3)
    found = {}
    for packing, lab in labs.items():
        found[packing] = measure_perplexity(
            run, lab.config(), hp_platform, newest(run), data="evaluation" if text is TEXT else "all"
        )
    assert found["best_fit"].tokens == found["none"].tokens > 900
    # The same terms, summed in other rows.
    assert found["best_fit"].loss == pytest.approx(found["none"].loss, rel=2e-6)
