"""The examples of architectures: each is what it is called, and trains alike on both frameworks in any layout."""

from __future__ import annotations

import numpy as np
import pytest
from architecture_losses import ARCHITECTURES, EXAMPLES, REFERENCE, SETTINGS, assert_as_on_one_rank_of_torch
from training_runs import Lab, newest

from hp_trainer._coordination import Alone
from hp_trainer.config import load_config
from hp_trainer.evaluation import measure_perplexity
from hp_trainer.exceptions import ExportError
from hp_trainer.models.hugging_face import ARCHITECTURES as KNOWN
from hp_trainer.models.hugging_face.export import find_architecture
from hp_trainer.plugins import registries
from hp_trainer.run import create_run
from hp_trainer.run.export import export_run
from hp_trainer.training.setup import full_model


def test_every_architecture_has_an_example():
    assert ARCHITECTURES == sorted(KNOWN) == sorted(REFERENCE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_example_is_the_architecture_that_it_is_called(name):
    config = load_config(EXAMPLES / f"{name}.yaml", registered=registries()).config
    assert find_architecture(config.model.options).model_type == name


# All architectures in all layouts, twenty steps each, are in proof_architectures.py.
@pytest.mark.parametrize(
    ("name", "layout"),
    [("gemma2", "1 rank"), ("gpt_oss", "2 ranks, tensor parallel"), ("deepseek_v3", "2 ranks, sharded")],
)
def test_the_first_losses_are_those_of_one_rank_on_torch(lab: Lab, name, layout):
    if lab.platform.name != "torch" and name == "deepseek_v3":
        pytest.skip("two simulated ranks take most of a minute there: one of the two")
    assert_as_on_one_rank_of_torch(lab, name, layout, steps=3 if lab.platform.name == "torch" else 2)


def trained(lab: Lab, name: str, **settings):
    """A run of an example with a high learning rate, so that its routers move."""
    given = {**SETTINGS, "training.steps": 10, "optimizer.lr": 1e-2, "data.path": lab.text, **settings}
    overrides = [(path, str(value)) for path, value in {**given, "data.eval_fraction": 0.2}.items()]
    config = load_config(EXAMPLES / f"{name}.yaml", overrides, registered=registries()).config
    return lab.train(create_run(lab.folder / name, config)), config


def exported(lab: Lab, run, config, **options):
    export_run(run, config, newest(run), lab.folder / "exported", Alone(), **options)
    return lab.folder / "exported"


# MindSpore writes the same checkpoints, and its environment has no transformers.
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in ARCHITECTURES),
        ("deepseek_v3", {"model.load_balance_coeff": "null", "model.num_key_value_heads": 2}),
    ],
)
def test_an_exported_example_has_the_logits_and_loss_of_the_run(lab: Lab, name, settings):
    transformers = pytest.importorskip("transformers")
    run, config = trained(lab, name, **settings)
    folder = exported(lab, run, config)
    theirs, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not found["missing_keys"] | found["unexpected_keys"]
    source = registries().datasets.get(config.data.name).build(config.data.options)
    samples = source.open(run.data, config.training.sequence_length).evaluation
    rows = samples.read(np.arange(len(samples)))
    assert rows.positions is None
    expected = theirs(theirs.lm_head.weight.new_tensor(rows.ids).long()).logits.detach().double().numpy()
    with full_model(config, lab.platform, newest(run)) as model:
        logits = lab.platform.to_numpy(model(lab.platform.from_numpy(rows.ids)))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    shifted = expected - expected.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    loss = -np.take_along_axis(log_probabilities, rows.targets[..., None], -1).mean()
    assert measure_perplexity(run, config, lab.platform, newest(run)).loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ({"model.load_balance_coeff": 0.01}, "the expert_bias of 4 layers, which load_balance_coeff = 0.01 changed"),
        ({"model.capacity_factor": 1.5}, "capacity_factor = 1.5"),
        ({"model.routing": "uniform"}, "routing = uniform"),
        ({"model.routing": "sinkhorn", "model.global_batch_aux_loss": 0}, "routing = sinkhorn"),
    ],
)
def test_what_an_architecture_cannot_express_is_refused_or_lost_on_request(lab: Lab, settings, lost):
    run, config = trained(lab, "mixtral", **{"training.steps": 2, **settings})
    with pytest.raises(ExportError, match=f"mixtral of transformers cannot express .*{lost}.*--lossy"):
        exported(lab, run, config)
    assert not (lab.folder / "exported").exists()
    assert (exported(lab, run, config, lossy=True) / "config.json").exists()
