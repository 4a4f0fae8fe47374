"""States of optimizers that keep them in another form than float32 tensors.

An optimizer whose state waits in host memory, and is on the device for one bucket of parameters after another.
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

Tensor = Any


def set_state(optimizer: Any, name: str, slot: str, values: Tensor) -> None:
    """Tell an optimizer that a tensor of its `state()` has been written into, where it does not keep that tensor."""
    if hasattr(optimizer, "set_state"):
        optimizer.set_state(name, slot, values)


def has_plain_state(optimizer: Any) -> bool:
    """Return True if an optimizer keeps the very tensors of its `state()`, so that nobody need tell it of writes."""
    return bool(getattr(optimizer, "has_plain_state", not hasattr(optimizer, "set_state")))


def state_bytes(optimizer: Any, platform: Platform) -> int:
    """Return the bytes of an optimizer's state on this rank."""
    if hasattr(optimizer, "state_bytes"):
        return int(optimizer.state_bytes(platform))
    tensors = [tensor for slots in optimizer.state().values() for tensor in slots.values()]
    return sum(math.prod(platform.local_shape(x)) * platform.itemsize(x.dtype) for x in tensors)


Named = list[tuple[str, Tensor]]

BUCKET_ELEMENTS = 1 << 26
"""Elements of whole parameters whose state is brought to the device together."""


def build_on_host(
    named: Named, build: Callable[[Named], Any], platform: Platform, bucket_elements: int = BUCKET_ELEMENTS
) -> Any:
    """Return an optimizer that keeps its state in host memory; where the device is the host, a plain one.

    An update brings the state of one bucket of parameters to the device, the next one's beside the computation, and
    takes it back. Numbers are those of the plain optimizer.

    Args:
        named: (name, parameter).
        build: makes an optimizer (`hp_trainer.training.Optimizer`) of some parameters.
        bucket_elements: of whole parameters; a larger parameter is a bucket of its own.

    Raises:
        CapabilityError: the platform cannot copy between the device and the host.
        TrainingError: the optimizer keeps its state in another form than the tensors of `state()`.
    """
    storage, kind = get_storage(platform), platform.device_types[0]
    if storage.is_host(kind):
        return build(named)
    storage.check_offload(kind)
    counts = [math.prod(parameter.shape) for _, parameter in named]
    buckets = [named[part] for part in split_into_buckets(counts, bucket_elements)] or [[]]
    return OptimizerOnHost([StateOnHost(build(bucket), storage, platform) for bucket in buckets])


def split_into_buckets(counts: Sequence[int], most: int) -> Iterator[slice]:
    """Yield consecutive parts of tensors with so many elements together, or one tensor with more.

    Args:
        counts: elements of each tensor, of its whole shape: all ranks cut alike.
    """
    begin = elements = 0
    for place, count in enumerate(counts):
        if place > begin and elements + count > most:
            yield slice(begin, place)
            begin, elements = place, 0
        elements += count
    if begin < len(counts):
        yield slice(begin, len(counts))


class OptimizerOnHost:
    """Buckets of parameters as one optimizer; see `hp_trainer.training.Optimizer`."""

    def __init__(self, buckets: list[StateOnHost]) -> None:
        self._buckets = buckets

    @property
    def num_steps(self) -> int:
        """Updates done."""
        return int(self._buckets[0].optimizer.num_steps)

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        for bucket in self._buckets:
            bucket.optimizer.num_steps = steps

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient, and count the update."""
        for number, bucket in enumerate(self._buckets):
            for ahead in self._buckets[number : number + 2]:
                ahead.fetch()
            bucket.wait()
            bucket.optimizer.step(learning_rate)
            bucket.put_away()
            # Its copies have had this bucket's time; so three buckets at most are on the device.
            for before in self._buckets[max(0, number - 1) : number]:
                before.settle()
        self._buckets[-1].settle()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for bucket in self._buckets:
            bucket.optimizer.zero_grad()

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the state of each parameter by name and slot, in host memory; it may be written."""
        return ChainMap(*(bucket.state for bucket in self._buckets))

    def state_bytes(self, platform: Platform) -> int:
        """Return the bytes of state that stay on the device: none."""
        return 0


@dataclass
class _Slot:
    """A tensor of state: on the device (its memory is there during an update only), and on the host."""

    on_device: Tensor
    on_host: Tensor
    arriving: Work | None = None
    leaving: Work | None = None


class StateOnHost:
    """The state of one optimizer: in host memory but between `fetch` and `settle`.

    Attributes:
        optimizer: updates with its own tensors, which have memory only then.
        state: tensors in host memory, by parameter and slot.
    """

    def __init__(self, optimizer: Any, storage: ParameterStorage, platform: Platform) -> None:
        self.optimizer, self._storage, self._platform = optimizer, storage, platform
        self._slots: list[_Slot] = []
        tensors, again = optimizer.state(), optimizer.state()
        if not has_plain_state(optimizer) or any(
            tensor is not again[name][slot] for name, slots in tensors.items() for slot, tensor in slots.items()
        ):
            raise self._another_form()
        self.state = {
            name: {slot: self._moved(tensor) for slot, tensor in slots.items()} for name, slots in tensors.items()
        }
        self.put_away()
        self.settle()

    def _moved(self, tensor: Tensor) -> Tensor:
        """Note a tensor of state, and return the one in host memory that stands for it."""
        local = local_of(self._platform, tensor)
        numel = math.prod(local.shape)
        if not numel:
            return tensor
        # Made now: a view of memory that has been freed would have it allocated again.
        flat = self._storage.view(local, 0, (numel,))
        if self._storage.address(flat) != self._storage.address(local):
            # A part of another tensor's memory, which it would be freed with.
            raise self._another_form()
        host = self._storage.host_buffer(numel, local.dtype, pin_memory=True)
        self._slots.append(_Slot(flat, host))
        shown = self._laid_out_as(local, host)
        return self._platform.wrap(shown, tensor.spec) if isinstance(tensor, DTensor) else shown

    def _laid_out_as(self, local: Tensor, host: Tensor) -> Tensor:
        """Return a view of host memory whose elements lie as those of `local`, which may be cut along any dimension."""
        shape = tuple(local.shape)
        for first_dim in range(max(1, len(shape))):
            view = self._storage.view(host, 0, shape, first_dim)
            if _steps(view) == _steps(local):
                return view
        raise self._another_form()

    def _another_form(self) -> TrainingError:
        return TrainingError(
            f"training.offload_optimizer: {type(self.optimizer).__name__} keeps its state in another form than dense "
            "tensors, the same at each call of state(), which could wait on the host; set it to false"
        )

    def fetch(self) -> None:
        """Begin to bring the state to the device, beside what it computes."""
        for slot in self._slots:
            if slot.arriving is None:
                # Of the computation's memory, which it is freed to.
                self._storage.refill(slot.on_device)
                with self._storage.copy_stream():
                    slot.arriving = self._storage.to_device(slot.on_device, slot.on_host)

    def wait(self) -> None:
        """Have the computation wait for the state."""
        for slot in self._slots:
            if slot.arriving is not None:
                slot.arriving.wait()

    def put_away(self) -> None:
        """Begin to copy the state back."""
        for slot in self._slots:
            if slot.arriving is not None:
                # The host's tensor has been read before it is written.
                self._storage.finish_reading(slot.arriving)
            slot.leaving, slot.arriving = self._storage.to_host(slot.on_host, slot.on_device), None

    def settle(self) -> None:
        """Wait until the state is on the host, and free it on the device."""
        for slot in self._slots:
            if slot.leaving is not None:
                slot.leaving.wait()
                slot.leaving = None
                self._storage.release(slot.on_device)


def _steps(x: Tensor) -> list[tuple[int, int]]:
    """Return size and stride of the dimensions that have more than one element."""
    return [(size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
