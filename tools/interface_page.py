"""Write docs/platform_interface.md: all methods and operations of a platform, from the sources.

python tools/interface_page.py           write the page
python tools/interface_page.py --check   check that the page is current
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.platform.attention import AttentionInterface
from hp_dtensor.platform.autograd import AutogradInterface
from hp_dtensor.platform.composition import PRIMITIVES
from hp_dtensor.platform.interface import OP_SIGNATURES, ModuleInterface, ProcessInterface, TensorInterface
from hp_fsdp.storage import ParameterStorage

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "platform_interface.md"
HEAD = """\
# The interface of platforms

Attributes, methods and operations of `hp_dtensor.Platform`, and methods of hp-fsdp's `ParameterStorage` and of process
groups, written from their docstrings by `tools/interface_page.py`; see [writing a platform](writing_a_platform.md).

**Without it** says what happens if a platform does not implement a method. *Required*: nothing works. *Default*: it
works as the description says, or more slowly. *Refused*: what needs it raises a `CapabilityError`. **Tests** are the
first modules of the conformance suites that call it directly; others use it too.
"""
PARTS: dict[str, tuple[type, str]] = {
    "Tensors and dtypes": (TensorInterface, "platform"),
    "Autograd": (AutogradInterface, "platform"),
    "Modules": (ModuleInterface, "platform"),
    "Processes, devices and memory": (ProcessInterface, "platform"),
    "Attention by blocks": (AttentionInterface, "platform"),
    "Parameter storage of hp-fsdp": (ParameterStorage, "storage"),
    "Process groups": (ProcessGroup, "group"),
}


def main() -> int:
    """Write or check the page. Returns 1 when it is not current."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    print(f"{PAGE.name} is not what the interface says; run python tools/interface_page.py")
    return 1


def page() -> str:
    """Return the text of the page."""
    sources = sorted(ROOT.glob("packages/*/src/*/testing/conformance/test_*.py"))
    suites = {f"{path.parts[-4]} `{path.stem}`": path.read_text() for path in sources}
    lines = [HEAD]
    for title, (owner, kind) in PARTS.items():
        lines += [
            f"## {title}",
            "",
            *_attributes(owner),
            "| method | without it | description | tests |",
            "|---|---|---|---|",
        ]
        lines += [_row(owner, name, value, kind, suites) for name, value in _methods(owner)]
        lines.append("")
    lines += ["## Operations", "", "On plain tensors, by `platform.ops`. `composed`: of the required ones.", ""]
    lines += ["| operation | without it | tests |", "|---|---|---|"]
    lines += [
        f"| `{name}{signature}` | {'required' if name in PRIMITIVES else 'composed'} "
        f"| hp_dtensor: `test_ops`{'' if name in PRIMITIVES else ', its composition too'} |".replace("' | '", "' or '")
        for name, signature in OP_SIGNATURES.items()
    ]
    return "\n".join(lines) + "\n"


def _attributes(owner: type) -> Iterator[str]:
    """Yield a table of the attributes that the docstring of a part describes."""
    described = (inspect.getdoc(owner) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", described, re.MULTILINE)
    if found:
        yield from ("| attribute | description |", "|---|---|")
        yield from (f"| `{name}` | {' '.join(text.split())} |" for name, text in found)
        yield ""


def _methods(owner: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        function = value.fget if isinstance(value, property) else getattr(value, "func", value)
        if not inspect.isfunction(function) or name.startswith("__"):
            continue
        # Private methods are listed where platforms implement them.
        if not name.startswith("_") or getattr(value, "__isabstractmethod__", False):
            yield name, value


def _row(owner: type, name: str, value: Any, kind: str, suites: dict[str, str]) -> str:
    found = [suite for suite, source in suites.items() if re.search(rf"\.{name.removeprefix('_')}\b", source)]
    described = _description(owner, name, value)
    return f"| `{name}{_signature(value)}` | {_without(name, value, kind)} | {described} | {', '.join(found[:3])} |"


def _function(value: Any) -> Any:
    return value.fget if isinstance(value, property) else getattr(value, "func", value)


def _signature(value: Any) -> str:
    if isinstance(value, property):
        return ""
    names = [
        f"*{each.name}" if each.kind is each.VAR_POSITIONAL else each.name
        for each in inspect.signature(_function(value)).parameters.values()
        if each.name != "self"
    ]
    return f"({', '.join(names)})"


def _without(name: str, value: Any, kind: str) -> str:
    if getattr(value, "__isabstractmethod__", False):
        return "required"
    if kind == "group" and not name.startswith("_"):
        return "given"
    return "refused" if "raise CapabilityError" in inspect.getsource(_function(value)) else "default"


def _description(owner: type, name: str, value: Any) -> str:
    # An underscored method is the part of a public one that a platform implements.
    documented = inspect.getdoc(_function(value)) or inspect.getdoc(getattr(owner, name.removeprefix("_"), None)) or ""
    first = documented.partition("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
