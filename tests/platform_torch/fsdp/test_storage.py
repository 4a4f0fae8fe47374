"""Host buffers, which share pages and go back to the system, and models whose backward has failed, which are freed."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hp_dtensor.testing import run_ranks
from hp_fsdp import fully_shard, get_storage
from hp_fsdp.communication import Communication
from hp_platform_torch.fsdp.storage import RETAINED_BYTES, allocate_on_host, refill_on_host
from hp_platform_torch.processes import _drop_failed_nodes

MEBIBYTE = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_buffer_is_a_flat_tensor_of_its_own():
    buffer = allocate_on_host(3 * MEBIBYTE // 2, torch.bfloat16)
    assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == ((3 * MEBIBYTE // 2,), torch.bfloat16, True)
    assert buffer.fill_(2).sum(dtype=torch.float64) == 3 * MEBIBYTE


def test_a_small_buffer_is_as_large_as_asked_for():
    assert allocate_on_host(5, torch.float32).untyped_storage().nbytes() == 20


def test_a_step_on_tensors_without_memory_leaves_none_of_them_for_real_steps(hp_platform):
    """Constants that are made once, such as a factor or the zeros of padding, are made of memory."""
    storage = get_storage(hp_platform)

    def written_and_scaled() -> torch.Tensor:
        buffer = torch.empty(7)
        storage.write(buffer, [(0, 4, 0), (4, 3, 0)], [torch.ones(2, 2), None])
        storage.scale_(buffer, 0.3125)
        return buffer

    with FakeTensorMode():
        assert isinstance(written_and_scaled(), FakeTensor)
    real = written_and_scaled()
    assert real.tolist() == [0.3125] * 4 + [0.0] * 3
    with FakeTensorMode():
        assert isinstance(written_and_scaled(), FakeTensor)


TURNS = """
import itertools, resource
import torch
from hp_platform_torch.fsdp.storage import allocate_on_host, refill_on_host

num_bytes = 8 * 2**20
# The larger buffer of a root: when it is freed, glibc raises the size up to which it retains memory.
allocate_on_host(3 * num_bytes, torch.uint8)
storages = [allocate_on_host(num_bytes, torch.uint8).untyped_storage() for _ in range(4)]
for storage in storages:
    storage.resize_(0)
# Blocks of other sizes lie between the freed ones: the buffers have settled in their places after one to three turns.
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    # As in forward: the next buffer is filled before this one is freed.
    for this, following in itertools.pairwise([None, *storages, None]):
        if following is not None:
            refill_on_host(following, num_bytes)
            following.fill_(1)
        if this is not None:
            assert this[num_bytes - 1] == 1
            this.resize_(0)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc retains freed memory, and counts page faults")
def test_buffers_in_turns_touch_no_fresh_pages():
    # In a new process: what other tests have left between freed blocks keeps buffers from taking their places.
    done = subprocess.run([sys.executable, "-c", TURNS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    # Fresh pages of one buffer are 2,048 faults.
    assert min(map(int, done.stdout.split())) < 1000, done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_large_buffers_leave_nothing_resident():
    before = resident_bytes()
    for extra in range(1, 4):
        buffer = allocate_on_host(RETAINED_BYTES + extra * MEBIBYTE, torch.uint8).fill_(1)
        buffer.untyped_storage().resize_(0)
        refill_on_host(buffer.untyped_storage(), RETAINED_BYTES + extra * MEBIBYTE)
        assert buffer.fill_(3)[::MEBIBYTE].tolist() == [3] * (RETAINED_BYTES // MEBIBYTE + extra)
        del buffer
    assert resident_bytes() - before < 8 * MEBIBYTE


class Failing(Communication):
    """Raises at one of its reductions, as a collective does when a peer has died."""

    def __init__(self, fails_at):
        self.left = fails_at

    def reduce_scatter(self, output, full, group):
        self.left -= 1
        if not self.left:
            raise RuntimeError("a peer has died")
        return super().reduce_scatter(output, full, group)


def context_of_failed(fails_at):
    """Return a weak reference to what the layers of a discarded model share, whose backward has raised."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.set_communication(Failing(fails_at))
    with pytest.raises(RuntimeError, match="a peer has died"):
        model(torch.ones(2, 4)).sum().backward()
    return weakref.ref(model._fsdp.schedule_of_root().context)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_discarded_model_whose_backward_has_failed_is_freed_with_its_connections(hp_platform, fails_at):
    def program():
        context = context_of_failed(fails_at)
        # What a rank does after the death of another one.
        _drop_failed_nodes()
        gc.collect()
        return context() is None

    assert run_ranks(program, 2, hp_platform) == [True, True]
