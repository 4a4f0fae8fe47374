"""Large host buffers: what is freed goes back to the system at once."""

import sys
from pathlib import Path

import pytest
import torch

from hp_platform_torch.fsdp.storage import allocate_on_host, refill_on_host

MEBIBYTE = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_buffer_is_a_flat_tensor_of_its_own():
    buffer = allocate_on_host(3 * MEBIBYTE // 2, torch.bfloat16)
    assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == ((3 * MEBIBYTE // 2,), torch.bfloat16, True)
    assert buffer.fill_(2).sum(dtype=torch.float64) == 3 * MEBIBYTE


def test_a_small_buffer_is_as_large_as_asked_for():
    assert allocate_on_host(5, torch.float32).untyped_storage().nbytes() == 20


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_freed_buffers_of_many_sizes_leave_nothing_resident():
    retained = []
    before = resident_bytes()
    for size in reversed(range(2, 30)):
        buffer = allocate_on_host(size * MEBIBYTE, torch.uint8).fill_(1)
        # What an allocator would put into the hole that the buffer leaves.
        retained.append(torch.ones(1000))
        untyped = buffer.untyped_storage()
        untyped.resize_(0)
        refill_on_host(untyped, size * MEBIBYTE)
        assert buffer.fill_(3)[:: MEBIBYTE // 2].tolist() == [3] * (2 * size)
        del buffer, untyped
    left = resident_bytes() - before
    assert left < 8 * MEBIBYTE, left
    assert len(retained) == 28
