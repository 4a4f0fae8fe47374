"""Models of Hugging Face: the same logits as transformers', checked directories, weights straight into shards."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import numpy
import pytest
from hugging_face_models import (
    CLOSE,
    CONFIGS,
    IDS,
    LLAMA3,
    fill,
    logits_of_trained,
    logits_of_transformers,
    model_type_of,
    options_of,
    write_model,
)

from hp_dtensor.platform.selection import get_platform
from hp_dtensor.testing import run_ranks
from hp_trainer._coordination import Alone
from hp_trainer.checkpoint import Box
from hp_trainer.exceptions import ConfigError, ExportError
from hp_trainer.models import DecoderConfig, build_decoder
from hp_trainer.models.hugging_face import ARCHITECTURES, ModelDirectory
from hp_trainer.models.hugging_face.export import export_weights, find_architecture, meaning
from hp_trainer.models.hugging_face.model_directory import Weights, narrow, widen
from hp_trainer.parallel import ParallelDims

# Made by transformers with the weights of `write_model`; `test_transformers_computes_the_same` makes them again.
REFERENCE = json.loads(Path(__file__).with_name("hugging_face_logits.json").read_text())


def logits_of(platform, folder):
    config = options_of(folder)
    assert not list(config.check())
    model = build_decoder(config, platform)
    fill(platform, model, ModelDirectory(folder, config))
    with platform.no_grad():
        return platform.to_numpy(model(platform.from_numpy(IDS)))


def test_every_architecture_has_a_reference():
    assert list(ARCHITECTURES) == list(CONFIGS) == list(REFERENCE)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_logits_are_those_of_transformers(platform, tmp_path, model_type):
    write_model(tmp_path / "model", model_type, largest=6000)
    expected = numpy.array(REFERENCE[model_type])
    numpy.testing.assert_allclose(logits_of(platform, tmp_path / "model")[:, -1, :8], expected, **CLOSE)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_transformers_computes_the_same(platform, tmp_path, model_type):
    """Both ways: it reads what is written here, without a tensor too few or too many, and its own files are read."""
    transformers = pytest.importorskip("transformers")
    write_model(tmp_path / "model", model_type, largest=6000)
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True, attn_implementation="eager"
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert not found["mismatched_keys"]
    expected = loaded(loaded.lm_head.weight.new_tensor(IDS).long()).logits.detach().numpy()
    numpy.testing.assert_allclose(expected[:, -1, :8], numpy.array(REFERENCE[model_type]), **CLOSE)
    loaded.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    numpy.testing.assert_allclose(logits_of(platform, tmp_path / "theirs"), expected, **CLOSE)
    assert options_of(tmp_path / "theirs") == options_of(tmp_path / "model")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Each gave other logits than transformers; `proof_hugging_face.py` has thousands more. Ellipsis deletes a key.
CHANGED = [
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("llama", {"rope_parameters": {**YARN, "factor": None}}),
    ("mistral", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16}),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 3}),
    ("qwen2", {"max_window_layers": ...}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
    ("gemma2", {"attn_logit_softcapping": ...}),
    ("gemma2", {"final_logit_softcapping": ...}),
    ("deepseek_v3", {"rope_interleave": None}),
    ("deepseek_v3", {"rope_scaling": {**CONFIGS["deepseek_v3"]["rope_scaling"], "mscale": 0.0}}),
    ("gpt_oss", {"rope_parameters": ...}),
]
REFUSED = [
    ("llama", {"is_causal": False}, "is_causal: is not supported"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads: out of range"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: factor: missing"),
    # transformers divides by it.
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": None}}, "rope_scaling: factor: missing"),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_type": "llama3", "low_freq_factor": None}}, "low_freq_factor: miss"),
    ("qwen3", {"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ("deepseek_v3", {"head_dim": 3}, "head_dim: is not supported"),
]


def change(folder, keys):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **keys}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize(("model_type", "keys"), CHANGED)
def test_missing_and_changed_keys_mean_what_they_mean_to_transformers(platform, tmp_path, model_type, keys):
    write_model(tmp_path / "model", model_type)
    change(tmp_path / "model", keys)
    expected = logits_of_transformers(tmp_path / "model")
    numpy.testing.assert_allclose(logits_of_trained(platform, tmp_path / "model"), expected, **CLOSE)


@pytest.mark.parametrize(("model_type", "keys", "message"), REFUSED)
def test_what_the_decoder_cannot_compute_is_refused(platform, tmp_path, model_type, keys, message):
    write_model(tmp_path / "model", model_type)
    change(tmp_path / "model", keys)
    with pytest.raises(ConfigError, match=message):
        logits_of_trained(platform, tmp_path / "model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_reading_and_writing_changes_no_bit(tmp_path, model_type, dtype):
    config = write_model(tmp_path / "model", model_type, dtype=dtype)
    directory = ModelDirectory(tmp_path / "model", config)
    again = tmp_path / "again"
    names = export_weights(again, directory.tensors, directory.read, {}, Alone(), dtype=dtype, largest=5000)
    assert len(names) > 1
    before, after = Weights(tmp_path / "model"), Weights(again)
    assert sorted(before.names) == sorted(after.names)
    for name in before.names:
        full_value = tuple(slice(None) for _ in before.shape(name))
        assert after.dtype(name) == before.dtype(name)
        assert before.read(name, full_value).tobytes() == after.read(name, full_value).tobytes(), name


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_kept_together_are_read_too(tmp_path, model_type):
    config = write_model(tmp_path / "apart", model_type)
    write_model(tmp_path / "together", model_type, fused=True)
    apart, together = (ModelDirectory(tmp_path / name, config) for name in ("apart", "together"))
    assert not [*apart.problems(), *together.problems()]
    assert any(name.endswith("experts.gate_up_proj") for name in together.weights.names)
    for name, tensor in apart.tensors.items():
        full_value = Box.full(tensor.shape)
        numpy.testing.assert_array_equal(apart.read(name, full_value), together.read(name, full_value), err_msg=name)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_the_map_has_the_tensors_of_the_model(platform, tmp_path, model_type):
    config = write_model(tmp_path / "model", model_type)
    model, tensors = build_decoder(config, platform), ModelDirectory(tmp_path / "model", config).tensors
    named = [*platform.named_parameters(model), *platform.named_buffers(model)]
    assert {name: tuple(tensor.shape) for name, tensor in named} == {name: t.shape for name, t in tensors.items()}


def read_on_rank(folder, degrees):
    """The logits of a model that is parallelized and filled, and the share of the weights that this rank read."""
    platform, config = get_platform(), options_of(folder)
    dims = ParallelDims(**degrees)
    model = build_decoder(config, platform)
    model.parallelize(dims, dims.build_mesh("cpu", platform=platform))
    directory = ModelDirectory(folder, config)
    fill(platform, model, directory)
    total = sum(4 * math.prod(directory.weights.shape(name)) for name in directory.weights.names)
    with platform.no_grad():
        logits = platform.to_numpy(model(platform.from_numpy(IDS))).copy()
    return logits, directory.weights.bytes_read / total


LAYOUTS = {
    "sharded": {"dp_shard": 2, "world_size": 2},
    "tensor parallel": {"tp": 2, "world_size": 2},
    "experts": {"dp_shard": 2, "ep": 2, "world_size": 2},
    "all": {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 1, "world_size": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_rank_reads_its_shards_alone(platform, tmp_path, model_type, layout):
    degrees = LAYOUTS[layout]
    if platform.name != "torch" and (degrees["world_size"] > 2 or model_type == "gpt_oss"):
        pytest.skip("all of them on torch")
    write_model(tmp_path / "model", model_type)
    expected = logits_of(platform, tmp_path / "model")
    results = run_ranks(functools.partial(read_on_rank, tmp_path / "model", degrees), degrees["world_size"])
    for logits, _ in results:
        numpy.testing.assert_allclose(logits, expected, **CLOSE)
    shares = [share for _, share in results]
    # Tensor parallel ranks each have the norms and gates; a few rows are sharded unevenly.
    largest = 0.36 if degrees["world_size"] == 4 else 0.62
    assert max(shares) < largest, shares
    assert sum(shares) < 1.3, shares


class TestDirectoriesThatDoNotFit:
    @pytest.fixture
    def folder(self, tmp_path):
        self.config = write_model(tmp_path / "model", "qwen2", largest=6000)
        return tmp_path / "model"

    def problems(self, folder):
        return "\n".join(map(str, ModelDirectory(folder, self.config).problems()))

    def change(self, folder, **keys):
        change(folder, keys)
        return "\n".join(map(str, DecoderConfig.read_directory(folder)[1]))

    def test_unknown_architecture(self, folder):
        message = self.change(folder, model_type="qwen4")
        assert "config.json: model_type: unknown architecture" in message
        assert "try: qwen" in message
        assert "llama" in message

    def test_every_setting_that_cannot_be_computed_is_told(self, folder):
        message = self.change(folder, hidden_act="relu", hidden_size=..., rope_scaling={"rope_type": "longrope"})
        for part in ("hidden_act: is not supported", 'got: "relu"', "hidden_size: missing", "rope_type: is not"):
            assert part in message, message

    def test_quantized(self, folder):
        assert "quantization_config: is not supported" in self.change(folder, quantization_config={"bits": 4})

    def test_no_json(self, folder):
        (folder / "config.json").write_text("{")
        assert "config.json: is not JSON" in "\n".join(map(str, DecoderConfig.read_directory(folder)[1]))

    def test_nothing_there(self, tmp_path):
        (problem,) = DecoderConfig.read_directory(tmp_path / "nowhere")[1]
        assert "config.json: cannot be read" in str(problem)

    def test_missing_and_truncated_shards(self, folder):
        first, second, *_ = sorted(folder.glob("*.safetensors"))
        first.unlink()
        second.write_bytes(second.read_bytes()[:-5])
        message = self.problems(folder)
        assert f"{first} is missing" in message
        assert f"{second} is damaged" in message

    def test_pickles_are_not_read(self, folder):
        for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
            file.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
        assert "pytorch_model.bin is a pickle, which is never read" in self.problems(folder)

    def test_an_index_that_names_files_elsewhere(self, folder):
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
        assert "names files elsewhere: ../secret.safetensors" in self.problems(folder)

    def test_other_shapes_and_names(self, folder):
        import dataclasses

        self.config = dataclasses.replace(self.config, intermediate_size=20, num_hidden_layers=2, qk_norm="head")
        message = self.problems(folder)
        assert "missing: model.layers.0.self_attn.q_norm.weight" in message
        assert "not expected: model.layers.2." in message
        assert "model.layers.0.mlp.gate_proj.weight has another shape" in message
        assert "expected: [20, 16]" in message


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_model_is_known_by_its_options(tmp_path, model_type):
    config = write_model(tmp_path / "model", model_type)
    found = find_architecture(config)
    written = {**found.write(config), "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = options_of(tmp_path)
    from hp_trainer.config import to_plain

    assert meaning(to_plain(again), 3) == meaning(to_plain(config), 3)
    assert found.model_type == model_type_of(tmp_path)


def test_a_model_that_transformers_does_not_have_is_refused():
    with pytest.raises(ExportError, match="is nearest: logit_soft_cap is None there"):
        find_architecture(DecoderConfig(logit_soft_cap=20.0))


def test_bfloat16_is_rounded_to_nearest_even():
    values = numpy.float32([1.0, 1.00390625, 1.01171875, -3.3e38, numpy.inf, 1e-40, 0.0])
    torch = pytest.importorskip("torch")
    expected = torch.tensor(values).bfloat16().float().numpy()
    numpy.testing.assert_array_equal(widen(narrow(values, "bfloat16"), "bfloat16"), expected)
    assert numpy.isnan(widen(narrow(numpy.float32([numpy.nan]), "bfloat16"), "bfloat16")[0])
