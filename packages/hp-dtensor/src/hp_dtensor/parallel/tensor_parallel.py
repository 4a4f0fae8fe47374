"""Tensor-parallel styles, following torch's `torch.distributed.tensor.parallel` in names and arguments.

The layouts are those of Megatron-LM (arXiv 1909.08053). A column-wise linear layer followed by a row-wise one needs one
all-reduce in forward, of the row-wise output, which is partial, and one in backward, of the gradient of the column-wise
input. No code here computes a gradient: the all-reduce in backward is the dual of the varying view that `linear` takes
of the replicated input.

`PrepareModuleInput`, `PrepareModuleOutput` and their combination redistribute the inputs and outputs of any module.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.dispatch.implicit_replication import replication_region
from hp_dtensor.exceptions import PlanError
from hp_dtensor.parallel.distribute_module import distribute_module, own_parameters, place_parameter, replicate_plain
from hp_dtensor.parallel.parallelize_module import ParallelStyle
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.explicit import explicit_region
from hp_dtensor.spec.placements import Placement, Replicate, Shard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor import conversions
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.saved_shards import reshard_after_forward
from hp_dtensor.trees import like_sequence

Tensor = Any
Module = Any


def to_placement(x: Any, mesh: DeviceMesh, given: Placement, desired: Placement, reshards: bool = False) -> Any:
    """Return `x` as a DTensor redistributed to placement `desired` on a 1-D mesh.

    Args:
        x: a DTensor, or a plain tensor that is this rank's shard of one placed as `given`. The global length of the
            dimension that `given` shards is the sum of the ranks' lengths, which are exchanged. They must be those of
            `Shard`, the last ones of which may be shorter.
        reshards: let products save the shard of a gathered result; see `reshard_after_forward`.
    """
    if not isinstance(x, DTensor):
        x = conversions.from_local(x, mesh, (given,), shape=_global_shape(x, mesh, given))
    result = x.redistribute(placements=(desired,))
    if reshards and result is not x:
        reshard_after_forward(x, result)
    return result


def _global_shape(x: Tensor, mesh: DeviceMesh, given: Placement) -> tuple[int, ...]:
    """Return the global shape of the tensor of which `x` is this rank's shard."""
    # Replicated and partial local tensors have the global shape already.
    if not isinstance(given, Shard):
        return tuple(x.shape)
    shape = list(x.shape)
    lengths = mesh.group_along().all_gather_bytes(str(shape[given.dim]).encode())
    shape[given.dim] = sum(int(length) for length in lengths)
    return TensorSpec(mesh, (given,), shape, x.dtype).shape


def first_input(module: Module, args: tuple[Any, ...]) -> Any:
    """Return the first positional argument of a call of `module`, or raise a PlanError."""
    if not args:
        raise PlanError(
            f"{type(module).__name__}: a tensor-parallel style takes the module's first positional argument as its "
            "input, but the module was called with keyword arguments only; pass the input by position"
        )
    return args[0]


def map_outputs(where: str, output: Any, entries: Sequence[Any], place: Callable[[Any, Any], Any]) -> Any:
    """Apply `place(value, entry)` to each value of `output`, and return a value or sequence of the same kind.

    Args:
        where: names the module in messages.
        output: one value, or a tuple, named tuple or list.
        entries: one entry of the plan per value.
    """
    several = isinstance(output, (tuple, list))
    values = list(output) if several else [output]
    if len(values) != len(entries):
        raise PlanError(f"{where} returned {len(values)} outputs, its output plan has {len(entries)}")
    placed = [place(value, entry) for value, entry in zip(values, entries, strict=True)]
    return like_sequence(output, placed) if several else placed[0]


# An attribute that only embeddings have -> the name of their table. The first is that of torch and `mindspore.mint.nn`,
# the second that of `mindspore.nn.Embedding`.
_TABLES = {"embedding_dim": "weight", "embedding_table": "embedding_table"}


_STYLE_ATTRIBUTE = "_hp_dtensor_style"


class _ShardedLayer(ParallelStyle):
    """Base of column-wise and row-wise styles: a linear layer or embedding with a sharded weight."""

    reshard_after_forward = False

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
    def _layout(self, table: str | None) -> tuple[Mapping[str, Placement], Placement, Placement]:
        """Return the placements of the sharded parameters, of the input, and of the output; `table`: an embedding's."""

    def unfit(self, module: Module, platform: Platform) -> str | None:
        names = list(own_parameters(platform, module))
        if (styled := getattr(module, _STYLE_ATTRIBUTE, None)) is not None:
            return f"{styled} has been applied to it already"
        if (_table_of(module) or "weight") in names:
            return None
        own = ", ".join(names) or "no parameters of its own"
        return f"it is for a linear layer or an embedding, with a weight; {type(module).__name__} has {own}"

    def placements(self, module: Module, platform: Platform) -> Mapping[str, Placement]:
        sharded, _, _ = self._layout(_table_of(module))
        own = own_parameters(platform, module)
        names: dict[int, str] = {}
        for name, parameter in own.items():
            # A tied parameter has several names, and is sharded once.
            names.setdefault(id(parameter), name)
        # If one name of a tied parameter is to be sharded, that name decides.
        names |= {id(own[name]): name for name in sharded if name in own}
        return {name: sharded.get(name, Replicate()) for name in names.values()}

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        platform = device_mesh.platform
        for name, placement in self.placements(module, platform).items():
            place_parameter(module, name, device_mesh, (placement,), self.src_data_rank)
        _, wanted, result = self._layout(_table_of(module))
        # A plain input is expected in the placement that the layer computes with, unless stated otherwise.
        given, result = self.input_layouts or wanted, self.output_layouts or result
        reshards = self.reshard_after_forward

        def before(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return (to_placement(first_input(m, args), device_mesh, given, wanted, reshards), *args[1:]), kwargs

        # A replicated input of a column-wise layer gets a different gradient from each rank's columns. The varying view
        # that `linear` takes of it sums them, so no hook of the backward is needed here.
        def after(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            output = output.redistribute(placements=(result,))
            return output.to_local() if self.use_local_output else output

        # Hooks rather than a wrapper: names of parameters and the module's class stay as they are.
        platform.add_forward_pre_hook(module, before)
        platform.add_forward_hook(module, after)
        object.__setattr__(module, _STYLE_ATTRIBUTE, type(self).__name__)
        return module


class ColwiseParallel(_ShardedLayer):
    """Shard a linear layer's weight `[out, in]` and bias over `out`; an embedding's table over its width.

    Args:
        input_layouts: placement of a plain input (default: replicated). The layer computes with the input replicated.
        output_layouts: placement to which the output is redistributed (default: sharded over its last dimension).
        use_local_output: return the plain local shard (default), as plain modules expect; False: the DTensor.
        reshard_after_forward: save the shard of an input that is gathered here, and gather it again in backward, as
            Megatron-LM does (arXiv 2205.05198, section 4.2.2). Default: save the gathered input, as torch does.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     parallelize_module(model, mesh, ColwiseParallel())
        ...     return model.weight.placements, tuple(model(platform.zeros((3, 4), model.weight.dtype)).shape)
        >>> run_ranks(program, 2)[0]
        ((Shard(0),), (3, 3))
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        reshard_after_forward: bool = False,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.reshard_after_forward = reshard_after_forward

    def _layout(self, table: str | None) -> tuple[Mapping[str, Placement], Placement, Placement]:
        sharded = {"weight": Shard(0), "bias": Shard(0)} if table is None else {table: Shard(1)}
        return sharded, Replicate(), Shard(-1)


class RowwiseParallel(_ShardedLayer):
    """Shard a linear layer's weight `[out, in]` over `in`; an embedding's table over its vocabulary.

    Args:
        input_layouts: placement of a plain input (default: sharded over its last dimension; ids of an embedding:
            replicated).
        output_layouts: placement to which the output, which is partial, is redistributed (default: replicated).
        use_local_output: return the plain local shard (default), as plain modules expect; False: the DTensor.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     parallelize_module(model, mesh, RowwiseParallel())
        ...     return model.weight.placements, tuple(model(platform.zeros((3, 2), model.weight.dtype)).shape)
        >>> run_ranks(program, 2)[0]
        ((Shard(1),), (3, 6))
    """

    def _layout(self, table: str | None) -> tuple[Mapping[str, Placement], Placement, Placement]:
        # Every rank looks all ids up in its part of the vocabulary, so ids are replicated.
        return (
            ({"weight": Shard(1)}, Shard(-1), Replicate())
            if table is None
            else ({table: Shard(0)}, Replicate(), Replicate())
        )


class SequenceParallel(ParallelStyle):
    """Replicate parameters and compute on an input sharded along the sequence (arXiv 2205.05198).

    Args:
        sequence_dim: the sharded dimension (default 1). A plain input is this rank's shard.
        use_local_output: return the plain local shard instead of a DTensor.

    Examples:
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
        sharding = self.sequence_sharding

        def input_fn(m: Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return (to_placement(first_input(m, args), mesh, sharding, sharding), *args[1:])

        def output_fn(m: Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if self.use_local_output else output

        # `distribute_module` would replicate too, but with the values of rank 0 only.
        replicate_plain(module, device_mesh, self.src_data_rank)
        return distribute_module(module, device_mesh, None, input_fn, output_fn)


def _table_of(module: Module) -> str | None:
    """Return the name of an embedding's table, or None if `module` is not an embedding."""
    return next((table for attribute, table in _TABLES.items() if hasattr(module, attribute)), None)


Layouts = Placement | Sequence[Placement | None] | None
"""A placement per input or output, None for one that is left alone; a single one needs no tuple."""


class PrepareModuleInput(ParallelStyle):
    """Redistribute the inputs of a module.

    Args:
        input_layouts: per positional argument, the placement of a plain local tensor; None leaves it alone.
        desired_input_layouts: per positional argument, the placement to redistribute it to.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same by keyword.
        use_local_output: pass plain local tensors to the module; default: DTensors.
        reshard_after_forward: linear layers save the shards of DTensors that are gathered here, and backward gathers
            each once again, as Megatron-LM does (arXiv 2205.05198, section 4.2.2). Default: they save the gathered
            inputs, as in torch.

    Raises:
        PlanError: given and desired layouts differ in number or names.

    Examples:
        >>> style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 4)
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     parallelize_module(model, mesh, style)
        ...     distribute_module(model, mesh)
        ...     return tuple(model(platform.zeros((3, 4), platform.dtype("float32"))).shape)
        >>> run_ranks(program, 2)[0]  # each rank passed 3 rows, and computes on all
        (6, 4)
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
        reshard_after_forward: bool = False,
    ) -> None:
        self.input_layouts = _as_tuple(input_layouts)
        self.desired_input_layouts = _as_tuple(desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        self.reshard_after_forward = reshard_after_forward
        given, desired = len(self.input_layouts), len(self.desired_input_layouts)
        by_name, desired_by_name = sorted(self.input_kwarg_layouts), sorted(self.desired_input_kwarg_layouts)
        problems = []
        if given != desired:
            problems.append(f"{given} input_layouts, {desired} desired_input_layouts")
        if by_name != desired_by_name:
            problems.append(f"keyword layouts for {by_name} and {desired_by_name}")
        if problems:
            raise PlanError(f"PrepareModuleInput: {'; '.join(problems)}; they must match")

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        by_position = list(zip(self.input_layouts, self.desired_input_layouts, strict=True))

        def place(x: Any, given: Placement | None, desired: Placement | None) -> Any:
            return _placed(x, device_mesh, (given, desired), self.use_local_output, self.reshard_after_forward)

        def prepare(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if by_position and len(args) != len(by_position):
                raise PlanError(
                    f"PrepareModuleInput: the module got {len(args)} inputs, the plan has {len(by_position)}"
                )
            # Without layouts by position the positional arguments stay as they are, in any number.
            placed = [place(x, *ways) for x, ways in zip(args, by_position, strict=True)] if by_position else args
            kwargs = dict(kwargs)
            # An optional argument that is not given needs no placement. Sorted: redistribution is a collective, and the
            # order of a set of strings differs between processes.
            for name in sorted(self.input_kwarg_layouts.keys() & kwargs.keys()):
                ways = self.input_kwarg_layouts[name], self.desired_input_kwarg_layouts[name]
                kwargs[name] = place(kwargs[name], *ways)
            return tuple(placed), kwargs

        device_mesh.platform.add_forward_pre_hook(module, prepare)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Redistribute the outputs of a module.

    Args:
        output_layouts: per output, the placement of a plain local tensor; None leaves it alone.
        desired_output_layouts: per output, the placement to redistribute it to.
        use_local_output: return plain local tensors (default); False: DTensors.

    Raises:
        PlanError: given and desired layouts differ in number.

    Examples:
        >>> style = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 4)
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     parallelize_module(model, mesh, style)
        ...     return tuple(model(platform.zeros((3, 4), platform.dtype("float32"))).shape)
        >>> run_ranks(program, 2)[0]
        (6, 4)
    """

    def __init__(
        self, *, output_layouts: Layouts = None, desired_output_layouts: Layouts = None, use_local_output: bool = True
    ) -> None:
        self.output_layouts = _as_tuple(output_layouts)
        self.desired_output_layouts = _as_tuple(desired_output_layouts)
        self.use_local_output = use_local_output
        if len(self.output_layouts) != len(self.desired_output_layouts):
            raise PlanError(
                f"PrepareModuleOutput: {len(self.output_layouts)} output_layouts, "
                f"{len(self.desired_output_layouts)} desired_output_layouts; they must match"
            )

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        ways = list(zip(self.output_layouts, self.desired_output_layouts, strict=True))
        where = f"PrepareModuleOutput: {type(module).__name__}"

        def prepare(m: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            return map_outputs(where, output, ways, lambda x, way: _placed(x, device_mesh, way, self.use_local_output))

        # Without layouts the outputs stay as they are, in any number.
        if ways:
            device_mesh.platform.add_forward_hook(module, prepare)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` combined.

    Takes the arguments of both; `use_local_input` is the input's `use_local_output`.

    Examples:
        >>> style = PrepareModuleInputOutput(
        ...     input_layouts=Shard(0), desired_input_layouts=Replicate(),
        ...     output_layouts=Replicate(), desired_output_layouts=Shard(0),
        ... )
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 4)
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     parallelize_module(model, mesh, style)
        ...     distribute_module(model, mesh)
        ...     return tuple(model(platform.zeros((3, 4), platform.dtype("float32"))).shape)
        >>> run_ranks(program, 2)[0]
        (3, 4)
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts = None,
        desired_output_layouts: Layouts = None,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        self.prepare_module_input.apply(module, device_mesh)
        return self.prepare_module_output.apply(module, device_mesh)


def _placed(
    x: Any, mesh: DeviceMesh, ways: tuple[Placement | None, Placement | None], local: bool, reshards: bool = False
) -> Any:
    """Redistribute an input or output from the given to the desired placement; return the plain shard if `local`."""
    given, desired = ways
    if given is None or desired is None:
        return x
    x = to_placement(x, mesh, given, desired, reshards)
    return x.to_local() if local else x


def _as_tuple(layouts: Layouts) -> tuple[Placement | None, ...]:
    if layouts is None:
        return ()
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Compute `cross_entropy` in the block on logits sharded over classes, with plain targets and class weights.

    Follows torch's `torch.distributed.tensor.parallel.loss_parallel`. Plain targets and class weights count as
    replicated: every rank must pass the same full ones. Outside the block sharded logits stay sharded too; inside, an
    error is raised where they would be communicated. The backward may run after the block.

    Raises:
        ImplicitRedistributionError: from a `cross_entropy` that would communicate its logits.
        RankMismatchError: in `check_mode`, from one whose plain targets differ between ranks.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     logits = zeros(3, 4, device_mesh=mesh, placements=[Shard(1)])  # classes are sharded
        ...     targets = distribute_tensor(platform.from_numpy(np.array([0, 1, 2])), mesh, [Replicate()])
        ...     with loss_parallel():
        ...         loss = platform.ops.cross_entropy(logits, targets)
        ...     return round(float(platform.to_numpy(loss.full_tensor())), 4)
        >>> run_ranks(program, 2)[0]
        1.3863
    """
    with explicit_region.of("cross_entropy"), replication_region.of("cross_entropy"):
        yield
