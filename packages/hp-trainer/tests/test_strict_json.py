"""Files of JSON hold no bare NaN, and those of earlier versions are read still."""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
import pytest

from hp_trainer._files import strict_json
from hp_trainer.checkpoint import Box, Checkpoint, LocalStorage, TensorPart, list_checkpoints, save_checkpoint
from hp_trainer.checkpoint.index import Index
from hp_trainer.cli.report import describe_checkpoints

NAN, INF = math.nan, math.inf


def parse_strictly(text: str):
    """As readers of RFC 8259 do."""

    def refuse(word: str):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_become_text_wherever_they_are():
    value = {"a": NAN, "b": [INF, (-INF, 1.5)], "c": {"d": np.float64("nan"), "e": None}, "f": True, "g": "nan"}
    wanted = {"a": "nan", "b": ["inf", ["-inf", 1.5]], "c": {"d": "nan", "e": None}, "f": True, "g": "nan"}
    assert parse_strictly(strict_json(value)) == wanted


def saved(storage: LocalStorage, step: int, **state: object) -> None:
    part = TensorPart("w", "float32", (2,), [(Box.full((2,)), np.ones(2, np.float32))])
    save_checkpoint(storage, [part], step=step, model={"name": "tiny"}, state=state, keep=1, keep_best=1)


def test_the_index_of_a_checkpoint_after_a_skipped_step_is_json(tmp_path):
    storage = LocalStorage(tmp_path)
    saved(storage, 1, loss=NAN, evaluation_loss=NAN)
    parse_strictly((tmp_path / "step-00000001" / "index.json").read_text())
    checkpoint = Checkpoint(storage, "step-00000001")
    checkpoint.verify()
    assert checkpoint.state == {"loss": "nan", "evaluation_loss": "nan"}
    assert " nan  " in describe_checkpoints(storage)[0]


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path):
    storage = LocalStorage(tmp_path)
    for step, loss in enumerate((3.0, NAN, 2.0, 5.0), 1):
        saved(storage, step, evaluation_loss=loss)
    assert list_checkpoints(storage) == ["step-00000004", "step-00000003"]


def test_the_index_of_an_earlier_version_with_a_bare_nan_is_read():
    body = json.loads(Index(1, "id", (), {}, {"name": "tiny"}, {}).dump())
    del body["sha256"]
    body["state"] = {"loss": NAN}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    text = json.dumps(body | {"sha256": digest})
    assert "NaN" in text
    assert math.isnan(Index.parse(text, "index.json").state["loss"])


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_model_whose_options_are_not_finite_is_recognized_again(tmp_path, value):
    storage, model = LocalStorage(tmp_path), {"name": "tiny", "scale": value}
    part = TensorPart("w", "float32", (2,), [(Box.full((2,)), np.ones(2, np.float32))])
    folder = save_checkpoint(storage, [part], step=1, model=model, state={})
    Checkpoint(storage, folder).check_model(model)
