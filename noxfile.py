"""Every check of the repository, per package and across packages. `nox -l` lists them.

Environments are made by `tools/workspace.py`: once, and again only when what they consist of has changed.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import workspace  # noqa: E402
from environments import Environment, SetupError  # noqa: E402
from lock import write_lock  # noqa: E402

nox.needs_version = ">=2025.5"
nox.options.error_on_external_run = False
nox.options.sessions = [
    "environments",
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
    "site",
]
# By name only: `main` is the other command of the README, `loss_parity` trains five times, `bench` measures,
# `proof` takes hours, `chaos` as many minutes as it is given, `accelerator` needs one, `release` is for those who
# release, `lock` makes every environment anew from the newest releases.

CORES = len(os.sched_getaffinity(0))
WORKERS = min(4, CORES + 1)  # one more than cores: some tests only wait for processes; each imports a framework
SPREAD = (f"--numprocesses={WORKERS}", "--dist=worksteal")

TEST_TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6")
# On Triton's interpreter, kernels for CUDA devices are tested on the CPU. torch's CPU build comes without it; its CUDA
# builds each need one version, which is kept.
KERNEL_TOOLS = {"torch": ("triton>=3.6,<4",), "mindspore": ()}
# Checkpoints in an object store are tested against one in memory.
OBJECT_STORE = "fsspec>=2024.2"
# Its models are the oracle of our conversions from and to Hugging Face's layouts.
ORACLES = {"torch": ("transformers>=5.9,<6", "peft>=0.18"), "mindspore": ()}
MAIN_CONFIG = "examples/moe_small.yaml"

# Python keeps what it compiles, under .nox, even where PYTHONDONTWRITEBYTECODE is set: half of importing a framework is
# compiling, and hundreds of processes import one.
os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(workspace.NOX_FOLDER / "bytecode")}

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


def run(session: nox.Session, python: Path, *arguments: str, silent: bool = False, **variables: str) -> str:
    """Run an environment's interpreter in the repository's root, its commands first on the path.

    With `silent`, return what it printed; that of a failure is shown in any case.
    """
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    output = session.run(
        str(python),
        *arguments,
        silent=silent,
        env={**QUIET, "PATH": path, **variables},
        # Ctrl-C reaches the ranks by itself; give them the time to end in order.
        interrupt_timeout=30,
        terminate_timeout=10,
    )
    return output if isinstance(output, str) else ""


def pytest(session: nox.Session, python: Path, *arguments: str, **variables: str) -> None:
    """Run pytest with the repository's configuration; no test at all is a failure.

    All tests are spread over the cores, those that start processes first. Where the session's arguments choose some,
    one process runs them, so that what comes first is seen first and a debugger can be used.
    """
    spread = () if session.posargs else SPREAD
    command = ("-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", *spread, *arguments, *session.posargs)
    run(session, python, *command, **variables)


def one_core(name: str) -> tuple[str, ...]:
    """Options for the tests of a platform or package: of MindSpore's, which the spinning of its idle threads would
    make half as long again."""
    return ("--hp-one-core",) if name.endswith("mindspore") else ()


def at_once(function: Callable[..., str], cases: Iterable[tuple[object, ...]]) -> None:
    """Call `function` with each of `cases`, as many at a time as there are cores; print what each returns."""
    with ThreadPoolExecutor(CORES) as pool:
        for output in pool.map(lambda case: function(*case), cases):
            print(output, end="", flush=True)


def full(framework: str) -> Path:
    """Return the interpreter of the environment that holds every package but the other platform."""
    tools = (*TEST_TOOLS, OBJECT_STORE, *KERNEL_TOOLS[framework], *ORACLES[framework])
    return workspace.development(framework, ("hp-trainer", f"hp-platform-{framework}"), tools)


def components() -> Path:
    """Return the interpreter of the environment with every component package and no framework."""
    # jinja2: a class of the trainer extends one of its classes.
    tools = (*TEST_TOOLS, "mypy==2.4.1", "types-PyYAML", "jinja2>=3.1")
    return workspace.development("components", workspace.COMPONENTS, tools)


def for_tests(package: str) -> Path:
    """Return the interpreter of the environment for a package's own tests."""
    return workspace.for_tests(package, TEST_TOOLS)


def ruff() -> Path:
    """Return the interpreter of the environment that holds ruff."""
    return Environment("ruff", requirements=("ruff==0.17.5",), locked_as="lint").prepare(workspace.NOX_FOLDER / "lint")


def house_tools() -> Path:
    """Return the interpreter of the environment in which the house checks itself."""
    requirements = (*TEST_TOOLS, "nox==2026.10.20", "pip>=23")
    return Environment("house", requirements=requirements, locked_as="house").prepare(workspace.NOX_FOLDER / "house")


@session
def environments(session: nox.Session) -> None:
    """The environments of the sessions below, several made at a time; without this, each is made when needed."""

    def made(make: Callable[..., Path], *names: str) -> str:
        make(*names)
        return ""

    workspace.wheels("editable")
    frameworks = [(full, each) for each in workspace.FRAMEWORKS]
    packages = [(for_tests, each) for each in workspace.PACKAGES]
    at_once(made, [*frameworks, (components,), *packages, (ruff,), (house_tools,), (site_tools,)])


@session
def lock(session: nox.Session) -> None:
    """Write tools/lock.toml anew: the newest releases that the requirements allow, in every environment."""
    os.environ["HP_UNLOCKED"] = "1"
    environments(session)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    folders = [path.parent for path in (*ROOT.glob(".nox/*/stamp.json"), ROOT / ".venv" / "stamp.json")]
    write_lock(folders, pip)


@session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and its format."""
    python = ruff()
    run(session, python, "-m", "ruff", "check", *session.posargs)
    run(session, python, "-m", "ruff", "format", "--check")


@session
def types(session: nox.Session) -> None:
    """Types: mypy, strict, over the component packages, without any framework installed."""
    run(session, components(), "-m", "mypy", *(f"packages/{name}/src" for name in workspace.COMPONENTS))


@session
def import_rules(session: nox.Session) -> None:
    """Import rules: no framework in a component, no platform in another, a light `import hp_dtensor`."""
    pytest(session, components(), "tests/house/test_import_rules.py")


@session
def house(session: nox.Session) -> None:
    """The house itself: `run.py`, the environments, the list of sessions."""
    pytest(session, house_tools(), "tests/house", "--ignore", "tests/house/test_import_rules.py")


@session
@nox.parametrize("package", workspace.PACKAGES, ids=workspace.PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """A package's own tests, in an environment with only what that package and its tests need."""
    pytest(session, for_tests(package), *one_core(package), f"packages/{package}/tests")


def cross(session: nox.Session, platform: str, **variables: str) -> None:
    """Run the conformance suite on a platform and the tests across packages, or what the arguments name."""
    python = full(platform)
    conformance = ("--pyargs", "hp_dtensor.testing.conformance")
    tests = ("tests", "--ignore", "tests/house", *served_tests(platform))
    for selected in [()] if session.posargs else [conformance, tests]:
        pytest(session, python, *one_core(platform), *selected, HP_PLATFORM=platform, **variables)


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
def accelerator(session: nox.Session) -> None:
    """Conformance and cross-package tests on the accelerator at hand, where there is one; arguments go to pytest."""
    found = {platform: accelerators(session, platform) for platform in workspace.FRAMEWORKS}
    for platform, (kind, count) in found.items():
        if count:
            session.log(f"{platform}: {count} of {kind}")
            # Tests start up to four real ranks; where there are fewer devices, they share them.
            shared = {"HP_BACKEND": "gloo"} if platform == "torch" and count < 4 else {}
            cross(session, platform, HP_DEVICE=kind, **shared)
    if not any(count for _, count in found.values()):
        session.log(f"no accelerator that {' or '.join(found)} can use is on this machine: nothing was tested")


def accelerators(session: nox.Session, platform: str) -> tuple[str, int]:
    """Return the best kind of device of a framework, and how many there are on this machine."""
    asked = (
        "from hp_dtensor.platform.selection import get_platform; platform = get_platform(); "
        "print(platform.device_types[0], platform.num_accelerators())"
    )
    kind, count = run(session, full(platform), "-c", asked, silent=True, HP_PLATFORM=platform).split()[-2:]
    return kind, int(count)


@session
def subsets(session: nox.Session) -> None:
    """Wheels built, and every sensible subset installed and used alone, each in a fresh environment."""
    workspace.wheels("standard")
    chosen = {name: wanted for name, wanted in SUBSETS.items() if not session.posargs or name in session.posargs}
    at_once(functools.partial(check_subset, session), chosen.items())


def check_subset(
    session: nox.Session, name: str, wanted: tuple[str, ...], siblings: dict[str, Path] | None = None
) -> str:
    """Install packages as a user would, and return what the check of that environment printed."""
    python = workspace.released(name, wanted, siblings)
    return run(session, python, "-I", "tools/check_subset.py", *workspace.closure(wanted), silent=True)


def check_floor_tests(session: nox.Session, name: str, oldest: dict[str, Path]) -> None:
    """Run a package's tests with its oldest siblings, if any of them is not today's."""
    if oldest.items() <= workspace.wheels("standard").items():
        return
    siblings, others = workspace.test_requirements(name)
    python = workspace.released(f"floor-tests-{name}", (name, *siblings), oldest, (*others, *TEST_TOOLS))
    pytest(session, python, f"packages/{name}/tests")


@session
def floors(session: nox.Session) -> None:
    """Each package with its siblings at the oldest version that it allows."""
    oldest = {name: workspace.floor_wheels(name) for name, package in workspace.packages().items() if package.siblings}
    workspace.wheels("standard")
    cases = [(f"floor-{name}", (name,), wheels) for name, wheels in oldest.items()]
    at_once(functools.partial(check_subset, session), cases)
    for name, wheels in oldest.items():
        check_floor_tests(session, name, wheels)


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
@nox.parametrize("platform", ("torch", "mindspore"), ids=("torch", "mindspore"))
def proof(session: nox.Session, platform: str) -> None:
    """The full-size proofs, `proof_*.py`, and every case of training on each framework; arguments go to pytest."""
    found = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/proof_*.py"))
    variables = {"HP_PLATFORM": platform, "HP_ALL_CASES": "1"}
    selected = found if platform == "torch" else [*found, "tests/trainer"]  # torch's are all in the suite
    pytest(session, full(platform), *SPREAD, *one_core(platform), "--verbose", *selected, **variables)


@session
@nox.parametrize("platform", ("torch", "mindspore"), ids=("torch", "mindspore"))
def chaos(session: nox.Session, platform: str) -> None:
    """Faults against small runs (kills, damage, full disks, signals, clocks), minutes or `-- --minutes 120`."""
    run(session, full(platform), "tests/chaos/campaign.py", *session.posargs, HP_PLATFORM=platform)


@session
def bench(session: nox.Session) -> None:
    """The benchmarks, each on its framework; not by default, as the figures depend on what else the machine does."""
    for path in session.posargs or sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/[!_]*.py")):
        platform = "mindspore" if Path(path).name.startswith("mindspore_") else "torch"
        run(session, full(platform), path, HP_PLATFORM=platform)


@session
def release(session: nox.Session) -> None:
    """Prepare a package's release: `nox -s release -- PACKAGE [major|minor|patch|X.Y.Z] [--write]`; dry by default."""
    run(session, house_tools(), "tools/release.py", *session.posargs)


@session
def docs(session: nox.Session) -> None:
    """The documentation: every link within the repository leads somewhere, every Python block parses."""
    run(session, house_tools(), "tools/check_docs.py")


def site_tools() -> Path:
    """Return the interpreter of the environment in which the site is built."""
    requirements = ("mkdocs==1.6.1", "mkdocs-material==9.8.1", "mkdocstrings[python]==1.0.8")
    return Environment("site", requirements=requirements, locked_as="site").prepare(workspace.NOX_FOLDER / "site")


@session
def site(session: nox.Session) -> None:
    """The documentation site, in site/html: every page, and a reference from docstrings; a broken link is an error."""
    python = site_tools()
    run(session, python, "tools/site_pages.py", "site/pages")
    run(session, python, "-m", "mkdocs", "build", "--quiet", NO_MKDOCS_2_WARNING="1")
