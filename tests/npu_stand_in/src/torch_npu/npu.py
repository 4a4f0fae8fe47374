"""The module `torch.npu`: devices, streams, events, random state and memory figures."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from torch_npu._build import extension

_calls = torch.ops.npu_stand_in
_NAME = "Ascend910B2"
_MEMORY = 64 * 2**30


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def init() -> None:
    """Do nothing: there is nothing to start."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return _calls.device_count()


def current_device() -> int:
    return _calls.current_device()


def set_device(device: Any) -> None:
    _calls.set_device(_index(device))


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def synchronize(device: Any = None) -> None:
    """Do nothing: every operation is complete when it returns."""
    _index(device)


def get_device_name(device: Any = None) -> str:
    _index(device)
    return _NAME


def get_device_properties(device: Any = None) -> SimpleNamespace:
    _index(device)
    return SimpleNamespace(name=_NAME, total_memory=_MEMORY)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


# Streams ---------------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **named: Any) -> Stream:
        return super().__new__(cls, device=torch.device("npu", _index(device)), priority=priority, **named)


def Event(enable_timing: bool = False) -> torch.Event:
    # A class in torch_npu, but a subclass could not measure the time to another one.
    return torch.Event("npu", enable_timing=enable_timing)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=20)


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else stream


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


# Random numbers --------------------------------------------------------------------------------------------


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return extension.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = "npu") -> None:
    extension.default_generator(_index(device)).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    extension.default_generator(current_device()).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        extension.default_generator(index).manual_seed(int(seed))


def initial_seed() -> int:
    return extension.default_generator(current_device()).initial_seed()


# Memory ----------------------------------------------------------------------------------------------------


def memory_allocated(device: Any = None) -> int:
    return _calls.figure("allocated", _index(device))


def max_memory_allocated(device: Any = None) -> int:
    return _calls.figure("peak", _index(device))


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def memory_stats(device: Any = None) -> dict[str, int]:
    return {
        "allocated_bytes.all.current": memory_allocated(device),
        "allocated_bytes.all.peak": max_memory_allocated(device),
    }


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return _MEMORY - memory_allocated(device), _MEMORY


def reset_peak_memory_stats(device: Any = None) -> None:
    _calls.reset_figures(_index(device))


def empty_cache() -> None:
    """Do nothing: freed memory is returned at once."""


class memory:
    """Snapshots of allocations: here without any."""

    _records = False

    @classmethod
    def _record_memory_history(cls, enabled: str | None = "all", max_entries: int = 0) -> None:
        cls._records = enabled is not None

    @classmethod
    def _dump_snapshot(cls, filename: str = "dump_snapshot.pickle") -> None:
        assert cls._records, "no history is recorded"
        Path(filename).write_bytes(pickle.dumps({"segments": [], "device_traces": []}))


def host_reads(device: Any = None) -> int:
    """Return how often the host has waited for this device's data since the last reset. Only the stand-in has this."""
    return _calls.figure("host_reads", _index(device))
