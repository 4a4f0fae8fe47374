"""Padding, repeating, windows and diagonals: the dimensions that change are whole."""

from __future__ import annotations

from hp_dtensor.rules.engine.factors import LINEAR, Dim, Dims, Factorization, PartialResults, uncut
from hp_dtensor.rules.engine.notation import line
from hp_dtensor.rules.engine.registry import OpCall, RuleRegistry, names_for


def register(registry: RuleRegistry) -> None:
    registry.register("pad", "input pad mode=constant value=None", _pad)
    registry.register("repeat tile", "input *repeats", _repeat)
    registry.register("unfold", "input dimension size step", _unfold, view=True)
    matrices = line("... rows! columns! -> ... rows columns", linear=True)
    registry.register("tril triu", "input diagonal=0", matrices)
    registry.register("tril_ triu_", "input diagonal=0", matrices, in_place=True)
    registry.register("diagonal", "input offset=0 dim1=0 dim2=1", _diagonal, view=True)
    registry.register("diagonal_copy", "input offset=0 dim1=0 dim2=1", _diagonal)
    registry.register("linalg_diagonal", "A * offset=0 dim1=-2 dim2=-1", _diagonal, view=True)
    registry.register("unfold_copy", "input dimension size step", _unfold)
    registry.register("diag_embed", "input offset=0 dim1=-2 dim2=-1", _diag_embed)


def _pad(call: OpCall) -> Factorization:
    """Padded dimensions, from the last one backward in pairs, are whole."""
    shape, pad = call.tensors[0].shape, list(call["pad"])
    dims, sizes = names_for("d", shape)
    output = list(dims)
    fixed = set()
    for pair in range(len(pad) // 2):
        before, after = pad[2 * pair : 2 * pair + 2]
        dim = len(shape) - 1 - pair
        if before or after:
            sizes[f"o{dim}"] = shape[dim] + before + after
            fixed |= {f"d{dim}", f"o{dim}"}
            output[dim] = (f"o{dim}",)
    linear = call["mode"] == "constant" and not call["value"]
    return Factorization(
        (dims,), (tuple(output),), sizes, cuts=uncut(fixed), partial=LINEAR if linear else PartialResults()
    )


def _repeat(call: OpCall) -> Factorization:
    """A dimension that is repeated is whole; one repeated once is parallel."""
    shape, repeats = call.tensors[0].shape, tuple(call["repeats"])
    if call.name == "tile":
        repeats = (1,) * (len(shape) - len(repeats)) + repeats
    dims, sizes = names_for("d", shape)
    aligned: Dims = (*((),) * (len(repeats) - len(shape)), *dims)
    output: list[Dim] = []
    for i, (dim, count) in enumerate(zip(aligned, repeats, strict=True)):
        sizes |= {f"r{i}": count}
        output.append(dim if count == 1 else (f"r{i}", *dim))
    return Factorization(
        (dims,), (tuple(output),), sizes, cuts=uncut(f"r{i}" for i in range(len(repeats))), partial=LINEAR
    )


def _unfold(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    dims, sizes = names_for("d", shape)
    dim = call.dim(call["dimension"])
    windows = (shape[dim] - call["size"]) // call["step"] + 1
    output = (*dims[:dim], ("windows",), *dims[dim + 1 :], ("window",))
    fixed = frozenset({f"d{dim}", "windows", "window"})
    sizes = sizes | {"windows": windows, "window": call["size"]}
    return Factorization((dims,), (output,), sizes, cuts=uncut(fixed), partial=LINEAR)


def _diagonal(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    dims, sizes = names_for("d", shape)
    first, second, offset = call.dim(call["dim1"]), call.dim(call["dim2"]), call["offset"]
    rows, columns = shape[first] + min(offset, 0), shape[second] - max(offset, 0)
    sizes = sizes | {"diagonal": max(0, min(rows, columns))}
    output = (*(dim for i, dim in enumerate(dims) if i not in (first, second)), ("diagonal",))
    fixed = frozenset({f"d{first}", f"d{second}", "diagonal"})
    return Factorization((dims,), (output,), sizes, cuts=uncut(fixed), partial=LINEAR)


def _diag_embed(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    dims, sizes = names_for("d", shape)
    if {call["dim1"], call["dim2"]} - {-2, -1} or call["dim1"] == call["dim2"]:
        raise call.whole("its rule puts the diagonal into the last two dimensions")
    length = shape[-1] + abs(call["offset"])
    output = (*dims[:-1], ("row",), ("column",))
    fixed = frozenset({dims[-1][0], "row", "column"})
    return Factorization(
        (dims,), (output,), sizes | {"row": length, "column": length}, cuts=uncut(fixed), partial=LINEAR
    )
