"""Gradients of one flat buffer: collected from autograd in full, and stored in the parameters once reduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from hp_fsdp._engine.buffer_memory import BufferMemory
from hp_fsdp._engine.fsdp_parameter import FSDPParameter
from hp_fsdp._engine.offload import AwaitedGradients, arrived
from hp_fsdp._engine.used_parameters import UsedParameters
from hp_fsdp._engine.versions import ParameterVersions
from hp_fsdp.exceptions import FSDPStateError
from hp_fsdp.storage import Gradients

Tensor = Any


class BufferGradients:
    """Collects the gradients of a buffer's parameters, and gives each sharded parameter its part once reduced.

    Attributes:
        unreduced: full gradients in the layout of the full buffer, not reduced yet; None: there are none.
        unreduced_indices: the parameters that have gradients in there.
        partial_shard: a reduced shard that waits for another reduction: for later micro-batches (ZeRO-2), or for the
            replicate axis; None: there is none.
        partial_indices: the parameters that have gradients in there, or in reductions under way that will end there.
        awaited: reduced gradients that lie apart from their parameters.
    """

    def __init__(self, memory: BufferMemory, versions: ParameterVersions) -> None:
        self._memory = memory
        self._versions = versions
        self._storage, self._platform = memory.storage, memory.platform
        self._gaps = list(memory.layout.gaps())
        self.awaited = AwaitedGradients(memory.offload, self._zero_part, self._set_gradients)
        self.unreduced: Tensor | None = None
        self.unreduced_indices: frozenset[int] = frozenset()
        self.partial_shard: Tensor | None = None
        self.partial_indices: frozenset[int] = frozenset()

    # Collecting ------------------------------------------------------------------------------------------

    def collect(self, indices: Sequence[int], grads: Gradients) -> None:
        """Write gradients into the full gradient buffer, or add them to those that wait there unreduced.

        Args:
            indices: the parameters of the autograd node that has run.
            grads: their gradients; None for those that the loss does not use.

        Raises:
            FSDPStateError: a gradient that is not dense.
        """
        # A fresh buffer has no values: gradients are copied into it, and only gaps and unused parameters are set to
        # zero. One pass over memory instead of two.
        fresh = self.unreduced is None
        if fresh:
            self.unreduced = self._memory.new_buffer(self._memory.layout.numel, self._memory.reduce_dtype)
            self._memory.count_allocation()
            self._zero(self._gaps)
        # A parameter that has been frozen since the forward takes no gradient.
        wanted = self._memory.wanted_gradients()
        given = {i: grad for i, grad in zip(indices, grads, strict=True) if wanted[i]}
        self.unreduced_indices |= {i for i, grad in given.items() if grad is not None}
        for index, parameter in enumerate(self._memory.parameters):
            self._collect_one(index, given.get(index), fresh)
            # Recomputation inside a backward may use the parameter by a graph of its own, which accumulates in a leaf.
            recomputed = self._storage.take_grad(parameter.leaf)
            if recomputed is not None and wanted[index]:
                self.unreduced_indices |= {index}
                self._collect_one(index, recomputed, fresh=False)

    def outlive(self, freed: Sequence[Tensor], grads: Gradients) -> Gradients:
        """Return the gradients, copied where one lies in memory to be freed: it is a parameter itself, as of x * w."""
        if not freed:
            return grads
        with self._platform.local_op():
            begins = [self._storage.address(buffer) for buffer in freed]
            ends = [begin + self._storage.held_bytes(buffer) for begin, buffer in zip(begins, freed, strict=True)]
            inside = [
                grad is not None
                and any(a <= self._storage.address(grad) < b for a, b in zip(begins, ends, strict=True))
                for grad in grads
            ]
        if not any(inside):
            return grads
        return [self._platform.ops.clone(x) if copied else x for x, copied in zip(grads, inside, strict=True)]

    def forget(self) -> None:
        """Drop gradients that have been accumulated but not reduced."""
        self.unreduced = self.partial_shard = None
        self.unreduced_indices = self.partial_indices = frozenset()
        for parameter in self._memory.parameters:
            self._storage.take_grad(parameter.leaf)

    @property
    def are_waiting(self) -> bool:
        """True if gradients wait for more micro-batches, or for another reduction."""
        return self.unreduced is not None or self.partial_shard is not None

    @property
    def are_out_of_date(self) -> bool:
        """True if an operation has written parameters while gradients of their earlier values waited."""
        return self.are_waiting and self._versions.written_since_accumulation

    def _collect_one(self, index: int, grad: Tensor | None, fresh: bool) -> None:
        layout = self._memory.layout
        offset, numel = layout.offsets[index], layout.blocks[index].numel
        if grad is None:
            if fresh:
                self._zero([(offset, numel)])
            return
        parameter, shape = self._memory.parameters[index], tuple(grad.shape)
        if math.prod(shape) != numel:
            raise self._irreducible(parameter, f"it is of shape {list(shape)}, not of {numel} elements")
        part = self._storage.part(self.unreduced, offset, shape, parameter.first_dim)
        try:
            (self._platform.copy_ if fresh else self._storage.add_)(part, grad)
        except RuntimeError as error:
            raise self._irreducible(parameter, error) from error

    def _irreducible(self, parameter: FSDPParameter, why: object) -> FSDPStateError:
        return FSDPStateError(
            f"rank {self._memory.world.rank}: the gradient of {parameter.name} cannot be reduced: {why}. It must be "
            "dense (Embedding(sparse=False)); or leave the parameter out (ignored_params)"
        )

    def _zero(self, intervals: Iterable[tuple[int, int]]) -> None:
        for offset, numel in intervals:
            self._storage.zero_(self._storage.part(self.unreduced, offset, (numel,)))

    # Storing ---------------------------------------------------------------------------------------------

    def start_store(self, reduced: Tensor, used: UsedParameters) -> Callable[[], None]:
        """Begin to bring a reduced shard to where the parameters' gradients lie.

        Args:
            used: the parameters to get gradients; by the time the function returned is called, those of all ranks.

        Returns:
            The function that waits for the copy and makes the shard's parts the parameters' gradients.
        """
        offload = self._memory.offload
        flat = self._memory.cast(reduced, self._memory.grad_dtype)
        # What somebody has looked at lies with the parameters; what is added to it joins it.
        apart = offload.is_apart and not self._any_gradient_set()
        on_host = offload.gradients if apart else offload.parameters
        flat, copy = offload.to_host(flat) if on_host else arrived(flat)

        def finish() -> None:
            copy.wait()
            parameters = [self._memory.parameters[index] for index in sorted(used.indices)]
            if not parameters:
                return
            if apart:
                self.awaited.add(flat, parameters)
            else:
                # What lies apart from earlier joins first, or this sum would replace it.
                self.awaited.fetch()
                self._set_gradients(parameters, flat)

        return finish

    def _any_gradient_set(self) -> bool:
        wanted = zip(self._memory.parameters, self._memory.wanted_gradients(), strict=True)
        return any(self._storage.local_grad(each.sharded) is not None for each, is_wanted in wanted if is_wanted)

    def run_gradient_hooks(self, indices: Collection[int]) -> None:
        """Call the hooks that users have put on the gradients of these parameters, which have been written."""
        for index in sorted(indices):
            self._storage.run_gradient_hooks(self._memory.parameters[index].sharded)

    def _zero_part(self, parameter: FSDPParameter, flat: Tensor) -> None:
        self._storage.zero_(self._memory.part_of(parameter, flat))

    def _set_gradients(self, parameters: Sequence[FSDPParameter], flat: Tensor) -> None:
        """Make the parts of a flat shard the gradients of sharded parameters, or add them to those they have."""
        for parameter in parameters:
            grad = self._memory.part_of(parameter, flat)
            present = self._storage.local_grad(parameter.sharded)
            if present is None:
                self._storage.set_local_grad(parameter.sharded, grad, parameter.sharded.spec)
            else:
                self._storage.add_(present, grad)

    # Bytes -----------------------------------------------------------------------------------------------

    @property
    def unreduced_bytes(self) -> int:
        """Bytes of full gradients that wait for a reduction."""
        return self._storage.held_bytes(self.unreduced) if self.unreduced is not None else 0

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the sharded parameters' gradients, and of a reduced shard that waits for another reduction."""
        parameters = self._memory.parameters
        grads = [self._storage.local_grad(parameter.sharded) for parameter in parameters]
        waiting = [shard for shard in (self.partial_shard, self.awaited.flat) if shard is not None]
        return sum(self._storage.held_bytes(shard) for shard in waiting) + sum(
            math.prod(parameter.local_shape) * self._platform.itemsize(grad.dtype)
            for parameter, grad in zip(parameters, grads, strict=True)
            if grad is not None
        )
