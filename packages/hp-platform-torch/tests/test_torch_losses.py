"""The losses that are put together from other operations are torch's own, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_platform_torch.ops.decompositions import LOSSES

Tensor = torch.Tensor


def _calls() -> dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    torch.manual_seed(0)
    x, y, z = (torch.randn(50, 7, requires_grad=True) for _ in range(3))
    positive, signs = torch.rand(50, 7) + 0.1, torch.randn(50, 7).sign()
    classes, listed = torch.randint(0, 7, (50,)), torch.randint(-1, 7, (50, 7))
    return {
        "poisson_nll_loss": [((x, positive * 3), {}), ((positive, positive * 3, False, True), {})],
        "gaussian_nll_loss": [((x, y, positive * 1e-6), {}), ((x, y, positive), {"full": True}), ((x, y, 0.3), {})],
        "hinge_embedding_loss": [((x, signs, 0.3), {})],
        "margin_ranking_loss": [((x, y, signs, 0.2), {})],
        "cosine_embedding_loss": [((x, y, signs[:, 0], 0.1), {})],
        "triplet_margin_loss": [((x, y, z), {}), ((x, y, z), {"swap": True, "p": 1.0, "margin": 2.0})],
        "triplet_margin_with_distance_loss": [((x, y, z), {"swap": True})],
        "multi_margin_loss": [((x, classes), {}), ((x, classes, 2, 0.5, positive[0]), {})],
        "multilabel_margin_loss": [((x, listed), {})],
        "multilabel_soft_margin_loss": [((x, (signs > 0).float(), positive[0]), {})],
    }


SUMMED_IN_ANOTHER_ORDER = ("multi_margin_loss", "multilabel_margin_loss")


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients(name: str, reduction: str) -> None:
    for args, options in _calls()[name]:
        leaves = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        both = [function(*args, **options, reduction=reduction) for function in (getattr(F, name), LOSSES[name])]
        grads = [torch.autograd.grad(loss.sum(), leaves) if leaves else () for loss in both]
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if name in SUMMED_IN_ANOTHER_ORDER else {"rtol": 0, "atol": 0}
        torch.testing.assert_close((both[1], *grads[1]), (both[0], *grads[0]), **tolerance)


def test_gradients_where_a_margin_is_just_reached() -> None:
    x = torch.tensor([[1.0, 0.0, 2.0, 1.0], [0.0, 1.0, 0.0, -1.0]], requires_grad=True)
    signs, classes = torch.tensor([[1, -1, -1, 1], [-1, 1, -1, 1]]), torch.tensor([0, 1])
    calls: dict[str, tuple[Any, ...]] = {
        "hinge_embedding_loss": (x, signs),
        "margin_ranking_loss": (x, x.detach() - signs, signs, 1.0),
        "multi_margin_loss": (x, classes),
        "multilabel_margin_loss": (x, torch.tensor([[0, 3, -1, -1], [1, -1, 0, 0]])),
    }
    for name, args in calls.items():
        expected, got = (torch.autograd.grad(f(*args), x)[0] for f in (getattr(F, name), LOSSES[name]))
        torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_the_older_arguments_of_reduction() -> None:
    x, y = torch.randn(5, 2), torch.randn(5, 2).sign()
    with pytest.warns(UserWarning, match="deprecated"):
        expected = F.hinge_embedding_loss(x, y, size_average=False)
    with pytest.warns(UserWarning, match="deprecated"):
        assert torch.equal(LOSSES["hinge_embedding_loss"](x, y, size_average=False), expected)
    with pytest.raises(ValueError, match="median is not a valid value for reduction"):
        LOSSES["hinge_embedding_loss"](x, y, reduction="median")
