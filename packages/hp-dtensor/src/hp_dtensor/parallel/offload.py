"""Activation offload: tensors that blocks save for backward are held in host memory until then.

What autograd saves in a block is copied to the host while the next block computes: for every byte that the next block
saves, one byte of the block before is freed. In backward, when half of a block's bytes have been used, those of the
block before start to come back, in the order in which they are needed and two for each byte used. So each copy has
between half and all of a block's time, and the device holds about as much as one block saves (after Rhu et al., 2016,
"vDNN", arXiv 1602.08124).

Where the platform can, entire storages are copied, once each: views of one storage share its copy, and come back as
views with the same offsets and strides.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Any

from hp_dtensor.comm.saved_tensors import MODIFIED, SavedReference, SavedTensor, saving_tensors
from hp_dtensor.platform.autograd import HostCopies
from hp_dtensor.platform.interface import Platform
from hp_dtensor.trees import tensors_in

Tensor = Any


class ActivationOffload:
    """Calls the blocks of one forward in order, and holds in host memory what they save for backward.

    The last block's tensors stay on the device, because backward starts with them, as do those of blocks called by
    `staying`, parameters, buffers and unsharded weights, storages shared with `args`, small tensors, and results that
    `checkpoint` saves. Make a new object for each forward.

    Args:
        smallest: storages of fewer bytes stay on the device.

    Raises:
        CapabilityError: the platform has no hooks on what autograd saves.

    Examples:
        >>> x = platform.zeros((4, 3), platform.dtype("float32"))
        >>> offload = ActivationOffload(platform)
        >>> offload(platform.ops.silu, offload(platform.ops.silu, x)).shape
        torch.Size([4, 3])
    """

    def __init__(self, platform: Platform, smallest: int = 1024) -> None:
        self._platform = platform
        self._copies = platform.host_copies()
        self._smallest = smallest
        self._last: _Block | None = None

    def __call__(self, function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
        """Return `function(x, *args)`, offloading what it saves.

        Args:
            function: a module, or a `functools.partial` of or with one, whose parameters stay on the device. Parameters
                of other functions are recognized only if they are leaves of the graph; others are offloaded like
                activations.
            args: tensors in it, such as tables shared by blocks, stay on the device.

        Raises:
            RuntimeError: from backward, if a saved tensor has been written.
        """
        if not self._platform.is_grad_enabled():
            return function(x, *args)
        block = _Block(self._platform, self._copies, self._smallest, self._last)
        # Parameters and arguments outlive the block, so copying them would free nothing.
        block.exclude(self._tensors_of(function), tensors_in(args, self._platform.Tensor))
        return self._run(block, function, x, args)

    def staying(self, function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
        """Return `function(x, *args)`; what it saves stays on the device while the block before is offloaded.

        Raises:
            RuntimeError: from backward, if a saved tensor has been written.

        Examples:
            >>> x = platform.zeros((4, 3), platform.dtype("float32"))
            >>> offload = ActivationOffload(platform)
            >>> offload.staying(platform.ops.silu, offload(platform.ops.silu, x)).shape
            torch.Size([4, 3])
        """
        if self._last is None or not self._platform.is_grad_enabled():
            return function(x, *args)
        # Its saved tensors are watched only to notice when backward reaches it, and to fetch the block before then.
        result = self._run(_StayingBlock(self._platform, self._copies, self._smallest, self._last), function, x, args)
        self._last = None
        return result

    def _run(self, block: _Block, function: Callable[..., Tensor], x: Tensor, args: tuple[Any, ...]) -> Tensor:
        with ExitStack() as stack:
            # Two sources of saved tensors: the framework's own operations, and nodes of `platform.custom_function`.
            stack.enter_context(self._platform.saving(block.save, lambda holder: holder.get()))
            stack.enter_context(saving_tensors(self._platform, block.save_detached))
            result = function(x, *args)
        # What this block's own saves have not freed yet: copies of the block before had the time of this whole block.
        if self._last is not None:
            self._last.free()
        # Linked backwards only: a block refers to the one before it, which backward reaches next.
        self._last = block
        return result

    def _tensors_of(self, function: Any) -> list[Tensor]:
        """Return the parameters and buffers of a module, or of the modules in a `functools.partial`."""
        if isinstance(function, functools.partial):  # such as `checkpoint` of a block
            return [x for each in (function.func, *function.args) for x in self._tensors_of(each)]
        if not isinstance(function, self._platform.Module):
            return []
        named = (self._platform.named_parameters(function), self._platform.named_buffers(function))
        return [x for tensors in named for _, x in tensors]


class _Block:
    """The storages that one block has saved, `num_bytes` so far, and the block before, which backward reaches next."""

    def __init__(self, platform: Platform, copies: HostCopies, smallest: int, before: _Block | None) -> None:
        self._platform, self._copies, self._smallest, self._before = platform, copies, smallest, before
        self._excluded: set[Hashable] = set()
        # Weak: an entry lives as long as the graph needs it. While it holds its source, the address that identifies it
        # cannot be reused.
        self._entries: weakref.WeakValueDictionary[Hashable, _OffloadedStorage] = weakref.WeakValueDictionary()
        self.num_bytes, self._used = 0, 0
        # Entries not freed yet, with the bytes saved up to their end, and entries not fetched yet, with those before
        # them.
        self._leaving: deque[tuple[int, weakref.ref[_OffloadedStorage]]] = deque()
        self._on_host: list[tuple[int, weakref.ref[_OffloadedStorage]]] = []
        self._is_entered = False

    def exclude(self, *lists: list[Tensor]) -> None:
        """Exclude the storages of these tensors from offload."""
        with self._platform.local_op():
            found = [self._copies.memory_of(x) for tensors in lists for x in tensors]
        self._excluded |= {memory[0] for memory in found if memory is not None}

    def save(self, x: Tensor) -> SavedTensor:
        """Return a holder for a tensor that the framework's autograd saves, which may be part of the graph."""
        if self._platform.is_leaf(x):
            if self._platform.requires_grad(x):
                self.exclude([x])
            return self.save_detached(x)
        with self._platform.no_grad():
            # Detached: the graph would hold its own results otherwise, a cycle.
            return self.save_detached(self._platform.detach(x))

    def save_detached(self, x: Tensor) -> SavedTensor:
        """Return a holder for a leaf, or a tensor outside the graph: a reference if its storage stays on the device."""
        memory = self._copies.memory_of(x)
        if memory is None or memory[1] < self._smallest or memory[0] in self._excluded:
            return SavedReference(self._platform, x)
        # Where full storages cannot be copied, views with different forms need copies of their own.
        shared = None if self._copies.copies_full_storage else self._copies.form(x)
        # The version: a storage that is written between two saves is two sets of values.
        key = memory[0], self._platform.version(x), shared
        with self._platform.no_grad(), self._platform.local_op():
            entry = self._entries.get(key)
            # Tensors over one storage may count their writes separately (MindSpore), so a write to one need not show in
            # the version of another.
            if entry is None or entry.is_written:
                entry = self._entries[key] = _OffloadedStorage(self, self._platform, self._copies, x, memory[1])
                self._on_host.append((self.num_bytes, weakref.ref(entry)))
                self._save(memory[1])
                self._leaving.append((self.num_bytes, weakref.ref(entry)))
            return _OffloadedTensor(entry, self._copies, x)

    def _save(self, num_bytes: int) -> None:
        """Count saved bytes, and free as many of the block before."""
        self.num_bytes += num_bytes
        if self._before is not None:
            self._before.free(self.num_bytes)

    def free(self, num_bytes: float = math.inf) -> None:
        """Free the device storages within the first `num_bytes` saved, once they have been copied to the host."""
        # In the order of saving, which is also that of copying: the oldest copies are most likely complete.
        while self._leaving and self._leaving[0][0] <= num_bytes:
            entry = self._leaving.popleft()[1]()
            if entry is not None:
                entry.finish()

    def fetch(self, num_bytes: float = math.inf) -> None:
        """Start copying back the storages within the last `num_bytes` saved, which backward needs first."""
        # From the end: backward uses saved tensors in reverse order.
        while self._on_host and self.num_bytes - self._on_host[-1][0] <= num_bytes:
            entry = self._on_host.pop()[1]()
            if entry is not None:
                entry.fetch()

    def enter(self) -> None:
        """Start copying back everything that is still on the host. Only the first call has an effect."""
        if not self._is_entered:
            self._is_entered = True
            self.fetch()

    def use(self, num_bytes: int, *, is_last: bool = True) -> None:
        """Count the use of a storage in backward, and fetch storages of the block before.

        In the second half of this block two bytes of the block before are fetched for each byte used.

        Args:
            is_last: no other tensor over the storage is still needed.
        """
        # Bytes used by the current operation are still on the device, so they do not count yet.
        used_up = self._used
        if is_last:
            self._used += num_bytes
        if self._before is not None:
            # Negative in the first half of the block, when nothing is fetched yet.
            share = 2 * used_up / self.num_bytes - 1 if self._used < self.num_bytes else 1.0
            self._before.fetch(share * self._before.num_bytes)


class _StayingBlock(_Block):
    """A block whose storages stay on the device; their use still fetches those of the block before."""

    def save_detached(self, x: Tensor) -> SavedTensor:
        """Return a holder that leaves a tensor on the device and reports its use."""
        memory = self._copies.memory_of(x)
        num_bytes = 0 if memory is None or memory[0] in self._excluded else memory[1]
        self._save(num_bytes)
        return _Watched(self, self._platform, x, num_bytes)


class _Watched(SavedReference):
    """A tensor that stays on the device, and reports to its block when backward uses it."""

    def __init__(self, block: _Block, platform: Platform, x: Tensor, num_bytes: int) -> None:
        super().__init__(platform, x)
        self._block, self._num_bytes = block, num_bytes

    def get(self) -> Tensor:
        self._block.use(self._num_bytes)
        return super().get()


class _OffloadedStorage:
    """One saved storage: on the device with its tensors, by `finish` a host copy, by `fetch` copied back."""

    def __init__(self, block: _Block, platform: Platform, copies: HostCopies, x: Tensor, num_bytes: int) -> None:
        self._block, self._platform, self._copies = block, platform, copies
        self._num_bytes = num_bytes
        self._shape = list(x.shape)
        self._sources: list[SavedReference] = []  # the users' tensors, while the storage is on the device
        self._host, self._wait = copies.to_host(copies.memory(x))
        self._fetched: Any = None
        self._was_written = False
        self._users = 0

    def add(self, x: Tensor) -> None:
        """Add a saved tensor over this storage. It must not be written while the storage is on the device."""
        self._users += 1
        self._sources.append(SavedReference(self._platform, x))

    @property
    def is_written(self) -> bool:
        """True if one of the tensors was written while the storage was on the device."""
        return self._was_written or not all(source.is_unchanged for source in self._sources)

    def finish(self) -> None:
        """Wait for the copy to the host, and free the storage on the device."""
        if not self._sources:
            return
        self._wait()
        # Checked after the copy has ended: a write during the copy may have reached it.
        self._was_written = self.is_written
        self._sources = []

    def fetch(self) -> None:
        """Start copying the storage back to the device, unless it is there."""
        if not self._sources and self._fetched is None:
            # Waits here too: backward may run on another stream than the one on which `finish` waited.
            self._wait()
            self._fetched = self._copies.to_device(self._host)

    def check(self) -> None:
        if self.is_written:
            raise RuntimeError(MODIFIED.format(self._shape))

    def take(self) -> Tensor:
        """Return the storage on the device for one of its saved tensors. It is released with the last of them."""
        # The first use in backward means that this block has been reached: all of it is needed now.
        self._block.enter()
        self._users -= 1
        self._block.use(self._num_bytes, is_last=self._users == 0)
        self.check()
        if self._sources:
            with self._platform.local_op():
                return self._copies.memory(self._sources[0].get())
        self.fetch()
        memory, wait = self._fetched
        wait()
        # The last user frees the fetched storage, so that the device holds it no longer than needed.
        if self._users <= 0:
            self._fetched = None
        return memory


class _OffloadedTensor:
    """The holder of one saved tensor: its storage, and its form (offset, shape, strides) within that."""

    def __init__(self, entry: _OffloadedStorage, copies: HostCopies, x: Tensor) -> None:
        self._entry, self._copies, self._form = entry, copies, copies.form(x)
        entry.add(x)

    def get(self) -> Tensor:
        return self._copies.tensor(self._entry.take(), self._form)

    def check(self) -> None:
        self._entry.check()
