"""Weights that several stages of a pipeline use: a copy on each, kept equal by the sum of their gradients."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_trainer.exceptions import PipelineError

Tensor = Any


class TiedWeights:
    """Parameters that are one weight, such as an embedding on the first stage and a head on the last.

    Every copy gets the sum of all copies' gradients, once per step, so equal copies stay equal under any optimizer.
    Every rank of the pipeline makes one, without parameters too.

    Args:
        parameters: (name, parameter) of this rank's stages; those that have a name on several stages are one weight,
            others are left alone.
        mesh: the ranks of the pipeline: `mesh["pp"]`, or a process group.

    Attributes:
        copies: this rank's parameters that another stage counts, in a norm or a number of parameters.

    Raises:
        PipelineError: copies of other shapes, or that are cut otherwise.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,), ("pp",))
        ...     weight = platform.Parameter(platform.ops.ones((2,), platform.dtype("float32")))
        ...     tied = TiedWeights([("embedding", weight)], mesh["pp"])
        ...     platform.backward(platform.ops.sum(platform.ops.mul(weight, 1.0 + mesh.get_rank())))
        ...     tied.sum_gradients()
        ...     return platform.to_numpy(platform.get_grad(weight)).tolist(), tied.is_copy(weight)
        >>> run_ranks(program, 2)
        [([3.0, 3.0], False), ([3.0, 3.0], True)]
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], mesh: DeviceMesh | ProcessGroup) -> None:
        group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
        assert group.platform is not None
        self._platform: Platform = group.platform
        mine: dict[str, list[Tensor]] = {}
        for name, parameter in parameters:
            if all(parameter is not known for known in mine.get(name, [])):
                mine.setdefault(name, []).append(parameter)
        self._owners = self._exchange(mine, group)
        # Sorted: ranks that share several weights reduce them in one order.
        self._mine = {name: copies for name, copies in sorted(mine.items()) if name in self._owners}
        world = current_world(self._platform)
        self.copies: list[Tensor] = [
            copy
            for name, copies in self._mine.items()
            for index, copy in enumerate(copies)
            if index or self._owners[name][0] != world.rank
        ]

    def is_copy(self, parameter: Tensor) -> bool:
        """Return True if this parameter is among `copies`."""
        return any(parameter is copy for copy in self.copies)

    def _exchange(self, mine: dict[str, list[Tensor]], group: ProcessGroup) -> dict[str, tuple[int, ...]]:
        """Return the global ranks that have each tied weight; those with a single copy are left out."""
        told = {name: [_form(self._platform, copy) for copy in copies] for name, copies in mine.items()}
        everyones = [json.loads(part) for part in group.all_gather_bytes(json.dumps(told).encode())]
        owners: dict[str, list[int]] = {}
        forms: dict[str, list[str]] = {}
        for rank, part in zip(group.ranks, everyones, strict=True):
            for name, found in part.items():
                owners.setdefault(name, []).append(rank)
                forms.setdefault(name, []).extend(found)
        wrong = [f"{name}: {' and '.join(dict.fromkeys(found))}" for name, found in forms.items() if len({*found}) > 1]
        if wrong:
            raise PipelineError(
                f"tied weights need equal shapes, dtypes and shards on their stages; got {'; '.join(wrong)}. Call "
                "fully_shard on the module of a tied weight alone, so that it is cut alike wherever it is"
            )
        return {name: tuple(owners[name]) for name, found in forms.items() if len(found) > 1}

    def broadcast(self) -> None:
        """Give every copy the values of the first."""
        with self._platform.no_grad():
            for name, copies in self._mine.items():
                first = local_of(self._platform, copies[0])
                if len(self._owners[name]) > 1:
                    values = self._platform.contiguous(self._platform.detach(first))
                    self._group(name).broadcast(values, 0)
                    self._platform.copy_(first, values)
                for copy in copies[1:]:
                    self._platform.copy_(local_of(self._platform, copy), first)

    def sum_gradients(self) -> None:
        """Replace the gradient of every copy by the sum over all copies; one all-reduce for each weight."""
        platform = self._platform
        with platform.no_grad():
            for name, copies in self._mine.items():
                grads = [grad for copy in copies if (grad := platform.get_grad(copy)) is not None]
                total = self._sum_here(copies[0], grads)
                if len(self._owners[name]) > 1:
                    self._group(name).all_reduce(total)
                for copy in copies:
                    self._set_gradient(copy, total)

    def _sum_here(self, like: Tensor, grads: list[Tensor]) -> Tensor:
        platform, local = self._platform, local_of(self._platform, like)
        # Zeros where no copy here has a gradient: the other stages wait for this rank in the all-reduce all the same.
        total = platform.zeros(tuple(local.shape), (grads[0] if grads else local).dtype)
        for grad in grads:
            total = platform.ops.add(total, local_of(platform, grad))
        return platform.contiguous(total)

    def _set_gradient(self, copy: Tensor, total: Tensor) -> None:
        grad = self._platform.get_grad(copy)
        if grad is not None:
            # In place: a gradient of FSDP is a view of the buffer that the optimizer's step reads.
            self._platform.copy_(local_of(self._platform, grad), total)
        elif isinstance(copy, DTensor):
            self._platform.set_grad(copy, self._platform.wrap(self._platform.ops.clone(total), copy.spec))
        else:
            self._platform.set_grad(copy, self._platform.ops.clone(total))

    def _group(self, name: str) -> ProcessGroup:
        return current_world(self._platform).group(self._owners[name])


def _form(platform: Platform, x: Tensor) -> str:
    local = platform.local_shape(x)
    placements = f" {[str(each) for each in x.placements]}" if isinstance(x, DTensor) else ""
    return f"{platform.dtype_name(x.dtype)}{list(local)}{placements}"
