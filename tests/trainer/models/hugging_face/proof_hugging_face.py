"""Every key of every supported `config.json`, deleted and changed: transformers' logits, or a refusal."""

from __future__ import annotations

import json

import numpy
import pytest

pytest.importorskip("transformers")

from hugging_face_models import CLOSE, CONFIGS, logits_of_trained, logits_of_transformers, write_model
from hugging_face_mutations import mutations

from hp_trainer.exceptions import ConfigError


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_changed_config_gives_transformers_logits_or_is_refused(platform, tmp_path, model_type):
    write_model(tmp_path / "model", model_type)
    equal, differing = 0, []
    for what, config in mutations(model_type):
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        try:
            ours = logits_of_trained(platform, tmp_path / "model")
        except ConfigError:
            continue
        theirs = logits_of_transformers(tmp_path / "model")
        if theirs is None:
            continue
        equal += 1
        if not numpy.allclose(ours, theirs, **CLOSE):
            differing.append(f"{what}: {abs(ours - theirs).max():.3g}")
    assert not differing
    assert equal > 150
