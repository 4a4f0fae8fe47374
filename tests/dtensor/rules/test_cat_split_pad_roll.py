"""`cat` passes over tensors of the shape (0,), as key-value caches hold at first; on torch, which does so itself."""

from __future__ import annotations

import pytest

from hp_dtensor import Replicate, Shard, distribute_tensor, implicit_replication, init_device_mesh
from hp_dtensor.testing import run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("hp_platform_torch")


@pytest.mark.parametrize("placement", [Shard(1), Shard(2), Replicate()])
def test_a_cache_grows_from_nothing_along_a_negative_dimension(placement):
    keys = [torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(step)) for step in range(3)]

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        cache = torch.tensor([])
        with implicit_replication():
            for step in keys:
                part = distribute_tensor(step, mesh, [placement]).requires_grad_()
                cache = torch.cat([cache, part], dim=-2)
        torch.testing.assert_close(cache.full_tensor().detach(), torch.cat(keys, dim=-2))
        cache.full_tensor().square().sum().backward()
        torch.testing.assert_close(part.grad.full_tensor(), 2 * keys[-1])
        nothing = distribute_tensor(torch.tensor([]), mesh, [Replicate()])
        assert torch.cat([nothing, nothing]).shape == (0,)

    run_ranks(rank, 2, "torch")
