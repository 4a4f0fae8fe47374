"""Nothing of MindSpore takes a sharded DTensor for a plain tensor: all functions of mint and methods are called."""

from __future__ import annotations

import itertools
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops
from mindspore.common._register_for_tensor import tensor_operator_registry

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import SilentWorld
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.spec.placements import Shard
from hp_dtensor.tensor.conversions import from_local
from hp_dtensor.tensor.dtensor import DTensor
from hp_platform_mindspore.patches.functions_without_fallback import FUNCTIONS

OPERATORS = """
    add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv ifloordiv mod rmod imod pow
    rpow matmul rmatmul and or xor invert neg pos abs eq ne lt le gt ge lshift rshift getitem iter len contains
""".split()
CRASHING = {"Tensor.assign_value", "Tensor.assign_value_cpp"}
"""They stop the process when they are given what they do not expect; MindSpore calls them itself."""

PLACES = (("mint", mint), ("mint.nn.functional", mint.nn.functional), ("mint.special", mint.special),
          ("mint.linalg", mint.linalg))  # fmt: skip


def first_shard(platform, full):
    """The first rank's shard of an array whose rows are sharded, on a mesh of two ranks that do not communicate."""
    mesh = DeviceMesh("cpu", (2,), world=SilentWorld(0, 2, platform))
    rows = -(-full.shape[0] // 2)
    return from_local(Tensor(full[:rows].copy()), mesh, [Shard(0)], shape=full.shape)


def functions():
    for path, owner in PLACES:
        for name in sorted(vars(owner)):
            if (
                not name.startswith("_")
                and callable(getattr(owner, name))
                and not isinstance(getattr(owner, name), type)
            ):
                yield f"{path}.{name}", getattr(owner, name)
    for name in sorted(dir(Tensor)):
        if (not name.startswith("_") or name.strip("_") in OPERATORS) and callable(getattr(Tensor, name, None)):
            yield f"Tensor.{name}", lambda x, *rest, name=name: getattr(x, name)(*rest)


CALLS = dict(functions())


def arguments(platform):
    def numbers(*shape):
        return first_shard(platform, np.linspace(0.5, 2.0, int(np.prod(shape)), dtype=np.float32).reshape(shape))

    ids = first_shard(platform, np.array([0, 2, 1, 0, 2]))
    rows = first_shard(platform, np.array([[0, 2, 1, 0]] * 5))
    image = numbers(5, 2, 3, 4)
    x = numbers(5, 4)
    yield from itertools.product([x], [(), (1,), (0,), (2.0,), (x,), ((1,),), (0, 1), (1, 0, 2), (x > 1, 0.5), (x, x)])
    yield from itertools.product([x], [(0, ids, x), (1, rows), (1, rows, x), (ids,), (1, ids), (0.0, 1.0), (None, 1)])
    yield from itertools.product([image], [(2,), (numbers(3, 2, 2, 2),), (2, 1), (1, 2), ((1, 2),)])
    yield from itertools.product([ids], [(), (3,), (numbers(7, 4),), (0,)])
    yield from itertools.product([[x, x]], [(), (0,)])


def tensors_of(result):
    if isinstance(result, (tuple, list)):
        return [x for item in result for x in tensors_of(item)]
    return [result] if isinstance(result, Tensor) else []


@pytest.fixture
def recording_again(platform):
    """Some of MindSpore's errors turn recording off for the process."""
    state = platform.rank_state()
    yield
    with platform.enable_grad():
        platform.set_rank_state(state)


@pytest.mark.usefixtures("recording_again")
@pytest.mark.parametrize("name", sorted(set(CALLS) - CRASHING))
def test_results_are_dtensors_or_errors(platform, name):
    for first, rest in arguments(platform):
        try:
            result = CALLS[name](first, *rest)
        except Exception:
            continue
        plain = [x for x in tensors_of(result) if not isinstance(x, DTensor) and x.size]
        assert not plain, f"{name}{rest} gave plain tensors of shapes {[x.shape for x in plain]}"


LIKE = {
    "ops.rand_like": lambda x, dtype: ops.rand_like(x, dtype=dtype),
    "ops.randn_like": lambda x, dtype: ops.randn_like(x, dtype=dtype),
    "ops.full_like": lambda x, dtype: ops.full_like(x, 3, dtype=dtype),
    "ops.zeros_like": lambda x, dtype: ops.zeros_like(x, dtype=dtype),
    "ops.ones_like": lambda x, dtype: ops.ones_like(x, dtype=dtype),
    "mint.rand_like": lambda x, dtype: mint.rand_like(x, dtype=dtype),
    "mint.randn_like": lambda x, dtype: mint.randn_like(x, dtype=dtype),
    "mint.full_like": lambda x, dtype: mint.full_like(x, 3, dtype=dtype),
    "mint.zeros_like": lambda x, dtype: mint.zeros_like(x, dtype=dtype),
    "mint.ones_like": lambda x, dtype: mint.ones_like(x, dtype=dtype),
}


@pytest.mark.parametrize("dtype", [None, ms.float16], ids=str)
@pytest.mark.parametrize("name", LIKE)
def test_what_is_made_like_a_dtensor_is_placed_like_it(platform, name, dtype):
    x = first_shard(platform, np.linspace(0.5, 2.0, 20, dtype=np.float32).reshape(5, 4))
    made = LIKE[name](x, dtype)
    assert (made.placements, made.shape, made.dtype) == (x.placements, (5, 4), dtype or ms.float32)


def test_random_numbers_of_a_function_of_mindspores_follow_the_platforms_seed(platform):
    x = first_shard(platform, np.zeros((5, 4), np.float32))
    drawn = []
    for random_like in (ops.rand_like, mint.rand_like, platform.operation("rand_like")):
        platform.manual_seed(3)
        drawn.append(platform.to_numpy(random_like(x).to_local()).tolist())
    platform.manual_seed(3)
    full = platform.operation("rand_like")(Tensor(np.zeros((5, 4), np.float32)))
    assert drawn == [platform.to_numpy(full)[:3].tolist()] * 3


def test_a_seed_of_one_call_is_refused(platform):
    x = first_shard(platform, np.zeros((5, 4), np.float32))
    with pytest.raises(CapabilityError, match="manual_seed"):
        ops.rand_like(x, 3)
    with pytest.raises(CapabilityError, match="random_"):
        ops.randint_like(first_shard(platform, np.zeros((5, 4), np.int32)), 0, 5)


def test_methods_that_are_of_another_kind_on_each_device_are_refused(platform):
    x = first_shard(platform, np.zeros((5, 4), np.float32))
    for call, instead in ((lambda: x.std(0), "mint.std"), (lambda: x.median(), "mint.median")):
        with pytest.raises(CapabilityError, match=instead):
            call()
    assert mint.std(x, 1).placements == (Shard(0),)


def test_real_numbers_are_real_wherever_they_are(platform):
    found = ops.isreal(first_shard(platform, np.full((5, 4), np.nan, np.float32)))
    assert (type(found), found.shape, found.dtype) == (Tensor, (5, 4), ms.bool_), "made from the global shape alone"
    assert found.asnumpy().all()


@pytest.mark.parametrize("form", ["function", "method"])
def test_every_piece_is_a_dtensor(platform, form):
    x = first_shard(platform, np.zeros((5, 4), np.float32))
    pieces = ops.tensor_split(x, 7) if form == "function" else x.tensor_split(7)
    assert [(type(piece), piece.shape[0]) for piece in pieces] == [(platform.DTensor, n) for n in (1, 1, 1, 1, 1, 0, 0)]


def test_functions_of_plain_tensors_are_mindspores_own(platform):
    x = Tensor(np.zeros((5, 4), np.float32))
    assert type(ops.full_like(x, 3)) is Tensor
    assert [piece.shape for piece in ops.tensor_split(x, (2,))] == [(2, 4), (3, 4)]


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_function_is_replaced_under_all_names_by_which_mindspore_calls_it(platform, name):
    replaced = getattr(ms.ops, name)
    own = replaced.__wrapped__
    modules = [module for path, module in list(sys.modules.items()) if path.split(".")[0] == "mindspore"]
    assert not [module for module in (*modules, tensor_operator_registry) if vars(module).get(name) is own]
    assert getattr(ms.ops.functional, name) is replaced
