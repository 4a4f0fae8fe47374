"""A simulated device for offload: functions of a storage that treat CPU memory as host or device memory.

A copy has no values before `wait`, and everything is logged.
"""

from __future__ import annotations

import contextlib
import threading

import numpy

from hp_dtensor.comm.world import current_world


class Copy:
    """A copy that happens in the first `wait`; or that has already happened."""

    def __init__(self, device, entry, target, source, at_once=False):
        self.device, self.entry, self.target, self.source = device, entry, target, source
        device.storage.zero_(target)
        if at_once:
            device.storage.platform.copy_(target, source)

    def wait(self):
        if self.source is not None:
            self.device.log(*self.entry)
            self.device.storage.platform.copy_(self.target, self.source)
            self.source = None


class FakeDevice:
    """Entries of the log: (rank, kind, elements)."""

    METHODS = (
        "is_host",
        "check_offload",
        "host_buffer",
        "copy_stream",
        "to_device",
        "to_host",
        "finish_reading",
    )

    def __init__(self, storage):
        self.storage, self.entries, self.host = storage, [], {}
        self.pinned = []
        # (rank, elements) of copies to the device that the host has waited for before it may write what they read
        self.read = []
        self.local = threading.local()

    def log(self, kind, numel):
        self.entries.append((current_world(self.storage.platform).rank, kind, numel))

    def of_rank(self, rank):
        """Return the log entries (kind, elements) of one rank, in order."""
        return [entry[1:] for entry in list(self.entries) if entry[0] == rank]

    def lies_on_host(self, x):
        """Return True if a tensor, or a DTensor's shard, is a view of a host buffer."""
        platform = self.storage.platform
        with platform.local_op():
            start = self.storage.address(x)
        return any(base <= start < base + size for base, (size, _) in list(self.host.items()))

    def is_host(self, device_type):
        return False

    def check_offload(self, device_type):
        pass

    def host_buffer(self, numel, dtype, pin_memory):
        platform = self.storage.platform
        buffer = platform.zeros((numel,), dtype)
        platform.copy_(buffer, platform.ops.cast(platform.from_numpy(numpy.full(numel, 77, numpy.float32)), dtype))
        with platform.local_op():
            # Held, so that no other tensor gets its address.
            self.host[self.storage.address(buffer)] = numel * platform.itemsize(dtype), buffer
        self.pinned.append(pin_memory)
        return buffer

    @contextlib.contextmanager
    def copy_stream(self):
        self.local.depth = getattr(self.local, "depth", 0) + 1
        try:
            yield
        finally:
            self.local.depth -= 1

    def to_device(self, target, host):
        assert self.local.depth, "called beside the computation"
        assert not self.lies_on_host(target)
        self.log("to device", host.shape[0])
        # A gather is beside the computation, as the copy is.
        return Copy(self, ("on device", host.shape[0]), target, host, at_once=self.local.depth > 1)

    def finish_reading(self, copying):
        self.read.append((current_world(self.storage.platform).rank, copying.entry[1]))

    def to_host(self, host, source):
        assert self.lies_on_host(host)
        assert not self.lies_on_host(source)
        self.log("to host", source.shape[0])
        return Copy(self, ("on host", source.shape[0]), host, source)


def install(storage, monkeypatch):
    """Replace functions of `storage` by those of a `FakeDevice`."""
    device = FakeDevice(storage)
    for name in FakeDevice.METHODS:
        monkeypatch.setattr(storage, name, getattr(device, name), raising=True)
    return device
