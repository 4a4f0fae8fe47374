"""Fine-tuning: adapters and frozen parameters, in any layout, and in PEFT's files."""

from __future__ import annotations

import numpy as np
import pytest
from hugging_face_models import write_model
from training_runs import Lab, losses, newest

from hp_dtensor.exceptions import LaunchError
from hp_trainer._coordination import Alone
from hp_trainer.config import parse_config
from hp_trainer.exceptions import ConfigError, ExportError
from hp_trainer.plugins import registries
from hp_trainer.run import create_run
from hp_trainer.run.export import export_run

CONFIG = """\
model: {{from: {source}{more}}}
data: {{path: {text}}}
training: {{steps: 3, global_batch_size: 4, sequence_length: 16}}
optimizer: {{lr: 2.0e-2, eps: 1.0e-5}}
metrics: {{trackers: [jsonl]}}
generate: {{prompts: []}}
"""
LORA = ", lora: {{rank: 3, alpha: 6.0, targets: [{targets}]}}"
LAYOUTS = {
    "sharded": {"parallel.dp_shard": 2},
    "tensor parallel": {"parallel.tp": 2},
    "both": {"parallel.dp_shard": 2, "parallel.tp": 2},
}
MODELS = {
    "llama": "q_proj, v_proj, o_proj, gate_proj, down_proj",
    "deepseek_v3": "q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, up_proj",
}


def configured(lab: Lab, model_type, more="", **settings):
    source = lab.folder / model_type
    if not source.exists():
        write_model(source, model_type, vocab_size=256)
    given = [(name, str(value)) for name, value in settings.items()]
    text = CONFIG.format(source=source, text=lab.text, more=more)
    return parse_config(text, given, registered=registries()).config


def adapted(lab: Lab, model_type, **settings):
    return configured(lab, model_type, LORA.format(targets=MODELS[model_type]), **settings)


def trained(lab: Lab, name, config, world_size=1):
    return lab.train(create_run(lab.folder / name, config), world_size)


def weights(run):
    checkpoint = newest(run)
    return {name: checkpoint.read(name) for name in checkpoint.index.tensors if name.startswith("model.")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", MODELS)
def test_adapters_train_alike_in_every_layout(torch_or, lab: Lab, model_type, layout):
    torch_or(layout == list(LAYOUTS)[-1])
    degrees = LAYOUTS[layout]
    world_size = int(np.prod(list(degrees.values())))
    if lab.platform.name != "torch" and (world_size > 2 or model_type != "llama"):
        pytest.skip("on torch")
    one = trained(lab, "one", adapted(lab, model_type))
    many = trained(lab, "many", adapted(lab, model_type, **degrees), world_size)
    np.testing.assert_allclose(losses(many), losses(one), rtol=1e-5)
    assert losses(one)[2] < losses(one)[0]
    before = weights(trained(lab, "before", adapted(lab, model_type, **{"optimizer.lr": 1e-30})))
    for run in (one, many):
        for name, values in weights(run).items():
            # The first matrix of an adapter is moved too, from the second step on.
            assert ("lora" in name) == (not np.array_equal(values, before[name])), name


def test_adapters_are_files_of_peft_and_merge_into_the_weights(lab: Lab):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    run = trained(lab, "run", adapted(lab, "llama"))
    config = run.load_config().config
    export_run(run, config, newest(run), lab.folder / "merged", Alone())
    assert export_run(run, config, newest(run), lab.folder / "adapter", Alone(), adapters=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(lab.folder / "llama", attn_implementation="eager")
    ids = base.lm_head.weight.new_tensor(np.arange(20).reshape(2, 10)).long()
    plain = base(ids).logits.detach().numpy()
    model = peft.PeftModel.from_pretrained(base, lab.folder / "adapter")
    expected = model(ids).logits.detach().numpy()
    merged = transformers.AutoModelForCausalLM.from_pretrained(lab.folder / "merged", attn_implementation="eager")
    assert not np.allclose(expected, plain, atol=1e-2)
    np.testing.assert_allclose(merged(ids).logits.detach().numpy(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("degrees", [{}, {"parallel.dp_shard": 2, "parallel.tp": 2}], ids=["one rank", "four"])
def test_frozen_parameters_stay(lab: Lab, degrees):
    if lab.platform.name != "torch" and degrees:
        pytest.skip("on torch")
    frozen = {"training.freeze": "[embed.*, 'layers.0.*', '*.k_proj.bias']"}
    run = trained(lab, "run", configured(lab, "qwen2", **frozen, **degrees), 4 if degrees else 1)
    before = weights(trained(lab, "before", configured(lab, "qwen2", **{"optimizer.lr": 1e-30})))
    for name, values in weights(run).items():
        stays = name.startswith(("model.embed.", "model.layers.0.")) or name.endswith("k_proj.bias")
        assert np.array_equal(values, before[name]) == stays, name
    slots = [name for name in newest(run).index.tensors if name.startswith("optimizer.")]
    assert slots
    assert not [name for name in slots if ".layers.0." in name or "embed" in name]


def test_what_cannot_be_adapted_or_frozen_is_told(lab: Lab):
    with pytest.raises(ConfigError, match=r"lora.targets: not projections"):
        configured(lab, "llama", LORA.format(targets="qproj"))
    with pytest.raises(ConfigError, match=r"no such projections \(experts take no adapters\)"):
        configured(lab, "mixtral", LORA.format(targets="gate_proj"))
    with pytest.raises(ConfigError, match=r"global_batch_aux_loss: has no effect with adapters"):
        configured(lab, "mixtral", LORA.format(targets="q_proj"), **{"model.global_batch_aux_loss": 0.1})
    with pytest.raises(LaunchError, match=r"training.freeze: no parameter matches embedd.\*"):
        trained(lab, "wrong", configured(lab, "llama", **{"training.freeze": "[embedd.*]"}))
    with pytest.raises(LaunchError, match="no parameter is left to train"):
        trained(lab, "nothing", configured(lab, "llama", **{"training.freeze": "['*']"}))
    run = trained(lab, "run", configured(lab, "llama"))
    with pytest.raises(ExportError, match="has no adapters"):
        export_run(run, run.load_config().config, newest(run), lab.folder / "out", Alone(), adapters=True)
