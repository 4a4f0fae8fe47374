"""`save_pretrained` of transformers' models that are sharded: one rank writes the full parameters."""

from __future__ import annotations

import copy
import importlib.util
import os
import runpy
import sys
from pathlib import Path

import pytest

from hp_dtensor import ColwiseParallel, init_device_mesh, parallelize_module
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.testing import run_ranks
from hp_fsdp import StateDictError, StateDictOptions, fully_shard, get_model_state_dict

torch = pytest.importorskip("torch")
pytest.importorskip("hp_platform_torch")
if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)


def build(tied):
    # Imported by tests, because collecting them would take each worker two seconds.
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_model_trains_and_is_saved_in_full(tied, tmp_path):
    ids = torch.arange(12).reshape(2, 6) % 16
    reference = build(tied)
    loss = reference(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        model = build(tied)
        for layer in model.model.layers:
            fully_shard(layer, mesh)
        fully_shard(model, mesh)
        found = model(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(found, loss)
        found.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.save_pretrained(tmp_path / "model", is_main_process=mesh.get_local_rank() == 0)
        read = type(reference).from_pretrained(tmp_path / "model")
        for name, parameter in reference.named_parameters():
            # Gradients of two ranks with the same rows, averaged.
            torch.testing.assert_close(read.get_parameter(name), parameter, rtol=1e-5, atol=1e-6, msg=name)

    run_ranks(rank, 2, "torch")


def test_a_tensor_parallel_model_is_saved_from_its_whole_state_dict(tmp_path):
    reference = build(False)

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(copy.deepcopy(reference), mesh, {"model.layers.*.mlp.*_proj": ColwiseParallel()})
        with pytest.raises(ShardingRuleError, match=r"hp_fsdp\.get_model_state_dict"):
            model.save_pretrained(tmp_path / str(mesh.get_local_rank()))
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if mesh.get_local_rank() == 0:
            model.save_pretrained(tmp_path / "model", state_dict=state)

    run_ranks(rank, 2, "torch")
    read = type(reference).from_pretrained(tmp_path / "model")
    for name, parameter in reference.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter), name


# Both ranks are forks of one process, since loading transformers takes far longer than the training.
TWO_RANKS = """
import os, runpy, sys, transformers
sys.argv = sys.argv[1:]
transformers.Trainer, transformers.LlamaForCausalLM
ranks = []
for rank in range(2):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        runpy.run_path(sys.argv[0], run_name="__main__")
        os._exit(0)
sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
"""


@pytest.mark.real_ranks
def test_a_trainer_of_transformers_trains_and_saves_a_sharded_model(tmp_path, free_port, fork_server):
    """The example trains on two ranks what one device trains in a plain loop."""
    example = Path(__file__).parents[2] / "examples" / "transformers_trainer.py"
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", TWO_RANKS, str(example), str(tmp_path)]
    ran = fork_server.run(command, 300, env=os.environ | address)
    assert ran.returncode == 0, ran.stderr

    definitions = runpy.run_path(str(example))
    reference, samples = definitions["build"](), definitions["samples"]()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    ids = torch.stack([sample["input_ids"] for sample in samples])
    for step in range(1, 4):
        optimizer.zero_grad()
        reference(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)  # the Trainer's default
        optimizer.step()
        for folder in (f"checkpoint-{step}", "model")[: 1 + (step == 3)]:
            read = type(reference).from_pretrained(tmp_path / folder)
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(read.get_parameter(name), parameter, rtol=1e-5, atol=1e-6, msg=name)


def test_an_error_of_the_rank_that_saves_is_told_by_all(tmp_path):
    (tmp_path / "model" / "model.safetensors").mkdir(parents=True)

    def rank():
        model = fully_shard(build(False), init_device_mesh("cpu", (2,)))
        with pytest.raises(StateDictError if model._fsdp.group.buffers[0].world.rank else Exception):
            model.save_pretrained(tmp_path / "model")

    run_ranks(rank, 2, "torch")


class Unsaved(torch.nn.Linear):
    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None):
        raise NotImplementedError


def test_an_error_without_a_message_is_reported_too():
    def rank():
        model = fully_shard(Unsaved(4, 6), init_device_mesh("cpu", (2,)))
        others = model._fsdp.group.buffers[0].world.rank
        with pytest.raises(StateDictError if others else NotImplementedError, match="NotImplementedError" * others):
            model.save_pretrained("model")

    run_ranks(rank, 2, "torch")
