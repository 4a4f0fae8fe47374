"""Every check of the repository, per package and across packages. `nox -l` lists them.

Environments are made by `tools/workspace.py`: once, and again only when what they consist of has changed.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import workspace  # noqa: E402
from environments import Environment, SetupError  # noqa: E402

nox.needs_version = ">=2025.5"
nox.options.error_on_external_run = False
nox.options.sessions = [
    "lint",
    "import_rules",
    "house",
    "types",
    "tests",
    "cross_torch",
    "cross_mindspore",
    "subsets",
    "floors",
    "docs",
]
# By name only: `main` is the other command of the README, `loss_parity` trains five times, `bench` measures.

TEST_TOOLS = ("pytest>=8", "pytest-timeout>=2.3")
MAIN_CONFIG = "examples/moe_small.yaml"

# One thread a rank: several ranks share the machine's cores.
QUIET = {"OMP_NUM_THREADS": "1", "GLOG_v": "3", "MPLBACKEND": "Agg"}

# What a user may sensibly install, and nothing else with it.
SUBSETS = {
    "dtensor": ("hp-dtensor",),
    "fsdp": ("hp-fsdp",),
    "moe": ("hp-moe",),
    "fsdp-moe": ("hp-fsdp", "hp-moe"),
    "trainer": ("hp-trainer",),
    "torch": ("hp-platform-torch",),
    "fsdp-torch": ("hp-fsdp", "hp-platform-torch"),
    "moe-torch": ("hp-moe", "hp-platform-torch"),
    "trainer-torch": ("hp-trainer", "hp-platform-torch"),
    "mindspore": ("hp-platform-mindspore",),
    "fsdp-mindspore": ("hp-fsdp", "hp-platform-mindspore"),
    "moe-mindspore": ("hp-moe", "hp-platform-mindspore"),
    "trainer-mindspore": ("hp-trainer", "hp-platform-mindspore"),
    "both-platforms": ("hp-platform-mindspore", "hp-platform-torch"),
}


def session(function: Callable[..., None]) -> Callable[..., None]:
    """Make `function` a nox session that says in a line why an environment could not be made."""

    @functools.wraps(function)
    def guarded(nox_session: nox.Session, *arguments: str, **options: str) -> None:
        try:
            function(nox_session, *arguments, **options)
        except SetupError as error:
            nox_session.error(str(error).rstrip("."))

    return nox.session(python=False)(guarded)


def run(session: nox.Session, python: Path, *arguments: str, **variables: str) -> None:
    """Run an environment's interpreter in the repository's root, its commands first on the path."""
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    session.run(
        str(python),
        *arguments,
        env={**QUIET, "PATH": path, **variables},
        # Ctrl-C reaches the ranks by itself; give them the time to end in order.
        interrupt_timeout=30,
        terminate_timeout=10,
    )


def pytest(session: nox.Session, python: Path, *arguments: str, **variables: str) -> None:
    """Run pytest with the repository's configuration; no test at all is a failure."""
    run(session, python, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", *arguments, **variables)


def full(framework: str) -> Path:
    """Return the interpreter of the environment that holds every package but the other platform."""
    return workspace.development(framework, ("hp-trainer", f"hp-platform-{framework}"), TEST_TOOLS)


def house_tools() -> Path:
    """Return the interpreter of the environment in which the house checks itself."""
    requirements = (*TEST_TOOLS, "nox==2026.10.20", "pip>=23")
    return Environment("house", requirements=requirements).prepare(workspace.NOX_FOLDER / "house")


@session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and its format."""
    python = Environment("ruff", requirements=("ruff==0.17.5",)).prepare(workspace.NOX_FOLDER / "lint")
    run(session, python, "-m", "ruff", "check", *session.posargs)
    run(session, python, "-m", "ruff", "format", "--check")


@session
def types(session: nox.Session) -> None:
    """Types: mypy, strict, over the component packages, without any framework installed."""
    tools = ("mypy==2.4.1", "types-PyYAML", *TEST_TOOLS)
    python = workspace.development("types", workspace.COMPONENTS, tools)
    run(session, python, "-m", "mypy", *(f"packages/{name}/src" for name in workspace.COMPONENTS))


@session
def import_rules(session: nox.Session) -> None:
    """Import rules: no framework in a component, no platform in another, a light `import hp_dtensor`."""
    python = workspace.development("components", workspace.COMPONENTS, TEST_TOOLS)
    pytest(session, python, "tests/house/test_import_rules.py", *session.posargs)


@session
def house(session: nox.Session) -> None:
    """The house itself: `run.py`, the environments, the list of sessions."""
    python = house_tools()
    pytest(session, python, "tests/house", "--ignore", "tests/house/test_import_rules.py", *session.posargs)


@session
@nox.parametrize("package", workspace.PACKAGES, ids=workspace.PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """A package's own tests, in an environment with only what that package and its tests need."""
    pytest(session, workspace.for_tests(package), f"packages/{package}/tests", *session.posargs)


def cross(session: nox.Session, platform: str) -> None:
    """Run the conformance suite on a platform and the tests across packages, or what the arguments name."""
    python = full(platform)
    conformance = ("--pyargs", "hp_dtensor.testing.conformance")
    tests = ("tests", "--ignore", "tests/house", *served_tests(platform))
    for selected in [session.posargs] if session.posargs else [conformance, tests]:
        pytest(session, python, *selected, HP_PLATFORM=platform)


def served_tests(platform: str) -> list[str]:
    """Return a platform's own tests of what it gives to a component, skipped where only the platform is installed."""
    tests = workspace.packages()[f"hp-platform-{platform}"].folder / "tests"
    found = [path for part in ("fsdp", "moe", "trainer") for path in tests.glob(f"test_*_{part}*.py")]
    return [str(path.relative_to(ROOT)) for path in sorted(found)]


@session
def cross_torch(session: nox.Session) -> None:
    """Tests across packages on PyTorch, and the conformance suite."""
    cross(session, "torch")


@session
def cross_mindspore(session: nox.Session) -> None:
    """Tests across packages on MindSpore, and the conformance suite."""
    cross(session, "mindspore")


@session
def subsets(session: nox.Session) -> None:
    """Wheels built, and every sensible subset installed and used alone, each in a fresh environment."""
    for name, wanted in SUBSETS.items():
        if session.posargs and name not in session.posargs:
            continue
        python = workspace.released(name, wanted)
        run(session, python, "-I", "tools/check_subset.py", *workspace.closure(wanted))


def check_floors(session: nox.Session, name: str) -> None:
    """Install a package with its oldest siblings; run its tests too if any of them is not today's."""
    oldest = workspace.floor_wheels(name)
    python = workspace.released(f"floor-{name}", (name,), oldest)
    run(session, python, "-I", "tools/check_subset.py", *workspace.closure((name,)))
    if oldest.items() <= workspace.wheels("standard").items():
        return
    siblings, others = workspace.test_requirements(name)
    python = workspace.released(f"floor-tests-{name}", (name, *siblings), oldest, others)
    pytest(session, python, f"packages/{name}/tests")


@session
def floors(session: nox.Session) -> None:
    """Each package with its siblings at the oldest version that it allows."""
    for name, package in workspace.packages().items():
        if package.siblings:
            check_floors(session, name)


@session
def main(session: nox.Session) -> None:
    """The main job: train the small mixture-of-experts model on PyTorch (arguments go to hp-train)."""
    arguments = list(session.posargs)
    config = [] if arguments and not arguments[0].startswith("-") else [MAIN_CONFIG]
    python = full("torch")
    run(session, python, str(python.with_name("hp-train")), *config, *arguments)


@session
def loss_parity(session: nox.Session) -> None:
    """The first losses of one YAML on PyTorch and on MindSpore, in several layouts, compared in a table."""
    torch, mindspore = full("torch"), full("mindspore")
    run(
        session,
        torch,
        "tests/loss_parity.py",
        "--torch",
        str(torch),
        "--mindspore",
        str(mindspore),
        *session.posargs,
    )


@session
def bench(session: nox.Session) -> None:
    """The benchmarks, on PyTorch; not by default, as the figures depend on what else the machine does."""
    python = full("torch")
    for path in session.posargs or sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/*.py")):
        run(session, python, path)


@session
def docs(session: nox.Session) -> None:
    """The documentation: every link within the repository leads somewhere, every Python block parses."""
    run(session, house_tools(), "tools/check_docs.py")
