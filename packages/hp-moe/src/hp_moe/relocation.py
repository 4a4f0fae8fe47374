"""Moving experts to other ranks between steps, with their weights, gradients and optimizer states."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hp_dtensor.comm.collectives import RowMove, move_rows_data
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.tensor.dtensor import DTensor
from hp_moe.dispatch import ReplicatingDispatcher
from hp_moe.exceptions import ExpertParallelError
from hp_moe.experts import WEIGHTS, dispatcher_of
from hp_moe.load_balance import LoadMetrics, moe_layers
from hp_moe.moe import MoE
from hp_moe.placement import ExpertPlacement, check_placement, place_experts

Tensor = Any
States = Callable[[Tensor], Iterable[Tensor]]
AfterLayer = Callable[[str], None]
# The layers whose experts can be moved, by name.
Movable = dict[str, tuple[MoE, ReplicatingDispatcher]]
ChoosePlacements = Callable[[Movable], Mapping[str, Sequence[int]]]

_GUARD_HANDLES = "_hp_state_guards"


def move_experts(
    model: Any,
    loads: Mapping[str, LoadMetrics],
    states: States,
    *,
    max_swaps: int = 8,
    min_gain: float = 0.05,
    after_layer: AfterLayer | None = None,
) -> dict[str, ExpertPlacement]:
    """Move experts between ranks to reduce the peak load of a rank, in layers with a `ReplicatingDispatcher`.

    Pairs of experts are swapped, with their rows of weights, gradients and optimizer states. This costs one exchange,
    and the results of later steps differ only by rounding. A copy of an expert, in contrast, shares its load but costs
    a transfer of its weights in every step. Moving removes all copies; call `update_expert_copies` afterwards.

    Call it between steps with the result of `update_expert_bias`. Every rank computes the same placement, including
    ranks of other expert groups that shard or replicate the same weights. Parameters keep their names and shapes, but
    their rows are in the order of positions. Call `return_experts` before saving, loading or converting weights; until
    then state dicts and checkpoints raise an error. Code that reads single parameters cannot detect moved experts and
    must not be used meanwhile: an optimizer's own `state_dict` and MindSpore's `save_checkpoint`.

    Args:
        states: maps a parameter to its optimizer states, with the placements of the parameter, and to other tensors
            with a row for each expert, such as averages. Scalars are ignored. It is called for one layer after the
            other, and tensors of a moved layer are not referenced any more.
        max_swaps, min_gain: as in `hp_moe.place_experts`.
        after_layer: called with a layer's name after its rows are moved and before `states` is called for the next
            layer. If `states` creates tensors, `after_layer` can store them.

    Returns:
        By the layer's name, the new position of each expert. Layers without tokens are unchanged and left out.

    Raises:
        ExpertParallelError: on every rank. If ranks compute different placements or one of them failed, nothing is
            moved. If weights or states are not sharded by experts over the dispatcher's ranks alone, or are not on the
            weights' device, the layers before the one named are moved; see `expert_placement`.

    Examples:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> y = model(platform.ops.ones((3, 4), platform.dtype("float32")))
        >>> move_experts(model, update_expert_bias(model), lambda parameter: [])  # all experts are on this rank
        {}
    """

    def balanced(movable: Movable) -> dict[str, ExpertPlacement]:
        return {
            name: place_experts(
                loads[name].loads,
                dispatcher.expert_placement,
                dispatcher.group.size,
                max_swaps=max_swaps,
                min_gain=min_gain,
            )
            for name, (_, dispatcher) in movable.items()
            if loads[name].tokens
        }

    return _move(model, balanced, states, after_layer)


def return_experts(model: Any, states: States, *, after_layer: AfterLayer | None = None) -> None:
    """Move every expert back to its initial position, before weights are saved, loaded or converted.

    Args:
        states, after_layer: as in `move_experts`.

    Raises:
        ExpertParallelError: as `move_experts`.

    Examples:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> return_experts(model, lambda parameter: [])  # nothing is moved
    """

    def initial(movable: Movable) -> dict[str, Sequence[int]]:
        return {
            name: range(dispatcher.num_experts)
            for name, (_, dispatcher) in movable.items()
            if not dispatcher.is_initial_placement
        }

    _move(model, initial, states, after_layer)


def expert_placement(model: Any) -> dict[str, ExpertPlacement]:
    """Return the position of each expert, by the layer's name, of the layers whose experts are moved.

    Examples:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> expert_placement(model)
        {}
    """
    return {
        name: dispatcher.expert_placement
        for name, (_, dispatcher) in _movable(model).items()
        if not dispatcher.is_initial_placement
    }


def set_expert_placement(
    model: Any, placements: Mapping[str, Sequence[int]], states: States, *, after_layer: AfterLayer | None = None
) -> None:
    """Move experts to given positions, such as those returned by `expert_placement` before `return_experts`.

    Args:
        placements: the position of each expert, by the layer's name, the same on every rank. Other layers are
            unchanged.
        states, after_layer: as in `move_experts`.

    Raises:
        ExpertParallelError: as `move_experts`, or a rank was given an unknown layer or positions that are not a
            permutation; every rank raises, and nothing is moved.

    Examples:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> set_expert_placement(model, {}, lambda parameter: [])
    """
    _move(model, lambda movable: placements, states, after_layer)


def _movable(model: Any) -> Movable:
    """Return the layers with a `ReplicatingDispatcher`, in model order."""
    found = {}
    for name, layer in moe_layers(model).items():
        dispatcher = dispatcher_of(layer.experts, layer.platform)
        if isinstance(dispatcher, ReplicatingDispatcher):
            found[name] = layer, dispatcher
    return found


def _move(
    model: Any, choose: ChoosePlacements, states: States, after_layer: AfterLayer | None
) -> dict[str, ExpertPlacement]:
    """Move the experts of the chosen layers, one layer after the other, and return their placements."""
    movable = _movable(model)
    placements = _agreed_placements(movable, choose)
    for name, placement in placements.items():
        _move_layer(f"{name or 'MoE'}.experts", *movable[name], placement, states)
        if after_layer is not None:
            after_layer(name)
    return placements


def _agreed_placements(movable: Movable, choose: ChoosePlacements) -> dict[str, ExpertPlacement]:
    """Return the placements in model order that all ranks choose alike; else raise on every rank."""
    placements: dict[str, ExpertPlacement] = {}
    fault = None
    try:
        given = choose(movable)
        if unknown := [name for name in given if name not in movable]:
            raise ExpertParallelError(f"experts of {unknown[0]!r} cannot be moved; those of {[*movable]} can")
        placements = {
            name: check_placement(given[name], movable[name][1].num_experts) for name in movable if name in given
        }
    except Exception as error:
        # Any error: a rank that raised here without reporting it would leave them waiting for its rows.
        fault = error
    before = {name: dispatcher.expert_placement for name, (_, dispatcher) in movable.items()}
    # The current placements are compared too: ranks that differ there would send other rows.
    mine = [list(placements), _digest([before, placements])]
    answers: dict[int, Any] = {}
    gathered: set[Any] = set()
    # Usually one exchange, since all layers have the same ranks.
    for layer, dispatcher in movable.values():
        groups = _groups(layer, dispatcher)
        if (ranks := tuple(tuple(group.ranks) for group in groups)) not in gathered:
            gathered.add(ranks)
            answers |= _gather_answers(groups, dispatcher, [fault and str(fault), *mine])
    if (other := _differing_answer("experts", fault, mine, answers)) is not None:
        rank, names = other
        raise ExpertParallelError(
            f"expected the same expert placement on all ranks, got one for {[*placements]} here and for {names}, or "
            f"another placement, on rank {rank}"
        )
    return placements


def _move_layer(
    name: str, layer: MoE, dispatcher: ReplicatingDispatcher, placement: ExpertPlacement, states: States
) -> None:
    """Move the rows of one layer's weights, gradients and states to a new placement."""
    # All ranks agreed on the placement, so all of them return here without communication.
    if placement == dispatcher.expert_placement:
        return
    chunk = dispatcher.chunk
    # One row for each expert, from its old (rank, row) to its new one.
    moves = [
        RowMove(old // chunk, old % chunk, new // chunk, new % chunk, 1)
        for old, new in zip(dispatcher.expert_placement, placement, strict=True)
    ]
    with layer.platform.no_grad():
        for local in _agreed_rows(name, layer, dispatcher, states):
            # In place: optimizers and FSDP hold references to these tensors.
            layer.platform.copy_(local, move_rows_data(layer.platform.detach(local), dispatcher.group, 0, moves))
    dispatcher.set_placement(placement)
    _guard_state(layer, dispatcher)


def _agreed_rows(name: str, layer: MoE, dispatcher: ReplicatingDispatcher, states: States) -> list[Tensor]:
    """Return this rank's local tensors to move, after checking that all ranks with shards of them move the same."""
    fault = None
    moving: list[Tensor] = []
    try:
        for each in WEIGHTS:
            if (weight := getattr(layer.experts, each, None)) is not None:
                moving += _local_tensors(f"{name}.{each}", weight, dispatcher, states)
    except Exception as error:
        # Any error, as in _agreed_placements.
        fault = error
    mine = [len(moving), _digest([layer.platform.dtype_name(each.dtype) for each in moving])]
    answers = _gather_answers(_groups(layer, dispatcher), dispatcher, [fault and str(fault), *mine])
    if (other := _differing_answer(name, fault, mine, answers)) is not None:
        rank, number = other
        raise ExpertParallelError(
            f"{name}: expected the same gradients and states on all ranks, got {len(moving)} tensors here and "
            f"{number}, or other dtypes, on rank {rank}"
        )
    return moving


def _differing_answer(
    name: str, fault: Exception | None, mine: Sequence[Any], answers: Mapping[int, Any]
) -> tuple[int, Any] | None:
    """Return a rank with another answer and its first differing item, or None; raise the fault of a rank."""
    if fault is not None:
        raise fault
    for rank, (reported, *_) in answers.items():
        if reported is not None:
            raise ExpertParallelError(f"{name}: rank {rank} cannot move experts: {reported}")
    return next(((rank, theirs[0]) for rank, (_, *theirs) in answers.items() if theirs != mine), None)


def _groups(layer: MoE, dispatcher: ReplicatingDispatcher) -> list[ProcessGroup]:
    """Return the groups, one per mesh axis, that together connect all ranks with shards of the layer's weights."""
    weights = [getattr(layer.experts, each, None) for each in WEIGHTS]
    meshes = [weight.device_mesh for weight in weights if isinstance(weight, DTensor)]
    if not meshes or dispatcher.group.size == 1:
        return [dispatcher.group]
    return [meshes[0].group_along(dim) for dim in range(meshes[0].ndim) if meshes[0].size(dim) > 1]


def _gather_answers(groups: Sequence[ProcessGroup], dispatcher: ReplicatingDispatcher, mine: Any) -> dict[int, Any]:
    """Gather one JSON value from every rank of a mesh, given the groups of its axes; returns them by rank."""
    answers = {dispatcher.group.ranks[dispatcher.group.rank]: mine}
    # Axis by axis: each exchange forwards the answers gathered along the axes before.
    for group in groups:
        gathered = group.all_gather_bytes(json.dumps(list(answers.items())).encode())
        answers = dict(pair for each in gathered for pair in json.loads(each))
    return answers


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _local_tensors(name: str, weight: Tensor, dispatcher: ReplicatingDispatcher, states: States) -> list[Tensor]:
    """Return this rank's local tensors of a weight, its gradient and its states."""
    platform = dispatcher.platform
    tensors = [weight, platform.get_grad(weight), *states(weight)]
    # Scalars, such as step counts, have no rows.
    tensors = [each for each in tensors if each is not None and len(each.shape)]
    for each in tensors:
        if tuple(each.shape) != tuple(weight.shape) or not _is_sharded_by_experts(each, dispatcher):
            raise ExpertParallelError(
                f"{name}: expected a weight and states of shape {list(weight.shape)}, sharded along dimension 0 over "
                f"the ranks {list(dispatcher.group.ranks)} alone, got shape {list(each.shape)} with placements "
                f"{getattr(each, 'placements', 'none')}; shard experts along another dimension (expert_shard_dim), "
                "and return optimizer states with the placements of the parameter"
            )
    local = [platform.unwrap(each) for each in tensors]
    devices = [str(platform.device_of(each)) for each in local]
    if len({*devices}) > 1:
        raise ExpertParallelError(
            f"{name}: expected states on the weight's device, {devices[0]}, got them on {sorted({*devices})}; move "
            "offloaded states to the device before moving experts"
        )
    return local


def _guard_state(layer: MoE, dispatcher: ReplicatingDispatcher) -> None:
    """Let the framework's `state_dict` and `load_state_dict` of the layer raise an error while experts are moved."""
    if dispatcher.is_initial_placement:
        for handle in vars(layer).pop(_GUARD_HANDLES, ()):
            handle.remove()
    elif _GUARD_HANDLES not in vars(layer):
        register = [getattr(layer, f"register_{name}_pre_hook", None) for name in ("state_dict", "load_state_dict")]
        handles = [each(_check_state) for each in register if each is not None]
        # Frameworks override the attribute access of modules, which must not see these handles.
        object.__setattr__(layer, _GUARD_HANDLES, handles)


# At module level, not a lambda: a module is pickled with its hooks.
def _check_state(layer: MoE, *_: Any) -> None:
    layer._hp_check_state()


def _is_sharded_by_experts(tensor: Tensor, dispatcher: ReplicatingDispatcher) -> bool:
    """Return whether dimension 0 is sharded over exactly the ranks of the dispatcher."""
    if not isinstance(tensor, DTensor):
        return False
    axes = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard(0)]
    groups = [tensor.device_mesh.group_along(axis).ranks for axis in axes]
    return [list(ranks) for ranks in groups] == [list(dispatcher.group.ranks)]
