"""`torch_npu.profiler` with the host's events: its profiles have a trace, and no `key_averages`."""

from __future__ import annotations

import enum
from typing import Any

from torch import profiler


class ProfilerActivity(enum.Enum):
    CPU = 0
    NPU = 1


class profile:
    def __init__(self, *, activities: list[ProfilerActivity], record_shapes: bool, profile_memory: bool) -> None:
        assert set(activities) == set(ProfilerActivity)
        activity = [profiler.ProfilerActivity.CPU]
        self._profile = profiler.profile(
            activities=activity, record_shapes=record_shapes, profile_memory=profile_memory
        )

    def __enter__(self) -> profile:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    def export_chrome_trace(self, output_path: str) -> None:
        if not output_path.endswith(".json"):
            raise RuntimeError("Invalid parameter output_path, which must be a json file.")
        self._profile.export_chrome_trace(output_path)
