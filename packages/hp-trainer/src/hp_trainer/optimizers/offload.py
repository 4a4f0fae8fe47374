"""Offload of the state of optimizers to host memory (`training.offload_optimizer`).

The state is on the device only during the update, one bucket of parameters
after the other.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.process_group import Work
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp.plugins import get_storage
from hp_fsdp.storage import ParameterStorage
from hp_trainer.exceptions import TrainingError
from hp_trainer.optimizers.groups import GroupedOptimizer, Named, has_plain_state

Tensor = Any


BUCKET_ELEMENTS = 1 << 26
"""Elements of (unsharded) parameters whose state is copied to the device together."""


def build_on_host(
    named: Named, build: Callable[[Named], Any], platform: Platform, bucket_elements: int = BUCKET_ELEMENTS
) -> Any:
    """Build an optimizer with its state in host memory; a plain optimizer if the device is the host.

    An update copies the state of one bucket of parameters after the other to the device and back. Copies of the next
    bucket overlap with the computation. Results are those of the plain optimizer.

    Args:
        named: (name, parameter) pairs.
        build: builds an optimizer (`hp_trainer.training.Optimizer`) of some parameters.
        bucket_elements: elements of unsharded parameters in a bucket; a larger parameter is a bucket of its own.

    Raises:
        CapabilityError: the platform cannot copy between the device and the host.
        TrainingError: the optimizer's state is not the tensors of `state()`.
    """
    storage, kind = get_storage(platform), platform.device_types[0]
    if storage.is_host(kind):
        return build(named)
    storage.check_offload(kind)
    counts = [math.prod(parameter.shape) for _, parameter in named]
    buckets = [named[bucket] for bucket in split_into_buckets(counts, bucket_elements)] or [[]]
    return OptimizerOnHost([StateOnHost(build(bucket), storage, platform) for bucket in buckets])


def split_into_buckets(counts: Sequence[int], most: int) -> Iterator[slice]:
    """Yield slices of `counts` of at most `most`, or of one larger tensor; unsharded, so that all ranks split alike."""
    start = elements = 0
    for index, count in enumerate(counts):
        if index > start and elements + count > most:
            yield slice(start, index)
            start, elements = index, 0
        elements += count
    if start < len(counts):
        yield slice(start, len(counts))


class OptimizerOnHost(GroupedOptimizer):
    """Optimizers of buckets of parameters as one; see `hp_trainer.training.Optimizer`."""

    def __init__(self, buckets: list[StateOnHost]) -> None:
        super().__init__([(bucket.optimizer, 1.0) for bucket in buckets])
        self._buckets = buckets

    def step(self, learning_rate: float) -> None:
        for number, bucket in enumerate(self._buckets):
            # This bucket and the next, whose copy overlaps with this update. `prefetch` does nothing for a copy that
            # has started.
            for each in self._buckets[number : number + 2]:
                each.prefetch()
            bucket.wait()
            bucket.optimizer.step(learning_rate)
            bucket.offload()
            # The preceding bucket's copies to the host had the time of this update, so three buckets at most are on the
            # device: that one, this one and the prefetched one.
            for each in self._buckets[max(0, number - 1) : number]:
                each.release()
        self._buckets[-1].release()

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the state of each parameter by name and slot, in host memory; it may be written."""
        return ChainMap(*(bucket.state for bucket in self._buckets))

    def state_bytes(self, platform: Platform) -> int:
        """Return the bytes of state that remain on the device: none."""
        return 0


@dataclass
class _Slot:
    """A state tensor on the host, and its copy on the device, which has memory only during an update."""

    on_device: Tensor
    on_host: Tensor
    arriving: Work | None = None
    leaving: Work | None = None


class StateOnHost:
    """The state of one optimizer, on the host (`state`) except between `prefetch` and `release`."""

    def __init__(self, optimizer: Any, storage: ParameterStorage, platform: Platform) -> None:
        self.optimizer, self._storage, self._platform = optimizer, storage, platform
        self._slots: list[_Slot] = []
        # Read twice: a state that is computed on access has other tensors each time, and cannot be swapped.
        tensors, again = optimizer.state(), optimizer.state()
        if not has_plain_state(optimizer) or any(
            tensor is not again[name][slot] for name, slots in tensors.items() for slot, tensor in slots.items()
        ):
            raise self._not_offloadable()
        self.state = {
            name: {slot: self._on_host(tensor) for slot, tensor in slots.items()} for name, slots in tensors.items()
        }
        # The initial state exists on the device; it is moved to the host bucket by bucket while the optimizer is built.
        self.offload()
        self.release()

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Register a state tensor, and return the tensor in host memory that replaces it."""
        local = local_of(self._platform, tensor)
        numel = math.prod(local.shape)
        if not numel:
            return tensor
        # The view is created now: creating it later, when the storage is freed, would allocate the storage again.
        flat = self._storage.view(local, 0, (numel,))
        if self._storage.address(flat) != self._storage.address(local):
            # Its storage is shared with another tensor, so freeing it would free that one too.
            raise self._not_offloadable()
        # Pinned, because copies from pageable memory do not overlap with computation.
        host = self._storage.host_buffer(numel, local.dtype, pin_memory=True)
        self._slots.append(_Slot(flat, host))
        view = self._strided_as(local, host)
        return self._platform.wrap(view, tensor.spec) if isinstance(tensor, DTensor) else view

    def _strided_as(self, local: Tensor, host: Tensor) -> Tensor:
        """Return a view of host memory with the strides of `local`, which may be sharded along any dimension."""
        shape = tuple(local.shape)
        for first_dim in range(max(1, len(shape))):
            view = self._storage.view(host, 0, shape, first_dim)
            if _strides(view) == _strides(local):
                return view
        raise self._not_offloadable()

    def _not_offloadable(self) -> TrainingError:
        return TrainingError(
            f"training.offload_optimizer: the state of {type(self.optimizer).__name__} cannot be offloaded, because "
            "it is not dense tensors that are the same at each call of state(); set it to false"
        )

    def prefetch(self) -> None:
        """Start to copy the state to the device, overlapping with computation."""
        for slot in self._slots:
            if slot.arriving is None:
                # Allocated on the computation's stream, because it is freed there.
                self._storage.refill(slot.on_device)
                with self._storage.copy_stream():
                    slot.arriving = self._storage.to_device(slot.on_device, slot.on_host)

    def wait(self) -> None:
        """Let the computation wait for the state."""
        for slot in self._slots:
            if slot.arriving is not None:
                slot.arriving.wait()

    def offload(self) -> None:
        """Start to copy the state back to the host."""
        for slot in self._slots:
            if slot.arriving is not None:
                # The copy to the device must have read the host's tensor before it is overwritten.
                self._storage.finish_reading(slot.arriving)
            slot.leaving, slot.arriving = self._storage.to_host(slot.on_host, slot.on_device), None

    def release(self) -> None:
        """Wait until the state is on the host, and free it on the device."""
        for slot in self._slots:
            if slot.leaving is not None:
                slot.leaving.wait()
                slot.leaving = None
                self._storage.release(slot.on_device)


def _strides(x: Tensor) -> list[tuple[int, int]]:
    """Return size and stride of the dimensions that have more than one element."""
    # Strides of dimensions of size 1 are arbitrary, and frameworks differ in them.
    return [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
