"""torch's own samples of its operators, run on DTensors and compared with plain tensors.

Importing this takes half a minute: torch's samples import much.
"""

from __future__ import annotations

import itertools
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

if "expecttest" not in sys.modules:  # torch's samples import it for tests of texts, which are not used here
    _stub = types.ModuleType("expecttest")
    _stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = _stub

from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from hp_dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from hp_dtensor.exceptions import HPError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import replicate_like
from hp_dtensor.testing.pytest_plugin import ALL, Share, chosen

Tensor = torch.Tensor
Placements = tuple[Placement, ...]

OPERATORS = {info.full_name: info for info in op_db}

_BY_REASON = {
    "its result depends on strides, which a shard has others of, or changes storage": """
        as_strided as_strided.partial_views as_strided_copy as_strided_scatter resize_ resize_as_
    """,
    "the shape of its result depends on data of all ranks": """
        masked_select unique unique_consecutive nonzero argwhere bincount nn.functional.one_hot repeat_interleave
    """,
    "it draws random numbers": """
        svd_lowrank pca_lowrank normal normal.number_mean nn.functional.fractional_max_pool2d
        nn.functional.fractional_max_pool3d nn.functional.scaled_dot_product_attention
        nn.functional.multi_head_attention_forward
    """,
    "it writes running statistics": """
        _native_batch_norm_legit _batch_norm_with_update
    """,
    "it is an overload of torch.ops, below autograd": """
        slice native_dropout_backward max_pool2d_with_indices_backward torch.ops.aten._safe_softmax.default
    """,
}
UNINITIALISED = frozenset("empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split())
"""Operators whose results are uninitialized memory: that two of them are equal says nothing."""
REFUSED = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}
"""Operators of which samples with sharded operands may all be refused -> why."""


@dataclass
class Findings:
    """Cases of one operator on one rank.

    Attributes:
        right: cases with the values and gradients of plain tensors, by whether some operand was sharded.
        refused: messages of refusals, by whether some operand was sharded.
        wrong: results and gradients that differ, and errors that are none of ours, one line each.
    """

    right: Counter[bool] = field(default_factory=Counter)
    refused: list[tuple[bool, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def accepts_sharded(self) -> bool:
        """Return True unless every case with a sharded operand was refused."""
        return bool(self.right[True]) or not any(sharded for sharded, _ in self.refused)


def cases_of(
    name: str, dtype: torch.dtype = torch.float32, *, in_place: bool = False, samples: int | None = None
) -> list[Case]:
    """Return torch's samples of operator `name` that mean the same at every call.

    Made once for all ranks: memory that is not initialized may be the same twice on one of them.

    Args:
        in_place: the variant that writes its first operand.
        samples: at most so many; None: all.
    """
    if name in UNINITIALISED:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = chosen(list(_samples(OPERATORS[name], dtype)), samples)
        made = [Case.of(OPERATORS[name], sample, in_place) for sample in found]
    return [case for case in made if case is not None]


def sweep(
    platform: Platform,
    mesh_shape: tuple[int, ...],
    cases: Sequence[Case],
    limit: int | None = None,
    share: Share = ALL,
) -> Findings:
    """Run cases on this rank with operands placed in every way.

    Args:
        limit: at most so many ways to place the operands of a case; None: all.
        share: which of these.
    """
    names = tuple(f"a{i}" for i in range(len(mesh_shape)))
    mesh = DeviceMesh("cpu", mesh_shape, mesh_dim_names=names, platform=platform)
    findings = Findings()
    for case in cases:
        for placements in chosen(list(case.all_placements(mesh)), limit, share):
            case.check(mesh, placements, findings)
    return findings


def _samples(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    torch.manual_seed(7)
    gradients = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    yield from info.sample_inputs("cpu", dtype, requires_grad=gradients)


@dataclass
class Case:
    """One sample with its results and gradients on plain tensors.

    Attributes:
        function: of the sample's arguments.
        leaves: the sample's arguments, flattened.
        tensors: which of them are tensors.
        expected: the results that are tensors, and the gradients of these with `weights` as cotangents.
    """

    name: str
    function: Callable[..., Any]
    leaves: list[Any]
    structure: Any
    tensors: list[int]
    expected: list[Any]
    gradients: list[Tensor | None]
    rtol: float

    @classmethod
    def of(cls, info: Any, sample: Any, in_place: bool) -> Case | None:
        """Return the case, or None if the operator does not do this or does not give the same twice."""
        function = info.get_inplace() if in_place else info.get_op()
        if function is None or (in_place and not isinstance(sample.input, Tensor)):
            return None
        leaves, structure = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
        leaves = [_plain(x) if isinstance(x, Tensor) else x for x in leaves]
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        if not tensors or any(x.layout is not torch.strided for i in tensors if (x := leaves[i]) is not None):
            return None
        case = cls(info.full_name, function, leaves, structure, tensors, [], [], 0.0)
        try:
            case.expected, case.gradients = case._run({i: leaves[i] for i in tensors})
            again, gradients = case._run({i: leaves[i] for i in tensors})
            same = [_agree(*pair, 0.0) for pair in itertools.zip_longest(case.expected, again)]
            same += [_agree(*pair, 1e-5) for pair in itertools.zip_longest(case.gradients, gradients)]
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AssertionError):
            return None  # torch refuses the sample, or to compare its results
        if not all(same):
            return None  # random, or memory that is not initialized
        half = any(leaves[i].dtype in (torch.bfloat16, torch.float16) for i in tensors)
        # Sums in another order: some roundings of the largest terms, of eight bits or of twenty-four.
        case.rtol = 5e-2 if half else 1e-3
        return case

    def all_placements(self, mesh: DeviceMesh) -> Iterator[tuple[Placements, ...]]:
        """Yield placements for each tensor; partial ones where sums of halves are exact enough."""
        per_tensor = []
        for i in self.tensors:
            options: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(self.leaves[i].ndim))]
            if self.leaves[i].dtype.is_floating_point:
                options.append(Partial())
            per_tensor.append(list(itertools.product(options, repeat=mesh.ndim)))
        count = 1
        for options in per_tensor:
            count *= len(options)
        if count <= 4096:
            yield from itertools.product(*per_tensor)
            return
        for turn in range(64):  # too many to list: every option of every tensor, in several combinations
            yield tuple(options[(turn * (7 * i + 1)) % len(options)] for i, options in enumerate(per_tensor))

    def check(self, mesh: DeviceMesh, placements: tuple[Placements, ...], findings: Findings) -> None:
        """Run the operator on operands placed so, and note how it went."""
        sharded = any(p.is_shard() for each in placements for p in each)
        label = f"{self.name} {self._described(placements)}"
        try:
            placed = {i: _placed(self.leaves[i], mesh, each) for i, each in zip(self.tensors, placements, strict=True)}
            results, gradients = self._run(placed)
        except HPError as error:
            findings.refused.append((sharded, f"{label}: {error}"))
            return
        except Exception as error:
            findings.wrong.append(f"{label}: {type(error).__name__}: {str(error)[:300]}")
            return
        pairs = [("result", *pair) for pair in itertools.zip_longest(results, self.expected)]
        pairs += [("gradient", *pair) for pair in itertools.zip_longest(gradients, self.gradients)]
        for what, got, wanted in pairs:
            if not _agree(got, wanted, self.rtol):
                findings.wrong.append(f"{label}: {what} {_shown(got)}, expected {_shown(wanted)}")
                return
        findings.right[sharded] += 1

    def _run(self, tensors: dict[int, Tensor]) -> tuple[list[Any], list[Tensor | None]]:
        """Results and gradients, as full plain tensors."""
        name = getattr(self.function, "__name__", "")
        written = name.endswith("_") and not name.endswith("__")
        given = [
            (x.detach().requires_grad_(x.requires_grad) if i in tensors else x)
            for i, x in enumerate(tensors.get(i, leaf) for i, leaf in enumerate(self.leaves))
        ]
        inputs = [given[i] for i in self.tensors]
        args, kwargs = pytree.tree_unflatten(given, self.structure)
        if written:
            args = (args[0].clone(), *args[1:])
        torch.manual_seed(3)
        results = [x for x in pytree.tree_leaves(self.function(*args, **kwargs)) if x is not None]
        wanted = [x for x in inputs if x.requires_grad]
        loss = None
        for x in results:
            if isinstance(x, Tensor) and x.requires_grad and x.numel():
                real = torch.view_as_real(x) if x.is_complex() else x
                term = (real * _cotangent(real)).sum()
                loss = term if loss is None else loss + term
        gradients: list[Tensor | None] = []
        if loss is not None and wanted:
            loss.backward()
            gradients = [_full(x.grad) for x in wanted]
        return [_full(x) for x in results], gradients

    def _described(self, placements: tuple[Placements, ...]) -> str:
        shapes = [list(self.leaves[i].shape) for i in self.tensors]
        operands = ", ".join(f"{shape} {list(each)}" for shape, each in zip(shapes, placements, strict=True))
        others = [x for i, x in enumerate(self.leaves) if i not in self.tensors]
        return f"({operands}; {others})"


def _cotangent(x: Tensor) -> Tensor:
    """Weights that depend on an element's place alone, placed as `x`, since values may differ in their last bits."""
    weights = (torch.arange(x.numel()) % 7 * 0.25 + 0.5).reshape(x.shape).to(x.dtype)
    return replicate_like(weights, x)


def _plain(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _placed(x: Tensor, mesh: DeviceMesh, placements: Placements) -> Tensor:
    dtensor: Any = distribute_tensor(x.detach(), mesh, placements, src_data_rank=None)
    return dtensor.detach().requires_grad_(x.requires_grad)


def _full(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return (x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()).resolve_conj().resolve_neg().clone()


def _agree(got: Any, wanted: Any, rtol: float) -> bool:
    if not isinstance(got, Tensor) or not isinstance(wanted, Tensor):
        if got is None or wanted is None:
            other = got if wanted is None else wanted
            return other is None or (isinstance(other, Tensor) and not other.any())
        return bool(got == wanted) or (got != got and wanted != wanted)
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if not rtol or not (got.is_floating_point() or got.is_complex()):
        return torch.equal(got, wanted) or bool(((got == wanted) | ((got != got) & (wanted != wanted))).all())
    scale = wanted.abs()[wanted.isfinite()].max().item() if wanted.isfinite().any() else 1.0
    if rtol > 1e-2:
        scale = max(scale, 0.1)  # a small gradient is a difference of terms of order one
    return torch.allclose(got, wanted, rtol, 1e-5 + (0.02 if rtol > 1e-2 else 2e-5) * scale, equal_nan=True)


def _shown(x: Any) -> str:
    return f"{list(x.shape)} {x.dtype} {x.flatten()[:4].tolist()}" if isinstance(x, Tensor) else repr(x)
