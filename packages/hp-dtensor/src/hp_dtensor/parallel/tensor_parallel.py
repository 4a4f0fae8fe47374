"""Tensor-parallel styles for linear layers, embeddings and normalizations.

Names and arguments follow torch's `torch.distributed.tensor.parallel`. The layouts are those of Megatron-LM
(arXiv 1909.08053): a column-wise layer followed by a row-wise one needs one all-reduce in forward and one in backward.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.parallel.distribute_module import distribute_module, replicate_plain
from hp_dtensor.parallel.inputs_outputs import bring, first_input
from hp_dtensor.parallel.parameters import own_parameters, place_parameter
from hp_dtensor.parallel.style import ParallelStyle
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement, Replicate, Shard
from hp_dtensor.tensor.dtensor import DTensor

Module = Any

# An attribute that only embeddings have -> the name of their table: those of torch and `mindspore.mint.nn`, and
# `mindspore.nn.Embedding`.
_TABLES = {"embedding_dim": "weight", "embedding_table": "embedding_table"}


class _CutLayer(ParallelStyle):
    """A linear layer or embedding with a cut weight: the part that column-wise and row-wise styles share."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    @abstractmethod
    def _cut(self, module: Module) -> Mapping[str, Placement]:
        """Return the placements of the parameters that are cut; the others are replicated."""

    @abstractmethod
    def _ways(self, module: Module) -> tuple[Placement, Placement, Placement]:
        """Return the placements of a plain input, of the input that the layer computes with, and of the output."""

    def unfit(self, module: Module, platform: Platform) -> str | None:
        names = list(own_parameters(platform, module))
        if (_table_of(module) or "weight") in names:
            return None
        own = ", ".join(names) or "no parameters of its own"
        return f"it is for a linear layer or an embedding, with a weight; {type(module).__name__} has {own}"

    def placements(self, module: Module, platform: Platform) -> Mapping[str, Placement]:
        cut = self._cut(module)
        own = own_parameters(platform, module)
        names: dict[int, str] = {}
        for name, parameter in own.items():
            # A tied parameter has several names, and is cut once.
            names.setdefault(id(parameter), name)
        # Of the names of a tied parameter the one counts that says how it is cut.
        names |= {id(own[name]): name for name in cut if name in own}
        return {name: cut.get(name, Replicate()) for name in names.values()}

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        platform = device_mesh.platform
        for name, placement in self.placements(module, platform).items():
            place_parameter(module, name, device_mesh, (placement,), self.src_data_rank)
        given, wanted, result = self._ways(module)

        def before(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return (bring(first_input(m, args), device_mesh, given, wanted), *args[1:]), kwargs

        # A replicated input of a column-wise layer gets a different gradient from each rank's columns. The varying view
        # that `linear` takes of it sums them, so no hook of the backward is needed here.
        def after(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            output = output.redistribute(placements=(result,))
            return output.to_local() if self.use_local_output else output

        platform.add_forward_pre_hook(module, before)
        platform.add_forward_hook(module, after)
        return module


class ColwiseParallel(_CutLayer):
    """A linear layer's weight `[out, in]` and bias cut over `out`; an embedding's table cut over its width.

    Args:
        input_layouts: placement of a plain input (default: replicated). The layer computes with it replicated.
        output_layouts: placement that the output is brought to (default: cut over its last dimension).
        use_local_output: give the plain local shard (default), as plain modules expect; False: the DTensor.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     parallelize_module(model, mesh, ColwiseParallel())
        ...     return model.weight.placements, tuple(model(platform.zeros((3, 4), model.weight.dtype)).shape)
        >>> run_ranks(program, 2)[0]
        ((Shard(0),), (3, 3))
    """

    def _cut(self, module: Module) -> Mapping[str, Placement]:
        table = _table_of(module)
        return {"weight": Shard(0), "bias": Shard(0)} if table is None else {table: Shard(1)}

    def _ways(self, module: Module) -> tuple[Placement, Placement, Placement]:
        return self.input_layouts or Replicate(), Replicate(), self.output_layouts or Shard(-1)


class RowwiseParallel(_CutLayer):
    """A linear layer's weight `[out, in]` cut over `in`; an embedding's table cut over its vocabulary.

    Args:
        input_layouts: placement of a plain input (default: cut over its last dimension; ids of an embedding:
            replicated).
        output_layouts: placement that the output, which is partial, is brought to (default: replicated).
        use_local_output: give the plain local shard (default), as plain modules expect; False: the DTensor.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     parallelize_module(model, mesh, RowwiseParallel())
        ...     return model.weight.placements, tuple(model(platform.zeros((3, 2), model.weight.dtype)).shape)
        >>> run_ranks(program, 2)[0]
        ((Shard(1),), (3, 6))
    """

    def _cut(self, module: Module) -> Mapping[str, Placement]:
        table = _table_of(module)
        return {"weight": Shard(1)} if table is None else {table: Shard(0)}

    def _ways(self, module: Module) -> tuple[Placement, Placement, Placement]:
        wanted = Replicate() if _table_of(module) is not None else Shard(-1)
        return self.input_layouts or wanted, wanted, self.output_layouts or Replicate()


class SequenceParallel(ParallelStyle):
    """Parameters replicated, computation on an input cut along the sequence (arXiv 2205.05198).

    Args:
        sequence_dim: the dimension that is cut (default 1). A plain input is this rank's part of it.
        use_local_output: give the plain local shard instead of a DTensor.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     with nn.building(platform):
        ...         model = nn.RMSNorm(4)
        ...     parallelize_module(model, mesh, SequenceParallel())
        ...     x = platform.zeros((3, 5, 4), model.weight.dtype)  # this rank's 5 positions of 10
        ...     return model(x).placements, tuple(model(x).shape)
        >>> run_ranks(program, 2)[0]
        ((Shard(1),), (3, 10, 4))
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = Shard(sequence_dim)
        self.use_local_output = use_local_output

    def placements(self, module: Module, platform: Platform) -> Mapping[str, Placement]:
        return {name: Replicate() for name, x in platform.named_parameters(module) if not isinstance(x, DTensor)}

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        cut = self.sequence_sharding

        def input_fn(m: Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return (bring(first_input(m, args), mesh, cut, cut), *args[1:])

        def output_fn(m: Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if self.use_local_output else output

        replicate_plain(module, device_mesh, self.src_data_rank)
        return distribute_module(module, device_mesh, None, input_fn, output_fn)


def _table_of(module: Module) -> str | None:
    """Return the name of an embedding's table, or None if `module` is no embedding."""
    return next((table for attribute, table in _TABLES.items() if hasattr(module, attribute)), None)
