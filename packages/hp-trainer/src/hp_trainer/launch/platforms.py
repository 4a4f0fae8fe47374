"""The platform of a run, its accelerators on this machine, and the number of ranks of a job."""

from __future__ import annotations

import difflib
import functools
import os
from dataclasses import dataclass

from hp_dtensor.exceptions import PlatformError
from hp_dtensor.launch import is_launched, leave_launcher, rank_environment
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.plugins import call_each, plugin_manager
from hp_dtensor.platform.selection import get_platform
from hp_trainer import _coordination
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import ConfigError, Problem, join_choices


def chosen_platform(name: str | None) -> str | Problem:
    """Return the name of the platform by the rules of `hp_dtensor.get_platform`, without loading a framework."""
    # An empty variable counts as unset.
    wanted = name or os.environ.get("HP_PLATFORM") or None
    found = installed_platforms()
    if wanted is None and len(found) == 1:
        return found[0]
    if wanted in found:
        return str(wanted)
    if (missing := no_platform()) is not None:
        return missing
    if wanted is None:
        what, hint = "several platforms are installed and none is chosen", f"--platform={found[0]}"
        return Problem(path="platform", what=what, expected=join_choices(found), hint=hint)
    near = next(iter(difflib.get_close_matches(wanted, found, n=1)), "")
    hint = near or f"install the package that provides it: its entry point {wanted!r} of group 'hp_dtensor' is missing"
    return Problem(path="platform", what="is not installed", expected=join_choices(found), got=wanted, hint=hint)


def import_platform(name: str | None) -> Platform:
    """Return a platform as `get_platform`, reporting first that its framework is imported, which takes seconds.

    Raises:
        PlatformError: as `get_platform`.
    """
    chosen = chosen_platform(name)
    if isinstance(chosen, str):
        report_import(chosen)
    return get_platform(name)


@functools.cache
def report_import(name: str) -> None:
    """Report once that a framework is imported."""
    report(f"importing {name}")


def report(line: str) -> None:
    """Print a message of the job to standard error: under a launcher only on rank 0."""
    if is_first_process():
        _coordination.report(line)


def is_first_process() -> bool:
    """Return whether this process prints for the job: it was not started by a launcher, or it is rank 0."""
    found = rank_environment() if is_launched() else None
    return found is None or (found.rank == 0 and not found.is_scheduler)


def num_accelerators(name: str | None) -> int:
    """Return the number of accelerators of the platform on this machine; a missing or broken one counts as 0."""
    platform = chosen_platform(name)
    if isinstance(platform, Problem) or not _may_have_accelerators(platform):
        return 0
    try:
        return import_platform(platform).num_accelerators()
    except PlatformError:
        return 0


def max_local_ranks(name: str) -> int | None:
    """Return the most ranks that a platform can have on this machine; None: any number."""
    try:
        return import_platform(name).max_local_ranks() if _may_have_accelerators(name) else None
    except PlatformError:
        return None


def _may_have_accelerators(name: str) -> bool:
    hooks = [hook for hook in call_each(plugin_manager(), "hp_may_have_accelerators") if hook.name == name]
    return all(hook.call() != [False] for hook in hooks)


def has_unused_driver(name: str) -> bool:
    """Return whether a driver of devices that the platform could use is loaded, but the platform found none."""
    return os.environ.get("HP_DEVICE") != "cpu" and _may_have_accelerators(name) and num_accelerators(name) == 0


def compile_backends(name: str) -> tuple[str, ...] | None:
    """Return the names of a platform's compilers; None: it cannot be loaded. This loads its framework."""
    try:
        return import_platform(name).compile_backends()
    except PlatformError:
        return None


def no_platform() -> Problem | None:
    """Return the problem that no platform is installed; None: there is at least one."""
    hint = "pip install hp-platform-FRAMEWORK (from a clone: pip install ./packages/hp-platform-FRAMEWORK)"
    return None if installed_platforms() else Problem(path="platform", what="no platform is installed", hint=hint)


def installed_platforms() -> list[str]:
    """List the names of the platform plugins, without loading their frameworks."""
    # Lists the registered plugins without calling their hook, which would import the framework.
    return sorted(one.plugin_name for one in plugin_manager().hook.hp_platform.get_hookimpls())


@dataclass(frozen=True)
class Node:
    """A machine of a job, by number; its process starts the ranks there. Machine 0, at `host`, decides for all."""

    number: int
    host: str


def take_node(config: TrainerConfig) -> Node | None:
    """Return this machine of a job with `launch.nodes`, after which this process is no rank; None without them.

    Raises:
        ConfigError: no launcher has started this process.
    """
    if config.launch.nodes is None:
        return None
    found = leave_launcher()
    if found is None:
        problem = Problem(
            path="launch.nodes",
            what="no launcher has started this process: machines know their numbers from it",
            expected="null, or one process on each machine by srun --ntasks-per-node=1 or torchrun --nproc-per-node=1",
            got=str(config.launch.nodes),
        )
        raise ConfigError([problem], "this machine of the job")
    return Node(found.rank, found.address.rpartition(":")[0])


def world_size_of(config: TrainerConfig) -> int:
    """Return the number of ranks of the job.

    It is that of the launcher that started this process, else `launch.nodes` times `launch.local_ranks`, else one per
    accelerator of this machine, else `launch.cpu_ranks`.
    """
    found = rank_environment() if is_launched() else None
    if found is not None:
        return found.size
    # `num_accelerators` loads a framework, which takes seconds, so it comes second.
    local_ranks = config.launch.local_ranks or num_accelerators(config.platform) or config.launch.cpu_ranks
    return local_ranks * (config.launch.nodes or 1)
