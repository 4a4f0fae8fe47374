"""Ranks that share an accelerator, as far as a machine without one can show."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch_rank_functions as on_rank

from hp_dtensor.exceptions import PlatformError
from hp_platform_torch.comm.groups import StagedGroup
from hp_platform_torch.comm.world import TorchWorld, _backend_names
from hp_platform_torch.platform import TorchPlatform


@pytest.fixture
def cuda(monkeypatch) -> TorchPlatform:
    """A platform that believes in one CUDA device."""
    platform = TorchPlatform()
    platform.device_types = ("cuda", "cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return platform


def test_collectives_by_way_of_the_host_are_those_of_the_backend(three_ranks):
    for staged, direct in three_ranks.run(on_rank.staged_collectives):
        assert staged == direct


def test_ranks_share_devices_when_asked_and_else_each_needs_its_own(cuda, monkeypatch):
    monkeypatch.delenv("HP_BACKEND", raising=False)
    assert cuda.max_local_ranks() == 1
    assert "gloo" not in _made(cuda)
    monkeypatch.setenv("HP_BACKEND", "gloo")
    assert cuda.max_local_ranks() is None
    assert _made(cuda) == "gloo"
    assert _backend_names() == "cpu:gloo"
    cuda._use_device(3)
    assert cuda.device == torch.device("cuda", 0)


def test_another_backend_is_refused(cuda, monkeypatch):
    monkeypatch.setenv("HP_BACKEND", "mpi")
    with pytest.raises(PlatformError, match="HP_BACKEND is 'mpi'; expected gloo"):
        cuda.max_local_ranks()


def test_the_cpu_has_any_number_of_ranks_and_needs_no_detour(monkeypatch):
    monkeypatch.setenv("HP_BACKEND", "gloo")
    platform = SimpleNamespace(device_types=("cpu",))
    group = TorchWorld(0, 2, platform, None, timedelta(seconds=1))._create_group((0, 1))
    assert not isinstance(group, StagedGroup)
    assert TorchPlatform().max_local_ranks() is None


def _made(platform) -> str:
    """The backend of a group of two ranks."""
    return TorchWorld(0, 2, platform, None, timedelta(seconds=1))._create_group((0, 1)).backend
