"""The collectives of a group as something that can be exchanged: quantized, compressed, counted, faked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hp_dtensor.comm.world import ProcessGroup, Work
from hp_dtensor.platform.interface import Platform
from hp_fsdp.exceptions import FullyShardError

Tensor = Any


class Communication:
    """How flat buffers are gathered and reduced; this one by the process group's own collectives.

    All tensors are plain, 1-D and contiguous; a group has at least two ranks. What a method starts may run
    until the returned work's `wait`; inputs stay untouched by others until then, and the method's own
    temporaries are kept by the work. Every rank of a group calls the same methods in the same order.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def all_gather(self, output: Tensor, shard: Tensor, group: ProcessGroup) -> Work:
        """Fill `output` with every rank's `shard` in rank order.

        Args:
            output: `group.size * shard.shape[0]` elements in the dtype of computation; written in place.
            shard: the sharded parameters in their own dtype; only read.
        """
        if shard.dtype != output.dtype:
            with self.platform.no_grad():
                shard = self.platform.ops.cast(shard, output.dtype)
        return Holding(group.all_gather_into(output, shard, async_op=True), shard)

    def reduce_scatter(self, output: Tensor, gradients: Tensor, group: ProcessGroup) -> Work:
        """Put this rank's part of the sum of all ranks' `gradients` into `output`.

        Args:
            output: elements of one shard, in the dtype of reduction; written in place.
            gradients: `group.size` times as many, of the same dtype; may be overwritten.
        """
        return group.reduce_scatter_into(output, gradients, "sum", async_op=True)

    def all_reduce(self, shard: Tensor, group: ProcessGroup) -> Work:
        """Replace `shard` by the sum of all ranks', in place; for the replicate axis of a 2-D mesh."""
        return group.all_reduce(shard, "sum", async_op=True)


class Holding:
    """A work that keeps temporaries alive until it is over."""

    def __init__(self, work: Work, *held: Any) -> None:
        self._work = work
        self._held = held

    def wait(self) -> None:
        self._work.wait()
        self._held = ()


class Then:
    """A work with a step of its own after the communication."""

    def __init__(self, work: Work, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            self._work.wait()
            finish()


CommunicationFactory = Callable[[Platform], Communication]


class CommunicationRegistry:
    """Communications by name; filled by the hook `hp_fsdp_communication`."""

    def __init__(self) -> None:
        self._factories: dict[str, CommunicationFactory] = {}

    def add(self, name: str, factory: CommunicationFactory) -> None:
        """Make `factory(platform)` the communication called `name`.

        Raises:
            FullyShardError: the name is taken.
        """
        if name in self._factories:
            raise FullyShardError(f"communication {name!r} is registered twice; choose another name")
        self._factories[name] = factory

    @property
    def names(self) -> list[str]:
        return sorted(self._factories)

    def build(self, name: str, platform: Platform) -> Communication:
        """The communication called `name`.

        Raises:
            FullyShardError: no plugin has registered it; lists the names that are known.
        """
        factory = self._factories.get(name)
        if factory is None:
            raise FullyShardError(
                f"communication: expected one of {', '.join(map(repr, self.names))} or a Communication, got {name!r}; "
                "is the plugin that registers it (hook 'hp_fsdp_communication') installed?"
            )
        return factory(platform)


def get_communication(choice: str | Communication, platform: Platform) -> Communication:
    """The communication meant by a name or given as it is.

    Raises:
        FullyShardError: an unknown name, or neither a name nor a `Communication`.
    """
    if isinstance(choice, Communication):
        return choice
    if isinstance(choice, str):
        return _registry().build(choice, platform)
    raise FullyShardError(f"communication: expected a name or a Communication, got {type(choice).__name__}")


@functools.cache
def _registry() -> CommunicationRegistry:
    from hp_fsdp.storage import plugin_manager

    registry = CommunicationRegistry()
    registry.add("default", Communication)
    plugin_manager().hook.hp_fsdp_communication(registry=registry)
    return registry
