"""Initial values depend on seed, name and element index alone."""

from __future__ import annotations

import itertools

import numpy
import pytest

from hp_dtensor.tensor.init import Constant, Normal, Uniform, draw, stream_key

FROZEN = numpy.array([-0.3967628, 0.9736877, -2.3628266], numpy.float32)
KEY = stream_key(7, "layers.0.weight")
SHAPES = [(), (1,), (9,), (7, 5), (4, 3, 6), (2, 3, 4, 5)]


def full_draw(distribution, shape, key=KEY):
    return draw(distribution, key, shape, (0,) * len(shape), shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_box_holds_the_values_of_the_whole_tensor(shape):
    expected = full_draw(Normal(1.0), shape)
    splits = [[(0, n), (n // 3, n - n // 3), (n - 1, 1), (n, 0)] for n in shape]
    for box in itertools.product(*splits):
        offset, extent = [start for start, _ in box], [length for _, length in box]
        index = tuple(slice(start, start + length) for start, length in box)
        numpy.testing.assert_array_equal(draw(Normal(1.0), KEY, shape, offset, extent), expected[index])


def test_blocks_do_not_change_the_values(monkeypatch):
    expected = full_draw(Normal(1.0), (37, 11))
    monkeypatch.setattr("hp_dtensor.tensor.init._BLOCK_WORDS", 23)
    numpy.testing.assert_array_equal(full_draw(Normal(1.0), (37, 11)), expected)


def test_seed_and_name_give_streams_of_their_own():
    keys = [stream_key(seed, name) for seed in (0, 1) for name in ("a", "b", "a.b")]
    draws = [full_draw(Normal(1.0), (64,), key) for key in keys]
    assert all(numpy.abs(numpy.corrcoef(x, y)[0, 1]) < 0.5 for x, y in itertools.combinations(draws, 2))


def test_the_numbers_never_change():
    """A checkpoint-free rerun of an old configuration must start from the same weights."""
    assert stream_key(0, "w") == (8665583686924118448, 13426339802642190639)
    numpy.testing.assert_allclose(full_draw(Normal(1.0), (3,), (1, 2)), FROZEN, rtol=1e-6)


def test_normal_has_its_moments():
    x = full_draw(Normal(0.5, mean=2.0), (100_000,)).astype(numpy.float64)
    # Five standard errors of mean and deviation.
    assert abs(x.mean() - 2.0) < 5 * 0.5 / 316
    assert abs(x.std() - 0.5) < 5 * 0.5 / 447
    z = (x - 2.0) / 0.5
    assert abs((z**3).mean()) < 5 * numpy.sqrt(15 / 1e5)
    assert abs((z**4).mean() - 3) < 5 * numpy.sqrt(96 / 1e5)


def test_uniform_and_constant():
    x = full_draw(Uniform(-1.0, 3.0), (50_000,))
    assert x.min() >= -1.0
    assert x.max() < 3.0
    assert abs(x.mean() - 1.0) < 0.03
    numpy.testing.assert_array_equal(full_draw(Constant(0.25), (3, 2)), numpy.full((3, 2), 0.25, numpy.float32))
