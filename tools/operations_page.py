"""Write the tables of operations with sharding rules from the registry.

python tools/operations_page.py                     write docs/operations.md
python tools/operations_page.py torch               write docs/operations_torch.md: the platform's names
python tools/operations_page.py rules               write the list of tables in the README of the rules
python tools/operations_page.py [NAME] --check  check that the page is current
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import SilentWorld
from hp_dtensor.dispatch.arguments import bind
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.rules import tables
from hp_dtensor.rules.factors import Factorization
from hp_dtensor.rules.registry import REQUIRED, OpCall, Parameter, Registration, RuleRegistry
from hp_dtensor.rules.tables import register_builtin_rules, rule_registry
from hp_dtensor.spec.placements import Replicate
from hp_dtensor.spec.tensor_spec import TensorSpec

DOCS = Path(__file__).resolve().parent.parent / "docs"

TENSORS = (
    "input other weight bias target tensor mat1 mat2 batch1 batch2 query key value condition index src source".split()
)
TENSORS += ["boundaries", "sorted_sequence", "real", "imag", "abs", "angle", "A", "B", "input2", "tau"]
# Shapes to try for the tensors of a call, the most informative first.
SHAPES = (
    ((4, 6),), ((4, 6), (4, 6)), ((4, 6), (6, 2)), ((4, 6), (2, 6)), ((4, 6), (4,)), ((4,), (4, 6)), ((4,), (6,)),
    ((4, 6), (6,)), ((6,), (6,)), ((2, 4, 6), (2, 6, 4)), ((4, 6), (2, 6), (2,)), ((2,), (4, 6), (6, 2)), ((4, 6),
    (6,), (6,)), ((4, 6), (6, 4), (4, 4)), ((2, 4, 4), (2, 4, 6), (2, 6, 4)), ((4, 6), (4, 6), (4, 6)), ((4, 6),
    (2,), (2, 6)), ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)), ((2, 4, 9), (8, 4, 3)), ((2, 4, 9, 9), (8, 4, 3, 3)),
    ((2, 4, 9, 9, 9), (8, 4, 3, 3, 3)), ((2, 4, 9), (4, 8, 3)), ((2, 4, 9, 9), (4, 8, 3, 3)), ((2, 4, 9, 9, 9), (4,
    8, 3, 3, 3)), ((2, 4, 9, 9),), ((2, 4, 9, 9, 9),), ((2, 4, 9),),
)  # fmt: skip
STATIC: dict[str, Any] = {
    "dim": 1, "dim0": 0, "dim1": 1, "dims": (1, 0), "shape": (24,), "sizes": 2, "start": 0, "length": 2, "k": 2,
    "chunks": 2, "repeats": 2, "num_classes": 3, "minlength": 3, "normalized_shape": 6, "num_groups": 2, "size": 3,
    "step": 1, "pad": (1, 1), "shifts": 1, "fill_value": 0.0, "data": 1.0, "dimension": 1, "kernel_size": 3,
    "output_size": 3, "value": 0.0, "q": 0.5,
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {
    "einsum": {"equation": "ij,jk->ik", "operands": ((4, 6), (6, 2))},
    "getitem": {"input": (4, 6), "index": (0, slice(None))},
    "expand": {"input": (4, 1), "shape": (4, 6)},
    "expand_copy": {"input": (4, 1), "shape": (4, 6)},
    "cross": {"input": (4, 3), "other": (4, 3), "dim": 1},
    "linalg_cross": {"input": (4, 3), "other": (4, 3), "dim": 1},
    "squeeze_copy": {"input": (4, 1, 6)},
    "broadcast_to": {"input": (4, 1), "shape": (4, 6)},
    "unflatten": {"input": (4, 6), "dim": 1, "sizes": (2, 3)},
    "squeeze": {"input": (4, 1, 6)},
    "repeat": {"input": (4, 6), "repeats": (1, 2)},
    "tile": {"input": (4, 6), "repeats": (1, 2)},
    "select": {"input": (4, 6), "dim": 1, "index": 0},
    "roll": {"input": (4, 6), "shifts": 1, "dims": 1},
    "flip": {"input": (4, 6), "dims": (1,)},
    "split": {"input": (4, 6), "sizes": 3, "dim": 1},
    "group_norm": {"input": (2, 4, 6), "num_groups": 2},
    "cat": {"tensors": ((4, 6), (4, 6)), "dim": 1},
    "concat": {"tensors": ((4, 6), (4, 6)), "dim": 1},
    "stack": {"tensors": ((4, 6), (4, 6)), "dim": 1},
    "index_put": {"input": (4, 6), "indices": ((2,),), "values": (2, 6)},
    "index_put_": {"input": (4, 6), "indices": ((2,),), "values": (2, 6)},
    "embedding": {"input": (4,), "weight": (6, 2)},
    "index_select": {"input": (4, 6), "dim": 1, "index": (2,)},
    "index_fill": {"input": (4, 6), "dim": 1, "index": (2,), "value": 0.0},
}
SPECIAL |= {
    f"index_{kind}{end}": {"input": (4, 6), "dim": 1, "index": (2,), "source": (4, 2), "reduce": "prod"}
    for kind in ("add", "copy", "reduce")
    for end in ("", "_")
}
SPECIAL |= {
    f"scatter{end}": {"input": (4, 6), "dim": 1, "index": (4, 2), "src": (4, 2)} for end in ("", "_", "_add", "_add_")
}
SPECIAL |= {
    name: {"input": (4, 6), "other": (4, 6)} for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
}
SPECIAL |= {
    f"{loss}_loss": {"input": (4, 6), "target": (4, 6)} for loss in ("mse", "l1", "smooth_l1", "huber", "soft_margin")
}
SPECIAL |= {name: {"input": (4, 6), "target": (4, 6)} for name in ("binary_cross_entropy", "kl_div")}
SPECIAL |= {
    f"{kind}_pool{n}d": {"input": (2, 4, *(9,) * n), "kernel_size": 3, "output_size": 3}
    for kind in ("max", "avg", "adaptive_avg")
    for n in (1, 2, 3)
}
SPECIAL |= {
    "cholesky_solve": {"input": (4, 6, 2), "input2": (4, 6, 6)},
    "linalg_householder_product": {"input": (5, 4, 3), "tau": (5, 3)},
    "linalg_solve": {"A": (4, 6, 6), "B": (4, 6, 2)},
    "linalg_solve_triangular": {"A": (4, 6, 6), "B": (4, 6, 2), "upper": True},
    "im2col": {"input": (2, 4, 9, 9), "kernel_size": 3},
    "col2im": {"input": (2, 36, 49), "output_size": 9, "kernel_size": 3},
    "view_as_complex": {"input": (4, 6, 2)},
    "complex": {"real": (4, 6), "imag": (4, 6)},
    "polar": {"abs": (4, 6), "angle": (4, 6)},
    "bincount": {"input": (6,), "minlength": 3},
    "multinomial": {"input": (4, 6), "num_samples": 3},
    "one_hot": {"input": (4,), "num_classes": 3},
    "where": {"condition": (4, 6), "input": (4, 6), "other": (4, 6)},
    "rms_norm": {"input": (4, 6), "normalized_shape": 6, "weight": (6,)},
    "layer_norm": {"input": (4, 6), "normalized_shape": 6, "weight": (6,), "bias": (6,)},
}

SPECIAL |= {name: {"input": (4, 6, 6), "n": 2} for name in ("linalg_matrix_power", "matrix_power")}
SPECIAL |= {
    name: {"input": (4, 6, 6)}
    for name in """
        linalg_inv inverse linalg_matrix_exp matrix_exp linalg_cholesky linalg_det det logdet linalg_slogdet slogdet
        linalg_eigh linalg_eigvalsh
    """.split()
}
SPECIAL |= {
    name: {"input": (4, 6, 8)} for name in ("linalg_pinv", "pinverse", "linalg_svdvals", "linalg_svd", "linalg_qr")
}

REPLICATED_NOTE = """## Computed on full operands

For these operations every rank gathers the operands and computes the full result, as torch's DTensor does. The same
holds for calls of the operations above that their rule does not cover (another number of dimensions, tensors instead
of numbers). `CommDebugMode` counts the gathers, and `explicit_redistribution` refuses them. """

HEADER = """# Operations

Operations of DTensors that have a sharding rule, by their torch names. `tools/operations_page.py` writes this page.
The functions, methods and operators of a platform are mapped to these names: see [PyTorch](operations_torch.md) and
[MindSpore](operations_mindspore.md). Other operations raise an error that states the alternatives. Plugins add rules
through the hook `hp_sharding_rules`.

**Dimensions** shows the dimensions of each tensor of a call: arguments before the arrow, results after it. Equal
names are equal dimensions. `.2 .1` stand for any number of dimensions, counted from the last. `(a b)` is one
dimension composed of two, and `1` is a broadcast dimension of size 1. **May be sharded** lists the dimensions that
may be sharded over a mesh axis. With `sum`, `max` or `min` after a name, the results are then partial, and reduced
when they are needed. All other dimensions are gathered first if they are sharded. **Partial** lists the operands (by
number) that may be partial sums: `1, 2` are alternatives, `1 + 2` means both at once. Other partial operands are
reduced first, also sums that are rounded to integers.

"""


def mesh() -> DeviceMesh:
    """Return a mesh of two ranks, on a fake platform that has only dtypes."""
    platform = SimpleNamespace(
        dtype_name=str,
        is_floating=lambda dtype: dtype == "float32",
        is_complex=lambda dtype: False,
        picks_integers_first=False,
        itemsize=lambda dtype: 4,
    )
    return DeviceMesh("cpu", (2,), world=SilentWorld(0, 2, platform))  # type: ignore[arg-type]


def is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(size, int) for size in value)


def with_specs(name: str, value: Any, on: DeviceMesh) -> Any:
    """Replace the shapes of tensor arguments by specs."""
    if name in ("operands", "tensors", "indices"):
        return tuple(TensorSpec(on, (Replicate(),), shape, "float32") for shape in value)
    tensor = name in TENSORS or name == "values"
    return TensorSpec(on, (Replicate(),), value, "float32") if tensor and is_shape(value) else value


def calls(name: str, registration: Registration, on: DeviceMesh) -> Iterator[OpCall]:
    """Yield calls to try until the rule accepts one."""
    if name in SPECIAL:
        yield call_of(name, registration, SPECIAL[name], on)
        return
    tensors = [p for p in registration.parameters if p.name in TENSORS and not (p.name == "value" and name == "pad")]
    required = [p for p in tensors if p.default is REQUIRED]
    for shapes in SHAPES:
        for chosen in (required, tensors[: len(shapes)]):
            if len(chosen) == len(shapes):
                given = {p.name: shape for p, shape in zip(chosen, shapes, strict=True)}
                static = {p.name: STATIC[p.name] for p in registration.parameters if wants_value(p, given)}
                yield call_of(name, registration, {**static, **given}, on)


def wants_value(parameter: Parameter, given: dict[str, Any]) -> bool:
    needed = parameter.default is REQUIRED or parameter.name == "dim"
    return needed and parameter.name in STATIC and parameter.name not in given


def call_of(name: str, registration: Registration, values: dict[str, Any], on: DeviceMesh) -> OpCall:
    names = [p.name for p in registration.parameters]
    values = {names[0] if key == "input" and key not in names else key: shape for key, shape in values.items()}
    arguments = bind(registration, (), {key: with_specs(key, value, on) for key, value in values.items()})
    order = [p.name for p in registration.parameters if p.name in arguments]
    listed = itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in map(arguments.get, order))
    return OpCall(name, arguments, tuple(x for x in listed if isinstance(x, TensorSpec)))


def factorization(name: str, registration: Registration, on: DeviceMesh) -> Factorization | None:
    """Return the rule's factorization of the first call it accepts. None if the operation is always refused."""
    for call in calls(name, registration, on):
        try:
            return registration.rule(call)
        except (ShardingRuleError, ValueError, IndexError, KeyError, TypeError, AttributeError):
            continue
    return None


def dims(tensor: tuple[tuple[str, ...], ...]) -> str:
    return " ".join("1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in tensor) or "()"


def row(rule: Factorization) -> str:
    shown = f"`{', '.join(map(dims, rule.inputs))} -> {', '.join(dict.fromkeys(map(dims, rule.outputs)))}`"
    shardable = [f for f in rule.sizes if rule.can_shard(f) and any(f in dim for t in rule.inputs for dim in t)]
    named = [
        f"{f} ({rule.partial.reduced[f]})" if f in rule.partial.reduced and f not in rule.partial.complete else f
        for f in shardable
    ]
    terms = [", ".join(str(i + 1) for i in sorted(term)) for term in rule.partial.terms or ()]
    partial = " + ".join(f"({t})" if len(terms) > 1 and "," in t else t for t in terms) if all(terms) else ""
    return f"{shown} | {', '.join(named)} | {partial} |"


def page() -> str:
    registry, on = RuleRegistry(), mesh()
    register_builtin_rules(registry)
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    refused, replicated = [], []
    for name in registry.names():
        registration = registry.get(name)
        assert registration is not None
        if registration.replicated:
            replicated.append(name)
            continue
        rule = factorization(name, registration, on)
        if rule is None:
            refused.append(name)
        else:
            alike[signature(registration), row(rule)].append(name)
    lines = ["| Operations | Arguments | Dimensions | May be sharded | Partial |", "|---|---|---|---|---|"]
    for (arguments, rest), names in sorted(alike.items(), key=lambda item: item[1]):
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | `{arguments}` | {rest}")
    listed = ", ".join(f"`{name}`" for name in refused)
    text = HEADER + "\n".join(lines) + f"\n\nRefused for sharded data, with an error that says what to do: {listed}.\n"
    return f"{text}\n{REPLICATED_NOTE}{', '.join(f'`{name}`' for name in replicated)}.\n"


def signature(registration: Registration) -> str:
    return ", ".join(
        f"{'*' if p.variadic else ''}{p.name}{'' if p.default is REQUIRED else f'={p.default}'}"
        for p in registration.parameters
    )


NAMES_HEADER = """# Operations of {title}

Names in {title} {version} of the operations with a [sharding rule](operations.md), for DTensors of the platform
`{platform}`. `tools/operations_page.py {platform}` writes this page. {note}

| Operation | Names |
|---|---|
"""
TITLES = {"torch": "PyTorch", "mindspore": "MindSpore"}
NOTES = {
    "torch": "Operators are listed as methods such as\n`__add__`. Functions composed of these operations work too.",
    "mindspore": "Names with a path are functions and methods of\n"
    "MindSpore. Names without a path are the primitives that they call, which are intercepted. Operations that are\n"
    "not listed do not exist, or are refused, on its CPU.",
}


def names_page(name: str) -> str:
    """Return the page with a platform's names for its operations."""
    platform = get_platform(name)
    rows = {operation: platform.operation_names(operation) for operation in rule_registry().names()}
    lines = [
        f"| `{key}` | {', '.join(f'`{each}`' for each in names)} |" for key, names in sorted(rows.items()) if names
    ]
    text = NAMES_HEADER.format(title=TITLES[name], version=version(name), platform=name, note=NOTES[name])
    return text + "\n".join(lines) + "\n"


RULES = Path(tables.__file__).parent / "README.md"
MARK = "<!-- tables -->\n"


def tables_readme() -> str:
    """Return the README of the rules with a line per table: file, first line of its docstring, operations."""
    lines = ["| File | Rules | Operations |", "|---|---|---|"]
    for table in sorted(tables.TABLES, key=lambda table: table.__name__):
        registry = RuleRegistry()
        table.register(registry)
        first = inspect.getdoc(table).partition("\n")[0]
        names = registry.names()
        shown = ", ".join(f"`{name}`" for name in names[:4]) + (f", and {len(names) - 4} more" if names[4:] else "")
        lines.append(f"| `{table.__name__.partition('.rules.')[2].replace('.', '/')}.py` | {first} | {shown} |")
    return RULES.read_text().partition(MARK)[0] + MARK + "\n".join(lines) + "\n"


def version(name: str) -> str:
    """Return the framework's version without its build suffix."""
    return metadata.version(name).split("+")[0]


def main() -> int:
    """Write or check a page. Returns 1 when the page is not current."""
    platforms = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if platforms == ["rules"]:
        path, text = RULES, tables_readme()
    else:
        path = DOCS / (f"operations_{platforms[0]}.md" if platforms else "operations.md")
        text = names_page(platforms[0]) if platforms else page()
    if "--check" not in sys.argv[1:]:
        path.write_text(text)
        return 0
    if path.exists() and path.read_text() == text:
        return 0
    command = " ".join(["python tools/operations_page.py", *platforms])
    print(f"{path.name} is not what the sharding rules say; run {command}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
