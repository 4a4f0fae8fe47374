"""Functions by which real ranks use torch's own DTensors; see test_torch_interop.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import nn
from torch.distributed.tensor import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from hp_dtensor import (
    DeviceMesh,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    ShardingPlan,
    StridedShard,
    destroy_process_group,
    distribute_tensor,
    from_local,
    get_group_local_rank,
    get_process_group_ranks,
    init_device_mesh,
    shard_module,
    zeros,
)
from hp_dtensor.comm.mesh import as_group
from hp_dtensor.exceptions import MeshError, PlacementError
from hp_platform_torch.tensor.interop import (
    from_torch_dtensor,
    from_torch_mesh,
    to_torch_dtensor,
    to_torch_mesh,
    to_torch_state_dict,
)

FULL = torch.arange(35.0).view(7, 5)


def one_axis():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",), platform="torch")


def there_and_back():
    """Every placement that both have: memory, values, placements."""
    mesh = one_axis()
    for placement in (Replicate(), Shard(0), Shard(1)):
        x = distribute_tensor(FULL.clone(), mesh, [placement], src_data_rank=None)
        theirs = to_torch_dtensor(x)
        ours = from_torch_dtensor(theirs)
        assert torch.equal(theirs.full_tensor(), FULL)
        assert theirs.to_local().data_ptr() == x.to_local().data_ptr() == ours.to_local().data_ptr()
        assert ours.spec is x.spec
    partial = from_local(torch.full((2,), float(mesh.world.rank + 1)), mesh, [Partial()])
    return to_torch_dtensor(partial).full_tensor().tolist() == partial.full_tensor().tolist()


def gradients():
    """Through both conversions and torch's own operations in between."""
    mesh = one_axis()
    w = distribute_tensor(FULL.clone(), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    ours = from_torch_dtensor(to_torch_dtensor(w) * 3.0)
    (ours * ours).sum().backward()
    return torch.equal(w.grad.full_tensor(), 18 * FULL)


def gradients_of_partial_values(op):
    """Sums have the gradients of one rank; of the others the error of each direction."""
    mesh = one_axis()
    w = distribute_tensor(FULL.clone(), mesh, [Replicate()], src_data_rank=None).requires_grad_()
    partial = w.redistribute(placements=[Partial(op)])
    assert torch.equal(to_torch_dtensor(partial.detach()).full_tensor(), FULL)
    local = torch.ones(2).requires_grad_()
    theirs = TorchDTensor.from_local(local, to_torch_mesh(mesh), [TorchPartial(op)])
    with torch.no_grad():
        assert from_torch_dtensor(theirs).placements == (Partial(op),)
    try:
        to_torch_dtensor(partial).full_tensor().sum().backward()
        from_torch_dtensor(theirs).full_tensor().sum().backward()
    except PlacementError as error:
        try:
            from_torch_dtensor(theirs)
        except PlacementError as other:
            return str(error), str(other)
    return w.grad.full_tensor().unique().tolist(), local.grad.tolist()


def their_tensor_in_our_operations():
    torch_mesh = TorchMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("dp",))
    x = from_torch_dtensor(torch_distribute(FULL, torch_mesh, [TorchShard(0)]))
    y = from_torch_dtensor(torch_distribute(FULL, torch_mesh, [TorchReplicate()]))
    partial = from_torch_dtensor(torch_distribute(FULL, torch_mesh, [TorchPartial()]))
    assert x.device_mesh == y.device_mesh == from_torch_mesh(torch_mesh)
    return ((x @ y.T).sum() + partial.sum()).item() == (FULL @ FULL.T).sum().item() + FULL.sum().item()


def groups_are_shared():
    """On three ranks: a group of two of them, ours in torch and torch's in ours."""
    rank = dist.get_rank()
    created = dist.new_group([0, 2])
    world = one_axis().world
    if rank == 1:
        return None
    lower = DeviceMesh("cpu", (2,), mesh_dim_names=("dp",), ranks=(0, 2), world=world)
    theirs = to_torch_mesh(lower)
    assert to_torch_mesh(lower) is theirs
    assert theirs.get_group()._get_backend(torch.device("cpu")) is lower.group_along().connection("cpu")
    x = torch.full((2,), float(rank + 1))
    dist.all_reduce(x, group=theirs.get_group())
    back = from_torch_mesh(TorchMesh.from_group(created, "cpu"))
    y = torch.full((2,), float(rank + 1))
    back.group_along().all_reduce(y)
    total = to_torch_dtensor(from_local(torch.ones(2 - rank // 2), lower, [Shard(0)], shape=(3,)))
    return x.tolist(), y.tolist(), dist.get_process_group_ranks(theirs.get_group()), total.shape


def torchs_mesh_wherever_ours_is():
    """A mesh of torch.distributed.device_mesh given to distribute_tensor, from_local, factories and redistribute."""
    theirs = TorchMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("dp",))
    x = distribute_tensor(FULL.clone(), theirs, [Shard(0)])
    y = from_local(x.to_local(), theirs, [Shard(0)], shape=FULL.shape)
    z = zeros(7, 5, device_mesh=theirs, placements=[Shard(0)]) + x
    moved = z.redistribute(theirs, [Replicate()])
    assert x.spec is y.spec is z.spec
    return [torch.equal(each.full_tensor(), FULL) for each in (x, y, z, moved)]


def a_mesh_from_torchs_groups():
    """Our mesh over a group of two ranks that the program has made in torch, on three ranks."""
    created = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        try:
            DeviceMesh.from_group(created, "cpu")
        except MeshError as error:
            return str(error)
    mesh = DeviceMesh.from_group(created, "cpu", mesh_dim_names=("dp",))
    assert mesh.group_along().connection("cpu") is created._get_backend(torch.device("cpu"))
    x = torch.full((2,), float(dist.get_rank() + 1))
    mesh.group_along().all_reduce(x)
    assert mesh.group_along().all_gather_bytes(b"%d" % dist.get_rank()) == [b"1", b"2"]
    return mesh.mesh.tolist(), mesh.mesh.dtype, x.tolist()


def our_groups_in_torchs_calls():
    """Functions of torch.distributed on `mesh.get_group()`, on three ranks, two of them in one group."""
    mesh = one_axis()
    rank = dist.get_rank()
    x = torch.full((2,), float(rank + 1))
    dist.all_reduce(x, group=mesh.get_group())
    assert x.tolist() == [6.0, 6.0]
    alone = DeviceMesh("cpu", (3, 1), world=mesh.world).get_group(1)
    dist.all_reduce(x, group=alone)
    assert (x.tolist(), dist.get_world_size(alone)) == ([6.0, 6.0], 1)
    if rank == 1:
        return None
    group = DeviceMesh("cpu", [0, 2], world=mesh.world).get_group()
    y = torch.full((2,), float(rank + 1))
    dist.all_reduce(y, group=group)
    dist.broadcast(z := torch.full((1,), float(rank)), src=2, group=group)
    dist.all_gather(parts := [torch.zeros(1), torch.zeros(1)], torch.full((1,), float(rank)), group=group)
    dist.all_gather_object(objects := [None, None], f"rank {rank}", group=group)
    dist.all_gather_into_tensor(unsharded := torch.zeros(2), torch.full((1,), float(rank)), group=group)
    dist.reduce_scatter_tensor(part := torch.zeros(1), torch.tensor([1.0, 2.0]), group=group)
    assert unsharded.tolist() == [0.0, 2.0]
    assert part.item() == 2.0 * (1 + rank // 2)
    dist.barrier(group)
    asked = dist.get_world_size(group), dist.get_process_group_ranks(group), dist.get_global_rank(group, 1)
    assert dist.get_rank(group) == dist.get_group_rank(group, rank) == group.rank() == rank // 2
    assert all(isinstance(each, dist.ProcessGroup) for each in (group, alone))
    assert group.size() == 2
    return y.tolist(), z.item(), [part.item() for part in parts], objects, asked


def data_parallel_over_our_groups():
    """`DistributedDataParallel` with a group or a mesh of ours: gradients are the means over the group's ranks."""
    mesh = one_axis()
    grids = mesh.unflatten("dp", (dist.get_world_size(), 1), ("replicate", "shard"))
    gradients = []
    for options in ({"process_group": mesh.get_group()}, {"device_mesh": mesh}, {"device_mesh": grids["replicate"]}):
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False), **options)
        model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        gradients.append(model.module.weight.grad.tolist())
    return gradients


def groups_after_release():
    """A group that was destroyed is created again on its next use, in torch's tables too; ours takes torch's."""
    mesh = one_axis()
    pair = DeviceMesh("cpu", [0, 1], world=mesh.world) if dist.get_rank() < 2 else None
    if pair is None:
        return None
    first = pair.get_group()
    assert pair.get_group() is first
    assert as_group(first) is pair.group_along()
    assert (get_process_group_ranks(first), get_group_local_rank(first)) == ([0, 1], dist.get_rank())
    destroy_process_group(first)
    again = pair.get_group()
    x = torch.ones(1)
    dist.all_reduce(x, group=again)
    return again is first, x.item()


def descending_ranks():
    """torch sorts the ranks of its groups: the shards of such a mesh are in another order than it says."""
    local = torch.full((1,), float(dist.get_rank()))
    theirs = TorchDTensor.from_local(local, TorchMesh("cpu", torch.tensor([1, 0])), [TorchShard(0)])
    try:
        from_torch_dtensor(theirs)
    except MeshError as error:
        mesh = DeviceMesh("cpu", (2,), ranks=(1, 0), world=one_axis().world)
        ours = distribute_tensor(FULL.clone(), mesh, [Shard(0)], src_data_rank=None)
        there = to_torch_dtensor(ours)
        unsharded = [x.full_tensor() for x in (ours, there, from_torch_dtensor(there))]
        return [str(error), *(torch.equal(x, FULL) for x in unsharded)]


def two_axes():
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "tp"), platform="torch")
    x = distribute_tensor(FULL, mesh, [Shard(0), Shard(1)], src_data_rank=None)
    theirs = to_torch_dtensor(x)
    assert theirs.device_mesh.mesh_dim_names == ("pp", "tp")
    return torch.equal(theirs.full_tensor(), FULL)


def refusals():
    mesh = one_axis()
    ragged = from_local(torch.ones((5, 2)[mesh.world.rank], 2), mesh, [RaggedShard(0, (5, 2))])
    in_order = from_local(torch.ones((4, 3)[mesh.world.rank], 2), mesh, [RaggedShard(0, (4, 3))])
    assert to_torch_dtensor(in_order).placements == (TorchShard(0),)
    try:
        to_torch_dtensor(ragged)
    except PlacementError as error:
        return str(error)


def simulated_mesh_is_refused():
    from hp_dtensor.testing import run_ranks

    def convert():
        try:
            to_torch_mesh(init_device_mesh("cpu", (2,), platform="torch"))
        except MeshError as error:
            return str(error)

    return run_ranks(convert, 2, "torch")[0]


def _model(seed, placements):
    torch.manual_seed(seed)
    mesh = one_axis()
    plan = {"0.weight": (placements[0],), "0.bias": (placements[0],), "1.weight": (placements[1],)}
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.LayerNorm(3))
    return shard_module(model, mesh, ShardingPlan(plan))


def checkpoint(folder, convert):
    """Saved by torch.distributed.checkpoint, read into a model of another layout; weights before and after."""
    converted = to_torch_state_dict if convert else dict
    saved, read = _model(0, (Shard(0), Shard(1))), _model(1, (Replicate(), Shard(0)))
    dcp.save({"model": converted(saved.state_dict())}, checkpoint_id=folder)
    dcp.load({"model": converted(read.state_dict())}, checkpoint_id=folder)
    same = []
    for p, q in zip(saved.parameters(), read.parameters(), strict=True):
        unsharded = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in (p, q)]
        same.append(torch.equal(*unsharded))
    return same


def _layouts():
    """On three ranks: ways to hold a tensor of 7 x 5."""
    line = one_axis()
    some = DeviceMesh("cpu", (2,), mesh_dim_names=("dp",), ranks=(2, 0), world=line.world)
    placements = [Replicate(), Shard(0), Shard(1), StridedShard(0, 2), StridedShard(1, 4), RaggedShard(0, (0, 5, 2))]
    return [(line, (p,)) for p in placements] + [
        (some, (Shard(0),)),
        (line["dp",].unflatten("dp", (1, 3), "ab"), (placements[1], placements[2])),
    ]


def checkpoint_of_any_layout(folder):
    """Every layout read into every other, in place, and into plain tensors."""
    layouts = _layouts()
    values = [FULL + 100 * i for i in range(len(layouts))]
    state = {str(i): distribute_tensor(v, *where) for i, (v, where) in enumerate(zip(values, layouts, strict=True))}
    empty = distribute_tensor(torch.zeros(0, 3), one_axis(), [Shard(0)])
    one = distribute_tensor(torch.tensor([5]), one_axis(), [Shard(0)])
    dcp.save({**state, "empty": empty, "one": one}, checkpoint_id=folder)
    plain = {str(i): torch.zeros_like(FULL) for i in range(len(layouts))}
    dcp.load({**plain, "empty": empty, "one": (found := torch.zeros(1, dtype=torch.int64))}, checkpoint_id=folder)
    wrong = [f"plain {i}" for i, v in enumerate(values) if not torch.equal(plain[str(i)], v)]
    for shift in range(1, len(layouts)):
        turned = layouts[shift:] + layouts[:shift]
        read = {str(i): distribute_tensor(torch.zeros_like(FULL), *where) for i, where in enumerate(turned)}
        dcp.load(read, checkpoint_id=folder)
        wrong += [f"{i} into {x.spec}" for i, x in enumerate(read.values()) if not _holds(x, values[i])]
    return wrong, found.item()


def _holds(x, unsharded):
    if x.device_mesh.get_coordinate() is None:
        return True
    return torch.equal(
        x.to_local(), distribute_tensor(unsharded, *(x.device_mesh, x.placements), src_data_rank=None).to_local()
    )


def checkpoint_of_partial_values(folder):
    partial = from_local(torch.ones(2), one_axis(), [Partial()])
    try:
        dcp.save({"x": partial}, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        return [type(reason[0]).__name__ + ": " + str(reason[0]) for reason in error.failures.values()]


def checkpoint_in_the_background(folder):
    """The values of when it was asked for."""
    x = distribute_tensor(FULL.clone(), one_axis(), [Shard(0)], src_data_rank=None)
    under_way = dcp.async_save(to_torch_state_dict({"x": x}), checkpoint_id=folder)
    x.zero_()
    under_way.result()
    dcp.load({"x": x}, checkpoint_id=folder)
    return torch.equal(x.full_tensor(), FULL)
