"""The `ops` namespace: values against NumPy, gradients against central differences of NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_dtensor.platform.interface import OP_NAMES, Platform
from hp_dtensor.testing.conformance.operation_cases import Array, Case, cases, creation_cases
from hp_dtensor.testing.conformance.values import read, tensor

CASES = cases()
STEP = 1e-4  # of the central differences: their error is about 1e-8 of a third derivative
GRADIENT_TOLERANCE = 1e-5


def test_every_operation_has_a_case(hp_platform: Platform) -> None:
    made = {label.split()[0] for label in creation_cases(hp_platform)}
    assert {case.name for case in CASES} | made == set(OP_NAMES)


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_values_and_gradients(hp_platform: Platform, case: Case) -> None:
    operands = [_operand(hp_platform, case, array) for array in case.operands]
    outputs = _listed(case.call(hp_platform.ops, *operands))
    expected = _listed(case.reference(*case.operands))
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected, strict=True):
        _assert_close(hp_platform, output, np.asarray(wanted), case.tolerance)
    if case.differentiable and any(hp_platform.requires_grad(operand) for operand in operands):
        _check_gradients(hp_platform, case, operands, outputs)


def test_creation_and_casts(hp_platform: Platform) -> None:
    for label, (result, expected) in creation_cases(hp_platform).items():
        assert hp_platform.dtype_name(result.dtype) == expected.dtype.name, label
        np.testing.assert_array_equal(read(hp_platform, result), expected, err_msg=label)


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_casts_between_floats_keep_gradients(hp_platform: Platform, low: str) -> None:
    x = tensor(hp_platform, [1.0, -2.0], requires_grad=True)
    y = hp_platform.ops.cast(x, hp_platform.dtype(low))
    assert hp_platform.dtype_name(y.dtype) == low
    hp_platform.backward(y, tensor(hp_platform, [3.0, 4.0], low))
    gradient = hp_platform.get_grad(x)
    assert hp_platform.dtype_name(gradient.dtype) == "float32"
    np.testing.assert_array_equal(read(hp_platform, gradient), [3, 4])


def test_operands_stay_as_they_were(hp_platform: Platform) -> None:
    x = tensor(hp_platform, [[1.0, 2.0], [3.0, 4.0]])
    rows, values = tensor(hp_platform, [1], "int64"), tensor(hp_platform, [[9.0, 9.0]])
    hp_platform.ops.index_put(x, rows, values)
    hp_platform.copy_(hp_platform.ops.clone(x), tensor(hp_platform, np.zeros((2, 2))))
    np.testing.assert_array_equal(read(hp_platform, x), [[1, 2], [3, 4]])


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
    """The gradient of the weighted sum of all floating outputs with respect to one operand."""
    result = np.zeros(case.operands[position].shape)
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
