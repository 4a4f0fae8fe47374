"""Fourier transforms: the transformed dimensions are whole, all others parallel."""

from __future__ import annotations

from collections.abc import Sequence

from hp_dtensor.rules.engine.factors import LINEAR, Cuts, Dim, Factorization, uncut
from hp_dtensor.rules.engine.registry import OpCall, RuleRegistry, names_for

TO_HALF = frozenset({"fft_rfft", "fft_rfft2", "fft_rfftn", "fft_ihfft", "fft_ihfft2", "fft_ihfftn"})
"""Those that give the first half of a spectrum, along the last dimension that they transform."""
FROM_HALF = frozenset({"fft_irfft", "fft_irfft2", "fft_irfftn", "fft_hfft", "fft_hfft2", "fft_hfftn"})
"""Those that take it."""


def register(registry: RuleRegistry) -> None:
    kinds = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    registry.register(" ".join(f"fft_{kind}" for kind in kinds), "input n=None dim=-1 norm=None", _along_one)
    registry.register(" ".join(f"fft_{kind}2" for kind in kinds), "input s=None dim=None norm=None", _along_two)
    registry.register(" ".join(f"fft_{kind}n" for kind in kinds), "input s=None dim=None norm=None", _along_several)
    registry.register("fft_fftshift fft_ifftshift", "input dim=None", _shifted)


def _along_one(call: OpCall) -> Factorization:
    return _transformed(call, [call.dim(call["dim"])], [call["n"]])


def _along_two(call: OpCall) -> Factorization:
    return _several(call, (-2, -1) if call["dim"] is None else call["dim"])


def _along_several(call: OpCall) -> Factorization:
    return _several(call, call["dim"])


def _several(call: OpCall, dims: int | Sequence[int] | None) -> Factorization:
    ndim, lengths = call.tensors[0].ndim, call["s"]
    if dims is None:
        dims = range(ndim) if lengths is None else range(ndim - len(lengths), ndim)
    chosen = [call.dim(dim) for dim in ([dims] if isinstance(dims, int) else dims)]
    lengths = [None] * len(chosen) if lengths is None else [None if n == -1 else n for n in lengths]
    return _transformed(call, chosen, lengths)


def _transformed(call: OpCall, dims: Sequence[int], lengths: Sequence[int | None]) -> Factorization:
    """Linear over the reals; `lengths` of the signal are those of the input where they are None."""
    shape = call.tensors[0].shape
    if len(set(dims)) != len(lengths) or not dims:
        raise call.whole("its dimensions and lengths must be as many, and differ")
    names, sizes = names_for("d", shape)
    output: list[Dim] = list(names)
    for dim, length in zip(dims, lengths, strict=True):
        size = shape[dim] if length is None else length
        if dim == dims[-1] and call.name in FROM_HALF:
            size = 2 * (shape[dim] - 1) if length is None else length
        if dim == dims[-1] and call.name in TO_HALF:
            size = size // 2 + 1
        sizes[f"o{dim}"], output[dim] = size, (f"o{dim}",)
    fixed = frozenset({*(f"d{dim}" for dim in dims), *(f"o{dim}" for dim in dims)})
    others = frozenset(sizes) - fixed
    return Factorization((names,), (tuple(output),), sizes, cuts=Cuts(fixed=fixed, nonempty=others), partial=LINEAR)


def _shifted(call: OpCall) -> Factorization:
    names, sizes = names_for("d", call.tensors[0].shape)
    dims = call["dim"]
    chosen = range(len(names)) if dims is None else [call.dim(d) for d in ([dims] if isinstance(dims, int) else dims)]
    return Factorization((names,), (names,), sizes, cuts=uncut(f"d{dim}" for dim in chosen), partial=LINEAR)
