"""Offload of activations: what blocks keep for backward waits in host memory.

What autograd saves within a block is copied to the host while the next block computes: as that saves its own, as many
bytes of the block before are freed. In backward, when half of a block's bytes have been used, those of the block before
begin to come back, in the order in which they will be needed, and two for each one that is used. So a copy has between
half a block's time and all of it, and the device holds about as much as one block saves. (After Rhu et al., 2016,
"vDNN", arXiv 1602.08124.)

Where the platform can, whole memories of tensors are copied, once each: views that share one share its copy too, and
come back as they lay.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from typing import Any

from hp_dtensor.comm.saved_tensors import MODIFIED, Held, Keeper, keeping
from hp_dtensor.platform.autograd import HostCopies
from hp_dtensor.platform.interface import Platform
from hp_dtensor.trees import tensors_in

Tensor = Any


class ActivationOffload:
    """Calls the blocks of one forward, in their order, and keeps in host memory what they save for backward.

    The last block's tensors stay, for backward begins with them; those of blocks that are called by `staying` do too.
    So do parameters, buffers and gathered weights, what shares memory with `args`, small tensors, and results that
    `checkpoint` keeps. Make one for each forward.

    Args:
        smallest: bytes below which memory stays on the device.

    Raises:
        CapabilityError: the platform cannot replace what its autograd saves.

    Example:
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
        """Return `function(x, *args)`.

        Args:
            function: a module, or a `functools.partial` of one or with one, whose parameters stay on the device; of any
                other function, those that are no leaves of the graph are offloaded as if they were activations.
            args: tensors in it, such as tables that blocks share, stay on the device.

        Raises:
            RuntimeError: from backward, if a tensor that is needed there has been written.
        """
        if not self._platform.is_grad_enabled():
            return function(x, *args)
        block = _Block(self._platform, self._copies, self._smallest, self._last)
        block.leave(self._tensors_of(function), tensors_in(args, self._platform.Tensor))
        return self._run(block, function, x, args)

    def staying(self, function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
        """Return `function(x, *args)`, and leave on the device what it saves while the block before leaves.

        Args:
            function, args: any.

        Raises:
            RuntimeError: as for a block that is offloaded.

        Example:
            >>> x = platform.zeros((4, 3), platform.dtype("float32"))
            >>> offload = ActivationOffload(platform)
            >>> offload.staying(platform.ops.silu, offload(platform.ops.silu, x)).shape
            torch.Size([4, 3])
        """
        if self._last is None or not self._platform.is_grad_enabled():
            return function(x, *args)
        # Its tensors are looked at only to know when backward comes to it, and the block before is to be brought back.
        result = self._run(_StayingBlock(self._platform, self._copies, self._smallest, self._last), function, x, args)
        self._last = None
        return result

    def _run(self, block: _Block, function: Callable[..., Tensor], x: Tensor, args: tuple[Any, ...]) -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(self._platform.saving(block.save, lambda kept: kept.get()))
            stack.enter_context(keeping(block.keep))
            result = function(x, *args)
        # What this block has not made room for: the copies of the block before have had all its time.
        if self._last is not None:
            self._last.free()
        self._last = block
        return result

    def _tensors_of(self, function: Any) -> list[Tensor]:
        if isinstance(function, functools.partial):  # such as `checkpoint` of a block
            return [x for each in (function.func, *function.args) for x in self._tensors_of(each)]
        if not isinstance(function, self._platform.Module):
            return []
        named = (self._platform.named_parameters(function), self._platform.named_buffers(function))
        return [x for tensors in named for _, x in tensors]


class _Block:
    """The memories that one block has saved, and the block before, which backward comes to next.

    Attributes:
        num_bytes: of the memories that it has saved so far.
    """

    def __init__(self, platform: Platform, copies: HostCopies, smallest: int, before: _Block | None) -> None:
        self._platform, self._copies, self._smallest, self._before = platform, copies, smallest, before
        self._left: set[Hashable] = set()
        # An entry lives as long as the graph needs it. While it holds its source, whose memory identifies it, nothing
        # else can lie there.
        self._entries: weakref.WeakValueDictionary[Hashable, _Entry] = weakref.WeakValueDictionary()
        self.num_bytes, self._used = 0, 0
        # Those not freed yet, with the bytes up to their end, and those not brought back, with the bytes before them.
        self._leaving: deque[tuple[int, weakref.ref[_Entry]]] = deque()
        self._away: list[tuple[int, weakref.ref[_Entry]]] = []
        self._is_entered = False

    def leave(self, *lists: list[Tensor]) -> None:
        """Leave these tensors' memory where it is."""
        with self._platform.local_op():
            found = [self._copies.memory_of(x) for tensors in lists for x in tensors]
        self._left |= {memory[0] for memory in found if memory is not None}

    def save(self, x: Tensor) -> Keeper:
        """Keep a tensor that autograd saves, which may be a leaf, or part of the graph that saves it."""
        if self._platform.is_leaf(x):
            if self._platform.requires_grad(x):
                self.leave([x])
            return self.keep(x)
        with self._platform.no_grad():
            # Else the graph would hold itself by its results.
            return self.keep(self._platform.detach(x))

    def keep(self, x: Tensor) -> Keeper:
        """Keep a leaf, or a tensor outside the graph."""
        memory = self._copies.memory_of(x)
        if memory is None or memory[1] < self._smallest or memory[0] in self._left:
            return Held(self._platform, x)
        shared = None if self._copies.copies_whole_memory else self._copies.form(x)
        key = memory[0], self._platform.version(x), shared
        with self._platform.no_grad(), self._platform.local_op():
            entry = self._entries.get(key)
            # Tensors over one memory may each count their writes alone: that one has been written does not show in the
            # version of another.
            if entry is None or entry.is_written:
                entry = self._entries[key] = _Entry(self, self._platform, self._copies, x, memory[1])
                self._away.append((self.num_bytes, weakref.ref(entry)))
                self._save(memory[1])
                self._leaving.append((self.num_bytes, weakref.ref(entry)))
            return _Offloaded(entry, self._copies, x)

    def _save(self, num_bytes: int) -> None:
        """Count what is saved, and make room for it."""
        self.num_bytes += num_bytes
        if self._before is not None:
            self._before.free(self.num_bytes)

    def free(self, num_bytes: float = math.inf) -> None:
        """Free the device's memories within the first bytes that were saved, once they have been copied."""
        while self._leaving and self._leaving[0][0] <= num_bytes:
            entry = self._leaving.popleft()[1]()
            if entry is not None:
                entry.finish()

    def fetch(self, num_bytes: float = math.inf) -> None:
        """Begin to bring back the memories within the last bytes that were saved, which backward needs first."""
        while self._away and self.num_bytes - self._away[-1][0] <= num_bytes:
            entry = self._away.pop()[1]()
            if entry is not None:
                entry.fetch()

    def enter(self) -> None:
        """Bring back what is away of this block, at the first call."""
        if not self._is_entered:
            self._is_entered = True
            self.fetch()

    def use(self, num_bytes: int, *, is_last: bool = True) -> None:
        """Count the use of a memory; in this block's second half, bring back twice as much of the block before."""
        # What the present operation uses is still there.
        used_up = self._used
        if is_last:
            self._used += num_bytes
        if self._before is not None:
            share = 2 * used_up / self.num_bytes - 1 if self._used < self.num_bytes else 1.0
            self._before.fetch(share * self._before.num_bytes)


class _StayingBlock(_Block):
    """A block whose memories stay on the device; as they are used, those of the block before are brought back."""

    def keep(self, x: Tensor) -> Keeper:
        """Keep a leaf, or a tensor outside the graph, where it is."""
        memory = self._copies.memory_of(x)
        num_bytes = 0 if memory is None or memory[0] in self._left else memory[1]
        self._save(num_bytes)
        return _Watched(self, self._platform, x, num_bytes)


class _Watched(Held):
    """A tensor that stays where it is, and tells its block when backward needs it."""

    def __init__(self, block: _Block, platform: Platform, x: Tensor, num_bytes: int) -> None:
        super().__init__(platform, x)
        self._block, self._num_bytes = block, num_bytes

    def get(self) -> Tensor:
        self._block.use(self._num_bytes)
        return super().get()


class _Entry:
    """One memory: its source while that is there, its copy on the host, and what has been brought back."""

    def __init__(self, block: _Block, platform: Platform, copies: HostCopies, x: Tensor, num_bytes: int) -> None:
        self._block, self._platform, self._copies = block, platform, copies
        self._num_bytes = num_bytes
        self._shape = list(x.shape)
        self._sources: list[Held] = []  # the users' tensors, while the memory is on the device
        self._host, self._wait = copies.to_host(copies.memory(x))
        self._brought: Any = None
        self._was_written = False
        self._users = 0

    def add(self, x: Tensor) -> None:
        """Count a user, whose tensor must stay the same while it is on the device."""
        self._users += 1
        self._sources.append(Held(self._platform, x))

    @property
    def is_written(self) -> bool:
        """True if a user's tensor was written while it was on the device."""
        return self._was_written or not all(source.is_unchanged for source in self._sources)

    def finish(self) -> None:
        if not self._sources:
            return
        self._wait()
        # A copy under way may have seen what was written.
        self._was_written = self.is_written
        self._sources = []

    def fetch(self) -> None:
        if not self._sources and self._brought is None:
            # Here too, for backward need not be on the stream that `finish` has made wait.
            self._wait()
            self._brought = self._copies.to_device(self._host)

    def check(self) -> None:
        if self.is_written:
            raise RuntimeError(MODIFIED.format(self._shape))

    def take(self) -> Tensor:
        """Return the memory on the device, for one of the users; the last one's frees it."""
        self._block.enter()
        self._users -= 1
        self._block.use(self._num_bytes, is_last=self._users == 0)
        self.check()
        if self._sources:
            with self._platform.local_op():
                return self._copies.memory(self._sources[0].get())
        self.fetch()
        memory, wait = self._brought
        wait()
        if self._users <= 0:
            self._brought = None
        return memory


class _Offloaded:
    """One tensor in the memory of an entry."""

    def __init__(self, entry: _Entry, copies: HostCopies, x: Tensor) -> None:
        self._entry, self._copies, self._form = entry, copies, copies.form(x)
        entry.add(x)

    def get(self) -> Tensor:
        return self._copies.tensor(self._entry.take(), self._form)

    def check(self) -> None:
        self._entry.check()
