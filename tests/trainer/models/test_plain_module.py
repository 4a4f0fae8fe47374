"""Models and datasets from a Python file beside the configuration, and modules of a framework as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training_runs import Lab, events, losses, newest

from hp_dtensor.exceptions import LaunchError
from hp_trainer.config import dump_config, load_config
from hp_trainer.evaluation import measure_perplexity
from hp_trainer.exceptions import ConfigError
from hp_trainer.plugins import registries
from hp_trainer.run import create_run

# Written once: no parallelize of its own, so it is trained as a plain module.
NEUTRAL = """\
from pydantic import Field

from hp_dtensor import nn
from hp_dtensor.tensor.init import Normal
from hp_trainer.config import section


@section
class Options:
    width: int = Field(8, ge=1, description="width of an embedding")


class Bigrams(nn.Module):
    def __init__(self, options: Options):
        super().__init__()
        self.embed = nn.Embedding(256, options.width)
        self.up = nn.Linear(options.width, 2 * options.width, bias=True)
        self.down = nn.Linear(2 * options.width, 256)

    def forward(self, ids):
        return self.down(self.ops.silu(self.up(self.embed(ids))))

    def initializer(self, name, shape):
        assert name in ("embed.weight", "up.weight", "up.bias", "down.weight")
        return Normal(0.3)


def build(options: Options):
    return Bigrams(options)


def broken(options: int):
    return None
"""
TRANSFORMER = """\
def build():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, tie_word_embeddings=True, **sizes))
"""
DATA = """\
import numpy as np

from hp_trainer.data import TextDataConfig, TextSource


class OwnText(TextSource):
    def __init__(self, options: TextDataConfig):
        super().__init__(options)
"""
CONFIG = """\
model: {{name: "models/own.py:{build}"{options}}}
data: {{path: {text}}}
training: {{steps: 3, global_batch_size: 4, sequence_length: 16}}
optimizer: {{lr: 5.0e-3, eps: 1.0e-5}}
metrics: {{trackers: [jsonl]}}
generate: {{prompts: []}}
"""
LAYOUTS = {
    "sharded": {"dp_shard": 2},
    "replicated": {"dp_replicate": 2, "dp_shard": 1},
    "tensor parallel": {"tp": 2, "dp_shard": 1},
    "both": {"dp_shard": 2, "tp": 2},
}


def configured(lab: Lab, source: str, build: str = "build", options: str = "", more: str = "", **settings):
    """The configuration of a file beside the model's folder."""
    (lab.folder / "models").mkdir(exist_ok=True)
    (lab.folder / "models" / "own.py").write_text(source)
    file = lab.folder / "own.yaml"
    file.write_text(CONFIG.format(build=build, options=options, text=lab.text) + more)
    return load_config(file, [(name, str(value)) for name, value in settings.items()], registered=registries()).config


def trained(lab: Lab, name: str, config, world_size: int = 1):
    return losses(lab.train(create_run(lab.folder / name, config), world_size))


def laid_out(lab, source, degrees, plan):
    settings = {f"parallel.{name}": value for name, value in degrees.items()}
    lines = "".join(f'    "{pattern}": {style}\n' for pattern, style in plan.items())
    more = f"parallel:\n  tp_plan:\n{lines}" if "tp" in degrees else ""
    return configured(lab, source, more=more, **settings)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_without_a_layout_trains_in_any(lab: Lab, layout):
    degrees = LAYOUTS[layout]
    world_size = int(np.prod(list(degrees.values())))
    if lab.platform.name != "torch" and world_size > 2:
        pytest.skip("on torch")
    expected = trained(lab, "one", configured(lab, NEUTRAL))
    config = laid_out(lab, NEUTRAL, degrees, {"up": "colwise", "down": "rowwise"})
    # float32, sums in another order, three steps of AdamW.
    np.testing.assert_allclose(trained(lab, "many", config, world_size), expected, rtol=1e-5)
    assert len(set(expected)) == 3


@pytest.mark.parametrize("layout", ["sharded", "both"])
def test_a_model_of_transformers_trains_unchanged(lab: Lab, layout):
    pytest.importorskip("transformers")
    degrees = LAYOUTS[layout]
    plan = {
        **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    }
    expected = trained(lab, "one", configured(lab, TRANSFORMER))
    config = laid_out(lab, TRANSFORMER, degrees, plan)
    world_size = int(np.prod(list(degrees.values())))
    np.testing.assert_allclose(trained(lab, "many", config, world_size), expected, rtol=1e-5)


NESTED = """\
from hp_dtensor import nn
from hp_dtensor.tensor.init import Normal


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.ops.silu(self.first(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(256, 8), Layers(), nn.Linear(8, 256)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))

    def initializer(self, name, shape):
        return Normal(0.3)


def build():
    return Model()
"""


def test_groups_within_groups_may_be_listed_in_any_order(lab: Lab):
    expected = trained(lab, "one", configured(lab, NESTED))
    for name, units in (("outer first", "[layers, layers.*]"), ("inner first", "[layers.*, layers]")):
        config = configured(lab, NESTED, **{"parallel.dp_shard": 2, "parallel.fsdp_units": units})
        np.testing.assert_allclose(trained(lab, name, config, 2), expected, rtol=1e-5)


def test_the_layers_of_a_module_are_compiled(lab: Lab):
    pytest.importorskip("transformers")
    from torch._dynamo.utils import counters

    expected = trained(lab, "plain", configured(lab, TRANSFORMER))
    counters.clear()
    compiled = {"training.compile": True, "training.compile_backend": "eager"}
    np.testing.assert_allclose(trained(lab, "compiled", configured(lab, TRANSFORMER, **compiled)), expected, rtol=1e-5)
    assert counters["stats"]["calls_captured"] > 0


def test_the_perplexity_of_a_module_is_that_of_its_training(lab: Lab):
    every = {"training.eval_interval": 3, "training.eval_batches": "null", "data.eval_fraction": 0.1}
    config = configured(lab, NEUTRAL, **every)
    run = lab.train(create_run(lab.folder / "run", config))
    (expected_message,) = events(run, "evaluation")
    found = measure_perplexity(run, config, lab.platform, newest(run))
    assert found.tokens == expected_message["tokens"]
    assert found.loss == pytest.approx(expected_message["loss"], rel=1e-5)


def test_a_module_trains_in_training_and_nowhere_else(lab: Lab):
    checking = NEUTRAL.replace(
        "    def forward(self, ids):\n",
        "    def forward(self, ids):\n"
        "        assert self.training == self.up.training == self.platform.is_grad_enabled()\n"
        "        assert not self.down.training, 'was put out of training when it was built'\n",
    ).replace("2 * options.width, 256)\n", "2 * options.width, 256)\n        self.down.training = False\n")
    config = configured(lab, checking, **{"training.eval_interval": 1, "training.eval_batches": 1})
    run = lab.train(create_run(lab.folder / "run", config))
    assert len(events(run, "evaluation")) == 3
    assert measure_perplexity(run, config, lab.platform, newest(run)).tokens


def test_a_resumed_run_and_a_repeated_step_draw_the_same_numbers(lab: Lab):
    noise = "self.platform.random('uniform', (*ids.shape, 1), self.up.weight.dtype)"
    noisy = NEUTRAL.replace("self.embed(ids)", f"self.ops.mul(self.embed(ids), {noise})")
    full = lab.train(create_run(lab.folder / "undisturbed", configured(lab, noisy, **{"checkpoint.interval": 2})))
    again = lab.interrupted_copy(full, "again", step=2)
    lab.train(again, 1, newest(again).folder)
    assert losses(again) == losses(full)
    checked = configured(lab, noisy, **{"training.replay_interval": 1})
    assert trained(lab, "checked", checked) == losses(full)


def test_options_are_checked_and_the_run_remembers_the_file(lab: Lab):
    config = configured(lab, NEUTRAL, options=", width: 4")
    assert config.model.options.width == 4
    assert config.model.name == f"{lab.folder / 'models' / 'own.py'}:build"
    again = lab.folder / "elsewhere.yaml"
    again.write_text(dump_config(config))
    assert load_config(again, registered=registries()).config == config


@pytest.mark.parametrize(
    ("source", "build", "options", "message"),
    [
        (NEUTRAL, "build", ", width: 0", "own.yaml:1: model.width: out of range"),
        (NEUTRAL, "build", ", widht: 3", "try: model.width"),
        (NEUTRAL, "nothing", "", "has no function or class 'nothing'"),
        (NEUTRAL, "broken", "", "annotate it with a dataclass, got <class 'int'>"),
        ("x = 1\nraise ValueError('no')\n", "build", "", "cannot be imported: line 2: ValueError"),
    ],
)
def test_what_is_wrong_with_the_file_is_told(tmp_path: Path, hp_platform, source, build, options, message):
    # A file is imported once in a process, so each case has a folder of its own.
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        configured(Lab(tmp_path, hp_platform), source, build, options)


def test_a_file_that_is_not_there(lab: Lab):
    (lab.folder / "bad.yaml").write_text('model: {name: "nowhere.py:build"}\ntraining: {steps: 1}\n')
    with pytest.raises(ConfigError, match=r"bad.yaml:1: model.name: there is no file .*nowhere.py"):
        load_config(lab.folder / "bad.yaml", registered=registries())


def test_layouts_that_a_plain_module_does_not_have_are_refused(lab: Lab):
    with pytest.raises(LaunchError, match="no module is called 'upp'"):
        trained(lab, "wrong", laid_out(lab, NEUTRAL, {"tp": 2, "dp_shard": 1}, {"upp": "colwise"}), 2)
    with pytest.raises(LaunchError, match="tp needs a plan of the layers to shard"):
        trained(lab, "none", configured(lab, NEUTRAL, **{"parallel.tp": 2, "parallel.dp_shard": 1}), 2)


def test_a_plan_for_a_model_that_lays_itself_out_is_refused(lab: Lab):
    text = f"data: {{path: {lab.text}}}\ntraining: {{steps: 1, sequence_length: 8}}\n"
    (lab.folder / "plan.yaml").write_text(f"{text}parallel: {{fsdp_units: [layers.*]}}\n")
    config = load_config(lab.folder / "plan.yaml", registered=registries()).config
    with pytest.raises(LaunchError, match=r"model.name = decoder has its own parallelization"):
        trained(lab, "plan", config)


LAID_OUT = NEUTRAL.replace(
    "    def initializer",
    """    def parallelize(self, dims, mesh, training=None, *, reshard_after_forward=None):
        fully_shard(self, mesh[AXES])
        self.set_reduce_op_type("sum")

    def after_optimizer_step(self):
        return {}

    def initializer""",
).replace("from hp_dtensor import nn\n", "from hp_dtensor import nn\nfrom hp_fsdp import fully_shard\n")


def test_weights_laid_out_without_their_replicas_are_refused(lab: Lab):
    degrees = {"parallel.dp_replicate": 2, "parallel.dp_shard": 1}
    expected_message = (
        r"parallel.dp_replicate: .*own.py:build places embed.weight, up.weight, up.bias on a mesh without"
    )
    with pytest.raises(LaunchError, match=expected_message):
        trained(lab, "apart", configured(lab, LAID_OUT.replace("AXES", "'fsdp'"), **degrees), 2)


def test_a_dataset_of_ones_own(lab: Lab):
    (lab.folder / "own_data.py").write_text(DATA)
    file = lab.folder / "data.yaml"
    file.write_text(
        f'model: {{hidden_size: 16, num_hidden_layers: 1}}\ndata: {{name: "own_data.py:OwnText", path: {lab.text}}}\n'
        "training: {steps: 2, sequence_length: 8, global_batch_size: 2}\nmetrics: {trackers: [jsonl]}\n"
        "generate: {prompts: []}\n"
    )
    config = load_config(file, registered=registries()).config
    assert len(trained(lab, "data", config)) == 2
