"""The mesh of a `with mesh:` block: what factories and `distribute_tensor` use where none is given."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hp_dtensor.exceptions import MeshError

if TYPE_CHECKING:
    from hp_dtensor.comm.mesh import DeviceMesh


class _Entered(threading.local):
    def __init__(self) -> None:
        self.meshes: list[DeviceMesh] = []


_entered = _Entered()


def get_current_mesh() -> DeviceMesh:
    """The mesh of the innermost `with mesh:` block of this thread.

    Raises:
        MeshError: there is none.
    """
    if not _entered.meshes:
        raise MeshError("no mesh was given and there is no current one; pass device_mesh=, or use `with mesh:`")
    return _entered.meshes[-1]


def enter(mesh: DeviceMesh) -> None:
    """Make `mesh` current until `leave`."""
    _entered.meshes.append(mesh)


def leave() -> None:
    """End the innermost `enter`."""
    _entered.meshes.pop()
