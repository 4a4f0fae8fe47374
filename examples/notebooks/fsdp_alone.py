"""Sharded training alone: `python examples/notebooks/fsdp_alone.py`, or cell by cell in an editor.

Needs hp-fsdp and a platform. Two ranks are simulated in this process, each with half of every weight.
"""

# %% A model, written once for every platform
from hp_dtensor import Shard, init_device_mesh, randn
from hp_dtensor.parallel import nn
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_fsdp import fully_shard

platform = get_platform()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.second(platform.ops.relu(self.first(x)))


# %% Each rank keeps its shards; a group is gathered for its forward and again for its backward


def train(steps):
    mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("fsdp",))
    with nn.building(platform):
        model = Model()
    fully_shard(model.first, mesh)
    fully_shard(model, mesh)
    init_parameters(model, lambda name, shape: Normal(0.3), seed=0)
    losses = []
    x = randn(8, 6, device_mesh=mesh, placements=[Shard(0)]).to_local()  # each rank its rows
    for _ in range(steps):
        loss = platform.ops.mean(platform.ops.square(platform.ops.sub(model(x), 1.0)))
        platform.backward(loss)
        with platform.no_grad():
            for _, weight in platform.named_parameters(model):
                local = platform.unwrap(weight)
                step = platform.ops.mul(platform.unwrap(platform.get_grad(weight)), 0.05)
                platform.copy_(local, platform.ops.sub(local, step))
                platform.set_grad(weight, None)
        losses.append(float(platform.to_numpy(platform.detach(loss))))
    return losses


losses = run_ranks(train, 2, platform, 20)[0]
print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0]
