"""Parallel styles of experts: they shard the weights over a mesh and set how tokens are sent to their experts.

A style is applied to a `MoE`, or to experts alone. On a `MoE` it also sets what experts with a sharded hidden dimension
need: the same tokens on every rank that shares an expert, and the reduction of partial sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.parallel.distribute_module import distribute_module, place_parameter
from hp_dtensor.parallel.parallelize_module import ParallelStyle
from hp_dtensor.spec.placements import Placement, Replicate, Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_moe.dispatch import AutoDispatcher, TokenDispatcher, dispatchers
from hp_moe.exceptions import ExpertParallelError
from hp_moe.experts import WEIGHTS, ExpertHooks, GroupedExperts, hooks_of, install
from hp_moe.moe import MoE

Tensor = Any
BuildDispatcher = Callable[[ProcessGroup, int], TokenDispatcher]
COPYING = ("all_to_all", "all_to_all_int8", "all_to_all_fp8")
CHUNKED = (*COPYING, "auto")

# The hidden dimension is dimension 1 of w1 and w3, and dimension 2 of w2. b2, added to results, is replicated.
_HIDDEN_SHARDING: dict[str, Placement] = {
    "w1": Shard(1),
    "w2": Shard(2),
    "w3": Shard(1),
    "b1": Shard(1),
    "b2": Replicate(),
    "b3": Shard(1),
}


class BaseExpertParallel(ParallelStyle):
    """Base class of the styles: checks the module, shards the weights and sets the dispatcher.

    Subclasses define `_placements` of the weights, the `_dispatcher` of tokens, the `_partial_mesh` over which the
    hidden dimension is sharded, and the `_split_mesh` of ranks that are given the same tokens. A style holds no state
    of a call, so one object may be applied to any number of layers.

    A custom style may instead override, as in torchtitan:

    - `_partition_fn(name, module, device_mesh)`, which shards the weights;
    - `_token_dispatch(module, inputs, device_mesh)`, which maps the arguments of a call to those of the experts: rows
      in expert-major order and this rank's counts;
    - `_token_combine(module, output, device_mesh)`, which maps the experts' results to the output of the call.

    Besides `GroupedExperts`, a style applies to any module called with rows in expert-major order and the number of
    rows of each expert. It needs weights `w1` `[num_experts, hidden_dim, dim]` and `w2`
    `[num_experts, dim, hidden_dim]`; `w3` like `w1` and biases `b1`, `b3` `[num_experts, hidden_dim]` and `b2`
    `[num_experts, dim]` are optional. During its forward the weights are plain local tensors. If the hidden dimension
    is sharded, each rank returns a partial sum, and all ranks but one get zeros for `b2`.

    Examples:
        >>> [style.mesh_ndims for style in (ExpertParallel, ExpertTensorParallel)]
        [(1, 2), (2,)]
    """

    mesh_ndims: tuple[int, ...] = (1,)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Apply the style to `module`, a `MoE` or experts with plain weights, and return it."""
        experts = module.experts if isinstance(module, MoE) else module
        self._check(experts, device_mesh)
        # Before the weights are sharded: `w1` still has the experts of all ranks.
        dispatcher = self._dispatcher(int(experts.w1.shape[0]), device_mesh)
        base, own = BaseExpertParallel, type(self)
        has_own_dispatch = (own._token_dispatch, own._token_combine) != (base._token_dispatch, base._token_combine)
        if isinstance(experts, GroupedExperts) and not has_own_dispatch:
            self._partition_fn("", experts, device_mesh)
            if dispatcher is not None:
                experts.dispatcher = dispatcher
            # Its cost model compares communication with the computation that hides it.
            if isinstance(dispatcher, AutoDispatcher):
                dispatcher.expert_flop = self._expert_flop(experts, device_mesh)
        else:
            # Other experts modules do not know dispatchers, and custom styles replace the dispatch: hooks around the
            # forward.
            hooks = ExpertHooks(experts, device_mesh.platform, dispatcher, self._partial_mesh(device_mesh))
            self._partition_fn("", experts, device_mesh)
            install(
                experts,
                hooks,
                lambda inputs: self._token_dispatch(experts, inputs, device_mesh),
                lambda output: self._token_combine(experts, output, device_mesh),
            )
        if isinstance(experts, GroupedExperts):
            experts.partial_mesh = self._partial_mesh(device_mesh)
        if isinstance(module, MoE):
            module.split_mesh = self._split_mesh(device_mesh)
            router_mesh = self._router_mesh(device_mesh)
            # A gate that the user has distributed already is left as it is.
            if router_mesh is not None and not isinstance(module.router.gate.weight, DTensor):
                distribute_module(module.router.gate, router_mesh)
        return module

    def _check(self, experts: Any, mesh: DeviceMesh) -> None:
        name = type(self).__name__
        if not all(len(getattr(getattr(experts, weight, None), "shape", ())) == 3 for weight in ("w1", "w2")):
            raise ExpertParallelError(
                f"{name} applies to a MoE, GroupedExperts, or experts with 3-D weights w1, w2 (and w3), "
                f"got {type(experts).__name__}"
            )
        # Parameters that no placement is known for would silently stay replicated.
        others = [each for each, _ in mesh.platform.named_parameters(experts) if each not in WEIGHTS]
        if others and type(self)._partition_fn is BaseExpertParallel._partition_fn:
            raise ExpertParallelError(
                f"{name} shards {', '.join(WEIGHTS)}; {type(experts).__name__} also has {', '.join(others)}: override "
                "_partition_fn in a custom style"
            )
        if mesh.ndim not in self.mesh_ndims:
            wanted = " or ".join(map(str, self.mesh_ndims))
            raise ExpertParallelError(f"{name} needs a mesh of {wanted} axes, got {mesh.describe()}")

    def _placements(self, mesh: DeviceMesh) -> Mapping[str, tuple[Placement, ...]]:
        """Return the placements of all weights and biases by name, including optional ones.

        Raises:
            ExpertParallelError: the style defines neither this nor `_partition_fn`, which calls it.
        """
        raise ExpertParallelError(f"{type(self).__name__} must define _placements or _partition_fn")

    def _partition_fn(self, name: str, module: Any, device_mesh: DeviceMesh) -> None:
        """Shard the weights of experts. `name` is the name of `module` in its parent."""
        for weight, placements in self._placements(device_mesh).items():
            if getattr(module, weight, None) is not None:
                place_parameter(module, weight, device_mesh, placements)

    def _token_dispatch(self, module: Any, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[Any, ...]:
        """Dispatch tokens to experts other than `GroupedExperts`; overrides may call it.

        Args:
            inputs: `(x, routing)`, or `(rows, counts)` in expert-major order with the counts of all experts.

        Returns:
            `(rows, counts)` of this rank's experts, in expert-major order.
        """
        return hooks_of(module).dispatch(module, inputs)

    def _token_combine(self, module: Any, output: Any, device_mesh: DeviceMesh) -> Any:
        """Send the results for the rows of `_token_dispatch` back, in the order of the call's rows."""
        return hooks_of(module).combine(output)

    def _expert_flop(self, experts: GroupedExperts, mesh: DeviceMesh) -> int:
        """Return the floating-point operations of one expert for one row, on one rank."""
        partial = self._partial_mesh(mesh)
        products = 2 if experts.w3 is None else 3
        width, dim = (int(size) for size in experts.w1.shape[1:])
        # Each element of a weight is one multiplication and one addition.
        return 2 * products * width * dim // (1 if partial is None else partial.size())

    def _dispatcher(self, num_experts: int, mesh: DeviceMesh) -> TokenDispatcher | None:
        """Return the dispatcher, or None if all experts are on every rank."""
        return None

    def _partial_mesh(self, mesh: DeviceMesh) -> DeviceMesh | None:
        """Return the 1-D mesh over which each expert's hidden dimension is sharded, or None."""
        return None

    def _split_mesh(self, mesh: DeviceMesh) -> DeviceMesh | None:
        """Return the 1-D mesh of ranks that are given the same tokens and each route a share, or None."""
        return None

    def _router_mesh(self, mesh: DeviceMesh) -> DeviceMesh | None:
        """Return the axes over which the input of a `MoE` is replicated or sharded; None if each rank has its own."""
        return mesh


class ExpertParallel(BaseExpertParallel):
    """Expert parallelism: each rank of a 1-D mesh owns a chunk of the experts, and tokens are sent to their experts.

    On a 2-D mesh the experts are spread over the axis named `ep`, or over the first one if none has that name. The
    input is distributed over the other axis, whose ranks hold the same experts and route different tokens; the experts'
    gradients are summed over it.

    Args:
        dispatcher: name of the token dispatcher (hook `hp_token_dispatcher`): `all_to_all`, `copy_per_expert`,
            `all_gather`, `all_to_all_int8`, `all_to_all_fp8`, `auto`; or a function from a process group and the number
            of experts to one, such as `functools.partial(TwoLevelDispatcher, inner_size=8)`.
        num_chunks: number of chunks in which tokens are sent, so that communication overlaps with experts and shared
            experts; for the `all_to_all` dispatchers and `auto`. None: 1, or chosen by `auto`.
        split_tokens: set it if ranks of the experts' axis are given the same tokens, as for an axis of its own in
            addition to data parallelism. Each rank then routes a share of the tokens and gets all results.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        ...     ExpertParallel().apply(layer, init_device_mesh("cpu", (2,)))
        ...     y = layer(platform.ops.ones((3, 4), platform.dtype("float32")))
        ...     return layer.experts.w1.placements
        >>> run_ranks(program, 2)[0]
        (Shard(0),)
    """

    mesh_ndims: tuple[int, ...] = (1, 2)

    def __init__(
        self,
        dispatcher: str | BuildDispatcher = "all_to_all",
        *,
        num_chunks: int | None = None,
        split_tokens: bool = False,
    ) -> None:
        if num_chunks is not None and dispatcher not in CHUNKED:
            raise ExpertParallelError(
                f"num_chunks = {num_chunks} is for the dispatchers {', '.join(CHUNKED)}, got {dispatcher!r}"
            )
        self.dispatcher = dispatcher
        self.num_chunks = num_chunks
        self.split_tokens = split_tokens

    def _placements(self, mesh: DeviceMesh) -> Mapping[str, tuple[Placement, ...]]:
        expert_axis = _expert_axis(mesh)
        placements = tuple(Shard(0) if axis == expert_axis else Replicate() for axis in range(mesh.ndim))
        return dict.fromkeys(WEIGHTS, placements)

    def _dispatcher(self, num_experts: int, mesh: DeviceMesh) -> TokenDispatcher | None:
        build: Callable[..., TokenDispatcher] = (
            dispatchers().get(self.dispatcher).build if isinstance(self.dispatcher, str) else self.dispatcher
        )
        # Left out otherwise: dispatchers of other plugins need not have this argument.
        if self.num_chunks is not None:
            build = functools.partial(build, num_chunks=self.num_chunks)
        return build(mesh.group_along(_expert_axis(mesh)), num_experts)

    def _split_mesh(self, mesh: DeviceMesh) -> DeviceMesh | None:
        return mesh[mesh.mesh_dim_names[_expert_axis(mesh)]] if self.split_tokens else None

    def _router_mesh(self, mesh: DeviceMesh) -> DeviceMesh | None:
        if self.split_tokens:
            return mesh
        return _other_axis(mesh) if mesh.ndim == 2 else None


class TensorParallel(BaseExpertParallel):
    """Tensor parallelism within experts: hidden dimensions are sharded over a 1-D mesh, and no tokens are sent.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        ...     TensorParallel().apply(layer, init_device_mesh("cpu", (2,)))
        ...     y = layer(platform.ops.ones((3, 4), platform.dtype("float32")))
        ...     return layer.experts.w1.placements
        >>> run_ranks(program, 2)[0]
        (Shard(1),)
    """

    def _placements(self, mesh: DeviceMesh) -> Mapping[str, tuple[Placement, ...]]:
        return {name: (placement,) for name, placement in _HIDDEN_SHARDING.items()}

    def _partial_mesh(self, mesh: DeviceMesh) -> DeviceMesh | None:
        return mesh


class ExpertTensorParallel(ExpertParallel):
    """Expert and tensor parallelism: experts over one axis of a 2-D mesh, hidden dimensions over the other.

    The experts' axis is the one named `ep`, whatever the order of the axes, or the first one if none has that name.
    Tokens are sent along it only; ranks along the other axis take the same tokens.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        ...     ExpertTensorParallel().apply(layer, init_device_mesh("cpu", (2, 2)))
        ...     y = layer(platform.ops.ones((3, 4), platform.dtype("float32")))
        ...     return layer.experts.w1.placements
        >>> run_ranks(program, 4)[0]
        (Shard(0), Shard(1))
    """

    mesh_ndims = (2,)

    def _placements(self, mesh: DeviceMesh) -> Mapping[str, tuple[Placement, ...]]:
        # Placements are in the order of the mesh axes.
        if _expert_axis(mesh) == 0:
            return {name: (Shard(0), placement) for name, placement in _HIDDEN_SHARDING.items()}
        return {name: (placement, Shard(0)) for name, placement in _HIDDEN_SHARDING.items()}

    def _partial_mesh(self, mesh: DeviceMesh) -> DeviceMesh | None:
        return _other_axis(mesh)


def _expert_axis(mesh: DeviceMesh) -> int:
    """Return the index of the axis over which experts are spread: the one named `ep`, else the first."""
    # By name, since the order of the axes is that of the ranks, which the caller chooses.
    names = mesh.mesh_dim_names
    return names.index("ep") if "ep" in names else 0


def _other_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the 1-D mesh of the axis of a 2-D mesh over which experts are not spread."""
    return mesh[mesh.mesh_dim_names[1 - _expert_axis(mesh)]]


class ReplicatedExperts(BaseExpertParallel):
    """Replicated experts: every rank of a 1-D mesh holds all experts and routes its shard of a distributed input.

    The experts' gradients are summed over the mesh.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     with nn.building(platform):
        ...         layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        ...     ReplicatedExperts().apply(layer, mesh)
        ...     y = layer(ones(6, 4, device_mesh=mesh, placements=[Shard(0)]))
        ...     return layer.experts.w1.placements, y.placements
        >>> run_ranks(program, 2)[0]
        ((Replicate(),), (Shard(0),))
    """

    def _placements(self, mesh: DeviceMesh) -> Mapping[str, tuple[Placement, ...]]:
        return dict.fromkeys(WEIGHTS, (Replicate(),))


def expert_shard_dim(num_experts: int, expert_ranks: int, shard_ranks: int) -> int:
    """Return the dimension along which fully sharded data parallelism should shard the weights of experts.

    Dimension 0, the experts, if every rank gets at least one. Otherwise dimension 1, the hidden one of `w1` and `w3`:
    sharding experts would leave some ranks with none and others with one expert more.

    Args:
        num_experts: number of experts of all ranks.
        expert_ranks: number of ranks over which expert parallelism spreads the experts.
        shard_ranks: number of ranks that hold the same experts and shard them.

    Examples:
        >>> expert_shard_dim(num_experts=64, expert_ranks=4, shard_ranks=8), expert_shard_dim(8, 4, 8)
        (0, 1)
    """
    return 0 if num_experts >= expert_ranks * shard_ranks else 1
