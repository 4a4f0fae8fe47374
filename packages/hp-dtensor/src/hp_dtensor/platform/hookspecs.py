"""Hook specifications of hp_dtensor (entry-point group `hp_dtensor`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform

hookspec = pluggy.HookspecMarker("hp")


@hookspec
def hp_platform() -> Platform:  # type: ignore[empty-body]
    """Return this plugin's platform. Called once, when a platform is first requested.

    May raise `PlatformError` when the framework behind it is missing or too old; the platform then counts
    as unavailable, and the error is shown when it is requested by name. Since 0.1.
    """


@hookspec
def hp_may_have_accelerators() -> bool:  # type: ignore[empty-body]
    """Return False if this machine has no accelerator that the platform can use, without importing the framework.

    Optional: without it, or if it returns True, accelerators are counted by the framework. Since 0.1.
    """


@hookspec
def hp_driver_files() -> dict[str, tuple[str, str]]:  # type: ignore[empty-body]
    """Return files with versions of drivers and libraries that the framework uses, without importing it.

    The result maps a name, such as "CUDA driver", to a pair: a glob pattern of absolute paths, and a regular expression
    whose first group is the version in such a file. Files that do not exist, or do not match, are skipped. Optional.
    Since 0.1.1.
    """


@hookspec
def hp_sharding_rules(registry: Any) -> None:
    """Register rules in the `RuleRegistry`. Called once, before the first operation on a DTensor. Since 0.1."""
