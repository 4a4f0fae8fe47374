"""The command to run first on a new machine or cluster: facts, figures and problems of its ranks."""

from __future__ import annotations

import math
import os
import re
import socket
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import yaml

from hp_dtensor.exceptions import HPError
from hp_dtensor.launch import from_environment, is_launched, launch
from hp_dtensor.launch.environment import first_host
from hp_trainer._files import strict_json
from hp_trainer.cli.commands import Command
from hp_trainer.cli.shared import check_file_to_write
from hp_trainer.exceptions import Problem
from hp_trainer.launch import chosen_platform, import_platform, is_first_process
from hp_trainer.launch.examination import FILE_FORMAT, Examination, examine
from hp_trainer.launch.machine import (
    count_processors,
    find_mismatches,
    find_slow_links,
    find_slow_machines,
    find_slow_ranks,
    find_versions,
    machines_of,
)
from hp_trainer.launch.platforms import (
    has_unused_driver,
    installed_platforms,
    max_local_ranks,
    num_accelerators,
    report,
)

_WIDTH = 100
_LABEL_WIDTH = 13
_DEVICE_SUFFIXES = (".yaml", ".yml")
_MOST_MACHINES_SHOWN = 4
# They name a machine: the one of rank 0 for torchrun and msrun, and this one.
_HOST_VARIABLES = ("MASTER_ADDR", "MS_SCHED_HOST", "SLURMD_NODENAME", "HOSTNAME")


def _check_files(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[Path]:
    """Return the paths of the options, which must be files that can be written: reports or device files."""
    paths = [path for value in values if (path := check_file_to_write(ctx, parameter, value)) is not None]
    for path in paths:
        if path.suffix not in (".md", *_DEVICE_SUFFIXES):
            raise click.BadParameter(f"expected a report .md or a device file .yaml, got {str(path)!r}")
    return paths


@click.command("doctor", cls=Command)
@click.option(
    "--ranks", type=click.IntRange(1, 1024), metavar="N", help="Local ranks; default: one per device, else 1."
)
@click.option("--platform", metavar="NAME", help="torch, mindspore, ...; default: the installed one, or HP_PLATFORM.")
@click.option(
    "--to",
    "files",
    multiple=True,
    callback=_check_files,
    metavar="FILE",
    help="Also write a report for an issue (.md), or a device file for `hp-train plan --device` (.yaml).",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="For ranks to meet, and for each collective.",
)
def doctor_command(ranks: int | None, platform: str | None, files: list[Path], timeout: float) -> int:
    """Examine this machine or cluster: the first command to run on a new one.

    Prints versions, devices, memory, processors, rates of products, copies and collectives, latency and bandwidth
    between ranks, and problems with what to do. Results of collectives and their gradients are checked on the ranks.
    It takes about a minute. Start it as training will be started:

    \b
    hp-train doctor                          one rank per device
    hp-train doctor --ranks=2                two local ranks
    torchrun --nproc-per-node=8 ... -m hp_trainer doctor
    srun hp-train doctor --to report.md --to device.yaml

    Exit code 1: there are problems. What only makes training slow is no problem.
    """
    if ranks is not None and is_launched():
        raise click.UsageError("--ranks starts local ranks, but a launcher has started this process; leave it out")
    chosen = chosen_platform(platform)
    found, problems = None, []
    if isinstance(chosen, Problem):
        problems.append(chosen)
    else:
        found, problems = _examined(chosen, ranks, timeout)
    if not is_first_process():
        return 1 if problems else 0
    slow: list[Problem] = []
    if found is not None:
        problems += [*find_mismatches(found.facts), *_wrong_results(found)]
        slow += find_slow_machines(found.facts)
        slow += [*find_slow_links(found.pairs, found.facts), *find_slow_ranks(found.rates)]
        if found.facts[0].device_type == "cpu" and has_unused_driver(found.platform):
            what = f"a driver of accelerators is loaded, but {found.platform} uses the CPU"
            hint = "the build of the framework for this device; HP_DEVICE"
            slow.append(Problem(path="devices", what=what, hint=hint))
    text = "\n".join([*_describe(found, chosen), *_describe_problems(problems, slow)])
    print(text)
    for path in files:
        if path.suffix not in _DEVICE_SUFFIXES:
            path.write_text(_report(text, found), encoding="utf-8")
        elif found is not None:
            path.write_text(_device_file(found), encoding="utf-8")
        else:
            print(f"not written, since nothing was measured: {path}")
            continue
        print(f"written: {path}")
    return 1 if problems else 0


def _examined(platform_name: str, ranks: int | None, timeout: float) -> tuple[Examination | None, list[Problem]]:
    """Return what the ranks measured, or why they could not."""
    hint, joined = "", None
    try:
        platform = import_platform(platform_name)
        if is_launched():
            hint = "the same MASTER_ADDR and MASTER_PORT on all ranks, an open port on the machine of rank 0; "
            hint += "docs/how_to/many_machines.md"
            from_environment(platform, timeout)
            # From here on, errors are no longer about how ranks meet.
            hint, joined = "", platform
            return examine(platform_name), []
        count = ranks or num_accelerators(platform_name) or 1
        most = max_local_ranks(platform_name)
        if most is not None and count > most:
            what = f"there are {most} devices on this machine, and each rank needs its own"
            hint = f"--ranks={most}, or in the environment HP_DEVICE=cpu"
            return None, [Problem(path="--ranks", what=what, expected=f"at most {most}", got=str(count), hint=hint)]
        # In this process: a child would import the framework once more, which takes longer than the measurements.
        if count == 1:
            return examine(platform_name), []
        report(f"starting {count} ranks on {platform_name}")
        return launch(examine, (platform_name,), count, platform, timeout_seconds=timeout)[0], []
    # Frameworks raise RuntimeError for a device that cannot be used.
    except (HPError, RuntimeError, OSError) as error:
        # The other ranks report their own errors, which may be the cause.
        if not is_first_process():
            raise
        if click.get_current_context().obj.get("traceback"):
            traceback.print_exc()
        what = str(error) if isinstance(error, HPError) else f"{type(error).__name__}: {error}"
        return None, [Problem(path=platform_name, what=what, hint=hint)]
    finally:
        if joined is not None:
            joined.disconnect()


def _wrong_results(found: Examination) -> Iterator[Problem]:
    for check in found.checks:
        if check.error is not None:
            hint = "an issue, with the report of --to report.md"
            yield Problem(path=f"checks: {check.name}", what=f"wrong result {check.error}", hint=hint)


def _describe(found: Examination | None, chosen: str | Problem) -> list[str]:
    """Return the lines of what was found, without problems."""
    if found is None:
        names = [chosen] if isinstance(chosen, str) else installed_platforms()
        versions = {name: version for each in [*names, ""] for name, version in find_versions(each).items()}
        return ["hp-train doctor: nothing was measured", *_row("versions", _listed(versions))]
    machines, count = machines_of(found.facts), len(found.facts)
    lines = [f"hp-train doctor: {found.platform}, {_counted(count, 'rank')} on {_counted(len(machines), 'machine')}"]
    for number, members in enumerate(machines[:_MOST_MACHINES_SHOWN]):
        facts, processors = found.facts[members[0]], count_processors([found.facts[rank] for rank in members])
        shared = "none" if facts.shared_memory is None else _gib(facts.shared_memory)
        text = f"{facts.system}, {_counted(processors, 'processor')}, {_gib(facts.memory)} memory, "
        lines += _row(f"machine {number}", f"{text}{_gib(facts.available)} available, /dev/shm {shared}")
        text = f"{facts.device}, {_gib(facts.device_memory)}, {_counted(facts.accelerators, 'accelerator')}"
        lines += _row("device", f"{text}, {_counted(len(members), 'rank')}")
    if len(machines) > _MOST_MACHINES_SHOWN:
        lines += _row("", f"and {len(machines) - _MOST_MACHINES_SHOWN} more")
    lines += _row("versions", _listed(found.facts[0].versions))
    return [*lines, *_describe_rates(found), *_describe_links(found), *_describe_checks(found)]


def _describe_rates(found: Examination) -> Iterator[str]:
    label = "products"
    for dtype in dict.fromkeys(each.dtype for each in found.products):
        rates = [each for each in found.products if each.dtype == dtype]
        text = ", ".join(f"{'x'.join(map(str, each.shape))} {each.flops / 1e9:,.4g}" for each in rates)
        yield from _row(label, f"{dtype}, Gflop/s: {text}")
        label = ""
    text = f"{found.copy_bandwidth / 1e9:.3g} GB/s in the device's memory, {found.host_bandwidth / 1e9:.3g} to the host"
    yield from _row("copies", text)


def _describe_links(found: Examination) -> Iterator[str]:
    """Yield the links of each axis, also as the argument of cost models, and collectives of several sizes."""
    measured = [axis for axis, size in found.axes.items() if size > 1]
    for axis in measured:
        seconds, rate = found.links.latency_along(axis), found.links.bandwidth_along(axis)
        text = f"latency {seconds * 1e6:.3g} us, bandwidth {rate / 1e9:.3g} GB/s"
        yield from _row("links", f"{axis} of {_counted(found.axes[axis], 'rank')}: {text}")
    if measured:
        # Rounded numbers, so that the printed line can be pasted into a program.
        latency = {axis: float(f"{found.links.latency_along(axis):.3g}") for axis in measured}
        bandwidth = {axis: float(f"{found.links.bandwidth_along(axis):.3g}") for axis in measured}
        yield from _row("", f"hp_dtensor.Links({latency=}, {bandwidth=})")
    label = "all-gathers"
    for each in found.overlaps:
        text = f"{each.axis}, {each.bytes / 2**10:,.0f} KiB: {each.seconds * 1e3:.3g} ms after products "
        text += f"of {each.product_seconds * 1e3:.3g} ms; both at once {each.both_seconds * 1e3:.3g} ms"
        yield from _row(label, text)
        label = ""


def _describe_checks(found: Examination) -> list[str]:
    right, seconds = (sum(values) for values in zip(*((c.error is None, c.seconds) for c in found.checks), strict=True))
    return _row("checks", f"{right} of {len(found.checks)} of collectives and gradients right, {seconds:.1f} s")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _row(label: str, text: str) -> list[str]:
    gap = " " * _LABEL_WIDTH
    start = f"{label:<{_LABEL_WIDTH}}"
    return textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=gap, break_on_hyphens=False)


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _describe_problems(problems: list[Problem], slow: list[Problem]) -> list[str]:
    lines = ["problems: none"] if not problems else ["problems:", *map(str, problems)]
    return lines + (["slow:", *map(str, slow)] if slow else [])


def _report(text: str, found: Examination | None) -> str:
    """Return the text as Markdown, with all figures as JSON, without names of machines and the home folder."""
    parts = ["### hp-train doctor", f"```\n{text}\n```"]
    if found is not None:
        figures = strict_json(found.as_json())
        parts.append(f"<details><summary>all figures</summary>\n\n```json\n{figures}\n```\n\n</details>")
    return _without_names("\n\n".join(parts) + "\n", found)


def _without_names(text: str, found: Examination | None) -> str:
    """Replace the names and addresses of machines that errors contain, and the home folder in paths."""
    hosts = {socket.gethostname(), *(os.environ.get(name, "") for name in _HOST_VARIABLES)}
    hosts |= {
        first_host(os.environ.get("SLURM_STEP_NODELIST", "")),
        *(each.host for each in (found.facts if found else ())),
    }
    # The longest first, since a name may be the start of another.
    for host in sorted(hosts - {"", "localhost", "127.0.0.1", "::1"}, key=len, reverse=True):
        # A name is written with its domain or without it.
        name = host if re.fullmatch(r"[\d.]+|.*:.*", host) else host.partition(".")[0]
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(\.[\w-]+)*(?![\w-])", "HOST", text)
    # Numbers of versions have no port.
    text = re.sub(r"\b(?!127\.)\d+(\.\d+){3}(?=:\d)", "HOST", text)
    home = str(Path.home())
    return text if home == "/" else re.sub(rf"(?<!\w){re.escape(home)}(?![\w.-])", "~", text)


def _device_file(found: Examination) -> str:
    """Return the figures as a device file, whose products and collectives a plan fits rates to."""
    facts, local = found.facts[0], len(members := machines_of(found.facts)[0])
    is_host = facts.device_type == "cpu"
    fields: dict[str, Any] = {
        "format": FILE_FORMAT,
        "name": facts.device,
        "memory": facts.device_memory,
        "memory_bandwidth": found.copy_bandwidth,
        "host_bandwidth": found.host_bandwidth,
        "ranks_per_node": local,
        "is_host": is_host,
    }
    if is_host:
        # Ranks with several threads have several processors each.
        fields["processors"] = min(local, count_processors([found.facts[rank] for rank in members]))
    fields["products"] = [
        {**dict(zip(("rows", "inputs", "outputs"), each.shape, strict=True)), "dtype": each.dtype, "seconds": seconds}
        for each in found.products
        for seconds in [2 * math.prod(each.shape) / each.flops]
    ]
    fields["blocks"] = [{"dtype": "float32", **asdict(each)} for each in found.blocks]
    fields["collectives"] = [{"collective": "all_gather", **asdict(each)} for each in found.overlaps]
    for each in fields["collectives"]:
        del each["axis"]
    notes = [f"measured by hp-train doctor on {found.platform}, the slowest of {_counted(len(found.facts), 'rank')}"]
    if all(each.nodes > 1 for each in found.overlaps):
        notes.append("no links within a machine were measured: add inner_bandwidth and outer_bandwidth")
    comments = "".join(f"# {note}\n" for note in notes)
    # More digits than four would be noise of the measurement.
    return comments + yaml.safe_dump(_rounded(fields), sort_keys=False)


def _rounded(value: Any) -> Any:
    """Return nested values with floats of four digits."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
