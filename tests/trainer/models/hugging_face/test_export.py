"""Runs that begin with a Hugging Face model, and runs that are exported as one."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from hugging_face_models import write_model
from training_runs import Lab, losses, newest

from hp_dtensor.comm.world import current_world
from hp_dtensor.testing import run_ranks
from hp_trainer._coordination import Alone
from hp_trainer.config import to_plain
from hp_trainer.config.load import parse_config
from hp_trainer.exceptions import ConfigError, ExportError
from hp_trainer.launch import check_new_run
from hp_trainer.models import DecoderConfig
from hp_trainer.models.hugging_face.model_directory import Weights
from hp_trainer.parallel import ParallelDims
from hp_trainer.plugins import registries
from hp_trainer.run import create_run
from hp_trainer.run.export import export_run

# A rate that changes no weight, so that what comes out is what went in.
CONFIG = """\
model: {{from: {source}}}
data: {{path: {text}}}
training: {{steps: 2, global_batch_size: 4, sequence_length: 16}}
optimizer: {{lr: 1.0e-30, weight_decay: 0.0}}
metrics: {{trackers: [jsonl]}}
generate: {{prompts: []}}
"""
DEGREES = {"alone": {}, "fsdp, tp, ep": {"parallel.dp_shard": 2, "parallel.tp": 2, "parallel.ep": 2}}


def configured(lab, source, **settings):
    given = [(name, str(value)) for name, value in settings.items()]
    return parse_config(CONFIG.format(source=source, text=lab.text), given, registered=registries())


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    write_model(folder, "qwen3_moe", dtype="bfloat16", vocab_size=256, largest=20000)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def export(run, folder, group=None, **options):
    return export_run(run, run.load_config().config, newest(run), folder, group or Alone(), **options)


def all_tensors(folder):
    weights = Weights(folder)
    return {name: weights.read(name, tuple(map(slice, weights.shape(name)))) for name in sorted(weights.names)}


@pytest.mark.parametrize("degrees", DEGREES)
def test_a_model_that_is_not_changed_comes_back_bit_for_bit(lab: Lab, source, degrees):
    world_size = 4 if DEGREES[degrees] else 1
    if lab.platform.name != "torch" and world_size > 1:
        pytest.skip("on torch")
    run = create_run(lab.folder / "run", configured(lab, source, **DEGREES[degrees]).config)
    lab.train(run, world_size)
    out = lab.folder / "out"
    assert len(export(run, out, largest=30000)) > 1
    before, after = all_tensors(source), all_tensors(out)
    assert list(before) == list(after)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert {Weights(out).dtype(name) for name in after} == {"BF16"}
    assert (out / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 64
    again = create_run(lab.folder / "again", configured(lab, out).config)
    assert losses(lab.train(again)) == pytest.approx(losses(run), rel=1e-5)


def test_the_run_goes_on_without_the_directory(lab: Lab, source):
    run = create_run(lab.folder / "run", configured(lab, source, **{"checkpoint.interval": 1}).config)
    lab.train(run)
    expected = losses(run)
    copy = lab.interrupted_copy(run, "copy", step=1)
    shutil.rmtree(source)
    assert to_plain(copy.load_config().config) == to_plain(run.load_config().config)
    lab.train(copy, checkpoint=newest(copy).folder)
    assert losses(copy) == expected


def test_options_may_be_changed_where_the_weights_allow(lab: Lab, source):
    config = configured(lab, source, **{"model.load_balance_coeff": 0.01, "model.rope_theta": 77.0}).config
    assert config.model.options.load_balance_coeff == 0.01
    run = lab.train(create_run(lab.folder / "run", config))
    # The bias has moved, and qwen3_moe has no place for it.
    export(run, lab.folder / "out", lossy=True)
    assert json.loads((lab.folder / "out" / "config.json").read_text())["rope_theta"] == 77.0


def problems_of(lab, source, **settings):
    loaded = configured(lab, source, **settings)
    return "\n".join(map(str, check_new_run(loaded, lab.folder / "new", 1, registries())))


def test_everything_that_does_not_fit_is_told_before_training(lab: Lab, source):
    assert not problems_of(lab, source)
    next(source.glob("*00002-of*")).unlink()
    message = problems_of(lab, source, **{"model.hidden_size": 8})
    assert "model.from" in message
    assert "-00002-of-" in message
    assert "is missing" in message
    assert "model.embed_tokens.weight has another shape" in message
    (source / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match=r"configuration:1: model.from: .*unknown architecture"):
        configured(lab, source)
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be read"):
        configured(lab, lab.folder / "nowhere")


def test_a_model_of_ones_own_is_exported_as_what_it_is(lab: Lab):
    run = lab.run("run", model__num_experts=None, model__qk_norm="none", model__num_dense_layers=0)
    export(run, lab.folder / "out", dtype="float16")
    options, problems = DecoderConfig.read_directory(lab.folder / "out")
    config = json.loads((lab.folder / "out" / "config.json").read_text())
    assert not problems
    assert options["hidden_size"] == 16
    assert (config["model_type"], config["dtype"], config["max_position_embeddings"]) == ("llama", "float16", 16)


def test_what_transformers_does_not_have_is_not_exported(lab: Lab):
    run = lab.run("run", training__steps=1, training__global_batch_size=2)
    with pytest.raises(ExportError, match="no known architecture of transformers"):
        export(run, lab.folder / "out")


def test_a_directory_that_is_not_empty_is_left_alone(lab: Lab, source):
    run = lab.train(create_run(lab.folder / "run", configured(lab, source).config))
    with pytest.raises(ExportError, match="is not empty"):
        export(run, source)
    with pytest.raises(ExportError, match="/proc/out cannot be made: No such file or directory; choose another --to"):
        export(run, Path("/proc/out"))


class Exchange:
    """Groups of threads that exchange bytes."""

    def __init__(self, size):
        self.size, self.slots, self.barrier = size, [b""] * size, threading.Barrier(size)

    def group(self, rank):
        exchange = self

        class Group:
            size = exchange.size

            def all_gather_bytes(self, data):
                exchange.slots[rank] = data
                exchange.barrier.wait()
                gathered = list(exchange.slots)
                exchange.barrier.wait()
                return gathered

        group = Group()
        group.rank = rank
        return group


def test_all_ranks_write_and_each_other_files(lab: Lab, source):
    run = lab.train(create_run(lab.folder / "run", configured(lab, source).config))
    export(run, lab.folder / "one", largest=6000)
    exchange = Exchange(3)
    ranks = [
        threading.Thread(
            target=export, args=(run, lab.folder / "three", exchange.group(rank)), kwargs={"largest": 6000}
        )
        for rank in range(3)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    one, three = (sorted(file.name for file in (lab.folder / name).iterdir()) for name in ("one", "three"))
    assert one == three
    assert len(one) > 5
    for name in one:
        assert (lab.folder / "one" / name).read_bytes() == (lab.folder / "three" / name).read_bytes()


def build_on_rank(lab: Lab, config, shapes):
    """Set a rank's model up; return the shapes of the tensors that were made for it, and of its full parameters."""
    from hp_trainer.training.setup import build_model

    platform = lab.platform
    dims = ParallelDims.from_config(config.parallel, current_world(platform).size, config.model.options.num_experts)
    with shapes() as made:
        model = build_model(config, platform, dims, dims.build_mesh("cpu", platform=platform))
    return made, [tuple(parameter.shape) for _, parameter in platform.named_parameters(model)]


def test_no_rank_has_memory_for_a_whole_parameter_that_is_sharded(lab: Lab, source):
    """On MindSpore the full model is built on every rank: it has no tensors without data."""
    pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Shapes(TorchDispatchMode):
        def __enter__(self):
            super().__enter__()
            self.made = set()
            return self.made

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            is_new = str(function).startswith(("aten.zeros", "aten.empty", "aten.full", "aten.clone"))
            if is_new and result.device.type != "meta":
                self.made.add(tuple(result.shape))
            return result

    config = configured(lab, source, **{"parallel.dp_shard": 4}).config
    (made, shapes), *_ = run_ranks(build_on_rank, 4, lab.platform, lab, config, Shapes)
    assert made
    assert not made & {shape for shape in shapes if len(shape) > 1}
