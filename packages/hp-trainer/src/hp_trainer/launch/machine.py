"""Facts about the machines and devices of a job, and what is wrong with them: versions, processors, memory, links."""

from __future__ import annotations

import importlib.metadata
import os
import platform as system
import re
import shutil
import socket
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.plugins import call_each, plugin_manager
from hp_trainer.exceptions import Problem

_PACKAGES = ("hp-dtensor", "hp-fsdp", "hp-moe", "hp-trainer")
_LEAST_SHARED_MEMORY = 2**30
_LEAST_MEMORY_PER_RANK = 2 * 2**30
# A link or a rank is reported as slow below these shares of the median.
_SLOW_LINK, _SLOW_RANK = 1 / 3, 2 / 3


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Facts of one rank about its machine. Sizes are in bytes.

    Attributes:
        host: name of the machine.
        versions: of Python, packages and drivers, by name.
        processor_ids: those that this process may use; a launcher may bind each rank to other ones.
        quota: processors at a time that its control group allows; None: all.
        load: average number of running processes in the last minute, before the ranks computed.
        memory, available: of the machine, or the limit of the control group if that is lower.
        shared_memory: size of /dev/shm; None: there is none.
        threads: OMP_NUM_THREADS; None: not set, so that frameworks use all processors.
        accelerators: devices of the best type that this process sees.
        checks_run: Python runs `assert`, which `-O` would remove.
    """

    host: str
    system: str
    versions: dict[str, str]
    processor_ids: tuple[int, ...]
    quota: int | None
    load: float
    memory: int
    available: int
    shared_memory: int | None
    threads: int | None
    device_type: str
    device: str
    device_memory: int
    accelerators: int
    checks_run: bool = __debug__

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RankFacts:
        """Return the facts of `asdict` after a round trip through JSON."""
        return cls(**{**value, "processor_ids": tuple(value["processor_ids"])})


@dataclass(frozen=True)
class Pair:
    """The link between two ranks: latency in seconds, bandwidth in bytes per second that each sends."""

    ranks: tuple[int, int]
    latency: float
    bandwidth: float


def find_facts(platform: Platform, load: float) -> RankFacts:
    """Return the facts about this process, whose platform is loaded."""
    device = platform.describe_device()
    memory, available = _memory()
    shared = Path("/dev/shm")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return RankFacts(
        host=socket.gethostname(),
        system=f"{system.system()} {system.release()} {system.machine()}",
        versions=find_versions(platform.name) | device.versions,
        processor_ids=tuple(sorted(os.sched_getaffinity(0))),
        quota=_quota(),
        load=load,
        memory=memory,
        available=available,
        shared_memory=shutil.disk_usage(shared).total if shared.is_dir() else None,
        threads=int(threads) if threads.isdecimal() else None,
        device_type=platform.device_types[0],
        device=device.name,
        device_memory=device.memory,
        accelerators=platform.num_accelerators(),
    )


def find_versions(platform: str) -> dict[str, str]:
    """Return the versions of Python, of the packages and drivers of a platform, without importing its framework."""
    names = list(_PACKAGES)
    for found in importlib.metadata.entry_points(group="hp_dtensor"):
        if found.name == platform and found.dist is not None:
            # With its extras, such as a framework's package for an accelerator.
            required = (re.split(r"[^\w.-]", each)[0] for each in found.dist.requires or ())
            names += [found.dist.name, *required]
    versions = {"Python": system.python_version()}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions | _driver_versions(platform)


def _driver_versions(platform: str) -> dict[str, str]:
    hooks = [each for each in call_each(plugin_manager(), "hp_driver_files") if each.name == platform]
    files = [item for each in hooks for result in each.call() for item in result.items()]
    found = {}
    for name, (pattern, version) in files:
        for file in sorted(Path("/").glob(pattern.lstrip("/"))):
            with suppress(OSError):
                if match := re.search(version, file.read_text(errors="replace")):
                    found[name] = match[1].strip()
    return found


def _quota() -> int | None:
    """Return the number of processors that the control group of this process allows; None: it has no limit."""
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, round(int(quota) / int(period)))
    return None


def _memory() -> tuple[int, int]:
    """Return memory and available memory of this machine, or of the control group if it is limited further."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name: 1024 * int(number) for name, number, *_ in lines}
    total, available = sizes["MemTotal:"], sizes["MemAvailable:"]
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def machines_of(ranks: Sequence[RankFacts]) -> list[list[int]]:
    """Return the ranks of each machine, in the order of their first ranks."""
    machines: dict[str, list[int]] = defaultdict(list)
    for rank, facts in enumerate(ranks):
        machines[facts.host].append(rank)
    return list(machines.values())


def count_processors(of_machine: Sequence[RankFacts]) -> int:
    """Return the number of processors that the ranks of one machine may use together."""
    usable = len({number for facts in of_machine for number in facts.processor_ids})
    quota = of_machine[0].quota
    return usable if quota is None else min(usable, quota)


def find_mismatches(ranks: Sequence[RankFacts]) -> Iterator[Problem]:
    """Yield the problems of ranks whose versions or devices differ, and of checks that do not run."""
    first = ranks[0]
    for name in sorted({name for facts in ranks for name in facts.versions}):
        found = [facts.versions.get(name, "none") for facts in ranks]
        if len(set(found)) > 1:
            other = next(rank for rank, version in enumerate(found) if version != found[0])
            what = f"ranks differ in {name}: {found[0]} on rank 0, {found[other]} on rank {other}"
            yield Problem(path="versions", what=what, hint="install the same versions on all machines")
    for rank, facts in enumerate(ranks):
        if facts.device_type != first.device_type:
            what = f"rank 0 uses {first.device_type}, rank {rank} uses {facts.device_type}"
            yield Problem(path="devices", what=what, hint="HP_DEVICE=cpu on all ranks, or a device for each")
            break
    if not all(facts.checks_run for facts in ranks):
        what = "Python runs without assertions (-O or PYTHONOPTIMIZE), so the checks have compared nothing"
        yield Problem(path="checks", what=what, hint="run hp-train doctor without them")


def find_slow_machines(ranks: Sequence[RankFacts]) -> Iterator[Problem]:
    """Yield what makes ranks slow or makes them fail later: processors, memory and shared memory that are too few."""
    for number, members in enumerate(machines_of(ranks)):
        of_machine = [ranks[rank] for rank in members]
        here, count = of_machine[0], len(members)
        where = f"machine {number}"
        processors = count_processors(of_machine)
        # Frameworks start a thread for each processor unless a number is set.
        threads = [facts.threads or len(facts.processor_ids) for facts in of_machine]
        if count > processors and here.device_type == "cpu":
            what = f"{count} ranks share {processors} processors"
            yield Problem(path=where, what=what, hint=f"at most {processors} ranks on this machine")
        elif sum(threads) > max(count, processors):
            what = f"{count} ranks with {max(threads)} threads each share {processors} processors"
            hint = f"OMP_NUM_THREADS={max(1, processors // count)} in the environment of the ranks"
            yield Problem(path=where, what=what, hint=hint)
        if here.load >= processors:
            what = f"other programs use the processors: the load was {here.load:.1f} on {processors} processors"
            yield Problem(path=where, what=what, hint="end them, and measure again: all figures are too low")
        if count > 1 and here.shared_memory is not None and here.shared_memory < _LEAST_SHARED_MEMORY:
            what = f"/dev/shm has {here.shared_memory / 2**20:.0f} MiB, through which ranks exchange data"
            yield Problem(path=where, what=what, hint="docker run --shm-size=8g, or --ipc=host")
        if here.available < count * _LEAST_MEMORY_PER_RANK:
            what = f"{here.available / 2**30:.1f} GiB of memory are available to {count} ranks"
            yield Problem(path=where, what=what, hint="end other programs, or start fewer ranks")


def find_slow_links(pairs: Sequence[Pair], ranks: Sequence[RankFacts]) -> Iterator[Problem]:
    """Yield the links much slower than the median of their kind: within machines, or between machines."""
    kinds: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        inside = len({ranks[rank].host for rank in pair.ranks}) == 1
        kinds["of one machine" if inside else "of different machines"].append(pair)
    for kind, links in kinds.items():
        usual = statistics.median(link.bandwidth for link in links)
        for link in links:
            if link.bandwidth < _SLOW_LINK * usual:
                what = (
                    f"ranks {link.ranks[0]} and {link.ranks[1]} exchange {link.bandwidth / 1e9:.2g} GB/s, "
                    f"other ranks {kind} {usual / 1e9:.2g} GB/s"
                )
                yield Problem(path="links", what=what, hint="look at the network card, cable and slot of these ranks")


def find_slow_ranks(rates: Sequence[float]) -> Iterator[Problem]:
    """Yield the ranks that compute much slower than the median. All ranks wait for them in every step."""
    usual = statistics.median(rates)
    for rank, rate in enumerate(rates):
        if rate < _SLOW_RANK * usual:
            what = f"rank {rank} computes {rate / 1e9:.3g} Gflop/s, others {usual / 1e9:.3g}"
            hint = "look for other programs, a lower clock rate or a hot device on its machine"
            yield Problem(path="devices", what=what, hint=hint)
