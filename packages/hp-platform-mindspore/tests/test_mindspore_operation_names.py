"""MindSpore's primitives under torch's names: what each adapter makes of a call."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest

from hp_dtensor import DeviceMesh, Replicate, Shard, distribute_tensor, get_platform
from hp_dtensor.spec.placements import Placement
from hp_dtensor.testing import run_ranks
from hp_platform_mindspore.ops.primitive_names import ADAPTED, canonical

pytestmark = pytest.mark.usefixtures("platform")  # it sets the runtime up, before any kernel runs

X = ms.Tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
Y = ms.Tensor([[1.0, 0.0], [0.0, 1.0]])
IDS = ms.Tensor([0, 1])
ROW = (slice(1, 2), slice(0, 4))

SAME: dict[str, tuple[tuple[Any, ...], dict[str, Any], str, tuple[Any, ...], dict[str, Any]]] = {
    "AddExt": ((X, X, 1), {}, "add", (X, X), {}),
    "SumExt": ((X, 1, True, None), {}, "sum", (X,), {"dim": 1, "keepdim": True}),
    "MeanExt": ((X,), {"dim": 0}, "mean", (X,), {"dim": 0}),
    "ReduceSum": ((X, (), False), {}, "sum", (X,), {"dim": None, "keepdim": False}),
    "ReduceMean": ((X, (1,), True), {}, "mean", (X,), {"dim": (1,), "keepdim": True}),
    "Max": ((X,), {}, "amax", (X,), {"dim": (0, 1)}),
    "MatMul": ((X, X), {}, "matmul", (X, X), {}),
    "Gather": ((X, IDS, 1), {}, "index_select", (X, 1, IDS), {}),
    "SplitTensorView": ((X, 3, 1), {}, "split", (X, [3, 1], 1), {}),
    "Split": ((X, 1, 2), {}, "split", (X, [2, 2], 1), {}),
    "TopK": ((X, 2, True), {}, "topk", (X, 2, -1), {}),
    "Reshape": ((X, 4, 2), {}, "reshape", (X, (4, 2)), {}),
    "Transpose": ((X, (1, 0)), {}, "permute", (X, (1, 0)), {}),
    "Embedding": ((IDS, X, None, None, 2.0, False), {}, "embedding", (IDS, X), {}),
    "Squeeze": ((X, ()), {}, "squeeze", (X, ()), {}),
    "CumulativeLogsumexp": ((X, ms.Tensor(1)), {}, "logcumsumexp", (X, 1), {}),
    "ReduceStd": ((X, (0,), True, False), {}, "std_mean", (X, (0,), True, False), {}),
    "PadV3": ((X, [1, 2], ms.Tensor(0.5), "constant", True), {}, "pad", (X, (1, 2)), {"value": 0.5}),
    "ArgSort": ((X, 0, True, False), {}, "argsort", (X,), {"dim": 0, "descending": True, "stable": False}),
    "BincountExt": ((X,), {"minlength": 6}, "bincount", (X,), {"minlength": 6}),
    "SearchSorted": ((X, X, None, "int64", True), {}, "searchsorted", (X, X), {"right": True}),
    "Slice": ((X, (1, 0), (1, 4)), {}, "getitem", (X, ROW), {}),
    "StridedSlice": ((X, (1, 0), (2, 4), (1, 2), 0, 0), {}, "getitem", (X, (slice(1, 2, 1), slice(0, 4, 2))), {}),
    "SmoothL1Loss": ((X, X, 1.0, 1), {}, "smooth_l1_loss", (X, X), {"reduction": "mean", "beta": 1.0}),
    "BinaryCrossEntropy": ((X, X, None, 0), {}, "binary_cross_entropy", (X, X), {"reduction": "sum"}),
}  # fmt: skip


@pytest.mark.parametrize("primitive", SAME)
def test_an_adapter_gives_torchs_name_and_arguments(primitive: str) -> None:
    args, kwargs, name, wanted, options = SAME[primitive]
    found, (new_args, new_kwargs) = canonical(primitive, args, kwargs)
    assert (found, new_kwargs) == (name, options)
    assert len(new_args) == len(wanted)
    for got, expected in zip(new_args, wanted, strict=True):
        assert got is expected or got == expected


def test_factors_and_transpositions_are_carried_out() -> None:
    _, ((_, scaled), _) = canonical("SubExt", (X, Y, 3), {})
    assert scaled.asnumpy().tolist() == (Y * 3).asnumpy().tolist()
    _, ((left, right), _) = canonical("MatMul", (X, X, False, True), {})
    assert left is X
    assert right.shape == (4, 2)


REFUSED: dict[str, tuple[Any, ...]] = {
    "SumExt": (X, 1, True, ms.float16),
    "SearchSorted": (X, X, X, "int64", True),
    "StridedSlice": (X, (1, 0), (2, 4), (1, 2), 1, 0),
    "CumSum": (X, 0, True, False),
    "CumProd": (X, 0, False, True),
    "Gather": (X, IDS, 1, 1),
    "Embedding": (IDS, X, 0, None, 2.0, False),
    "ReduceSum": (X, (), False, True),
    "Softmax": (X, (0, 1)),
}


@pytest.mark.parametrize("primitive", REFUSED)
def test_an_argument_without_a_counterpart_is_refused(primitive: str) -> None:
    with pytest.raises(TypeError):
        canonical(primitive, REFUSED[primitive], {})


CUBE = np.arange(32, dtype=np.float32).reshape(2, 4, 4)


def _biased(placement: Any) -> np.ndarray:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("mindspore"))
    x = distribute_tensor(ms.Tensor(CUBE), mesh, (placement,))
    bias = distribute_tensor(ms.Tensor(CUBE[0, :, 0]), mesh, (Replicate(),))
    return ms.ops.bias_add(x, bias).full_tensor().asnumpy()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(2)], ids=str)
def test_a_bias_is_added_along_the_second_dimension(placement: Any) -> None:
    for result in run_ranks(_biased, 2, "mindspore", placement):
        np.testing.assert_array_equal(result, CUBE + CUBE[0, :, 0][:, None])


def _backward_sum() -> str:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("mindspore"))
    x = distribute_tensor(ms.Tensor(CUBE), mesh, (Shard(0),))
    with pytest.raises(TypeError) as refusal:
        ms.ops.CumSum(reverse=True)(x, 1)
    return str(refusal.value)


def test_a_reverse_scan_is_refused_with_the_way_out() -> None:
    assert "flip its input" in run_ranks(_backward_sum, 2, "mindspore")[0]


def test_every_adapter_leads_to_an_operation_that_there_is() -> None:
    from hp_dtensor.rules.tables import rule_registry

    known = {name for name, _ in ADAPTED.values()}
    without_rule = sorted(name for name in known if rule_registry().get(name) is None)
    assert [name for name in without_rule if get_platform("mindspore").operation(name) is None] == []


FLAT = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
AS_ON_ONE_RANK = {
    "mean(axis=1)": lambda x: x.mean(axis=1),
    "mean(keep_dims=True)": lambda x: x.mean(axis=0, keep_dims=True),
    "max(axis=1)": lambda x: x.max(axis=1, keepdims=True),
    "min(axis=0)": lambda x: x.min(axis=0),
    "max with its place": lambda x: x.max(axis=1, return_indices=True)[1],
    "sum with a start": lambda x: x.sum(axis=1, keepdims=True, initial=2.0),
    "var(axis=1)": lambda x: x.var(axis=1, ddof=1),
    "prod": lambda x: x.prod(1),
    "ReduceProd": lambda x: ms.ops.ReduceProd(True)(x, 0),
    "any(axis=1)": lambda x: (x > 1).any(axis=1),
    "all(axis=1)": lambda x: (x > 1).all(axis=1),
    "all(keep_dims=True)": lambda x: (x > 1).all(axis=0, keep_dims=True),
    "all(dim=1)": lambda x: (x > 1).all(dim=1, keepdim=True),
    "argmax": lambda x: x.argmax(1),
    "sort": lambda x: x.sort(1)[0],
    "sort(axis=1)": lambda x: x.sort(axis=1, descending=True)[0],
    "split": lambda x: x.split(3, 1)[1],
    "split(dim=0)": lambda x: x.split(2, dim=0)[2],
    "split in sizes": lambda x: x.split([1, 3], 1)[1],
    "chunk": lambda x: x.chunk(3, 0)[2],
    "expand_as": lambda x: x.sum(0, True).expand_as(x),
    "view_as": lambda x: x.view_as(x.T),
    "ops.add": lambda x: ms.ops.add(x, x),
    "RealDiv": lambda x: ms.ops.RealDiv()(x, x + 9),
    "Inv": lambda x: ms.ops.Inv()(x + 9),
    "Softmax": lambda x: ms.ops.Softmax(0)(x),
    "gelu": lambda x: ms.ops.gelu(x, "tanh"),
    "Flatten": lambda x: ms.ops.Flatten()(x[:, :, None]),
    "of probabilities": lambda x: ms.ops.SoftmaxCrossEntropyWithLogits()(x, ms.ops.softmax(x * 2, 1))[0],
    "of sigmoids": lambda x: ms.ops.SigmoidCrossEntropyWithLogits()(x, ms.ops.sigmoid(x * 2)),
    "of classes": lambda x: ms.ops.SparseSoftmaxCrossEntropyWithLogits()(x, x.argmax(1).astype(ms.int32)),
}


def _whole(name: str, placement: Placement) -> tuple[np.ndarray, Any]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("mindspore"))
    result = AS_ON_ONE_RANK[name](distribute_tensor(ms.Tensor(FLAT.copy()), mesh, (placement,)))
    return result.full_tensor().asnumpy(), result.dtype


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("name", AS_ON_ONE_RANK)
def test_mindspores_own_ways_to_say_it_give_what_one_rank_gets(name: str, placement: Placement) -> None:
    """Signatures that MindSpore has beside torch's, and primitives of its `ops` and `nn`."""
    expected = AS_ON_ONE_RANK[name](ms.Tensor(FLAT.copy()))
    for found, dtype in run_ranks(_whole, 2, "mindspore", name, placement):
        np.testing.assert_allclose(found, expected.asnumpy(), rtol=1e-5, atol=1e-6)
        assert dtype == expected.dtype
