"""`ops.rms_norm` against torch's composed form: values, gradients of any order, and the bytes that are saved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hp_platform_torch.ops.norms import rms_norm

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def forward_and_backward(function, x, weight, seed):
    x, weight = (None if each is None else each.clone().requires_grad_() for each in (x, weight))
    y = function(x, x.shape[-1:], weight, 1e-5)
    y.backward(seed)
    return [y.detach(), x.grad, None if weight is None else weight.grad]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 64), (64,), (0, 8), (4, 1)])
@pytest.mark.parametrize("has_weight", [True, False])
def test_values_are_those_of_torch_and_gradients_agree(dtype, shape, has_weight):
    torch.manual_seed(0)
    x, seed = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    weight = torch.randn(shape[-1:], dtype=dtype) if has_weight else None
    expected, found = (forward_and_backward(each, x, weight, seed) for each in (F.rms_norm, rms_norm))
    assert torch.equal(found[0], expected[0])
    for gradient, of_torch in zip(found[1:], expected[1:], strict=True):
        # Rounded once to 16 bits, where torch rounds each product: compared with that of 64 bits below.
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}
        torch.testing.assert_close(gradient, of_torch, **tolerance)


def test_watching_functions_changes_no_value_and_notes_the_call(platform):
    torch.manual_seed(0)
    x, weight, seed = torch.randn(64, 64), torch.randn(64), torch.randn(64, 64)
    expected, noted = forward_and_backward(rms_norm, x, weight, seed), []

    def note(name, result):
        if isinstance(result, torch.Tensor):
            noted.append(name.rpartition(".")[2])

    def function(*args):
        with platform.watch_functions(note):
            return rms_norm(*args)

    found = forward_and_backward(function, x, weight, seed)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not torch.equal(expected[1], forward_and_backward(F.rms_norm, x, weight, seed)[1])
    assert noted == ["rms_norm"]


def test_gradients_of_16_bits_are_as_near_to_those_of_64_bits_as_those_of_torch():
    torch.manual_seed(0)
    x, weight, seed = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((16, 64), (64,), (16, 64)))
    exact = forward_and_backward(F.rms_norm, x.double(), weight.double(), seed.double())
    ours, of_torch = (forward_and_backward(each, x, weight, seed) for each in (rms_norm, F.rms_norm))
    for a, b, c in zip(ours, of_torch, exact, strict=True):
        assert (a - c).norm() <= 1.01 * (b - c).norm()


def test_derivatives_of_the_first_and_second_order():
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 5), (5,)))

    def function(x, weight):
        return rms_norm(x * 1, (5,), weight, 1e-3)

    assert torch.autograd.gradcheck(function, (x, weight))
    assert torch.autograd.gradgradcheck(function, (x, weight))


def test_a_number_has_no_dimension_to_normalize() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    for norm in (F.rms_norm, rms_norm):
        with pytest.raises(RuntimeError, match="at least"):
            norm(x, (), None, 1e-5)


def test_the_gradient_of_torch_func():
    x, weight = torch.randn(4, 5), torch.randn(5)
    ours, composed = (torch.func.grad(lambda x, f=f: f(x, (5,), weight, 1e-3).sum())(x) for f in (rms_norm, F.rms_norm))
    torch.testing.assert_close(ours, composed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_saves_its_input_once_and_a_number_per_row(platform, dtype):
    x = torch.randn(4, 8, 64, dtype=dtype, requires_grad=True) * 1
    weight = torch.ones(64, dtype=dtype, requires_grad=True)
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = platform.ops.rms_norm(x, weight, 1e-6)
    wide = max(4, dtype.itemsize)
    assert sum(saved.values()) == x.nbytes + weight.nbytes + 4 * 8 * wide
    y.sum().backward()
