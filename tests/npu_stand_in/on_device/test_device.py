"""The stand-in refuses what a device refuses, and has the device's memory figures, random state and events."""

import threading

import pytest
import torch
from torch import nn

from hp_dtensor.parallel.nn import building
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_moe import AuxLosses, Capacity, MoE
from hp_platform_torch.profiling import peak_flops
from hp_trainer.launch.examination import examine


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + torch.ones(3),
        lambda x: x @ torch.ones(3, device="npu:1"),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: torch.add(x, x, out=torch.empty(3)),
        lambda x: nn.functional.embedding(torch.tensor([0, 2]), x[:, None]),
        lambda x: x.numpy(),
        lambda x: torch.ones(3, device="npu:9"),
    ],
    ids=["host operand", "other device", "list", "out", "host ids", "numpy", "no such device"],
)
def test_a_tensor_on_another_device_is_refused(call):
    with pytest.raises((RuntimeError, TypeError), match=r"device|npu"):
        call(torch.arange(3.0, device="npu"))


def test_cuda_is_refused():
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        torch.ones(2, device="npu").cuda()
    assert not torch.ones(2, device="npu").is_cuda


def test_values_gradients_views_and_copies_are_those_of_the_host():
    x = torch.arange(6.0).view(2, 3)
    there = x.to("npu").requires_grad_()
    (there.t()[1:].square().sum() + 1.0).backward()
    assert there.grad.device.type == "npu"
    assert there.grad.tolist() == [[0, 2, 4], [0, 8, 10]]
    y = x.to("npu")
    y.view(3, 2)[1].add_(10)
    assert y.tolist() == [[0, 1, 12], [13, 4, 5]]
    assert torch.add(y, y, out=torch.empty(0, device="npu")).shape == (2, 3)
    assert torch.complex(y, y).conj().imag.cpu().sum() == -y.sum().item()


def test_backward_of_experts_runs_on_the_thread_of_the_device():
    """Torch runs nodes without a gradient on the calling thread, beside the device's, so in no fixed order."""
    with building(get_platform("torch")):
        layer = MoE(8, 6, num_experts=5, top_k=2, aux_losses=AuxLosses(0.5, 0.4, 0.3, 0.2), capacity=Capacity(0.8))
    init_parameters(layer, lambda name, shape: Normal(0.3), seed=11)
    x = torch.linspace(-1, 1, 48, device="npu").view(1, 6, 8).requires_grad_()
    loss = layer(x).square().sum()
    threads = {}
    nodes, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes.add(node)
            node.register_prehook(
                lambda _, name=node.name(): threads.setdefault(threading.get_ident(), []).append(name)
            )
            waiting += [following for following, _ in node.next_functions if following]
    loss.backward()
    here = threads.pop(threading.get_ident(), [])
    assert here == []
    assert [len(names) for names in threads.values()] == [len(nodes)]


def test_host_scalars_and_indices_may_be_operands():
    x = torch.arange(4.0, device="npu")
    assert (x * torch.tensor(2.0))[torch.tensor([1, 3])].tolist() == [2, 6]


def test_memory_is_counted():
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    x = torch.empty(1000, device="npu")
    y = x + 1
    del x
    assert torch.npu.memory_allocated() - before == 4000
    assert torch.npu.max_memory_allocated() - before >= 8000
    y.untyped_storage().resize_(0)
    assert torch.npu.memory_allocated() == before


def test_random_numbers_depend_on_the_devices_state():
    torch.manual_seed(1)
    state = torch.npu.get_rng_state()
    first = torch.rand(3, device="npu")
    torch.rand(3)  # of the host
    second = torch.rand(3, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="npu"), first)
    assert torch.equal(torch.rand(3, device="npu"), second)


def test_streams_and_events():
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        assert torch.npu.current_stream() == stream
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    assert torch.empty(3, pin_memory=True).is_pinned()


def test_a_profile_is_torch_npus(platform, tmp_path):
    with platform.profile(tmp_path, 3):
        torch.ones(4, device="npu").sum()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank3-memory.pickle", "rank3-trace.json"]
    assert "aten::sum" in (tmp_path / "rank3-trace.json").read_text()


def test_the_platform_knows_the_device(platform):
    assert platform.device_types == ("npu", "cpu")
    assert platform.device == torch.device("npu", 0)
    assert platform.num_accelerators() == 4
    assert platform.peak_memory() == torch.npu.max_memory_allocated()
    assert platform.peak_flops("bfloat16") == peak_flops("Ascend910B2", "bfloat16") > 3e14


def test_hp_train_doctor_examines_the_device():
    found = examine("torch")
    (facts,) = found.facts
    assert (facts.device_type, facts.device, facts.accelerators) == ("npu", torch.npu.get_device_name(), 4)
    assert facts.device_memory == torch.npu.get_device_properties().total_memory
    assert found.host_bandwidth > 0
    assert not [each for each in found.checks if each.error is not None]
