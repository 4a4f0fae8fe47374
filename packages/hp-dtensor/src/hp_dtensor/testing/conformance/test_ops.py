"""The `ops` namespace: values against NumPy, gradients against central differences of NumPy in float64.

A reference gets its operands as float64 (or integer) arrays, so that its central differences are the wanted gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hp_dtensor.platform.composition import PRIMITIVES, complete
from hp_dtensor.platform.interface import OP_NAMES, Platform
from hp_dtensor.testing.conformance.ranks import read, tensor
from hp_dtensor.testing.pytest_plugin import dtype_params


@dataclass(frozen=True)
class Case:
    """`ops.<name>` applied by `call(ops, *operands)`; integer and boolean operands get no gradient.

    Attributes:
        tolerance: relative to the largest expected number; float32 rounds to 6e-8, and these sums are short.
    """

    name: str
    label: str
    operands: tuple[Array, ...]
    call: Callable[..., Any]
    reference: Callable[..., Any]
    differentiable: bool = True
    tolerance: float = 2e-6

    @property
    def id(self) -> str:
        return f"{self.name} {self.label}".strip()


def numbers(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> Array:
    """Return numbers at least 0.005 apart, so that no maximum or sign depends on rounding."""
    count = int(np.prod(shape))
    order = np.random.default_rng(seed).permutation(count)
    return (low + (high - low) * (order + 0.37) / count).reshape(shape)


def cases() -> list[Case]:
    """Return at least one case of each operation; `test_every_operation_has_a_case` checks that."""
    groups = (_pointwise, _comparisons, _reductions, _products, _normalization, _shapes, _selection)
    return [case for group in groups for case in group()]


def _case(name: str, *operands: Any, reference: Callable[..., Any], label: str = "", **more: Any) -> Case:
    """Return the case of `ops.name(*operands, *arguments, **keywords)`."""
    arguments = more.pop("arguments", ())
    keywords = more.pop("keywords", {})
    arrays = tuple(np.asarray(operand) for operand in operands)
    if not label:
        label = " ".join([str(list(array.shape)) for array in arrays] + [repr(a) for a in arguments])

    def call(ops: Any, *tensors: Any) -> Any:
        return getattr(ops, name)(*tensors, *arguments, **keywords)

    return Case(name, label, arrays, call, reference, **more)


def _pointwise() -> list[Case]:
    x, y = numbers(2, 3, seed=1), numbers(2, 3, seed=2)
    row, positive = numbers(3, seed=3), numbers(2, 3, seed=4, low=0.5, high=3.0)
    unary: dict[str, Callable[[Array], Array]] = {
        "neg": np.negative,
        "exp": np.exp,
        "abs": np.abs,
        "sin": np.sin,
        "cos": np.cos,
        "tanh": np.tanh,
        "sigmoid": _sigmoid,
        "relu": lambda a: np.maximum(a, 0),
        "silu": lambda a: a * _sigmoid(a),
        "gelu": lambda a: a * 0.5 * (1 + _erf(a / np.sqrt(2))),
        "square": np.square,
        "clone": np.copy,
    }
    roots: dict[str, Callable[[Array], Array]] = {"log": np.log, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a)}
    binary: dict[str, Callable[[Array, Array], Array]] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "maximum": np.maximum,
        "minimum": np.minimum,
    }
    mask = np.array([[True, False, True], [False, False, True]])
    integers = np.array([-3, 0, 2])
    return [
        *(_case(name, x, reference=reference) for name, reference in unary.items()),
        *(_case(name, positive, reference=reference) for name, reference in roots.items()),
        *(_case(name, x, y, reference=reference) for name, reference in binary.items()),
        *(_case(name, x, row, reference=reference) for name, reference in binary.items()),
        *(
            _case(name, x, arguments=(0.3,), reference=lambda a, reference=reference: reference(a, 0.3))
            for name, reference in binary.items()
        ),
        _case("pow", positive, arguments=(3.0,), reference=lambda a: a**3),
        _case("pow", positive, row, reference=np.power),
        _case("pow", x, arguments=(2.0,), reference=lambda a: a**2.0),
        _case("div", integers, integers + 5, label="int64", reference=lambda a, b: a / b),
        _case("div", integers, arguments=(2,), label="int64 by 2", reference=lambda a: a / 2),
        _case("clamp", x, keywords={"min": -1.0, "max": 0.7}, reference=lambda a: np.clip(a, -1.0, 0.7)),
        _case("clamp", x, label="min", keywords={"min": 0.1}, reference=lambda a: np.maximum(a, 0.1)),
        _case(
            "clamp", np.array([-1, 0, 1, 2]), label="int64 by fractions", keywords={"min": -0.5, "max": 1.5},
            reference=lambda a: np.clip(a, -0.5, 1.5),
        ),
        _case("where", mask, x, y, reference=np.where),
        _case("where", mask, x, row, reference=np.where),
        _case("masked_fill", x, mask, arguments=(-7.0,), reference=lambda a, m: np.where(m, -7.0, a)),
        _case("zeros_like", x, reference=np.zeros_like, differentiable=False),
        _case("ones_like", x, reference=np.ones_like, differentiable=False),
    ]  # fmt: skip


def _comparisons() -> list[Case]:
    # Some elements are equal, some differ in either direction: each comparison has both answers.
    x = np.array([[1.0, 2.0, 3.0], [0.0, -1.0, 3.0]])
    y = np.array([[1.0, 3.0, 2.0], [0.0, 0.0, 4.0]])
    a, b = x > 1, y > 1
    # NaN is not finite either, although it compares unequal to both infinities.
    odd = np.array([1.0, np.inf, -np.inf, np.nan])
    compared: dict[str, Callable[[Array, Any], Array]] = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }
    found = [
        *(_case(name, x, y, reference=reference) for name, reference in compared.items()),
        *(
            _case(name, x, arguments=(1.0,), reference=lambda v, reference=reference: reference(v, 1.0))
            for name, reference in compared.items()
        ),
        *(
            _case(
                name,
                np.array([-1, 0, 1, 2]),
                label=f"int64 {bound}",
                arguments=(bound,),
                reference=lambda v, reference=reference, bound=bound: reference(v, bound),
            )
            for name, reference in compared.items()
            for bound in (-0.5, 1.5, 1)
        ),
        *(
            _case(name, a, label="bool 2", arguments=(2,), reference=lambda v, reference=reference: reference(v, 2))
            for name, reference in compared.items()
        ),
        _case("eq", np.array([1, 2, 3]), np.array([[1], [3]]), reference=np.equal, label="int64"),
        _case("logical_and", a, b, reference=np.logical_and),
        _case("logical_or", a, b, reference=np.logical_or),
        _case("logical_not", a, reference=np.logical_not),
        # 1 and 2 have no bit in common, and are both true.
        _case("logical_and", np.array([0, 1, 2]), np.array([1, 2, 2]), label="int64", reference=np.logical_and),
        _case("logical_or", np.array([0, 1, 2]), np.array([0, 2, 0]), label="int64", reference=np.logical_or),
        _case("logical_not", np.array([0, 1, 2]), label="int64", reference=np.logical_not),
        _case("isfinite", odd, reference=np.isfinite),
    ]
    return [Case(c.name, c.label, c.operands, c.call, c.reference, differentiable=False) for c in found]


def _reductions() -> list[Case]:
    x, cube = numbers(2, 3, seed=5), numbers(2, 3, 4, seed=6)
    count = np.arange(6).reshape(2, 3)
    many = {"bool": np.ones(3), "int8": np.full(2, 100), "uint8": np.full(2, 200), "int32": np.full(2, 2**31 - 1)}
    return [
        _case("sum", x, reference=np.sum),
        _case("sum", cube, arguments=(1,), reference=lambda a: a.sum(1)),
        _case("sum", cube, arguments=((0, 2),), reference=lambda a: a.sum((0, 2))),
        _case("sum", cube, arguments=(-1, True), reference=lambda a: a.sum(-1, keepdims=True)),
        # No dimensions mean all of them, as in torch. NumPy would return the operand.
        _case("sum", x, arguments=((),), reference=np.sum),
        _case("mean", x, arguments=((),), reference=np.mean),
        _case("sum", count, arguments=(0,), label="int64", reference=lambda a: a.sum(0)),
        *(
            # Integers and booleans are added up in int64. In their own dtypes these sums would overflow.
            _case(name, ones.astype(dtype), arguments=(0,), label=dtype, reference=reference)
            for name, reference in {
                "sum": lambda a: a.sum(0, np.int64),
                "cumsum": lambda a: a.cumsum(0, np.int64),
            }.items()
            for dtype, ones in many.items()
        ),
        _case("mean", x, reference=np.mean),
        _case("mean", cube, arguments=(-1, True), reference=lambda a: a.mean(-1, keepdims=True)),
        _case("amax", cube, arguments=(1,), reference=lambda a: a.max(1)),
        _case("amax", cube, arguments=(-1, True), reference=lambda a: a.max(-1, keepdims=True)),
        _case("amin", cube, arguments=(0,), reference=lambda a: a.min(0)),
        _case("amin", np.array([-(2**63), 5]), arguments=(0,), label="int64", reference=lambda a: a.min(0)),
        _case("argmax", cube, arguments=(1,), reference=lambda a: a.argmax(1), differentiable=False),
        _case("logsumexp", cube, arguments=(-1,), reference=lambda a: _logsumexp(a, -1)[..., 0]),
        _case("logsumexp", x, arguments=(0, True), reference=lambda a: _logsumexp(a, 0)),
        _case("cumsum", x, arguments=(1,), reference=lambda a: a.cumsum(1)),
        _case("cumsum", count, arguments=(0,), label="int64", reference=lambda a: a.cumsum(0)),
    ]


def _products() -> list[Case]:
    x, y = numbers(3, 4, seed=7), numbers(4, 2, seed=8)
    batch, right = numbers(2, 3, 4, seed=9), numbers(2, 4, 2, seed=10)
    weight, bias = numbers(5, 4, seed=11), numbers(5, seed=12)
    query, key, value = numbers(1, 4, 3, 2, seed=13), numbers(1, 4, 3, 2, seed=14), numbers(1, 4, 3, 2, seed=15)
    # Two key-value heads for four query heads: heads 0 and 1 share the first.
    few_keys, few_values = numbers(1, 2, 3, 2, seed=16), numbers(1, 2, 3, 2, seed=17)
    return [
        _case("matmul", x, y, reference=np.matmul),
        _case("matmul", batch, y, reference=np.matmul),
        _case("matmul", batch, right, reference=np.matmul),
        _case("bmm", batch, right, reference=np.matmul),
        _case("linear", x, weight, reference=lambda a, w: a @ w.T),
        _case("linear", batch, weight, bias, reference=lambda a, w, b: a @ w.T + b),
        _case("scaled_dot_product_attention", query, key, value, label="full", reference=_attention),
        _case(
            "scaled_dot_product_attention", query, key, value,
            label="causal", keywords={"is_causal": True}, reference=lambda q, k, v: _attention(q, k, v, causal=True),
        ),
        _case(
            "scaled_dot_product_attention", query, few_keys, few_values,
            label="causal, grouped", keywords={"is_causal": True, "enable_gqa": True},
            reference=lambda q, k, v: _attention(q, k.repeat(2, 1), v.repeat(2, 1), causal=True),
        ),
    ]  # fmt: skip


def _normalization() -> list[Case]:
    x, weight = numbers(2, 3, 4, seed=18), numbers(4, seed=19, low=0.5)
    # -100 is torch's default index to ignore. A mean divides by the rows that count, not by all.
    logits, targets, ignoring = numbers(3, 4, seed=20), np.array([1, 3, 0]), np.array([1, -100, 0])
    table, ids = numbers(5, 2, seed=21), np.array([[0, 4], [4, 2]])
    return [
        _case("softmax", x, arguments=(-1,), reference=lambda a: np.exp(a - _logsumexp(a, -1))),
        _case("softmax", x, arguments=(1,), reference=lambda a: np.exp(a - _logsumexp(a, 1))),
        _case("log_softmax", x, arguments=(-1,), reference=lambda a: a - _logsumexp(a, -1)),
        _case("rms_norm", x, weight, arguments=(1e-3,), reference=lambda a, w: _rms(a, 1e-3) * w),
        *(
            _case(
                "cross_entropy", logits, targets, label=reduction, keywords={"reduction": reduction},
                reference=lambda a, t, reduction=reduction: _cross_entropy(a, t, reduction),
            )
            for reduction in ("mean", "sum", "none")
        ),
        *(
            _case(
                "cross_entropy", logits, ignoring, label=f"{reduction}, one ignored", keywords={"reduction": reduction},
                reference=lambda a, t, reduction=reduction: _cross_entropy(a, t, reduction),
            )
            for reduction in ("mean", "sum", "none")
        ),
        _case("cross_entropy", logits, targets, label="default", reference=lambda a, t: _cross_entropy(a, t, "mean")),
        _case("embedding", ids, table, reference=lambda i, t: t[i]),
    ]  # fmt: skip


def _shapes() -> list[Case]:
    x, cube, thin = numbers(2, 3, seed=22), numbers(2, 3, 4, seed=23), numbers(2, 1, 3, seed=24)
    row, long = numbers(1, 3, seed=25), numbers(5, 2, seed=26)
    empty = np.zeros((0, 3))

    def listed(name: str) -> Callable[..., Any]:
        return lambda ops, a, b: getattr(ops, name)([a, b], 0)

    return [
        _case("reshape", cube, arguments=((4, 6),), reference=lambda a: a.reshape(4, 6)),
        _case("reshape", cube, arguments=((2, -1),), reference=lambda a: a.reshape(2, -1)),
        _case("transpose", cube, arguments=(0, 2), reference=lambda a: a.swapaxes(0, 2)),
        _case("transpose", cube, arguments=(-1, -2), reference=lambda a: a.swapaxes(-1, -2)),
        _case("permute", cube, arguments=((2, 0, 1),), reference=lambda a: a.transpose(2, 0, 1)),
        _case("unsqueeze", x, arguments=(1,), reference=lambda a: a[:, None]),
        _case("unsqueeze", x, arguments=(-1,), reference=lambda a: a[..., None]),
        _case("squeeze", thin, arguments=(1,), reference=lambda a: a[:, 0]),
        _case("expand", row, arguments=((4, 3),), reference=lambda a: np.broadcast_to(a, (4, 3))),
        _case("expand", row, arguments=((2, -1, 3),), reference=lambda a: np.broadcast_to(a, (2, 1, 3))),
        Case("cat", "", (x, row), listed("cat"), lambda a, b: np.concatenate([a, b])),
        Case("cat", "with an empty one", (empty, x), listed("cat"), lambda a, b: np.concatenate([a, b])),
        Case(
            "cat",
            "of empty ones",
            (np.zeros((0, 1)), np.zeros((0, 2))),
            lambda ops, a, b: ops.cat([a, b], 1),
            lambda a, b: np.concatenate([a, b], 1),
        ),
        Case("stack", "", (x, -x), listed("stack"), lambda a, b: np.stack([a, b])),
        _case("split", long, arguments=([2, 0, 3], 0), reference=lambda a: np.split(a, [2, 2])),
        _case("split", x, arguments=([1, 2], 1), reference=lambda a: np.split(a, [1], 1)),
        _case("chunk", cube, arguments=(2, -1), reference=lambda a: np.split(a, 2, -1)),
        _case("chunk", long, arguments=(2, 0), reference=lambda a: [a[:3], a[3:]]),
        # Chunks of ceil(5 / 4) = 2 rows, so there are three and not four, as in torch.
        _case("chunk", long, arguments=(4, 0), label="fewer", reference=lambda a: [a[:2], a[2:4], a[4:]]),
        _case("chunk", np.zeros((0, 2)), arguments=(3, 0), reference=lambda a: [a, a, a]),
        _case("narrow", long, arguments=(0, 1, 3), reference=lambda a: a[1:4]),
        _case("narrow", cube, arguments=(-1, 2, 0), label="to nothing", reference=lambda a: a[..., 2:2]),
        _case("repeat_interleave", x, arguments=(2, 1), reference=lambda a: a.repeat(2, 1)),
    ]


def _selection() -> list[Case]:
    x, cube = numbers(4, 3, seed=27), numbers(2, 3, 4, seed=28)
    # A row that is selected twice gets the sum of both gradients.
    index, picked = np.array([3, 0, 3]), np.array([[0, 2], [1, 1], [2, 0], [0, 1]])
    rows, values = np.array([2, 0]), numbers(2, 3, seed=29)
    nothing = np.zeros((0,), np.int64)
    ids = np.array([1, 4, 1, 0])
    return [
        Case("index_select", "dim 0", (x, index), lambda o, a, i: o.index_select(a, 0, i), lambda a, i: a[i]),
        Case("index_select", "dim 2", (cube, index), lambda o, a, i: o.index_select(a, 2, i), lambda a, i: a[:, :, i]),
        Case("index_select", "nothing", (x, nothing), lambda o, a, i: o.index_select(a, 0, i), lambda a, i: a[i]),
        Case(
            "gather", "", (x, picked), lambda o, a, i: o.gather(a, 1, i), lambda a, i: np.take_along_axis(a, i, 1)
        ),
        Case("index_put", "", (x, rows, values), lambda o, a, i, v: o.index_put(a, i, v), _index_put),
        _case("topk", x, arguments=(2, 1), reference=lambda a: [-np.sort(-a, 1)[:, :2], np.argsort(-a, 1)[:, :2]]),
        _case("argsort", x, arguments=(1,), reference=lambda a: a.argsort(1), differentiable=False),
        _case(
            "argsort", ids, arguments=(0,), keywords={"stable": True, "descending": False},
            reference=lambda a: a.argsort(kind="stable"), differentiable=False,
        ),
        _case(
            "argsort", ids, arguments=(0,), label="descending, stable", keywords={"stable": True, "descending": True},
            reference=lambda a: (-a).argsort(kind="stable"), differentiable=False,
        ),
        *(
            # Their negatives overflow.
            _case(
                "argsort", numbers, arguments=(0,), label=f"descending {numbers.dtype}",
                keywords={"stable": True, "descending": True},
                reference=lambda a: (-a.astype(float)).argsort(kind="stable"), differentiable=False,
            )
            for numbers in (np.array([-(2**63), 5, -7]), np.array([0, 200, 3], np.uint8))
        ),
        _case(
            "argsort", x, arguments=(0,), label="descending", keywords={"descending": True},
            reference=lambda a: (-a).argsort(0), differentiable=False,
        ),
        _case("bincount", ids, arguments=(6,), reference=lambda a: np.bincount(a, minlength=6), differentiable=False),
        _case("bincount", nothing, arguments=(2,), reference=lambda a: np.zeros(2, int), differentiable=False),
        _case("one_hot", picked, arguments=(3,), reference=lambda a: np.eye(3, dtype=int)[a], differentiable=False),
    ]  # fmt: skip


def creation_cases(platform: Platform) -> dict[str, tuple[Any, Array]]:
    """Return label -> (result, expected) for operations that make tensors from nothing, and for casts."""
    ops, float32, int64 = platform.ops, platform.dtype("float32"), platform.dtype("int64")
    x = platform.from_numpy(np.array([1.7, -2.2, 0.0], np.float32))
    return {
        "zeros": (ops.zeros((2, 3), float32), np.zeros((2, 3), np.float32)),
        "ones": (ops.ones((2,), int64), np.ones(2, np.int64)),
        "full": (ops.full((2, 2), 3.5, float32), np.full((2, 2), 3.5, np.float32)),
        "full int": (ops.full((), 3, int64), np.array(3, np.int64)),
        "arange": (ops.arange(4, int64), np.arange(4)),
        "arange float": (ops.arange(3, float32), np.arange(3, dtype=np.float32)),
        "arange nothing": (ops.arange(0, int64), np.arange(0)),
        "cast int": (ops.cast(x, int64), np.array([1, -2, 0])),
        "cast bool": (ops.cast(x, platform.dtype("bool")), np.array([True, True, False])),
    }


def _sigmoid(a: Array) -> Array:
    return 1 / (1 + np.exp(-a))


def _erf(a: Array) -> Array:
    """Return the error function by its Taylor series, which for |a| < 2 has converged after 40 terms."""
    term, total = a.copy(), a.copy()
    for n in range(1, 40):
        term = term * -(a**2) / n
        total = total + term / (2 * n + 1)
    return total * 2 / np.sqrt(np.pi)


def _logsumexp(a: Array, axis: int) -> Array:
    return np.log(np.exp(a).sum(axis, keepdims=True))


def _rms(a: Array, eps: float) -> Array:
    return a / np.sqrt((a**2).mean(-1, keepdims=True) + eps)


def _cross_entropy(logits: Array, targets: Array, reduction: str) -> Array:
    counts = targets != -100
    picked = np.take_along_axis(logits, np.where(counts, targets, 0)[:, None], 1)
    losses = np.where(counts, (_logsumexp(logits, -1) - picked)[:, 0], 0)
    total = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counts.sum()}
    return np.asarray(total[reduction])


def _attention(query: Array, key: Array, value: Array, causal: bool = False) -> Array:
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    return np.exp(scores - _logsumexp(scores, -1)) @ value


def _index_put(a: Array, rows: Array, values: Array) -> Array:
    result = a.copy()
    result[rows] = values
    return result


CASES = cases()
STEP = 1e-4  # of the central differences: their error is about 1e-8 of a third derivative
# Relative to the largest gradient. The error is that of float32 in the framework; the differences are in float64.
GRADIENT_TOLERANCE = 1e-5


def test_every_operation_has_a_case(hp_platform: Platform) -> None:
    made = {label.split()[0] for label in creation_cases(hp_platform)}
    assert {case.name for case in CASES} | made == set(OP_NAMES)


def case_params(cases: list[Case]) -> list[Any]:
    """Return cases as parameters, skipped if the platform lacks a dtype of the operands."""
    # Operands of float64 become float32 on the platform.
    dtypes = [{array.dtype.name for array in case.operands} - {"float64"} for case in cases]
    return [
        pytest.param(case, id=case.id, marks=pytest.mark.dtypes(*sorted(names)))
        for case, names in zip(cases, dtypes, strict=True)
    ]


@pytest.mark.parametrize("case", case_params(CASES))
def test_values_and_gradients(hp_platform: Platform, case: Case) -> None:
    _check(hp_platform, case, hp_platform.ops)


COMPOSED = [case for case in CASES if case.name not in PRIMITIVES]


@pytest.mark.parametrize("case", case_params(COMPOSED))
def test_compositions(hp_platform: Platform, case: Case) -> None:
    """Operations composed of the platform's primitives, whether or not the platform uses the compositions."""
    _check(hp_platform, case, _composed(hp_platform))


def _composed(platform: Platform) -> SimpleNamespace:
    return SimpleNamespace(**complete(platform, {name: getattr(platform.ops, name) for name in PRIMITIVES}))


@pytest.fixture(params=["own", "composed"])
def either_ops(hp_platform: Platform, request: pytest.FixtureRequest) -> Any:
    """The platform's operations, and those composed of its primitives."""
    return hp_platform.ops if request.param == "own" else _composed(hp_platform)


@pytest.mark.parametrize(("dtype", "rounding"), dtype_params(("float32", 2e-5), ("float16", 1e-3), ("bfloat16", 8e-3)))
def test_small_results_of_sigmoid_and_silu(hp_platform: Platform, either_ops: Any, dtype: str, rounding: float) -> None:
    """Small results are as precise as large ones."""
    x = np.array([-30.0, -18.0, -12.0, -9.0, -4.0, 0.0, 9.0])
    x = x[3:] if dtype == "float16" else x  # its smallest normal number is 6e-5
    for name, expected in (("sigmoid", _sigmoid(x)), ("silu", x * _sigmoid(x))):
        result = getattr(either_ops, name)(tensor(hp_platform, x, dtype))
        assert hp_platform.dtype_name(result.dtype) == dtype
        np.testing.assert_allclose(read(hp_platform, result).astype(float), expected, rtol=rounding, err_msg=name)


@pytest.mark.parametrize("dtype", dtype_params("float16", "bfloat16"))
def test_compositions_add_up_half_precision_in_float32(hp_platform: Platform, dtype: str) -> None:
    """70000 is beyond the range of float16, and a sum of ones in bfloat16 stops at 256."""
    count, rounding = 70_000, {"float16": 1e-3, "bfloat16": 8e-3}[dtype]
    ops = _composed(hp_platform)
    x, pairs = tensor(hp_platform, np.ones(count), dtype), tensor(hp_platform, np.ones((count, 2)), dtype)
    zeros = tensor(hp_platform, np.zeros(count), "int64")
    heads = tensor(hp_platform, np.full((1, 1, 1, 4), 150.0), dtype)
    found = {
        "mean": (ops.mean(x), 1.0),
        "logsumexp": (ops.logsumexp(x, 0), 1 + np.log(count)),
        "softmax": (ops.softmax(x, 0), 1 / count),
        "log_softmax": (ops.log_softmax(x, 0), -np.log(count)),
        "cross_entropy": (ops.cross_entropy(pairs, zeros), np.log(2)),
        "scaled_dot_product_attention": (ops.scaled_dot_product_attention(heads, heads, heads), 150.0),
    }
    for name, (result, expected) in found.items():
        assert hp_platform.dtype_name(result.dtype) == dtype, name
        # 1 / 70000 is below the normal numbers of float16, whose distance there is 6e-8.
        np.testing.assert_allclose(read(hp_platform, result).astype(float), expected, rtol=rounding, atol=6e-8)


def test_the_composition_of_relu_keeps_nan(hp_platform: Platform) -> None:
    x = tensor(hp_platform, [np.nan, -1.0, 2.0])
    np.testing.assert_array_equal(read(hp_platform, _composed(hp_platform).relu(x)), [np.nan, 0, 2])


def _check(hp_platform: Platform, case: Case, ops: Any) -> None:
    operands = [_operand(hp_platform, case, array) for array in case.operands]
    outputs = _listed(case.call(ops, *operands))
    expected = _listed(case.reference(*case.operands))
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected, strict=True):
        _assert_close(hp_platform, output, np.asarray(wanted), case.tolerance)
    if case.differentiable and any(hp_platform.requires_grad(operand) for operand in operands):
        _check_gradients(hp_platform, case, operands, outputs)


@pytest.mark.parametrize("name", ["amax", "amin", "maximum", "minimum"])
def test_gradients_of_equal_maxima_add_up(hp_platform: Platform, name: str) -> None:
    """Equal elements share a gradient in any proportion, but none of it is lost or doubled."""
    x = tensor(hp_platform, [[1.0, 1.0, 1.0], [2.0, 0.0, 2.0]], requires_grad=True)
    y = tensor(hp_platform, [[1.0, 1.0, 1.0], [2.0, 0.0, 2.0]], requires_grad=True)
    if name in ("maximum", "minimum"):
        hp_platform.backward(getattr(hp_platform.ops, name)(x, y), tensor(hp_platform, np.full((2, 3), 6.0)))
        total = read(hp_platform, hp_platform.get_grad(x)) + read(hp_platform, hp_platform.get_grad(y))
        np.testing.assert_allclose(total, np.full((2, 3), 6.0))
    else:
        hp_platform.backward(getattr(hp_platform.ops, name)(x, 1), tensor(hp_platform, [6.0, 12.0]))
        np.testing.assert_allclose(read(hp_platform, hp_platform.get_grad(x)).sum(1), [6, 12])


@pytest.mark.parametrize("name", ["exp", "log", "sqrt", "sin", "cos", "tanh", "sigmoid", "gelu"])
def test_functions_of_integers_are_floats_or_refused(hp_platform: Platform, name: str) -> None:
    """Not rounded to integers. A framework may lack a kernel, and raise any exception of its own."""
    x = tensor(hp_platform, [1, 2], "int64")
    try:
        result = getattr(hp_platform.ops, name)(x)
        values = read(hp_platform, result)
    except Exception:
        pytest.skip(f"{hp_platform.name} refuses {name} of integers")
    assert hp_platform.dtype_name(result.dtype) == "float32"
    expected = getattr(hp_platform.ops, name)(tensor(hp_platform, [1.0, 2.0]))
    np.testing.assert_allclose(values, read(hp_platform, expected), rtol=1e-6)


@pytest.mark.parametrize("dtype", dtype_params("float64", "float16", "bfloat16"))
def test_operations_keep_the_dtype_of_floats(hp_platform: Platform, dtype: str) -> None:
    """A number among the operands does not change it either."""
    wrong = []
    for case in CASES:
        operands = [
            tensor(hp_platform, _representable(array, dtype), dtype)
            if array.dtype == np.float64
            else tensor(hp_platform, array, array.dtype.name)
            for array in case.operands
        ]
        if not any(array.dtype == np.float64 for array in case.operands):
            continue
        for output in _listed(case.call(hp_platform.ops, *operands)):
            if hp_platform.is_floating(output.dtype) and hp_platform.dtype_name(output.dtype) != dtype:
                wrong.append(f"{case.id}: {hp_platform.dtype_name(output.dtype)}")
    assert wrong == []


PROMOTED = [
    ("int64", 0.5, "float32"),
    ("bool", 2, "int64"),
    ("int32", 2, "int32"),
    ("float16", 0.5, "float16"),
    ("int64", "float32", "float32"),
    ("float16", "int64", "float16"),
    ("float16", "float32", "float32"),
    ("float32", "float64", "float64"),
    ("int32", "int64", "int64"),
    ("bool", "float32", "float32"),
    ("uint8", "int8", "int16"),
]


@pytest.mark.parametrize("name", ["add", "mul"])
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [pytest.param(*case, marks=pytest.mark.dtypes(*(x for x in case if isinstance(x, str)))) for case in PROMOTED],
)
def test_results_of_two_dtypes(
    hp_platform: Platform, name: str, first: str, second: str | float, expected: str
) -> None:
    """As torch promotes them: the wider of two, and numbers do not widen."""
    x = tensor(hp_platform, [1, 1], first)
    y = tensor(hp_platform, [1, 1], second) if isinstance(second, str) else second
    for left, right in ((x, y), (y, x)):
        result = getattr(hp_platform.ops, name)(left, right)
        assert hp_platform.dtype_name(result.dtype) == expected


@pytest.mark.dtypes("float64")
def test_a_tensor_without_dimensions_does_not_widen(hp_platform: Platform) -> None:
    x, scale = tensor(hp_platform, [1.0, 2.0], "float32"), tensor(hp_platform, 2.0, "float64")
    assert hp_platform.dtype_name(hp_platform.ops.mul(x, scale).dtype) == "float32"


@pytest.mark.parametrize("second", dtype_params("int64", "float64"))
def test_tensors_of_two_dtypes_are_joined(hp_platform: Platform, second: str) -> None:
    """Or refused, by any exception of the framework."""
    both = [tensor(hp_platform, [1, 2], second), tensor(hp_platform, [0.5])]
    try:
        joined = hp_platform.ops.cat(both, 0)
    except Exception:
        pytest.skip(f"{hp_platform.name} refuses to join tensors of two dtypes")
    assert hp_platform.dtype_name(joined.dtype) == ("float32" if second == "int64" else "float64")
    np.testing.assert_array_equal(read(hp_platform, joined), [1, 2, 0.5])


def test_creation_and_casts(hp_platform: Platform) -> None:
    for label, (result, expected) in creation_cases(hp_platform).items():
        assert hp_platform.dtype_name(result.dtype) == expected.dtype.name, label
        np.testing.assert_array_equal(read(hp_platform, result), expected, err_msg=label)


@pytest.mark.dtypes("float16")
def test_casts_to_float16_round(hp_platform: Platform) -> None:
    cast = hp_platform.ops.cast(tensor(hp_platform, [1.7, -2.2, 0.0]), hp_platform.dtype("float16"))
    assert hp_platform.dtype_name(cast.dtype) == "float16"
    np.testing.assert_array_equal(read(hp_platform, cast), np.array([1.7, -2.2, 0.0], np.float16))


@pytest.mark.parametrize("low", dtype_params("float16", "bfloat16"))
def test_casts_between_floats_keep_gradients(hp_platform: Platform, low: str) -> None:
    x = tensor(hp_platform, [1.0, -2.0], requires_grad=True)
    y = hp_platform.ops.cast(x, hp_platform.dtype(low))
    assert hp_platform.dtype_name(y.dtype) == low
    hp_platform.backward(y, tensor(hp_platform, [3.0, 4.0], low))
    gradient = hp_platform.get_grad(x)
    assert hp_platform.dtype_name(gradient.dtype) == "float32"
    np.testing.assert_array_equal(read(hp_platform, gradient), [3, 4])


def test_plain_tensors_are_indexed(hp_platform: Platform) -> None:
    """By `x[...]`, as users and the samples of rules do. `getitem` is not one of the names in `ops`."""
    array = numbers(4, 3, 2)
    x = tensor(hp_platform, array)
    for index in (1, slice(1, 3), (slice(None), 2), (..., None, slice(1, None)), (slice(0, 4, 2), None)):
        np.testing.assert_array_equal(read(hp_platform, x[index]), array.astype(np.float32)[index])


def test_operands_stay_as_they_were(hp_platform: Platform) -> None:
    x = tensor(hp_platform, [[1.0, 2.0], [3.0, 4.0]])
    rows, values = tensor(hp_platform, [1], "int64"), tensor(hp_platform, [[9.0, 9.0]])
    hp_platform.ops.index_put(x, rows, values)
    hp_platform.copy_(hp_platform.ops.clone(x), tensor(hp_platform, np.zeros((2, 2))))
    np.testing.assert_array_equal(read(hp_platform, x), [[1, 2], [3, 4]])


def _representable(array: Array, dtype: str) -> Array:
    """Return the numbers rounded to eight bits, which every dtype of floats has."""
    return array if dtype == "float64" else np.round(array * 16) / 16


def _operand(platform: Platform, case: Case, array: Array) -> Any:
    if array.dtype != np.float64:
        return tensor(platform, array, array.dtype.name)
    return tensor(platform, array, requires_grad=case.differentiable)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _assert_close(platform: Platform, output: Any, expected: Array, tolerance: float) -> None:
    found = read(platform, output)
    assert found.shape == expected.shape
    if expected.dtype != np.float64:
        assert platform.dtype_name(output.dtype) == expected.dtype.name
        np.testing.assert_array_equal(found, expected)
        return
    assert platform.dtype_name(output.dtype) == "float32"
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max(initial=0)))


def _check_gradients(platform: Platform, case: Case, operands: list[Any], outputs: list[Any]) -> None:
    floating = [output for output in outputs if platform.is_floating(output.dtype)]
    # The weights of all elements differ, so that a gradient at the wrong position is noticed.
    weights = [np.cos(1.0 + np.arange(int(np.prod(o.shape)))).reshape(tuple(o.shape)) for o in floating]
    leaves = [operand for operand in operands if platform.requires_grad(operand)]
    gradients = platform.grad(floating, leaves, [tensor(platform, weight) for weight in weights])
    expected = [
        _central_differences(case, position, weights)
        for position, array in enumerate(case.operands)
        if array.dtype == np.float64
    ]
    for gradient, wanted in zip(gradients, expected, strict=True):
        scale = max(1.0, np.abs(wanted).max(initial=0))
        np.testing.assert_allclose(read(platform, gradient), wanted, rtol=0, atol=GRADIENT_TOLERANCE * scale)


def _central_differences(case: Case, position: int, weights: list[Array]) -> Array:
    """Return the gradient of the weighted sum of all floating outputs with respect to one operand."""
    result = np.zeros(case.operands[position].shape)
    # Two calls of the reference for each element, which small operands make affordable.
    for where in np.ndindex(result.shape):
        sums = []
        for step in (STEP, -STEP):
            operands = [array.copy() for array in case.operands]
            operands[position][where] += step
            outputs = [np.asarray(output) for output in _listed(case.reference(*operands))]
            floating = [output for output in outputs if output.dtype == np.float64]
            sums.append(sum(float((o * w).sum()) for o, w in zip(floating, weights, strict=True)))
        result[where] = (sums[0] - sums[1]) / (2 * STEP)
    return result


Array = np.ndarray[Any, Any]
