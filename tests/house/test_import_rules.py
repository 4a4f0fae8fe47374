"""Permitted imports, read from the sources, function bodies included; the most important are measured too."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("hp_dtensor", "hp_fsdp", "hp_moe", "hp_trainer")
PLATFORMS = ("hp_platform_torch", "hp_platform_mindspore")
FRAMEWORKS = {"torch", "torch_npu", "triton", "mindspore"}

# Where the import name is not the distribution's.
MODULES_OF = {"mlflow-skinny": "mlflow", "pyyaml": "yaml", "tensorboardx": "tensorboardX"}

# A platform serves a component from modules of this name, loaded only when that component asks for them.
SERVED = {"hp_fsdp": "fsdp", "hp_moe": "moe", "hp_trainer": "trainer"}


def imports(source):
    """Yield (line, module, only for types) for every import in `source`, those by name through importlib included."""
    tree = ast.parse(source)
    guarded = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        for module in _imported(node):
            yield node.lineno, module, node in guarded


def _imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module]
    if isinstance(node, ast.Call) and _is_import_by_name(node):
        return [node.args[0].value]
    return []


def _is_import_by_name(call):
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    argument = call.args[0] if call.args else None
    return name in ("import_module", "__import__") and isinstance(getattr(argument, "value", None), str)


def folder(package):
    return ROOT / "packages" / package.replace("_", "-")


def project(package):
    return tomllib.loads((folder(package) / "pyproject.toml").read_text())["project"]


def declared(requirements):
    names = (re.match(r"[A-Za-z0-9._-]+", each)[0].lower() for each in requirements)
    return {MODULES_OF.get(name, name.replace("-", "_")) for name in names}


def allowed(package, path):
    """The top-level modules that the file `path` (relative to the package) may import."""
    metadata = project(package)
    extras = metadata.get("optional-dependencies", {})
    names = {package, *sys.stdlib_module_names, *declared(metadata["dependencies"])}
    optional = {name for title, extra in extras.items() if title != "testing" for name in declared(extra)}
    names |= optional if package in PLATFORMS else optional - {*FRAMEWORKS, *PLATFORMS}
    if package in PLATFORMS:
        names |= {component for component, part in SERVED.items() if serves(path.parts[0], part)}
    elif path.parts[0] == "testing":
        # The conformance suites. NumPy comes with hp-dtensor.
        names |= {"pytest", "numpy"}
    return names


def serves(module, part):
    """Return True if a platform's module or folder serves: `fsdp.py`, `fsdp/` and `fsdp_storage.py` serve hp_fsdp."""
    return re.fullmatch(rf"{part}(_\w+)?(\.py)?", module) is not None


def violations(package, path, source):
    permitted = allowed(package, path)
    served = SERVED.keys() if package in PLATFORMS else frozenset()  # naming a type needs no installation
    return [
        f"{package}/{path}:{line} imports {module}"
        for line, module, only_types in imports(source)
        if module.split(".")[0] not in (permitted | served if only_types else permitted)
    ]


@pytest.mark.parametrize("package", [*COMPONENTS, *PLATFORMS])
def test_a_package_imports_only_what_it_declares(package):
    source = folder(package) / "src" / package
    files = sorted(source.rglob("*.py"))
    assert files
    found = [line for file in files for line in violations(package, file.relative_to(source), file.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", COMPONENTS)
def test_a_component_declares_no_framework_and_no_platform(package):
    assert not declared(project(package)["dependencies"]) & {*FRAMEWORKS, *PLATFORMS}


def named_platforms(source):
    """Return the lines of strings, other than docstrings, that name a framework or the package of its platform."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (each for each in ast.walk(tree) if isinstance(each, ast.Constant) and id(each) not in documentation)
    named = re.compile("|".join([*FRAMEWORKS, *(f".*hp[-_]platform[-_]{each}.*" for each in FRAMEWORKS)]), re.DOTALL)
    return [each.lineno for each in texts if isinstance(each.value, str) and named.fullmatch(each.value)]


@pytest.mark.parametrize("package", COMPONENTS)
def test_a_component_names_no_platform(package):
    """Capabilities answer. The conformance suites in `testing` may compare platforms."""
    source = folder(package) / "src" / package
    files = [file for file in sorted(source.rglob("*.py")) if file.relative_to(source).parts[0] != "testing"]
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in named_platforms(file.read_text())]
    assert not found, "\n".join(found)


def test_named_platforms_are_found():
    source = '"""torch"""\nx = "torch"\ny = f"pip install hp-platform-mindspore{x}"\nz = "a torch"'
    assert named_platforms(source) == [2, 3]


def test_fsdp_and_experts_do_not_need_each_other():
    assert "hp_moe" not in declared(project("hp_fsdp")["dependencies"])
    assert "hp_fsdp" not in declared(project("hp_moe")["dependencies"])


@pytest.mark.parametrize("package", PLATFORMS)
def test_a_platform_declares_its_own_framework_only(package):
    frameworks = declared(project(package)["dependencies"]) & {*FRAMEWORKS, *PLATFORMS, *COMPONENTS}
    assert frameworks == {"hp_dtensor", package.removeprefix("hp_platform_")}


@pytest.mark.parametrize(
    ("package", "path", "line"),
    [
        ("hp_dtensor", "mesh.py", "import torch"),
        ("hp_dtensor", "mesh.py", "def f():\n    from mindspore import ops"),
        ("hp_dtensor", "mesh.py", "import_module('torch.distributed')"),
        ("hp_dtensor", "mesh.py", "import pytest"),
        ("hp_dtensor", "mesh.py", "import hp_fsdp"),
        ("hp_fsdp", "layout.py", "import hp_moe.router"),
        ("hp_moe", "router.py", "from hp_fsdp import fully_shard"),
        ("hp_trainer", "cli.py", "import hp_platform_torch"),
        ("hp_platform_torch", "plugin.py", "import hp_platform_mindspore"),
        ("hp_platform_torch", "plugin.py", "import mindspore"),
        ("hp_platform_torch", "plugin.py", "import hp_fsdp"),
        ("hp_platform_mindspore", "fsdp.py", "import hp_moe"),
        ("hp_platform_mindspore", "moeless.py", "import hp_moe"),
        ("hp_fsdp", "layout.py", "if TYPE_CHECKING:\n    import torch"),
        ("hp_platform_torch", "plugin.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import hp_fsdp"),
    ],
)
def test_the_rules_catch(package, path, line):
    assert len(violations(package, Path(path), line)) == 1


@pytest.mark.parametrize(
    ("package", "path", "line"),
    [
        ("hp_dtensor", "mesh.py", "import numpy.typing, pluggy\nfrom .spec import TensorSpec"),
        ("hp_dtensor", "testing/pytest_plugin.py", "import pytest"),
        ("hp_trainer", "data.py", "import yaml, hp_fsdp, hp_moe"),
        ("hp_platform_torch", "fsdp.py", "import torch, hp_fsdp"),
        ("hp_platform_torch", "fsdp_storage.py", "import hp_fsdp.storage"),
        ("hp_platform_torch", "moe/triton.py", "import hp_moe"),
        ("hp_platform_torch", "npu.py", "import torch_npu"),
        ("hp_platform_torch", "optimizers.py", "if TYPE_CHECKING:\n    import hp_trainer"),
    ],
)
def test_the_rules_allow(package, path, line):
    assert violations(package, Path(path), line) == []


IMPORT = """
import sys
before = set(sys.modules)
import hp_dtensor
print(*sorted(set(sys.modules) - before))
"""


def test_import_of_hp_dtensor_brings_itself_and_little_of_the_standard_library():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    brought = done.stdout.split()
    assert "hp_dtensor" in brought
    assert {module.split(".")[0] for module in brought} <= {"hp_dtensor", *sys.stdlib_module_names}
    assert len(brought) < 60


def test_proofs_import_names_that_the_helpers_of_tests_have():
    """Proofs run in no usual session, so that a renamed helper would not be noticed."""
    helpers = {path.stem: path for path in ROOT.glob("tests/**/*.py") if not path.stem.startswith(("test_", "proof_"))}
    missing = []
    for proof in ROOT.glob("tests/**/proof_*.py"):
        for node in ast.walk(ast.parse(proof.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in helpers:
                defined = _top_level_names(ast.parse(helpers[node.module].read_text()))
                missing += [
                    f"{proof.name}: {node.module}.{each.name}" for each in node.names if each.name not in defined
                ]
    assert not missing


def _top_level_names(tree):
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name) for alias in node.names}
        else:
            found |= {
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    return found
