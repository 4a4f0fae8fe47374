"""The table of what the platform replaces in torch: installed, listed in the README, and nothing to plain tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hp_platform_torch import patches

README = Path(__file__).parents[1] / "README.md"


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def _ones():
    return torch.ones(3, 4)


def _gradient(function):
    x = _ones().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


def _reentrant():
    x = _ones().requires_grad_()
    torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True).sum().backward()
    return x.grad


def _layer():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


def _scripted():
    function = torch.jit.script(torch.nn.ReLU())
    return torch._C.ScriptFunction.__call__(torch.jit.script(_relu), _ones()) + function(_ones())


def _relu(x: torch.Tensor):
    return torch.relu(x)


def _in_a_job_of_one(call):
    def run():
        started = not dist.is_initialized()
        if started:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return torch.tensor(call(dist.group.WORLD))
        finally:
            if started:
                dist.destroy_process_group()

    return run


PLAIN_CALLS = {
    "torch.autograd.Function.apply": lambda: _gradient(_Double.apply),
    "torch.utils.checkpoint.CheckpointFunction.backward": _reentrant,
    "torch.utils.checkpoint.CheckpointFunction.forward": _reentrant,
    "torch.utils.checkpoint._CheckpointFrame.__init__": lambda: _gradient(
        lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)
    ),
    "torch._functorch.eager_transforms._wrap_for_grad": lambda: torch.func.grad(lambda x: x.sin().sum())(_ones()),
    "torch._functorch.vmap._add_batch_dim": lambda: torch.func.vmap(torch.sum)(_ones()),
    "torch._functorch.eager_transforms._maybe_wrap_functional_tensor": lambda: torch.func.functionalize(torch.sin)(
        _ones()
    ),
    "torch.to_dlpack": lambda: torch.from_dlpack(torch.to_dlpack(_ones())),
    "torch.utils.dlpack.to_dlpack": lambda: torch.from_dlpack(torch.utils.dlpack.to_dlpack(_ones())),
    "torch._C.ScriptFunction.__call__": _scripted,
    "torch.Tensor.set_": lambda: torch.empty(0).set_(_ones()),
    "torch.nn.parallel.DistributedDataParallel.__init__": _in_a_job_of_one(
        lambda group: torch.nn.parallel.DistributedDataParallel(_layer(), process_group=group)(_ones()).tolist()
    ),
    "torch.Tensor.new_tensor": lambda: _ones().new_tensor([1, 2]),
    "torch.masked.mean": lambda: torch.masked.mean(_ones(), 0),
    "torch.masked._ops.mean": lambda: torch.masked._ops.mean(_ones(), 0, mask=_ones() > 0),
    "torch.masked._ops._std_var": lambda: torch.masked.var(_ones(), 0) + torch.masked.std(_ones(), 0),
    "torch.compile": lambda: torch.compile(torch.sin, backend="eager")(_ones()),
}


@pytest.fixture(autouse=True)
def installed(platform):
    """The platform has been made, and with it everything is in its place."""


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.name)
def test_plain_tensors_get_what_torch_gives_them(patch, monkeypatch):
    replaced = PLAIN_CALLS[patch.name]()
    owner, attribute = patch.place()
    ours = getattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, patches.install()[patch.name])
    assert getattr(owner, attribute) is not ours, "the replacement was in its place"
    torch.testing.assert_close(replaced, PLAIN_CALLS[patch.name](), rtol=0, atol=0)


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.name)
def test_a_replacement_says_what_it_replaces(patch):
    owner, attribute = patch.place()
    assert getattr(owner, attribute).__wrapped__ is not None


def test_installing_again_changes_nothing():
    before = [getattr(*patch.place()) for patch in patches.PATCHES]
    patches.install()
    assert [getattr(*patch.place()) for patch in patches.PATCHES] == before


def test_the_readme_has_the_table():
    assert patches.as_markdown() in README.read_text(), "copy it from hp_platform_torch.patches.as_markdown()"
