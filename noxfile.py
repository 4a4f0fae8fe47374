"""All checks of the repository, per package and across packages. `nox -l` lists them.

`tools/workspace.py` creates the environments and reuses them while their contents are unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import workspace  # noqa: E402
from environments import Environment, SetupError  # noqa: E402
from lock import write_lock  # noqa: E402

nox.needs_version = ">=2025.5"
nox.options.error_on_external_run = False
nox.options.sessions = [
    "environments",
    "static",
    "import_rules",
    "house",
    "tests",
    "cross_torch",
    "cross_mindspore",
    "installed",
    "floors",
]
# Not run by default: the parts of `static` and `installed`. `main` is the other command of the README, `loss_parity`
# trains five times, `bench` measures, `floor_tests` and `compatibility` take minutes, `proof` hours, `chaos` the time
# it is given, `accelerator` needs one, `npu` repeats tests on a stand-in for Ascend, `engines` starts Ray and Slurm for
# minutes, `release` prepares releases, `lock` creates every environment again from the newest releases.

CORES = len(os.sched_getaffinity(0))
# One more than cores, as some tests only wait for processes. Each worker imports a framework.
WORKERS = min(4, CORES + 1)
SPREAD = (f"--numprocesses={WORKERS}", "--dist=worksteal")

TEST_TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6")
# Triton's interpreter runs CUDA kernels in tests on the CPU. torch's CPU build does not include Triton. Its CUDA builds
# require one version, which is left in place.
KERNEL_TOOLS = {"torch": ("triton>=3.6,<4",), "mindspore": ()}
# Its in-memory file system is the object store in tests of checkpoints.
OBJECT_STORE = "fsspec>=2024.2"
# Their models are the reference for conversions from and to Hugging Face.
ORACLES = {"torch": ("transformers>=5.9,<6", "peft>=0.18"), "mindspore": ()}
ENGINES_TESTS = "tests/engines"
ENGINES = ("-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".")
# The tests across packages, without those that have a session and an environment of their own.
ACROSS = ["tests", "--ignore=tests/house", f"--ignore={ENGINES_TESTS}"]
# Those that use the device: others repeat what the conformance suites test, or measure the CPU.
ON_NPU = (
    "tests/npu_stand_in",
    *(f"tests/fsdp/test_{name}.py" for name in ("fully_shard", "hsdp", "communication")),
    *(f"tests/moe/test_{name}.py" for name in ("experts", "expert_parallel", "moe", "router")),
)
MAIN_CONFIG = "examples/moe_small.yaml"

# Bytecode is cached under .nox, even where PYTHONDONTWRITEBYTECODE is set: half the time of importing a framework is
# compilation, and hundreds of processes import one.
os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(workspace.NOX_FOLDER / "bytecode")}

# One thread per rank, as several ranks share the machine's cores.
QUIET = {"OMP_NUM_THREADS": "1", "GLOG_v": "3", "MPLBACKEND": "Agg"}

# Sets of packages that a user may install without the others.
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


def session(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `function` a nox session that reports in a line why an environment could not be created.

    A session for a framework that has no wheels for this Python is skipped.
    """

    @functools.wraps(function)
    def guarded(nox_session: nox.Session, *arguments: str, **options: Any) -> Any:
        try:
            return function(nox_session, *arguments, **options)
        except workspace.NoWheelsError as error:
            nox_session.skip(str(error))
        except SetupError as error:
            nox_session.error(str(error).rstrip("."))

    return nox.session(python=False)(guarded)


def run(session: nox.Session, python: Path, *arguments: str, silent: bool = False, **variables: str) -> str:
    """Run an environment's interpreter in the repository's root, with the environment's commands first on the path.

    With `silent`, the output is returned, and printed only after a failure.
    """
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    output = session.run(
        str(python),
        *arguments,
        silent=silent,
        env={**QUIET, "PATH": path, **variables},
        # The terminal sends Ctrl-C to the ranks too. They need time to shut down.
        interrupt_timeout=30,
        terminate_timeout=10,
    )
    return output if isinstance(output, str) else ""


def pytest(session: nox.Session, python: Path, *arguments: str, **variables: str) -> None:
    """Run pytest with the repository's configuration. Running no test is a failure.

    Tests are spread over the cores, those that start processes first. If the session has arguments, one process runs
    the selected tests, so that output is in order and a debugger can be used.
    """
    spread = () if session.posargs else SPREAD
    command = ("-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", *spread, *arguments, *session.posargs)
    run(session, python, *command, **variables)


def one_core(name: str) -> tuple[str, ...]:
    """Return pytest options for a platform or package. MindSpore's idle threads spin, so its workers are pinned."""
    return ("--hp-one-core",) if name.endswith("mindspore") else ()


def at_once(function: Callable[..., str], cases: Iterable[tuple[object, ...]]) -> None:
    """Call `function` with each of `cases` in parallel, one per core, and print the results."""
    with ThreadPoolExecutor(CORES) as pool:
        for output in pool.map(lambda case: function(*case), cases):
            print(output, end="", flush=True)


def installable(names: Iterable[str]) -> list[str]:
    """Return the packages among `names` whose framework, if any, has wheels for this Python."""
    return [name for name in names if workspace.has_wheels(workspace.packages()[name].framework)]


def full(framework: str) -> Path:
    """Return the interpreter of the environment with all packages except the other platform."""
    tools = (*TEST_TOOLS, OBJECT_STORE, *KERNEL_TOOLS[framework], *ORACLES[framework])
    return workspace.development(framework, ("hp-trainer", f"hp-platform-{framework}"), tools)


def training() -> Path:
    """Return the interpreter of the environment with the packages for torch alone, which is made in a few seconds."""
    return workspace.development("train", ("hp-trainer", "hp-platform-torch"))


def with_engines() -> Path:
    """Return the interpreter of the environment with all packages for torch, Ray, and the schemas of other engines."""
    # kubeflow-trainer-api has the schemas of TrainJob and JobSet, kubernetes-validate those of Kubernetes itself.
    tools = (*TEST_TOOLS, "ray[train]==2.60.0", "kubeflow-trainer-api>=2.1,<3", "kubernetes-validate>=1.30")
    return workspace.development("engines", ("hp-trainer", "hp-platform-torch"), tools)


def skypilot() -> Path:
    """Return the interpreter of the environment with SkyPilot: 500 MB, and another click than hp-trainer's."""
    requirements = ("skypilot>=0.14,<1", "pytest>=8", "pytest-timeout>=2.3")
    return Environment("skypilot", requirements=requirements).prepare(workspace.NOX_FOLDER / "skypilot")


def components() -> Path:
    """Return the interpreter of the environment with all component packages and no framework."""
    # mypy needs jinja2, because a class of the trainer extends one of its classes.
    tools = (*TEST_TOOLS, "mypy==2.4.1", "types-PyYAML", "jinja2>=3.1")
    return workspace.development("components", workspace.COMPONENTS, tools)


def for_tests(package: str) -> Path:
    """Return the interpreter of the environment for a package's own tests."""
    return workspace.for_tests(package, TEST_TOOLS)


def ruff() -> Path:
    """Return the interpreter of the environment with ruff."""
    return Environment("ruff", requirements=("ruff==0.17.5",), locked_as="lint").prepare(workspace.NOX_FOLDER / "lint")


def house_tools() -> Path:
    """Return the interpreter of the environment for the checks of the repository itself."""
    requirements = (*TEST_TOOLS, "nox==2026.10.20", "pip>=23", "griffe>=2,<3", "towncrier>=25.8")
    return Environment("house", requirements=requirements, locked_as="house").prepare(workspace.NOX_FOLDER / "house")


@session
def environments(session: nox.Session) -> None:
    """Create the environments of the default sessions in parallel; others are created when a session needs them."""

    def made(make: Callable[..., Path], *names: str) -> str:
        make(*names)
        return ""

    workspace.wheels("editable")
    frameworks = [(full, each) for each in workspace.FRAMEWORKS if workspace.has_wheels(each)]
    packages = [(for_tests, each) for each in installable(workspace.PACKAGES)]
    at_once(
        made,
        # The largest first.
        [*frameworks, (with_engines,), *packages, (components,), (ruff,), (house_tools,), (site_tools,)],
    )


@session
def lock(session: nox.Session) -> None:
    """Write tools/lock.toml with the newest releases that the requirements of each environment allow."""
    os.environ["HP_UNLOCKED"] = "1"
    environments(session)
    # The default sessions do not need this one.
    training()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    folders = [path.parent for path in (*ROOT.glob(".nox/*/stamp.json"), ROOT / ".venv" / "stamp.json")]
    write_lock(folders, pip)


@session
def static(session: nox.Session) -> None:
    """`types`, `site`, `lint`, `public_api` and `docs` in parallel, since each uses one core; the longest first."""
    at_once(lambda check: check(session, silent=True), ((check,) for check in (types, site, lint, public_api, docs)))


@session
def lint(session: nox.Session, *, silent: bool = False) -> str:
    """Style: ruff's rules and format."""
    python = ruff()
    found = run(session, python, "-m", "ruff", "check", *session.posargs, silent=silent)
    return found + run(session, python, "-m", "ruff", "format", "--check", silent=silent)


@session
def types(session: nox.Session, *, silent: bool = False) -> str:
    """Types: strict mypy on the component packages, without a framework installed."""
    sources = (f"packages/{name}/src" for name in workspace.COMPONENTS)
    return run(session, components(), "-m", "mypy", *sources, silent=silent)


@session
def import_rules(session: nox.Session) -> None:
    """Import rules: no framework in a component, no platform in another, a quick `import hp_dtensor`."""
    pytest(session, components(), "tests/house/test_import_rules.py")


@session
def house(session: nox.Session) -> None:
    """The repository itself: `run.py`, environments, sessions, import graph, releases."""
    pytest(session, house_tools(), "tests/house", "--ignore", "tests/house/test_import_rules.py")


@session
@nox.parametrize("package", workspace.PACKAGES, ids=workspace.PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """A package's own tests, in an environment with only the requirements of the package and its tests."""
    pytest(session, for_tests(package), *one_core(package), f"packages/{package}/tests")


def cross(session: nox.Session, platform: str, **variables: str) -> None:
    """Run the conformance suites and the tests across packages on a platform, or the tests that arguments select."""
    # In one run of pytest: each would start workers and ranks of its own, which import the framework.
    conformance = (f"{each}.testing.conformance" for each in ("hp_dtensor", "hp_fsdp", "hp_moe", "hp_trainer"))
    every = ("--pyargs", *conformance, *ACROSS)
    selected = () if session.posargs else every
    # The rules are code of hp-dtensor, run on torch in all these placements; an operation takes MindSpore ten times as
    # long on the CPU.
    share = ("--hp-share=1/6",) if platform == "mindspore" else ()
    pytest(session, full(platform), *one_core(platform), *share, *selected, HP_PLATFORM=platform, **variables)


@session
def cross_torch(session: nox.Session) -> None:
    """Tests across packages and the conformance suite on PyTorch."""
    cross(session, "torch")


@session
def cross_mindspore(session: nox.Session) -> None:
    """Tests across packages and the conformance suite on MindSpore."""
    cross(session, "mindspore")


@session
def installed(session: nox.Session) -> None:
    """`engines_core`, `outside` and `subsets` in parallel, since the first two leave a core idle; the longest first."""
    workspace.wheels("standard")  # built once for all
    at_once(lambda check: check(session, silent=True), ((check,) for check in (engines_core, outside, subsets)))


@session
def engines_core(session: nox.Session, *, silent: bool = False) -> str:
    """A worker of a real Ray cluster is killed and the run goes on; the files for Kubernetes agree with its schemas."""
    # In one process: the workers use the cores.
    selected = session.posargs or [ENGINES_TESTS]
    arguments = (*ENGINES, "-m", "engines_core", *selected)
    return run(session, with_engines(), *arguments, silent=silent, HP_PLATFORM="torch")


@session
def engines(session: nox.Session) -> None:
    """Real Ray and Slurm on this machine, and the files for Kubernetes; `-- skypilot` checks SkyPilot's file."""
    if session.posargs == ["skypilot"]:
        run(session, skypilot(), *ENGINES, f"{ENGINES_TESTS}/test_skypilot_file.py")
        return
    # Where Debian has the daemons, also if the user's path lacks it.
    if shutil.which("slurmd", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])) is None:
        session.log("slurmd is not installed, so Slurm is not tested; on Debian, as root: apt install slurm-wlm munge")
    # In one process: each engine starts several ranks.
    run(session, with_engines(), *ENGINES, *(session.posargs or [ENGINES_TESTS]), HP_PLATFORM="torch")


@session
def accelerator(session: nox.Session) -> None:
    """Conformance and cross-package tests on this machine's accelerator, if any; arguments are passed to pytest."""
    usable = filter(workspace.has_wheels, workspace.FRAMEWORKS)
    found = {platform: accelerators(session, platform) for platform in usable}
    for platform, (kind, count) in found.items():
        if count:
            session.log(f"{platform}: {count} of {kind}")
            # Tests start up to four real ranks, which share devices if there are fewer.
            shared = {"HP_BACKEND": "gloo"} if platform == "torch" and count < 4 else {}
            cross(session, platform, HP_DEVICE=kind, **shared)
    if not any(count for _, count in found.values()):
        session.log(f"no accelerator that {' or '.join(found)} can use is on this machine: nothing was tested")


def accelerators(session: nox.Session, platform: str) -> tuple[str, int]:
    """Return the preferred device type of a framework, and the number of such devices on this machine."""
    asked = (
        "from hp_dtensor.platform.selection import get_platform; platform = get_platform(); "
        "print(platform.device_types[0], platform.num_accelerators())"
    )
    kind, count = run(session, full(platform), "-c", asked, silent=True, HP_PLATFORM=platform).split()[-2:]
    return kind, int(count)


@session
def npu(session: nox.Session) -> None:
    """Conformance, tests of `fully_shard` and experts, and a training on the stand-in for Ascend; needs g++."""
    if shutil.which("g++") is None:
        session.skip("the stand-in is compiled with g++, which is not installed; on Debian: apt install g++")
    variables = {"PYTHONPATH": str(ROOT / "tests/npu_stand_in/src"), "HP_DEVICE": "npu", "HP_PLATFORM": "torch"}
    python = full("torch")
    conformance = (f"{each}.testing.conformance" for each in ("hp_dtensor", "hp_fsdp", "hp_moe"))
    selected = () if session.posargs else ("--pyargs", *conformance, *ON_NPU)
    pytest(session, python, *selected, **variables)
    if not session.posargs:
        steps = ("--training.steps=3", "--training.dtype=bfloat16", "--generate.max_new_tokens=4")
        folder = f"--run.folder={session.create_tmp()}/run"
        run(session, python, str(python.with_name("hp-train")), MAIN_CONFIG, *steps, folder, **variables)


@session
def subsets(session: nox.Session, *, silent: bool = False) -> str:
    """Build wheels, and install and use each sensible subset of packages in a fresh environment."""
    workspace.wheels("standard")
    chosen = {name: wanted for name, wanted in SUBSETS.items() if not session.posargs or name in session.posargs}
    possible = [(name, wanted) for name, wanted in chosen.items() if len(installable(wanted)) == len(wanted)]
    at_once(functools.partial(check_subset, session), possible)
    return ""  # printed already, each when it was complete


def check_subset(
    session: nox.Session, name: str, wanted: tuple[str, ...], siblings: dict[str, Path] | None = None
) -> str:
    """Install packages as a user would, check the environment, and return the output."""
    python = workspace.released(name, wanted, siblings)
    return run(session, python, "-I", "tools/check_subset.py", *workspace.closure(wanted), silent=True)


@session
def outside(session: nox.Session, *, silent: bool = False) -> str:
    """Third parties' platforms of `examples`, on wheels alone, compared with torch; `-- --full` runs all of it."""
    found = ""
    for folder in sorted(Path("examples").glob("hp-platform-*")):
        python = workspace.outside(folder.name, ("hp-trainer", "hp-platform-torch"), TEST_TOOLS)
        # Its own configuration and root, so that nothing of this repository is on the path.
        options = ("-c", f"{folder}/pyproject.toml", "--rootdir", str(folder), "-p", "no:cacheprovider")
        arguments = ("-I", "-m", "pytest", *options, f"{folder}/tests", *session.posargs)
        found += run(session, python, *arguments, silent=silent)
    return found


def floor_wheels(session: nox.Session) -> dict[str, dict[str, Path]]:
    """Return the wheels of the oldest siblings that each package allows, if one of them is older than the sources."""
    if not any(map(workspace.last_release, workspace.PACKAGES)):
        session.warn(f"this clone has no tags of releases, so older siblings are not tested. {workspace.TAGS_ADVICE}")
        return {}
    current = workspace.wheels("standard")
    dependent = [name for name in installable(workspace.PACKAGES) if workspace.packages()[name].siblings]
    oldest = {name: workspace.floor_wheels(name) for name in dependent}
    return {name: wheels for name, wheels in oldest.items() if not wheels.items() <= current.items()}


@session
def floors(session: nox.Session) -> None:
    """Import and start each package with its siblings at the oldest allowed versions, if these are not current."""
    at_once(functools.partial(check_floor, session), floor_wheels(session).items())


def check_floor(session: nox.Session, name: str, wheels: dict[str, Path]) -> str:
    """Check package `name` and the siblings of its extras with `wheels`, and return the output."""
    wanted = (name, *installable(each for each in wheels if each not in workspace.closure((name,))))
    with advice_on_floors(name, wheels):
        return check_subset(session, f"floor-{name}", wanted, wheels)


@contextlib.contextmanager
def advice_on_floors(name: str, wheels: dict[str, Path]) -> Iterator[None]:
    """Add to a failed check what to do, since a program that uses what siblings have not released fails so."""
    try:
        yield
    except CommandFailed as failure:
        raise SetupError(workspace.floor_advice(name, wheels)) from failure


@session
def floor_tests(session: nox.Session) -> None:
    """Run the own tests of each package with its siblings at the oldest allowed versions, if these are not current."""
    for name, wheels in floor_wheels(session).items():
        siblings, others = workspace.test_requirements(name)
        python = workspace.released(f"floor-tests-{name}", (name, *siblings), wheels, (*others, *TEST_TOOLS))
        with advice_on_floors(name, wheels):
            pytest(session, python, *one_core(name), f"packages/{name}/tests")


@session
def main(session: nox.Session) -> None:
    """The main job: train the small mixture-of-experts model on PyTorch; arguments are passed to hp-train."""
    arguments = list(session.posargs)
    config = [] if arguments and not arguments[0].startswith("-") else [MAIN_CONFIG]
    python = training()
    run(session, python, str(python.with_name("hp-train")), *config, *arguments)


@session
def loss_parity(session: nox.Session) -> None:
    """Compare the first losses of one YAML on PyTorch and on MindSpore in several layouts, as a table."""
    torch, mindspore = full("torch"), full("mindspore")
    run(
        session,
        torch,
        "tools/loss_parity.py",
        "--torch",
        str(torch),
        "--mindspore",
        str(mindspore),
        *session.posargs,
    )


@session
@nox.parametrize("platform", ("torch", "mindspore"), ids=("torch", "mindspore"))
def proof(session: nox.Session, platform: str) -> None:
    """The full proofs, `proof_*.py`, and all cases of the tests on each framework; arguments are passed to pytest."""
    found = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/proof_*.py"))
    variables = {"HP_PLATFORM": platform, "HP_ALL_CASES": "1"}
    # The suite contains nearly all cases on torch.
    some = (
        "dtensor/redistribute/test_planner",
        "fsdp/test_streamed_optimizer",
        "trainer/training/test_speed_stragglers",
    )
    found += [f"tests/{name}.py" for name in some] if platform == "torch" else ACROSS
    pytest(session, full(platform), *SPREAD, *one_core(platform), "--verbose", *found, **variables)


@session
@nox.parametrize("platform", ("torch", "mindspore"), ids=("torch", "mindspore"))
def chaos(session: nox.Session, platform: str) -> None:
    """Inject faults into small runs (kills, damage, full disks, signals, clocks); `-- --minutes 120` sets the time."""
    on_ray = platform == "torch" and ("--engine=ray" in session.posargs or "ray" in session.posargs)
    python = with_engines() if on_ray else full(platform)
    run(session, python, "tests/chaos/campaign.py", *session.posargs, HP_PLATFORM=platform)


@session
def bench(session: nox.Session) -> None:
    """The benchmarks, each on its framework; not run by default, as results depend on the load of the machine."""
    for path in session.posargs or sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/[!_]*.py")):
        platform = "mindspore" if Path(path).name.startswith("mindspore_") else "torch"
        run(session, full(platform), path, HP_PLATFORM=platform)


@session
def public_api(session: nox.Session, *, silent: bool = False) -> str:
    """Public names: listed in `api.toml`, and their changes since the last release announced in the changelog."""
    return run(session, house_tools(), "tools/public_api.py", *session.posargs, silent=silent)


@session
def compatibility(session: nox.Session) -> None:
    """Run core tests across packages with each released sibling; `-- --write` writes the page, `--full` runs all."""
    run(session, house_tools(), "tools/compatibility.py", *session.posargs)


@session
def release(session: nox.Session) -> None:
    """Prepare releases: without arguments the plan; `nox -s release -- PACKAGE [STEP] [--write]`, or `--all`."""
    run(session, house_tools(), "tools/release.py", *session.posargs)


@session
def docs(session: nox.Session, *, silent: bool = False) -> str:
    """Check the documentation: links within the repository exist, Python blocks parse."""
    return run(session, house_tools(), "tools/check_docs.py", silent=silent)


def site_tools() -> Path:
    """Return the interpreter of the environment that builds the site."""
    requirements = ("mkdocs==1.6.1", "mkdocs-material==9.8.1", "mkdocstrings[python]==1.0.8")
    return Environment("site", requirements=requirements, locked_as="site").prepare(workspace.NOX_FOLDER / "site")


@session
def site(session: nox.Session, *, silent: bool = False) -> str:
    """Build the documentation site in site/html, with a reference from docstrings; broken links are errors."""
    python = site_tools()
    found = run(session, python, "tools/site_pages.py", "site/pages", silent=silent)
    return found + run(session, python, "-m", "mkdocs", "build", "--quiet", silent=silent, NO_MKDOCS_2_WARNING="1")
