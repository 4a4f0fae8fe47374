"""The mesh of a `with mesh:` block: what factories and `distribute_tensor` use where none is given."""

from __future__ import annotations

from hp_dtensor.comm.mesh import DeviceMesh, entered
from hp_dtensor.exceptions import MeshError


def get_current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost `with mesh:` block of this thread.

    Raises:
        MeshError: there is none.

    Example:
        >>> def program():
        ...     with init_device_mesh("cpu", (2,)) as mesh:
        ...         return get_current_mesh() is mesh
        >>> run_ranks(program, 2)
        [True, True]
    """
    if not entered.meshes:
        raise MeshError("no mesh was given and there is no current one; pass device_mesh=, or use `with mesh:`")
    return entered.meshes[-1]
