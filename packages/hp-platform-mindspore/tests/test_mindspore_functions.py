"""Operations beyond `platform.ops` on plain tensors: values and gradients are those of NumPy in float64."""

from __future__ import annotations

import itertools
import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from hp_dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.testing import run_ranks

F = ms.mint.nn.functional

RNG = np.random.default_rng(5)


def values(*shape):
    return RNG.permutation(np.linspace(-2, 2, math.prod(shape))).reshape(shape)


def windows(x, kernel, stride, pad, dilation, fill):
    """(place of the window, its values) of an image `[batch, channels, positions...]`."""
    count = len(kernel)
    x = np.pad(x, [(0, 0), (0, 0), *[(pad, pad)] * count], constant_values=fill)
    sizes = [(n - dilation * (k - 1) - 1) // stride + 1 for n, k in zip(x.shape[2:], kernel, strict=True)]
    for place in itertools.product(*map(range, sizes)):
        picked = tuple(
            slice(i * stride, i * stride + dilation * (k - 1) + 1, dilation) for i, k in zip(place, kernel, strict=True)
        )
        yield place, sizes, x[(slice(None), slice(None), *picked)]


def convolved(x, weight, bias, stride=1, pad=0, dilation=1, groups=1):
    kernel, result = weight.shape[2:], None
    for place, sizes, part in windows(x, kernel, stride, pad, dilation, 0.0):
        if result is None:
            result = np.zeros((len(x), len(weight), *sizes))
        into, out = weight.shape[1], len(weight) // groups
        for g in range(groups):
            inside = part[:, g * into : (g + 1) * into].reshape(len(x), -1)
            filters = weight[g * out : (g + 1) * out].reshape(out, -1)
            result[(slice(None), slice(g * out, (g + 1) * out), *place)] = inside @ filters.T
    return result + bias.reshape(-1, *[1] * len(kernel))


def pooled(reduce, x, kernel, stride, pad, fill):
    result = None
    for place, sizes, part in windows(x, kernel, stride, pad, 1, fill):
        if result is None:
            result = np.zeros((*x.shape[:2], *sizes))
        result[(slice(None), slice(None), *place)] = reduce(part, axis=tuple(range(2, x.ndim)))
    return result


def cubic_weights(old, new):
    """The matrix of an interpolation by the kernel of Keys with a = -0.75, edges replicated."""

    def kernel(t):
        t = abs(t)
        return (1.25 * t - 2.25) * t**2 + 1 if t <= 1 else -0.75 * (t**3 - 5 * t**2 + 8 * t - 4) if t < 2 else 0.0

    result = np.zeros((new, old))
    for i in range(new):
        for j in range(-3, old + 3):
            result[i, min(max(j, 0), old - 1)] += kernel((i + 0.5) * old / new - 0.5 - j)
    return result


def added_at(x, index, source):
    result = x.copy()
    np.add.at(result, index, source)
    return result


def written_at(x, index, source):
    result = x.copy()
    result[index] = source
    return result


def normalized(x, axes):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


PRODUCTS = [
    ((1,), (1, 1, 4)), ((3,), (2, 3, 4)), ((1, 1), (1, 1, 4)), ((2, 1), (1, 3, 1, 4)), ((1, 1, 3), (3,)),
    ((1, 2, 3), (1, 3, 3, 1)), ((3, 2, 1), (1, 1, 4)), ((2, 3, 1, 3), (1, 3, 4)), ((2, 3, 2, 3), (1, 3, 1)),
    ((1, 3, 2, 1), (1, 1, 1, 4)), ((3, 1, 2, 3), (2, 3, 4)), ((3,), (3,)), ((1, 2, 1), (2, 1, 4)),
]  # fmt: skip
"""Shapes for which MindSpore's own gradient fails, has another shape, or does not."""

IDS = np.array([3, 0, 3])
ROWS = np.array([[0, 3, 1, 1], [2, 3, 4, 1]])
MATRIX = values(5, 4)

CASES = {
    **{
        f"matmul {left} {right}": ([values(*left), values(*right)], lambda f, x, y: f("matmul")(x, y), np.matmul)
        for left, right in PRODUCTS
    },
    "cumprod of zeros": (
        [np.array([[2.0, 0.5], [0.0, 3.0], [3.0, 0.0], [0.5, 0.0], [4.0, 2.0]])],
        lambda f, x: f("cumprod")(x, 0),
        lambda x: np.cumprod(x, 0),
    ),
    "conv1d": (
        [values(2, 4, 7), values(6, 2, 3), values(6)],
        lambda f, x, w, b: f("conv1d")(x, w, b, 2, 1, 1, 2),
        lambda x, w, b: convolved(x, w, b, 2, 1, 1, 2),
    ),
    "conv2d": (
        [values(2, 3, 6, 5), values(4, 3, 2, 3), values(4)],
        lambda f, x, w, b: f("conv2d")(x, w, b, 1, 1, 2),
        lambda x, w, b: convolved(x, w, b, 1, 1, 2),
    ),
    "max_pool2d": (
        [values(2, 2, 6, 5)],
        lambda f, x: f("max_pool2d")(x, 3, 2, 1),
        lambda x: pooled(np.max, x, (3, 3), 2, 1, -np.inf),
    ),
    "avg_pool2d": (
        [values(2, 2, 6, 5)],
        lambda f, x: f("avg_pool2d")(x, 3, 2, 1),
        lambda x: pooled(np.mean, x, (3, 3), 2, 1, 0.0),
    ),
    "conv3d": (
        [values(2, 2, 3, 4, 3), values(4, 2, 2, 2, 2), values(4)],
        lambda f, x, w, b: f("conv3d")(x, w, b, 1, 1),
        lambda x, w, b: convolved(x, w, b, 1, 1),
    ),
    "conv2d same": (
        [values(2, 3, 4, 5), values(4, 3, 2, 2), values(4)],
        lambda f, x, w, b: f("conv2d")(x, w, b, 1, "same"),
        lambda x, w, b: convolved(np.pad(x, [(0, 0), (0, 0), (0, 1), (0, 1)]), w, b),
    ),
    "conv2d of one image": (
        [values(3, 4, 5), values(4, 3, 2, 2)],
        lambda f, x, w: f("conv2d")(x, w),
        lambda x, w: convolved(x[None], w, np.zeros(4))[0],
    ),
    "max_pool1d": (
        [values(2, 3, 7)],
        lambda f, x: f("max_pool1d")(x, 3, 2, 1),
        lambda x: pooled(np.max, x, (3,), 2, 1, -np.inf),
    ),
    "max_pool3d": (
        [values(1, 2, 4, 3, 5)],
        lambda f, x: f("max_pool3d")(x, 2, 1),
        lambda x: pooled(np.max, x, (2, 2, 2), 1, 0, -np.inf),
    ),
    "avg_pool2d padded by columns": (
        [values(2, 2, 4, 5)],
        lambda f, x: f("avg_pool2d")(x, 2, 1, (0, 1)),
        lambda x: pooled(np.mean, np.pad(x, [(0, 0), (0, 0), (0, 0), (1, 1)]), (2, 2), 1, 0, 0.0),
    ),
    "avg_pool2d with a divisor": (
        [values(2, 2, 4, 5)],
        lambda f, x: f("avg_pool2d")(x, 2, divisor_override=3),
        lambda x: pooled(np.sum, x, (2, 2), 2, 0, 0.0) / 3,
    ),
    "avg_pool1d": (
        [values(2, 2, 7)],
        lambda f, x: f("avg_pool1d")(x, 3, 2, 1),
        lambda x: pooled(np.mean, x, (3,), 2, 1, 0.0),
    ),
    "avg_pool3d": (
        [values(1, 2, 4, 3, 5)],
        lambda f, x: f("avg_pool3d")(x, 2, 1, (1, 0, 0)),
        lambda x: pooled(np.mean, np.pad(x, [(0, 0), (0, 0), (1, 1), (0, 0), (0, 0)]), (2, 2, 2), 1, 0, 0.0),
    ),
    "adaptive_avg_pool2d": (
        [values(2, 2, 5, 4)],
        lambda f, x: f("adaptive_avg_pool2d")(x, (2, None)),
        lambda x: np.stack([x[..., :3, :].mean(-2), x[..., 2:, :].mean(-2)], -2),
    ),
    "adaptive_avg_pool1d": (
        [values(2, 2, 5)],
        lambda f, x: f("adaptive_avg_pool1d")(x, 2),
        lambda x: np.stack([x[..., :3].mean(-1), x[..., 2:].mean(-1)], -1),
    ),
    "adaptive_max_pool2d": (
        [values(2, 2, 4, 4)],
        lambda f, x: f("adaptive_max_pool2d")(x, 2),
        lambda x: pooled(np.max, x, (2, 2), 2, 0, -np.inf),
    ),
    "index_fill": (
        [MATRIX],
        lambda f, x: f("index_fill")(x, 1, f.ids(np.array([2, -4])), 3.0),
        lambda x: written_at(x, (slice(None), [2, 0]), 3.0),
    ),
    "median of NaN": (
        [np.array([[1.0, 3, 2], [1, 2, 3]])],
        lambda f, x: f("nanmedian")(f("masked_fill")(x, f.ids(np.array([[0, 1, 0], [0, 0, 0]])) == 1, math.nan), 1)[0],
        lambda x: x[[0, 1], [0, 1]],
    ),
    "median of all": ([MATRIX], lambda f, x: f("median")(x), lambda x: np.sort(x.reshape(-1))[(x.size - 1) // 2]),
    "nanmedian": ([MATRIX], lambda f, x: f("nanmedian")(x, 1, True)[0], lambda x: np.sort(x, 1)[:, 1:2]),
    "interpolate linear": (
        [values(1, 1, 4)],
        lambda f, x: f("interpolate")(x, 7, mode="linear", align_corners=True),
        lambda x: np.interp(np.linspace(0, 3, 7), np.arange(4), x[0, 0])[None, None],
    ),
    "interpolate nearest": (
        [values(2, 3, 2, 2)],
        lambda f, x: f("interpolate")(x, scale_factor=2),
        lambda x: x.repeat(2, 2).repeat(2, 3),
    ),
    "interpolate linear to one position": (
        [values(2, 3, 6)],
        lambda f, x: f("interpolate")(x, 1, mode="linear"),
        lambda x: x[..., 2:4].mean(-1, keepdims=True),
    ),
    "interpolate linear by a scale": (
        [values(1, 1, 5)],
        lambda f, x: f("interpolate")(x, scale_factor=1.5, mode="linear"),
        lambda x: np.interp((np.arange(7) + 0.5) / 1.5 - 0.5, np.arange(5), x[0, 0])[None, None],
    ),
    "interpolate bicubic": (
        [values(1, 2, 4, 3)],
        lambda f, x: f("interpolate")(x, (7, 2), mode="bicubic"),
        lambda x: cubic_weights(4, 7) @ x @ cubic_weights(3, 2).T,
    ),
    "interpolate by areas": (
        [values(2, 2, 5)],
        lambda f, x: f("interpolate")(x, 2, mode="area"),
        lambda x: np.stack([x[..., :3].mean(-1), x[..., 2:].mean(-1)], -1),
    ),
    "avg_pool2d with a divisor, padding not counted": (
        [values(2, 2, 4, 5)],
        lambda f, x: f("avg_pool2d")(x, 2, 1, 1, count_include_pad=False, divisor_override=3),
        lambda x: pooled(np.sum, x, (2, 2), 1, 1, 0.0) / 3,
    ),
    "adaptive_max_pool1d": (
        [values(2, 2, 5)],
        lambda f, x: f("adaptive_max_pool1d")(x, (2,), True)[0],
        lambda x: np.stack([x[..., :3].max(-1), x[..., 2:].max(-1)], -1),
    ),
    "index_fill by a tensor": (
        [MATRIX, values()],
        lambda f, x, y: f("index_fill")(x, 1, f.ids(np.array([2, -4])), y),
        lambda x, y: written_at(x, (slice(None), [2, 0]), y),
    ),
    "median": ([MATRIX], lambda f, x: f("median")(x, 0)[0], lambda x: np.median(x, 0)),
    "batch_norm": (
        [values(4, 3, 2), values(3), values(3)],
        lambda f, x, w, b: f("batch_norm")(x, None, None, w, b, True),
        lambda x, w, b: normalized(x, (0, 2)) * w[:, None] + b[:, None],
    ),
    "group_norm": (
        [values(2, 4, 3)],
        lambda f, x: f("group_norm")(x, 2),
        lambda x: normalized(x.reshape(2, 2, 6), (2,)).reshape(2, 4, 3),
    ),
    "einsum": (
        [values(2, 3, 4), values(2, 4, 5)],
        lambda f, x, y: f("einsum")("bij,bjk->kib", x, y),
        lambda x, y: np.einsum("bij,bjk->kib", x, y),
    ),
    "einsum of three with a sum and an ellipsis": (
        [values(2, 3, 4), values(4, 3), values(3)],
        lambda f, x, y, z: f("einsum")("...ij,jk,i->...k", x, y, z),
        lambda x, y, z: np.einsum("...ij,jk,i->...k", x, y, z),
    ),
    "einsum of a diagonal": (
        [values(2, 3, 3)],
        lambda f, x: f("einsum")("bii->bi", x),
        lambda x: np.einsum("bii->bi", x),
    ),
    "index_add": (
        [MATRIX, values(3, 4)],
        lambda f, x, y: f("index_add")(x, 0, f.ids(IDS), y, alpha=2),
        lambda x, y: added_at(x, IDS, 2 * y),
    ),
    "scatter_add": (
        [MATRIX, values(2, 4)],
        lambda f, x, y: f("scatter_add")(x, 0, f.ids(ROWS), y),
        lambda x, y: added_at(x, (ROWS, np.arange(4)), y),
    ),
    "scatter": (
        [MATRIX, values(2, 4)],
        lambda f, x, y: f("scatter")(x, 0, f.ids(ROWS), y),
        lambda x, y: written_at(x, (ROWS, np.arange(4)), y),
    ),
    "index_put": (
        [MATRIX, values(3)],
        lambda f, x, y: f("index_put_")(x * 1, (f.ids(IDS), f.ids(np.array([0, 1, 0]))), y, accumulate=True),
        lambda x, y: added_at(x, (IDS, np.array([0, 1, 0])), y),
    ),
    "logsigmoid": ([MATRIX * 50], lambda f, x: f("logsigmoid")(x), lambda x: -np.logaddexp(0, -x)),
    "halves that change places": (
        [values(3, 6)],
        lambda f, x: f("cat")(f("chunk")(x, 2, 1)[::-1], 1),
        lambda x: np.roll(x, 3, 1),
    ),
    "pieces that change places": (
        [values(3, 6)],
        lambda f, x: f("cat")(f("split")(x, [2, 4], 1)[::-1], 1),
        lambda x: np.roll(x, 4, 1),
    ),
    "columns that change places": (
        [values(3, 2)],
        lambda f, x: f("stack")(f("unbind")(x, 1)[::-1], 1),
        lambda x: x[:, ::-1],
    ),
    "selu": (
        [MATRIX],
        lambda f, x: f("selu")(x),
        lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)),
    ),
    "logaddexp": ([MATRIX, values(4)], lambda f, x, y: f("logaddexp")(x, y), np.logaddexp),
    "diag_embed": (
        [values(2, 3)],
        lambda f, x: f("diag_embed")(x, 1),
        lambda x: np.stack([np.diag(row, 1) for row in x]),
    ),
    "diagonal": ([MATRIX], lambda f, x: f("diagonal")(x, -1), lambda x: np.diagonal(x, -1)),
    "repeat": ([MATRIX], lambda f, x: f("repeat")(x, (2, 1, 3)), lambda x: np.tile(x, (2, 1, 3))),
    "kl_div": (
        [MATRIX, np.abs(values(5, 4)) + 0.1],
        lambda f, x, y: f("kl_div")(x, y, reduction="batchmean"),
        lambda x, y: (y * (np.log(y) - x)).sum() / 5,
    ),
}


class Found:
    """The platform's operations by name, and indices as its tensors."""

    def __init__(self, platform):
        self._platform = platform

    def __call__(self, name):
        return self._platform.operation(name)

    def ids(self, array):
        return self._platform.from_numpy(array.copy())


def slopes(function, arrays, weight):
    """Central differences of a weighted sum of results."""
    for array in arrays:
        slope = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            value = array[place]
            sides = []
            for step in (1e-6, -1e-6):
                array[place] = value + step
                sides.append((function(*arrays) * weight).sum())
            array[place] = value
            slope[place] = (sides[0] - sides[1]) / 2e-6
        yield slope


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(platform, name):
    arrays, call, reference = CASES[name]
    arrays = [array.copy() for array in arrays]
    leaves = [platform.from_numpy(array.astype(np.float32)) for array in arrays]
    for leaf in leaves:
        platform.set_requires_grad(leaf, True)
    with platform.enable_grad():
        result = call(Found(platform), *leaves)
    expected = reference(*arrays)
    np.testing.assert_allclose(platform.to_numpy(result), expected, rtol=1e-4, atol=1e-5)
    weight = np.linspace(0.5, 1.5, expected.size).reshape(expected.shape)
    loss = platform.ops.sum(result * platform.from_numpy(weight.astype(np.float32)))
    for found, slope in zip(platform.grad([loss], leaves), slopes(reference, arrays, weight), strict=True):
        np.testing.assert_allclose(platform.to_numpy(found), slope, rtol=1e-3, atol=1e-4)  # float32 and differences


SUMS = {
    "mm": ([(4, 0), (0, 5)], np.matmul),
    "mv": ([(4, 0), (0,)], np.matmul),
    "addmm": ([(4, 5), (4, 0), (0, 5)], lambda c, x, y: c + x @ y),
    "baddbmm": ([(2, 4, 5), (2, 4, 0), (2, 0, 5)], lambda c, x, y: c + x @ y),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_no_products_are_zeros(platform, name):
    """MindSpore's kernels leave what was in the memory."""
    shapes, reference = SUMS[name]
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    for _ in range(15):
        remains = [Tensor(np.full(size, 7.5, np.float32)) * 1 for size in (3, 4, 5, 16, 20, 40) for _ in range(6)]
        del remains
        leaves = [platform.from_numpy(array.copy()) for array in arrays]
        for leaf in leaves:
            platform.set_requires_grad(leaf, True)
        with platform.enable_grad():
            result = platform.operation(name)(*leaves)
        np.testing.assert_array_equal(platform.to_numpy(result), reference(*arrays))
        grads = platform.grad([platform.ops.sum(result)], leaves)
        addend = [np.ones(shapes[0])] if len(shapes) == 3 else []
        for grad, expected in zip(grads, [*addend, *map(np.zeros, shapes[-2:])], strict=True):
            np.testing.assert_array_equal(platform.to_numpy(grad), expected)


@pytest.mark.parametrize(
    ("name", "shape", "argument", "expected"),
    [("tile", (0, 3), (2, 1), (0, 3)), ("logsumexp", (2, 0, 3), 0, (0, 3))],
)
def test_of_nothing(platform, name, shape, argument, expected):
    x = platform.from_numpy(np.zeros(shape, np.float32))
    platform.set_requires_grad(x, True)
    with platform.enable_grad():
        result = platform.operation(name)(x, argument)
    (grad,) = platform.grad([platform.ops.sum(result)], [x])
    assert (result.shape, grad.shape) == (expected, shape)


def test_positions_of_pooling(platform):
    """As torch: into the flattened image."""
    image = platform.from_numpy(np.array([[[[1.0, 9, 2], [3, 4, 8]]]], np.float32))
    found, places = platform.operation("max_pool2d")(image, 2, 1, return_indices=True)
    assert platform.to_numpy(found).tolist() == [[[[9, 9]]]]
    assert platform.to_numpy(places).tolist() == [[[[1, 1]]]]


@pytest.mark.parametrize("name", ["max_pool2d", "max_pool3d", "adaptive_max_pool2d"])
def test_maxima_of_numbers_that_are_not_finite(platform, name):
    """A NaN is the maximum of its window, and the maximum of -inf is -inf, as in torch; gradients go where it is."""
    image = np.array([[[[1.0, math.nan, -math.inf, -math.inf], [math.inf, 2, -math.inf, -math.inf]]]])
    size = (1, 2) if name == "adaptive_max_pool2d" else 2
    if name == "max_pool3d":
        image = np.stack([image, image], 2)
    found, (grad,) = gradients(platform, lambda x: platform.operation(name)(x, size), image)
    np.testing.assert_array_equal(found.asnumpy().reshape(-1), [math.nan, -math.inf])
    assert np.flatnonzero(grad).tolist() == [1, 2]
    padded = platform.operation("max_pool2d")(Tensor(np.full((1, 1, 2, 2), -math.inf, np.float32)), 2, 2, 1)
    assert np.isneginf(padded.asnumpy()).all()


def test_nearest_positions_are_those_of_torch(platform):
    """A scale is not rounded to the quotient of the sizes, and positions do not mix with others."""
    x = Tensor(np.array([[[0.0, 1, 2, math.inf]]], np.float32))
    run = platform.operation("interpolate")
    assert run(x, scale_factor=1.7).asnumpy().tolist() == [[[0, 0, 1, 1, 2, 2]]]
    assert run(x, scale_factor=1.7, mode="nearest-exact").asnumpy().tolist() == [[[0, 0, 1, 2, 2, math.inf]]]
    assert run(x, scale_factor=1.7, recompute_scale_factor=True).asnumpy().tolist() == [[[0, 0, 1, 2, 2, math.inf]]]
    with pytest.raises(ValueError, match="no mode 'cubic'"):
        run(x, 3, mode="cubic")


IMAGES = {
    "max_pool2d": lambda run, x: run("max_pool2d")(x, 2),
    "max_pool1d": lambda run, x: run("max_pool1d")(x.reshape(x.shape[0], x.shape[1], 16), 2),
    "avg_pool2d": lambda run, x: run("avg_pool2d")(x, 2),
    "adaptive_avg_pool2d": lambda run, x: run("adaptive_avg_pool2d")(x, 2),
    "interpolate": lambda run, x: run("interpolate")(x, scale_factor=2, mode="bilinear"),
    "median": lambda run, x: run("median")(x, 2)[0],
    "index_fill": lambda run, x: run("index_fill")(x, 2, Tensor([1]), 0.5),
}


def gradients(platform, call, *arrays):
    """The result of a call, and the gradients of its sum."""
    leaves = [platform.from_numpy(array.astype(np.float32)) for array in arrays]
    for leaf in leaves:
        platform.set_requires_grad(leaf, True)
    with platform.enable_grad():
        result = call(*leaves)
    return result, [platform.to_numpy(grad) for grad in platform.grad([platform.ops.sum(result)], leaves)]


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (3, 0, 4, 4)])
def test_images_of_nothing(platform, name, shape):
    """A rank may have no images, or no channels."""
    full = IMAGES[name](platform.operation, Tensor(np.ones([max(n, 1) for n in shape], np.float32)))
    result, (grad,) = gradients(platform, lambda x: IMAGES[name](platform.operation, x), np.zeros(shape))
    assert (result.shape, grad.shape) == ((*shape[:2], *full.shape[2:]), shape)


@pytest.mark.parametrize("empty", ["images", "channels", "filters"])
def test_convolutions_of_nothing(platform, empty):
    x, weight, bias = np.ones((2, 3, 4, 5)), np.ones((4, 3, 2, 2)), np.ones(4)
    x = x[:0] if empty == "images" else x
    if empty == "channels":
        x, weight = x[:, :0], weight[:, :0]
    if empty == "filters":
        weight, bias = weight[:0], bias[:0]
    result, grads = gradients(platform, platform.operation("conv2d"), x, weight, bias)
    expected = np.ones((len(x), len(weight), 3, 4))
    np.testing.assert_array_equal(result.asnumpy(), expected)  # the bias alone
    for grad, wanted in zip(grads, [0 * x, 0 * weight, expected.sum((0, 2, 3))], strict=True):
        np.testing.assert_array_equal(grad, wanted)


@pytest.mark.parametrize("name", IMAGES)
def test_images_in_bfloat16(platform, name):
    x = values(2, 2, 4, 4).astype(np.float32)
    full = IMAGES[name](platform.operation, Tensor(x))
    half = IMAGES[name](platform.operation, Tensor(x).astype(ms.bfloat16))
    assert half.dtype == ms.bfloat16
    np.testing.assert_allclose(half.astype(ms.float32).asnumpy(), full.asnumpy(), atol=0.02)


def test_running_statistics(platform):
    x = values(4, 3, 2).astype(np.float32)
    mean, variance = (platform.from_numpy(np.full(3, value, np.float32)) for value in (1.0, 2.0))
    platform.operation("batch_norm")(platform.from_numpy(x), mean, variance, None, None, True, 0.25)
    np.testing.assert_allclose(platform.to_numpy(mean), 0.75 + 0.25 * x.mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(platform.to_numpy(variance), 1.5 + 0.25 * x.var((0, 2), ddof=1), rtol=1e-5)


def test_an_index_outside_is_an_error(platform):
    x = platform.from_numpy(MATRIX.astype(np.float32))
    with pytest.raises(IndexError, match="outside a dimension of 5"):
        platform.operation("index_add")(x, 0, platform.from_numpy(np.array([5])), x[:1])


SHAPES = {
    "layer_norm": (
        lambda run, x: run("layer_norm")(x, (7,)),
        (3, 4),
        r"layer_norm: expected a shape that ends in \(7,\)",
    ),
    "layer_norm of a number": (lambda run, x: run("layer_norm")(x, (1,)), (), r"layer_norm: .* ends in \(1,\)"),
    "batch_norm": (lambda run, x: run("batch_norm")(x, None, None, training=True), (4,), r"batch_norm: .*channels"),
    "group_norm": (lambda run, x: run("group_norm")(x, 3), (2, 4), "group_norm: .*channels in 3 groups"),
    "group_norm of a row": (lambda run, x: run("group_norm")(x, 1), (4,), "group_norm: .*channels in 1 groups"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_cannot_be_normalized_are_refused(platform, name):
    call, shape, message = SHAPES[name]

    def program():
        x = Tensor(np.ones(shape, np.float32))
        mesh = init_device_mesh("cpu", (2,), platform=platform)
        for each in (x, distribute_tensor(x, mesh, [Shard(0) if shape else Replicate()])):
            with pytest.raises(ValueError, match=message):
                call(platform.operation, each)

    run_ranks(program, 2, platform)


def test_likelihood_of_one_sample(platform):
    x = np.log(np.array([0.2, 0.5, 0.3], np.float32))

    def program():
        mesh = init_device_mesh("cpu", (2,), platform=platform)
        logits = distribute_tensor(Tensor(x), mesh, [Shard(0)])
        target = distribute_tensor(Tensor(np.int64(1)), mesh, [Replicate()])
        losses = [F.nll_loss(logits, target, reduction=how) for how in ("none", "sum", "mean")]
        losses.append(F.cross_entropy(logits, target))
        return [loss.full_tensor().asnumpy() for loss in losses]

    for losses in run_ranks(program, 2, platform):
        assert [loss.shape for loss in losses] == [()] * 4
        np.testing.assert_allclose(losses, [-x[1]] * 4, rtol=1e-6)


def test_differences_of_neighbours(platform):
    x, more = values(5, 3).astype(np.float32), np.ones((1, 3), np.float32)

    def program():
        mesh = init_device_mesh("cpu", (2,), platform=platform)
        rows, first = (distribute_tensor(Tensor(a), mesh, [Shard(0)]) for a in (x, more))
        with pytest.raises(ValueError, match="'n' must be 1, but got 2"):
            ms.ops.diff(rows, n=2)
        return [
            y.full_tensor().asnumpy()
            for y in (
                ms.ops.diff(rows),
                ms.ops.diff(rows, axis=0),
                ms.ops.diff(rows, 1, 0, prepend=first, append=first),
            )
        ]

    expected = [np.diff(x), np.diff(x, axis=0), np.diff(x, axis=0, prepend=more, append=more)]
    for found in run_ranks(program, 2, platform):
        for each, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(each, wanted, rtol=1e-6, atol=1e-6)
