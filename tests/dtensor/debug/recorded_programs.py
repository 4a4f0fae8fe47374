"""Programs of real ranks that are recorded."""

from __future__ import annotations

import numpy as np
from small_model import make_model

from hp_dtensor import get_platform
from hp_dtensor.comm.world import current_world
from hp_dtensor.debug import Recorder, Recording, Rows


def torch_fsdp2(data: np.ndarray) -> Recording:
    """Two steps of torch's own `fully_shard` on real ranks, each with its own rows."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    platform = get_platform("torch")
    world = current_world(platform)
    model = make_model(platform)
    mesh = init_device_mesh("cpu", (world.size,))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rows = np.array_split(np.arange(len(data)), world.size)[world.rank]
    recorder = Recorder(model, platform, about={"dtypes": ["float32"]})
    # FSDP2 averages gradients over ranks, so each rank's loss is multiplied by their number.
    recorder.gradient_factor = 1 / world.size
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in (1, 2):
        with recorder.step(step, Rows(rows, len(data))):
            loss = model(torch.from_numpy(data[rows])).square().sum() / (len(data) * 5)
            (loss * world.size).backward()
            recorder.gradients()
            optimizer.step()
            optimizer.zero_grad()
    return recorder.recording
