"""Dtypes, plain tensors, and conversion to and from NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import DTYPE_NAMES, OP_NAMES, Platform
from hp_dtensor.testing.conformance.ranks import assert_values, read, small_integers, tensor
from hp_dtensor.testing.pytest_plugin import dtype_params
from hp_dtensor.testing.simulated import run_ranks

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2}
every_dtype = pytest.mark.parametrize("name", dtype_params(*DTYPE_NAMES))


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


def test_required_dtypes(hp_platform: Platform) -> None:
    """Others may be missing, and their tests are skipped. Names that no test knows do not belong in `dtypes`."""
    assert all(map(hp_platform.has_dtype, ("float32", "int64", "bool")))
    assert set(hp_platform.dtypes) <= set(DTYPE_NAMES)


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


@pytest.mark.dtypes("bfloat16")
def test_bfloat16_is_converted_as_bit_patterns(hp_platform: Platform) -> None:
    # 1, -5, infinity, and the smallest subnormal number: a conversion through another dtype may change the last two.
    bits = np.array([[0x3F80, 0xC0A0], [0x7F80, 0x0001]], np.uint16)
    made = hp_platform.from_bits(bits, hp_platform.dtype("bfloat16"))
    assert hp_platform.dtype_name(made.dtype) == "bfloat16"
    found = hp_platform.to_numpy(made)
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found, bits)


@pytest.mark.dtypes("int32")
def test_other_dtypes_are_their_own_bits(hp_platform: Platform) -> None:
    made = hp_platform.from_bits(np.array([1, -2], np.int32), hp_platform.dtype("int32"))
    assert_values(hp_platform, made, [1, -2])


# Column-major, negative strides (which `torch.from_numpy` refuses), and strides of 0 in read-only memory.
@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3).T, np.arange(6)[::-2], np.broadcast_to(2, (2, 3))])
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
    hp_platform.copy_(alias, tensor(hp_platform, np.ones((2, 3))))
    assert_values(hp_platform, x, np.ones((2, 3)), "the memory is shared")


def test_copying_casts_and_is_not_recorded(hp_platform: Platform) -> None:
    target = tensor(hp_platform, [0.0, 0.0], requires_grad=True)
    hp_platform.copy_(target, tensor(hp_platform, [3, 4], "int64"))
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
    assert tuple(hp_platform.strides(y)) == (2, 1)
    weight = np.arange(6.0).reshape(3, 2)
    hp_platform.backward(y, tensor(hp_platform, weight))
    assert_values(hp_platform, hp_platform.get_grad(x), weight.T)


@pytest.mark.parametrize("view", ["narrow", "expand"])
def test_gaps_and_repeated_elements_become_contiguous(hp_platform: Platform, view: str) -> None:
    """The strides of these descend, as those of contiguous tensors do."""
    array = np.arange(6.0).reshape(2, 3)
    x = tensor(hp_platform, array if view == "narrow" else array[:, :1], requires_grad=True)
    ops = hp_platform.ops
    y = hp_platform.contiguous(ops.narrow(x, 1, 0, 2) if view == "narrow" else ops.expand(x, (2, 2)))
    expected = array[:, :2] if view == "narrow" else np.broadcast_to(array[:, :1], (2, 2))
    assert_values(hp_platform, y, expected)
    assert tuple(hp_platform.strides(y)) == (2, 1)
    hp_platform.backward(y, tensor(hp_platform, [[1.0, 2.0], [3.0, 4.0]]))
    gradient = [[1, 2, 0], [3, 4, 0]] if view == "narrow" else [[3], [7]]
    assert_values(hp_platform, hp_platform.get_grad(x), gradient)
    hp_platform.copy_(hp_platform.detach(y), tensor(hp_platform, np.full((2, 2), 9.0)))
    assert_values(hp_platform, hp_platform.detach(x), array if view == "narrow" else array[:, :1], "a copy was written")


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


def test_sums_of_squares_and_scaling_of_many_tensors(hp_platform: Platform) -> None:
    tensors = [tensor(hp_platform, [1.0, 2.0]), tensor(hp_platform, [[3.0]]), tensor(hp_platform, [], "float32")]
    assert_values(hp_platform, hp_platform.sum_of_squares(tensors), 14.0)
    assert_values(hp_platform, hp_platform.sum_of_squares([]), 0.0)
    hp_platform.scale_(tensors, tensor(hp_platform, 0.5))
    assert_values(hp_platform, tensors[0], [0.5, 1.0])
    assert_values(hp_platform, tensors[1], [[1.5]])


@pytest.mark.parametrize("name", dtype_params("float16", "bfloat16"))
def test_squares_of_half_precision_are_added_up_in_float32(hp_platform: Platform, name: str) -> None:
    total = hp_platform.sum_of_squares([tensor(hp_platform, [256.0, 256.0], name), tensor(hp_platform, [1.0], name)])
    assert_values(hp_platform, total, 131073.0)


def drawn(platform: Platform, distribution: str, count: int, dtype: str = "float32") -> np.ndarray:
    """Return random numbers; skips the test if the platform has none."""
    try:
        x = platform.random(distribution, (count,), platform.dtype(dtype))
    except CapabilityError:
        pytest.skip(f"platform {platform.name} has no random tensors")
    assert tuple(x.shape) == (count,)
    assert platform.dtype_name(x.dtype) == dtype
    return read(platform, x).astype(np.float64)


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_seeds_repeat(hp_platform: Platform, distribution: str) -> None:
    runs = []
    for seed in (7, 7, 8):
        hp_platform.manual_seed(seed)
        runs.append(drawn(hp_platform, distribution, 5))
    hp_platform.synchronize()
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


@pytest.mark.parametrize("dtype", dtype_params("float32", "float16"))
@pytest.mark.parametrize(("distribution", "mean", "deviation"), [("uniform", 0.5, 12**-0.5), ("normal", 0.0, 1.0)])
def test_random_numbers_have_their_distribution(
    hp_platform: Platform, dtype: str, distribution: str, mean: float, deviation: float
) -> None:
    hp_platform.manual_seed(1)
    numbers = drawn(hp_platform, distribution, 10_000, dtype)
    # Six standard errors of the mean, and as many of the standard deviation.
    assert abs(numbers.mean() - mean) < 6 * deviation / 100
    assert abs(numbers.std() / deviation - 1) < 6 / 140
    # float16 may round up to 1.
    assert distribution == "normal" or (numbers.min() >= 0 and numbers.max() <= 1)


def test_the_state_of_random_generators_is_restored(hp_platform: Platform) -> None:
    """Without `random_state`, dropout differs between a forward and its recomputation."""
    hp_platform.manual_seed(3)
    state = hp_platform.random_state()
    first = drawn(hp_platform, "normal", 4)
    assert not hp_platform.is_random_state(state)
    hp_platform.set_random_state(state)
    np.testing.assert_array_equal(drawn(hp_platform, "normal", 4), first)


def test_ranks_have_generators_of_their_own(hp_platform: Platform) -> None:
    """Ranks that draw alternately get the numbers of their seeds."""
    if not hp_platform.records_by_thread:
        pytest.skip("the platform cannot simulate ranks")

    def program() -> list[np.ndarray]:
        group = current_world(hp_platform).all
        hp_platform.manual_seed(group.rank)
        found = []
        for _ in range(2):
            group.barrier()
            found.append(drawn(hp_platform, "normal", 3))
        return found

    alternating = run_ranks(program, 2, hp_platform)
    for rank, found in enumerate(alternating):
        hp_platform.manual_seed(rank)
        np.testing.assert_array_equal(found, [drawn(hp_platform, "normal", 3) for _ in range(2)])
