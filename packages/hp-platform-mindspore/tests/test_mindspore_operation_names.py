"""MindSpore's primitives under torch's names: what each adapter makes of a call."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest

from hp_dtensor import DeviceMesh, Replicate, Shard, distribute_tensor, get_platform
from hp_dtensor.testing import run_ranks
from hp_platform_mindspore.operation_names import ADAPTED, canonical

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
    "PadV3": ((X, [1, 2], ms.Tensor(0.5)), {}, "pad", (X, (1, 2)), {"value": 0.5}),
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
    from hp_dtensor.dispatch import rule_registry

    known = {name for name, _ in ADAPTED.values()}
    without_rule = sorted(name for name in known if rule_registry().get(name) is None)
    assert [name for name in without_rule if get_platform("mindspore").operation(name) is None] == []
