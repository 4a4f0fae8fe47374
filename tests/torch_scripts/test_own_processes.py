"""Programs that start and join their processes by themselves, as scripts for torch do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hp_platform_torch")


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))


def train(model, ranks):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        losses = [model(torch.full((2, 4), float(rank + step))).square().mean() for rank in ranks]
        (sum(losses) / len(losses)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def weights_of_a_job(joins_itself: bool) -> list[torch.Tensor]:
    """Train a fully sharded model for a few steps, leave the job, and return the weights."""
    import torch.distributed as dist

    from hp_dtensor import init_device_mesh
    from hp_dtensor.comm.world import current_world
    from hp_dtensor.platform.selection import get_platform
    from hp_fsdp import fully_shard

    if joins_itself:
        dist.init_process_group("gloo")
    model = build()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    assert model[0].weight.device_mesh.size() == dist.get_world_size() == 2
    mesh = init_device_mesh("cpu", (2,))
    before = len(recorded())
    train(model, [mesh.get_local_rank()])
    # Shards are sent as messages, which the recorder does not see. It sees this collective of the same connection.
    mesh.group_along().all_reduce(torch.ones(1))
    assert recorded()[before:].count(("gloo:all_reduce", ["Float"])) == 1
    weights = [parameter.full_tensor().detach() for parameter in model.parameters()]
    dist.destroy_process_group()
    assert current_world(get_platform("torch")).size == 1
    return weights


def recorded() -> list[tuple[str, list[str]]]:
    """Return name and dtypes of each collective that torch's flight recorder has seen."""
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", [])
    return [(each["profiling_name"], each["input_dtypes"]) for each in entries]


def process(rank: int, ports: list[int], expected: str) -> None:
    """Join two jobs one after the other, the second one by nothing but what needs its ranks."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    weights = torch.load(expected)
    for joins_itself, port in zip((True, False), ports, strict=True):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
        # Means over ranks in another order.
        torch.testing.assert_close(weights_of_a_job(joins_itself), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.real_ranks
def test_fully_shard_without_a_mesh_finds_all_ranks(free_port, fork_server, tmp_path):
    model = build()
    train(model, [0, 1])
    expected = [parameter.detach() for parameter in model.parameters()]
    torch.save(expected, tmp_path / "weights")
    arguments = f"[{free_port()}, {free_port()}], {str(tmp_path / 'weights')!r}"
    program = f"import runpy; runpy.run_path({__file__!r})['process']({{rank}}, {arguments})"
    pipes = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    processes = [fork_server.popen([sys.executable, "-c", program.format(rank=rank)], **pipes) for rank in range(2)]
    errors = [each.communicate(timeout=300)[1] for each in processes]
    assert [each.returncode for each in processes] == [0, 0], errors
