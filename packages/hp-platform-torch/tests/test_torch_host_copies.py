"""Copies beside the computation, in the order in which streams wait for each other; the streams are played."""

from __future__ import annotations

import warnings

import pytest
import torch

from hp_dtensor.parallel.offload import ActivationOffload
from hp_dtensor.platform.selection import get_platform
from hp_platform_torch.tensor import saved_tensors

LOG = []


class Stream:
    def __init__(self, name):
        self.name = name

    def wait_stream(self, other):
        LOG.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        LOG.append(f"{self.name} waits for {event}")

    def record_event(self):
        return f"the copy on {self.name}"


class Memory:
    def __init__(self, name):
        self.name = name

    def copy_(self, source, non_blocking):
        assert non_blocking
        LOG.append(f"{source.name} to {self.name} on {torch.accelerator.current_stream().name}")

    def record_stream(self, stream):
        LOG.append(f"{self.name} held for {stream.name}")


@pytest.fixture
def computing(monkeypatch):
    """Play the current stream, which is returned as the one item of a list."""
    current = [Stream("forward")]
    LOG.clear()
    monkeypatch.setattr(saved_tensors, "_stream", lambda purpose, device: Stream("side"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: current.__setitem__(0, stream))
    return current


def test_a_source_is_held_until_it_is_on_the_host(computing):
    wait = saved_tensors._copy_on_own_stream("to host", Memory("host"), Memory("device"))
    assert computing[0].name == "forward"
    wait()
    assert LOG == [
        "side waits for forward",
        "device to host on side",
        "device held for side",
        "forward waits for the copy on side",
    ]


def test_memory_brought_back_is_held_for_the_stream_that_uses_it(computing):
    wait = saved_tensors._copy_on_own_stream("to device", Memory("device"), Memory("host"))
    computing[0] = Stream("another block's")
    wait()
    assert LOG == [
        "side waits for forward",
        "host to device on side",
        "device held for side",
        "another block's waits for the copy on side",
        "device held for another block's",
    ]


def test_nested_and_quantized_tensors_stay_where_they_are():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are prototypes
        nested = torch.nested.nested_tensor([torch.ones(30, 32), torch.ones(20, 32)], requires_grad=True)
        quantized = torch.quantize_per_tensor(torch.ones(32, 32), 0.1, 0, torch.quint8)
    copies = get_platform("torch").host_copies()
    assert copies.memory_of(nested) is copies.memory_of(quantized) is None
    layer = torch.nn.Linear(32, 4)
    y = ActivationOffload(get_platform("torch"))(lambda x: torch.nn.functional.silu(layer(x)), nested)
    torch.nested.to_padded_tensor(y, 0.0).sum().backward()
    expected = torch.nn.functional.silu(layer(torch.ones(50, 32))).sum()
    torch.testing.assert_close(layer.weight.grad, torch.autograd.grad(expected, layer.weight)[0])
