"""Operations in low precision and on nothing; float32 against NumPy is the conformance suite's."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from hp_dtensor.platform.attention import BlockScores
from hp_dtensor.testing.conformance.test_ops import cases

CASES = cases()
# Two units in the last place of the largest number: each of a few operations rounds once.
TOLERANCES = {"float16": 2e-3, "bfloat16": 1.6e-2}
# Sums whose terms the dtype rounds before they are added.
LOOSER = {
    "div": 4,
    "scaled_dot_product_attention": 2,
    "rms_norm": 2,
    "cumsum": 2,
    "gelu": 2,
    "silu": 2,
    "pow": 2,
    "matmul": 2,
}


def _operands(platform, case, dtype):
    operands = []
    for array in case.operands:
        if array.dtype != np.float64:
            operands.append(platform.from_numpy(array.copy()))
            continue
        x = platform.ops.cast(platform.from_numpy(array.astype(np.float32)), platform.dtype(dtype))
        platform.set_requires_grad(x, case.differentiable)
        operands.append(x)
    return operands


def _numbers(platform, x):
    return platform.to_numpy(platform.ops.cast(x, ms.float32))


def _run(platform, case, dtype):
    """Outputs and gradients as float32 arrays, from operands that the low dtype has rounded."""
    operands = _operands(platform, case, dtype)
    result = case.call(platform.ops, *operands)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    leaves = [x for x in operands if platform.requires_grad(x)]
    floating = [y for y in outputs if platform.requires_grad(y)]
    if floating:
        seeds = [platform.ops.ones(y.shape, y.dtype) for y in floating]
        gradients = platform.grad(floating, leaves, seeds)
        assert all(g.dtype == x.dtype for g, x in zip(gradients, leaves, strict=True))
    else:
        gradients = []
    return outputs, [_numbers(platform, x) for x in (*floating, *gradients)]


def _rounded(platform, case, dtype):
    """The case with operands that the dtype can hold, so that only the operation rounds."""
    arrays = []
    for array in case.operands:
        if array.dtype == np.float64:
            low = platform.ops.cast(platform.from_numpy(array.astype(np.float32)), platform.dtype(dtype))
            array = _numbers(platform, low).astype(np.float64)
        arrays.append(array)
    return type(case)(case.name, case.label, tuple(arrays), case.call, case.reference, case.differentiable)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_low_precision_is_float32_rounded(platform, case, dtype):
    case = _rounded(platform, case, dtype)
    _, expected = _run(platform, case, "float32")
    outputs, found = _run(platform, case, dtype)
    # Only floating operands have the low precision: integers with a fractional bound give float32.
    is_low = any(array.dtype == np.float64 for array in case.operands)
    for y in outputs:
        is_as_given = not platform.is_floating(y.dtype) or platform.dtype_name(y.dtype) == dtype
        assert is_as_given or not is_low or not case.differentiable
    for got, wanted in zip(found, expected, strict=True):
        scale = max(1.0, np.abs(wanted).max(initial=0)) * LOOSER.get(case.name, 1)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCES[dtype] * scale)


# Nothing -------------------------------------------------------------------------------------------------

EMPTY = {
    "add": (lambda o, x, y: o.add(x, y), [(2, 0, 3), (2, 1, 3)], (2, 0, 3)),
    "mul by a row": (lambda o, x, y: o.mul(x, y), [(0, 3), (3,)], (0, 3)),
    "div": (lambda o, x, y: o.div(x, y), [(3, 1), (1, 0)], (3, 0)),
    "maximum": (lambda o, x, y: o.maximum(x, y), [(0, 3), (1, 3)], (0, 3)),
    "exp": (lambda o, x: o.exp(x), [(0, 2)], (0, 2)),
    "clamp": (lambda o, x: o.clamp(x, 0.0, 1.0), [(0, 2)], (0, 2)),
    "clone": (lambda o, x: o.clone(x), [(2, 0)], (2, 0)),
    "sum of all": (lambda o, x: o.sum(x), [(0, 3)], ()),
    "sum over nothing": (lambda o, x: o.sum(x, 0), [(0, 3)], (3,)),
    "sum, keepdim": (lambda o, x: o.sum(x, (0, 1), True), [(0, 3)], (1, 1)),
    "sum of nothing": (lambda o, x: o.sum(x, 1), [(0, 3)], (0,)),
    "mean of nothing": (lambda o, x: o.mean(x, 1), [(0, 3)], (0,)),
    "cumsum": (lambda o, x: o.cumsum(x, 0), [(0, 3)], (0, 3)),
    "logsumexp": (lambda o, x: o.logsumexp(x, 1), [(0, 3)], (0,)),
    "softmax": (lambda o, x: o.softmax(x, -1), [(0, 3)], (0, 3)),
    "amax": (lambda o, x: o.amax(x, 1), [(0, 3)], (0,)),
    "matmul of no rows": (lambda o, x, y: o.matmul(x, y), [(0, 3), (3, 2)], (0, 2)),
    "matmul over nothing": (lambda o, x, y: o.matmul(x, y), [(2, 0), (0, 3)], (2, 3)),
    "matrix by vector": (lambda o, x, y: o.matmul(x, y), [(3, 0), (0,)], (3,)),
    "batches": (lambda o, x, y: o.bmm(x, y), [(0, 2, 3), (0, 3, 4)], (0, 2, 4)),
    "linear": (lambda o, x, w, b: o.linear(x, w, b), [(0, 3), (2, 3), (2,)], (0, 2)),
    "linear to nothing": (lambda o, x, w: o.linear(x, w), [(2, 3), (0, 3)], (2, 0)),
    "linear over nothing": (lambda o, x, w, b: o.linear(x, w, b), [(4, 0), (2, 0), (2,)], (4, 2)),
    "attention": (
        lambda o, q, k, v: o.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [(0, 4, 3, 2), (0, 2, 3, 2), (0, 2, 3, 2)],
        (0, 4, 3, 2),
    ),
    "rms_norm": (lambda o, x, w: o.rms_norm(x, w, 1e-5), [(0, 3), (3,)], (0, 3)),
    "reshape": (lambda o, x: o.reshape(x, (3, 0, 2)), [(0, 3)], (3, 0, 2)),
    "expand": (lambda o, x: o.expand(x, (4, 0, 3)), [(0, 1)], (4, 0, 3)),
    "expand to nothing": (lambda o, x: o.expand(x, (0, 3)), [(1, 3)], (0, 3)),
    "repeat_interleave": (lambda o, x: o.repeat_interleave(x, 2, 1), [(0, 3)], (0, 6)),
    "cat": (lambda o, x, y: o.cat([x, y], 1), [(0, 1), (0, 2)], (0, 3)),
    "cat with some": (lambda o, x, y: o.cat([x, y], 0), [(0, 2), (3, 2)], (3, 2)),
    "stack": (lambda o, x, y: o.stack([x, y], 1), [(0, 2), (0, 2)], (0, 2, 2)),
    "narrow": (lambda o, x: o.narrow(x, 1, 1, 0), [(2, 3)], (2, 0)),
    "index_select": (lambda o, x: o.index_select(x, 0, _ids()), [(3, 2)], (0, 2)),
    "gather": (lambda o, x: o.gather(x, 1, _ids(2, 0)), [(2, 3)], (2, 0)),
    "embedding": (lambda o, w: o.embedding(_ids(0, 4), w), [(5, 2)], (0, 4, 2)),
    "index_put": (lambda o, x, v: o.index_put(x, _ids(), v), [(3, 2), (0, 2)], (3, 2)),
    "cross_entropy": (lambda o, x: o.cross_entropy(x, _ids(), "sum"), [(0, 4)], ()),
    "cross_entropy of each": (lambda o, x: o.cross_entropy(x, _ids(), "none"), [(0, 4)], (0,)),
    "topk": (lambda o, x: o.topk(x, 2, 1)[0], [(0, 3)], (0, 2)),
    "transpose": (lambda o, x: o.transpose(x, 0, 1), [(0, 3)], (3, 0)),
    "where": (lambda o, x, y: o.where(o.gt(x, 0.0), x, y), [(0, 3), (1, 3)], (0, 3)),
    "masked_fill": (lambda o, x: o.masked_fill(x, o.gt(x, 0.0), 1.0), [(0, 3)], (0, 3)),
}


def _long(*values):
    return Tensor(np.array(values, np.int64))


def _ids(*shape):
    return Tensor.from_numpy(np.zeros(shape or (0,), np.int64))


@pytest.mark.parametrize("name", EMPTY)
def test_operations_on_nothing(platform, name):
    function, shapes, expected = EMPTY[name]
    leaves = [platform.from_numpy(np.ones(shape, np.float32)) for shape in shapes]
    for x in leaves:
        platform.set_requires_grad(x, True)
    result = function(platform.ops, *leaves)
    assert tuple(result.shape) == expected
    values = platform.to_numpy(result)
    if name == "cat with some" or name == "index_put" or name == "linear over nothing":
        assert (values == 1).all()
    else:
        assert (values == 0).all()
    gradients = platform.grad([result], leaves, [platform.ops.ones(expected, ms.float32)])
    for x, gradient in zip(leaves, gradients, strict=True):
        assert tuple(gradient.shape) == tuple(x.shape)
    sums = [float(platform.to_numpy(g).sum()) for g in gradients]
    count = {"cat with some": [0, 6], "index_put": [6, 0], "linear over nothing": [0, 0, 8]}
    assert sums == count.get(name, [0] * len(leaves))


def test_indices_into_nothing_are_refused(platform):
    with pytest.raises(IndexError, match=r"shape \[0, 2\], which holds no element"):
        platform.ops.embedding(Tensor(np.array([0])), platform.zeros((0, 2), ms.float32))


# Half precision -------------------------------------------------------------------------------------------

SQUARED = {
    "layer_norm": (lambda run, x: run.layer_norm(x, (64,)), lambda a: _standardized(a, -1)),
    "group_norm": (lambda run, x: run.group_norm(x, 4), lambda a: _standardized(a.reshape(4, 4, 16), -1)),
    "instance_norm": (
        lambda run, x: run.instance_norm(run.reshape(x, (4, 4, 16))),
        lambda a: _standardized(a.reshape(4, 4, 16), -1),
    ),
    "batch_norm": (lambda run, x: run.batch_norm(x, None, None, None, None, True), lambda a: _standardized(a, 0)),
    "std": (lambda run, x: run.std(x, -1), lambda a: a.std(-1, ddof=1)),
    "norm": (lambda run, x: run.norm(x, 2.0, -1), lambda a: np.linalg.norm(a, axis=-1)),
}


def _standardized(a, dim):
    return (a - a.mean(dim, keepdims=True)) / np.sqrt(a.var(dim, keepdims=True) + 1e-5)


@pytest.mark.parametrize("name", SQUARED)
def test_squares_of_half_precision_do_not_overflow(platform, name):
    call, expected = SQUARED[name]
    # Squares above 65504, the largest float16.
    values = (np.random.default_rng(0).standard_normal((4, 64)) * 500).astype(np.float16)
    result = call(platform.operations, Tensor(values))
    assert result.dtype == ms.float16
    wanted = expected(values.astype(np.float64))
    # One rounding to float16, half a unit in the last place.
    np.testing.assert_allclose(result.asnumpy().reshape(wanted.shape), wanted, rtol=2**-10, atol=2**-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_of_repeated_rows_do_not_stop(platform, dtype):
    index = platform.from_numpy(np.array([[1, 2], [1, 0]] * 1500))
    x = platform.ops.cast(platform.from_numpy(np.ones((4, 2), np.float32)), platform.dtype(dtype))
    platform.set_requires_grad(x, True)
    rows = platform.ops.embedding(index, x)
    # Backward uses the rows that forward has read.
    platform.to_numpy(index)[:] = 3
    (gradient,) = platform.grad([rows], [x], [platform.ops.ones(rows.shape, platform.dtype(dtype))])
    sums = platform.to_numpy(platform.ops.cast(gradient, ms.float32))
    # In half precision a sum of ones stays at 256 or 2048.
    np.testing.assert_allclose(sums, [[1500] * 2, [3000] * 2, [1500] * 2, [0] * 2], rtol=TOLERANCES.get(dtype, 0))


def test_rows_are_gathered_along_any_dimension_and_from_the_end(platform):
    x = platform.from_numpy(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    platform.set_requires_grad(x, True)
    picked = platform.ops.index_select(x, 1, platform.from_numpy(np.array([2, -1, 0])))
    np.testing.assert_array_equal(platform.to_numpy(picked), platform.to_numpy(x)[:, [2, 2, 0]])
    (gradient,) = platform.grad([picked], [x], [platform.from_numpy(np.arange(24, dtype=np.float32).reshape(2, 3, 4))])
    wanted = np.zeros((2, 3, 4), np.float32)
    np.add.at(wanted, (slice(None), [2, 2, 0]), np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    np.testing.assert_array_equal(platform.to_numpy(gradient), wanted)
    with pytest.raises(IndexError, match="an index is outside dimension 1 of 3 elements"):
        platform.ops.index_select(x, 1, platform.from_numpy(np.array([3])))


@pytest.mark.filterwarnings("error")
def test_infinite_gradients_and_casts_out_of_range_are_not_warned_of(platform):
    x = platform.from_numpy(np.array([np.inf, -np.inf, np.nan, 1e300]))
    for name in ("bfloat16", "float16", "float32", "int32", "bool"):
        assert platform.dtype_name(platform.ops.cast(x, platform.dtype(name)).dtype) == name
    rows = platform.from_numpy(np.ones((2, 1), np.float32))
    platform.set_requires_grad(rows, True)
    picked = platform.ops.index_select(rows, 0, platform.from_numpy(np.array([0, 0, 1], np.int8)))
    infinite = platform.from_numpy(np.array([[np.inf], [-np.inf], [1]], np.float32))
    (gradient,) = platform.grad([picked], [rows], [infinite])
    np.testing.assert_array_equal(platform.to_numpy(gradient), [[np.nan], [1]])
    huge = platform.from_numpy(np.full((1, 1, 2, 4), 1e20, np.float32))
    lse = platform.from_numpy(np.ones((1, 1, 2), np.float32))
    scores = BlockScores(1.0, is_causal=True)
    out, _ = platform.attention_block(huge, huge, huge, scores)
    grads = platform.attention_block_grad(huge, huge, huge, huge, out, lse, scores)
    assert not np.isfinite([platform.to_numpy(x) for x in grads]).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.complex64])
def test_rows_of_other_dtypes_are_gathered_by_mindspore(platform, dtype):
    x = platform.from_numpy(np.array([[1], [2], [3]], dtype))
    assert platform.ops.index_select(x, 0, platform.from_numpy(np.array([2, 0]))).asnumpy().tolist() == [[3], [1]]


def test_sums_of_half_precision_do_not_stop(platform):
    ones = Tensor(np.ones(5000, np.float16))
    np.testing.assert_array_equal(platform.ops.cumsum(ones, 0).asnumpy(), np.arange(1, 5001).astype(np.float16))
    logits, targets = Tensor(np.zeros((70000, 4), np.float16)), Tensor(np.zeros(70000, np.int64))
    loss = platform.ops.cross_entropy(logits, targets)
    assert loss.dtype == ms.float16
    assert float(loss) == float(np.float16(np.log(4)))
    loss = platform.operations.nll_loss(Tensor(np.full((70000, 4), -4, np.float16)), targets)
    assert loss.dtype == ms.float16
    assert float(loss) == 4
    average = platform.operations.nanmean(Tensor(np.ones(70000, np.float16)))
    assert average.dtype == ms.float16
    assert float(average) == 1


def test_ignored_targets_have_no_loss_even_if_class_0_is_impossible(platform):
    likelihood = Tensor(np.array([[-np.inf, -1], [-np.inf, -2]], np.float32))
    for weight in (None, Tensor(np.array([3, 2], np.float32))):
        assert float(platform.operations.nll_loss(likelihood, _long(-100, 1), weight)) == 2


def test_a_norm_of_integers_is_no_integer(platform):
    found = platform.operations.norm(Tensor(np.array([1, 2, 5])))
    np.testing.assert_allclose(found.asnumpy(), np.sqrt(30), rtol=1e-6)


# Arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda run, x: run.select(x, 0, 3), IndexError, "index 3 is outside dimension 0 of 3 elements"),
        (lambda run, x: run.select(x, 0, -4), IndexError, "index -4 is outside dimension 0 of 3 elements"),
        (lambda run, x: run.std(_long(1, 2)), TypeError, "std: expected a floating-point tensor, got Int64"),
        (lambda run, x: run.topk(x, -1), IndexError, "expected a number of values from 0 on, got -1"),
        (lambda run, x: run.diag_embed(x, 0, 1, -1), IndexError, "two different dimensions of 2, got 1 and -1"),
        (lambda run, x: run.diag_embed(x, 0, 0, 2), IndexError, "two different dimensions of 2, got 0 and 2"),
        (lambda run, x: run.embedding(_long(0, -1), run.unsqueeze(x, 1)), IndexError, "from 0 to 2, got -1"),
        (lambda run, x: run.embedding(_long(3), run.unsqueeze(x, 1)), IndexError, "from 0 to 2, got 3"),
        (lambda run, x: run.one_hot(_long(0, -1), 3), IndexError, "from 0 to 2, got -1"),
        (lambda run, x: run.one_hot(_long(3), 3), IndexError, "from 0 to 2, got 3"),
        (lambda run, x: run.cross_entropy(run.unsqueeze(x, 0), _long(-1)), IndexError, "from 0 to 2, got -1"),
        (lambda run, x: run.nll_loss(run.unsqueeze(x, 0), _long(-1)), RuntimeError, "got: 3"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(platform, call, error, message):
    with pytest.raises(error, match=message):
        call(platform.operations, Tensor(np.arange(3, dtype=np.float32)))


@pytest.mark.parametrize(("offset", "dim1", "dim2"), [(1, -2, -1), (1, 0, 1), (-2, 2, 0), (1, 1, 2), (0, -1, 0)])
def test_diagonals_may_be_embedded_in_any_dimensions(platform, offset, dim1, dim2):
    values = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    found = platform.operations.diag_embed(Tensor(values), offset, dim1, dim2).asnumpy()
    assert found.size == 2 * (3 + abs(offset)) ** 2
    # The inverse: diagonals become the last dimension.
    np.testing.assert_array_equal(np.diagonal(found, offset, dim1, dim2), values)


# Order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("descending", [False, True])
def test_equal_elements_keep_their_order(platform, descending):
    x = Tensor(np.array([[3, 1, 3, 1, 2], [0, 0, 0, 0, 0]], np.float32))
    found = platform.to_numpy(platform.ops.argsort(x, 1, descending=descending))
    assert found.dtype == np.int64
    assert found.tolist() == [[0, 2, 4, 1, 3] if descending else [1, 3, 4, 0, 2], [0, 1, 2, 3, 4]]
    values, indices = platform.ops.topk(x, 3, 1)
    assert indices.asnumpy().tolist() == [[0, 2, 4], [0, 1, 2]]
    assert values.asnumpy().tolist() == [[3, 3, 2], [0, 0, 0]]


@pytest.mark.parametrize("size", [0, 1, 4, 5])
def test_chunks_are_those_of_torch(platform, size):
    sizes = [piece.shape[0] for piece in platform.ops.chunk(platform.zeros((size, 2), ms.float32), 3, 0)]
    assert sizes == {0: [0, 0, 0], 1: [1], 4: [2, 2], 5: [2, 2, 1]}[size]
