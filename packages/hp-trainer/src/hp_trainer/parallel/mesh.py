"""The device mesh of a set of degrees, with every name that the trainer asks for."""

from __future__ import annotations

from collections.abc import Mapping

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import World


def build_mesh(
    device_type: str,
    world: World,
    dense: Mapping[str, int],
    aliases: Mapping[str, tuple[str, ...]],
    sparse: Mapping[str, int] | None,
) -> DeviceMesh:
    """Build a dense mesh over all ranks of `world`, with other names for the same ranks reachable as `mesh[name]`.

    Args:
        device_type: `cpu`, `cuda`, `npu`.
        world: its size is the product of the dense sizes.
        dense: size of every axis of the dense mesh, outermost first. Those of size 1 are no axes of the mesh, but
            their names give meshes of one rank; of all ones, `dp_shard` stays.
        aliases: names for several dense axes taken together.
        sparse: sizes of the experts' view of the same ranks, outermost first, among them `efsdp`, `ep` and `etp`;
            None: those three are named by `dense` and `aliases`.
    """
    root = DeviceMesh(device_type, (world.size,), mesh_dim_names=("world",), world=world)
    used = {name: size for name, size in dense.items() if size > 1} or {"dp_shard": 1}
    mesh = root.unflatten("world", tuple(used.values()), tuple(used))
    for name, parts in ({name: (name,) for name in dense} | dict(aliases)).items():
        if name not in used:
            mesh.flatten(name, [part for part in parts if part in used])
    if sparse is not None:
        # Views of one root share their aliases: what is named on the sparse view is found on the dense one.
        view = root.unflatten("world", tuple(sparse.values()), tuple(f"sparse_{name}" for name in sparse))
        for name in ("efsdp", "ep", "etp"):
            view.flatten(name, [f"sparse_{name}"])
    return mesh
