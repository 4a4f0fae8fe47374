"""Copies in key order and back; integer data makes every comparison exact."""

from __future__ import annotations

import numpy
import pytest

from hp_moe.dispatch.permutation import TokenPermutation

# rows, slots, keys: present keys are below 4, 9 marks a slot without a copy.
CASES = {
    "one slot": [[2], [0], [2], [1]],
    "two slots": [[2, 0], [0, 1], [3, 2]],
    "absent slots": [[2, 9], [9, 9], [0, 2], [9, 1]],
    "nothing present": [[9, 9], [9, 9]],
    "no rows": numpy.zeros((0, 3), numpy.int64),
    "repeated key": [[1, 1], [0, 1]],
}


@pytest.fixture(params=list(CASES))
def keys(request):
    return numpy.array(CASES[request.param], numpy.int64)


def expected_entries(keys):
    flat = keys.reshape(-1)
    order = numpy.argsort(flat, kind="stable")
    return order[: int((flat < 9).sum())]


def make(platform, keys):
    return TokenPermutation(platform, platform.from_numpy(keys), int((keys < 9).sum()))


def leaf(platform, array):
    x = platform.from_numpy(array.astype(numpy.float32))
    platform.set_requires_grad(x, True)
    return x


def test_rows_are_copied_in_key_order_and_gradients_summed(platform, keys):
    rows, slots = keys.shape
    entries = expected_entries(keys)
    data = numpy.arange(rows * 3).reshape(rows, 3) + 1
    x = leaf(platform, data)
    copies = make(platform, keys).permute(x)
    numpy.testing.assert_array_equal(platform.to_numpy(copies), data[entries // slots])
    grad = numpy.arange(len(entries) * 3).reshape(-1, 3) + 5
    (got,) = platform.grad([copies], [x], [platform.from_numpy(grad.astype(numpy.float32))])
    expected = numpy.zeros((rows, 3))
    numpy.add.at(expected, entries // slots, grad)
    numpy.testing.assert_array_equal(platform.to_numpy(got), expected)


def test_copies_are_summed_per_row_and_gradients_copied(platform, keys):
    rows, slots = keys.shape
    entries = expected_entries(keys)
    data = numpy.arange(len(entries) * 2).reshape(-1, 2) + 1
    y = leaf(platform, data)
    sums = make(platform, keys).unpermute(y)
    expected = numpy.zeros((rows, 2))
    numpy.add.at(expected, entries // slots, data)
    numpy.testing.assert_array_equal(platform.to_numpy(sums), expected)
    grad = numpy.arange(rows * 2).reshape(rows, 2) + 7
    (got,) = platform.grad([sums], [y], [platform.from_numpy(grad.astype(numpy.float32))])
    numpy.testing.assert_array_equal(platform.to_numpy(got), grad[entries // slots])


def test_scores_follow_their_copies(platform, keys):
    entries = expected_entries(keys)
    data = numpy.arange(keys.size).reshape(keys.shape) + 1
    values = leaf(platform, data)
    picked = make(platform, keys).permute_scores(values)
    numpy.testing.assert_array_equal(platform.to_numpy(picked), data.reshape(-1, 1)[entries])
    grad = numpy.arange(len(entries)).reshape(-1, 1) + 3
    (got,) = platform.grad([picked], [values], [platform.from_numpy(grad.astype(numpy.float32))])
    expected = numpy.zeros(keys.size)
    expected[entries] = grad[:, 0]
    numpy.testing.assert_array_equal(platform.to_numpy(got), expected.reshape(keys.shape))


def test_copies_are_summed_in_the_order_of_slots(platform):
    """(1e8 - 1e8) + 1 is 1 in float32; in the order of keys, the sum would be 0."""
    keys = numpy.array([[2, 1, 0, 9], [9, 9, 9, 9], [9, 2, 1, 0]], numpy.int64)
    by_key = numpy.array([[1], [1], [-1e8], [-1e8], [1e8], [1e8]], numpy.float32)
    sums = make(platform, keys).unpermute(platform.from_numpy(by_key))
    assert platform.to_numpy(sums).tolist() == [[1], [0], [1]]


def test_sums_in_16_bits_are_rounded_to_nearest_even(platform):
    """1 + 1/256 is between the bfloat16 numbers 1 and 1 + 1/128, and 1 is even."""
    bfloat16 = platform.dtype("bfloat16")
    y = platform.ops.cast(platform.from_numpy(numpy.array([[1], [2**-8]], numpy.float32)), bfloat16)
    sums = make(platform, numpy.array([[0, 1]], numpy.int64)).unpermute(y)
    assert platform.to_numpy(platform.ops.cast(sums, platform.dtype("float32"))).tolist() == [[1]]


def test_gradients_that_share_memory_are_summed(platform):
    """The gradient of a sum is one number, expanded to the shape of the copies."""
    keys = numpy.array([[2, 0], [9, 9], [1, 9]], numpy.int64)
    x = leaf(platform, numpy.ones((3, 2)))
    total = platform.ops.sum(make(platform, keys).permute(x))
    (got,) = platform.grad([total], [x], [platform.from_numpy(numpy.array(1, numpy.float32))])
    assert platform.to_numpy(got).tolist() == [[2, 2], [0, 0], [1, 1]]
