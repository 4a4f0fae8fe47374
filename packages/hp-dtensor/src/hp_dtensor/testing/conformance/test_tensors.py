"""Dtypes, plain tensors, and conversion to and from NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from hp_dtensor.platform.interface import DTYPE_NAMES, OP_NAMES, Platform
from hp_dtensor.testing.conformance.ranks import assert_values, read, small_integers, tensor

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2}
every_dtype = pytest.mark.parametrize("name", DTYPE_NAMES)


def test_what_a_platform_says_of_itself(hp_platform: Platform) -> None:
    assert hp_platform.name.isidentifier()
    assert hp_platform.device_types
    assert isinstance(tensor(hp_platform, [1.0]), hp_platform.Tensor)
    assert issubclass(hp_platform.DTensor, hp_platform.Tensor)


def test_every_operation_is_there(hp_platform: Platform) -> None:
    missing = [name for name in OP_NAMES if not callable(getattr(hp_platform.ops, name, None))]
    assert not missing


@every_dtype
def test_dtypes_have_names_and_sizes(hp_platform: Platform, name: str) -> None:
    dtype = hp_platform.dtype(name)
    assert hp_platform.dtype_name(dtype) == name
    assert hp_platform.itemsize(dtype) == BYTES.get(name, 1)
    assert hp_platform.is_floating(dtype) == ("float" in name)


def test_a_dtype_without_a_name_is_refused(hp_platform: Platform) -> None:
    with pytest.raises(ValueError, match="float33"):
        hp_platform.dtype("float33")
    with pytest.raises(ValueError, match="float33 has no counterpart"):
        hp_platform.dtype_name("float33")


@every_dtype
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3), (4, 1)])
def test_numbers_go_in_and_out_unchanged(hp_platform: Platform, name: str, shape: tuple[int, ...]) -> None:
    numbers = small_integers(name, shape, 3)
    made = tensor(hp_platform, numbers, name)
    assert tuple(made.shape) == shape
    assert made.dtype == hp_platform.dtype(name)
    assert_values(hp_platform, made, numbers)


def test_bfloat16_travels_as_bit_patterns(hp_platform: Platform) -> None:
    # 1, -5, infinity, and the smallest subnormal number: a conversion through another dtype may change the last two.
    bits = np.array([[0x3F80, 0xC0A0], [0x7F80, 0x0001]], np.uint16)
    made = hp_platform.from_bits(bits, hp_platform.dtype("bfloat16"))
    assert hp_platform.dtype_name(made.dtype) == "bfloat16"
    found = hp_platform.to_numpy(made)
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, bits)


def test_other_dtypes_are_their_own_bits(hp_platform: Platform) -> None:
    made = hp_platform.from_bits(np.array([1, -2], np.int32), hp_platform.dtype("int32"))
    assert_values(hp_platform, made, [1, -2])


# Column-major, negative strides (which `torch.from_numpy` refuses), and strides of 0 in read-only memory.
@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3).T, np.arange(6.0)[::-2], np.broadcast_to(2.0, (2, 3))])
def test_arrays_of_any_layout_come_in(hp_platform: Platform, array: np.ndarray) -> None:
    assert_values(hp_platform, hp_platform.from_numpy(array), array)


@every_dtype
def test_zeros_and_empty(hp_platform: Platform, name: str) -> None:
    dtype = hp_platform.dtype(name)
    zeros, empty = hp_platform.zeros((2, 3), dtype), hp_platform.empty([2, 3], dtype)
    assert_values(hp_platform, zeros, np.zeros((2, 3)))
    assert (tuple(empty.shape), empty.dtype) == ((2, 3), dtype)
    assert tuple(hp_platform.empty((), dtype).shape) == ()
    assert hp_platform.device_of(zeros) == hp_platform.device_of(empty)
    assert not hp_platform.is_meta(zeros)


@every_dtype
def test_copying_overwrites_in_place(hp_platform: Platform, name: str) -> None:
    numbers = small_integers(name, (2, 3), 5)
    target = hp_platform.zeros((2, 3), hp_platform.dtype(name))
    # Another tensor on the same storage sees whether the target was written or only rebound.
    alias = hp_platform.detach(target)
    hp_platform.copy_(target, tensor(hp_platform, numbers, name))
    assert_values(hp_platform, target, numbers)
    assert_values(hp_platform, alias, numbers)


def test_data_of_another_shape_is_set_in_new_memory(hp_platform: Platform) -> None:
    """The tensor is the same object, and others on its former memory keep their values."""
    x = tensor(hp_platform, np.arange(6.0).reshape(2, 3))
    alias, version = hp_platform.detach(x), hp_platform.version(x)
    hp_platform.set_data(x, tensor(hp_platform, [7.0, 8.0]))
    assert_values(hp_platform, x, [7.0, 8.0])
    assert_values(hp_platform, alias, np.arange(6.0).reshape(2, 3))
    assert hp_platform.version(x) > version or hp_platform.version(x) == 0
    hp_platform.set_data(x, alias)
    assert_values(hp_platform, x, np.arange(6.0).reshape(2, 3))


def test_copying_casts_and_is_not_recorded(hp_platform: Platform) -> None:
    target = tensor(hp_platform, [0.0, 0.0], requires_grad=True)
    hp_platform.copy_(target, tensor(hp_platform, [3, 4], "int32"))
    assert_values(hp_platform, target, [3, 4])
    assert hp_platform.is_leaf(target)
    assert hp_platform.requires_grad(target)


def test_copying_does_not_broadcast(hp_platform: Platform) -> None:
    with pytest.raises(Exception, match=r".+"):
        # torch's own `copy_` would broadcast, and hide a wrong shard. Any exception will do: each framework has its
        # own.
        hp_platform.copy_(hp_platform.zeros((2, 3), hp_platform.dtype("float32")), tensor(hp_platform, [1.0, 2, 3]))


def test_a_transposed_tensor_becomes_contiguous_within_the_graph(hp_platform: Platform) -> None:
    x = tensor(hp_platform, np.arange(6.0).reshape(2, 3), requires_grad=True)
    y = hp_platform.contiguous(hp_platform.ops.transpose(x, 0, 1))
    assert_values(hp_platform, y, np.arange(6.0).reshape(2, 3).T)
    weight = np.arange(6.0).reshape(3, 2)
    hp_platform.backward(y, tensor(hp_platform, weight))
    assert_values(hp_platform, hp_platform.get_grad(x), weight.T)


def test_what_is_contiguous_stays_what_it_is(hp_platform: Platform) -> None:
    x = hp_platform.zeros((2, 3), hp_platform.dtype("float32"))
    # A copy would leave `x` at zero.
    hp_platform.copy_(hp_platform.contiguous(x), tensor(hp_platform, np.ones((2, 3))))
    assert_values(hp_platform, x, np.ones((2, 3)))


def test_detached_tensors_share_data_but_no_graph(hp_platform: Platform) -> None:
    x = tensor(hp_platform, [1.0, 2.0], requires_grad=True)
    y = hp_platform.detach(hp_platform.ops.mul(x, 2.0))
    assert not hp_platform.requires_grad(y)
    alias = hp_platform.detach(x)
    hp_platform.copy_(alias, tensor(hp_platform, [5.0, 6.0]))
    assert_values(hp_platform, x, [5, 6])


def test_host_arrays_of_what_requires_gradients(hp_platform: Platform) -> None:
    x = hp_platform.ops.mul(tensor(hp_platform, [1.0, 2.0], requires_grad=True), 3.0)
    np.testing.assert_array_equal(read(hp_platform, x), [3.0, 6.0])


def test_many_at_once(hp_platform: Platform) -> None:
    tensors = [tensor(hp_platform, [1.0, 2.0]), tensor(hp_platform, [[3.0]]), tensor(hp_platform, [], "float32")]
    halves = [tensor(hp_platform, [2.0, 4.0], "float16")]
    assert_values(hp_platform, hp_platform.sum_of_squares(tensors), 14.0)
    assert_values(hp_platform, hp_platform.sum_of_squares(halves), 20.0)
    assert_values(hp_platform, hp_platform.sum_of_squares([]), 0.0)
    hp_platform.scale_(tensors, tensor(hp_platform, 0.5))
    assert_values(hp_platform, tensors[0], [0.5, 1.0])
    assert_values(hp_platform, tensors[1], [[1.5]])


def test_seeds_repeat_and_synchronizing_returns(hp_platform: Platform) -> None:
    hp_platform.manual_seed(7)
    hp_platform.synchronize()
