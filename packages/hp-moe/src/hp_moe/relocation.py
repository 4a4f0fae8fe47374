"""Experts that move to other ranks between steps, with their weights, gradients and optimizer states."""

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
from hp_moe.placement import Homes, check_homes, place_homes

Tensor = Any
States = Callable[[Tensor], Iterable[Tensor]]
AfterLayer = Callable[[str], None]
# The layers whose experts can move, by name, and what says where to.
Movable = dict[str, tuple[MoE, ReplicatingDispatcher]]
Wanted = Callable[[Movable], Mapping[str, Sequence[int]]]

_GUARDS = "_hp_state_guards"


def move_experts(
    model: Any,
    loads: Mapping[str, LoadMetrics],
    states: States,
    *,
    most_swaps: int = 8,
    least_gain: float = 0.05,
    after_layer: AfterLayer | None = None,
) -> dict[str, Homes]:
    """Give experts homes on other ranks where that leaves the busiest rank with less, in layers that allow for it.

    Those are the layers with a `ReplicatingDispatcher`. Two experts at a time change places: their rows of weights,
    gradients and optimizer states travel once, and the results of the next steps are the same but for rounding. A copy
    of an expert costs its weights in every step instead, but shares its load; copies are placed anew after a move
    (`place_copies_of_experts`).

    To be called between steps, with what `update_expert_bias` returned; every rank decides alike, also those of other
    expert groups that shard or replicate the same weights. Parameters keep their names and shapes, but their rows are
    in the order of the homes: call `return_experts` before weights are saved, loaded or converted. State dicts and
    checkpoints refuse until then. What reads parameters one by one does not know, and must not be used until then: an
    optimizer's own `state_dict`, MindSpore's `save_checkpoint`, or a parameter that is read by itself.

    Args:
        states: from a parameter to the tensors that the optimizer keeps for it, laid out as the parameter is, and to
            whatever else has rows of experts, such as averages; scalars may be among them. It is asked for one layer's
            parameters after another's, and nothing of a layer is held once that has moved.
        most_swaps, least_gain: as in `hp_moe.place_homes`.
        after_layer: called with a layer's name when all its rows have moved, before the next layer's are asked for;
            there, states that are made when they are asked for can be taken over.

    Returns:
        By the layer's name, the place of each expert from now on; layers without tokens stay as they are.

    Raises:
        ExpertParallelError: on every rank, if ranks would move others, or elsewhere, or one of them has failed: nothing
            has moved; if weights or states are not cut by whole experts over the dispatcher's ranks alone, or not on
            the weights' device: the layers before the one named have moved, as `expert_homes` tells.

    Example:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> y = model(platform.ops.ones((3, 4), platform.dtype("float32")))
        >>> move_experts(model, update_expert_bias(model), lambda parameter: [])  # all experts are on this rank
        {}
    """
    limits: dict[str, Any] = {"most_swaps": most_swaps, "least_gain": least_gain}

    def better(movable: Movable) -> dict[str, Homes]:
        return {
            name: place_homes(loads[name].loads, found.homes, found.group.size, **limits)
            for name, (_, found) in movable.items()
            if loads[name].tokens
        }

    return _move(model, better, states, after_layer)


def return_experts(model: Any, states: States, *, after_layer: AfterLayer | None = None) -> None:
    """Bring every expert back to the place of its number, before weights are saved, loaded or converted.

    Args:
        states, after_layer: as in `move_experts`.

    Raises:
        ExpertParallelError: as `move_experts`.

    Example:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> return_experts(model, lambda parameter: [])  # they never left
    """

    def own(movable: Movable) -> dict[str, Sequence[int]]:
        return {name: range(found.num_experts) for name, (_, found) in movable.items() if not found.is_home}

    _move(model, own, states, after_layer)


def expert_homes(model: Any) -> dict[str, Homes]:
    """Return the place of each expert of the layers whose experts are away, by the layer's name.

    Example:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> expert_homes(model)
        {}
    """
    return {name: found.homes for name, (_, found) in _movable(model).items() if not found.is_home}


def set_expert_homes(
    model: Any, homes: Mapping[str, Sequence[int]], states: States, *, after_layer: AfterLayer | None = None
) -> None:
    """Move experts to given places, such as those that `expert_homes` has told before they were brought home.

    Args:
        homes: the place of each expert, by the layer's name, the same on every rank; other layers stay as they are.
        states, after_layer: as in `move_experts`.

    Raises:
        ExpertParallelError: as `move_experts`, or a rank was given a layer that there is not, or places that are not
            each once; every rank raises, and nothing has moved.

    Example:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> set_expert_homes(model, {}, lambda parameter: [])
    """
    _move(model, lambda movable: homes, states, after_layer)


def _movable(model: Any) -> Movable:
    found = {}
    for name, layer in moe_layers(model).items():
        dispatcher = dispatcher_of(layer.experts, layer.platform)
        if isinstance(dispatcher, ReplicatingDispatcher):
            found[name] = layer, dispatcher
    return found


def _move(model: Any, wanted: Wanted, states: States, after_layer: AfterLayer | None) -> dict[str, Homes]:
    """Move the experts of some layers, one layer after another; return their homes."""
    movable = _movable(model)
    homes = _agreed_homes(movable, wanted)
    for name, places in homes.items():
        _move_layer(f"{name or 'MoE'}.experts", *movable[name], places, states)
        if after_layer is not None:
            after_layer(name)
    return homes


def _agreed_homes(movable: Movable, wanted: Wanted) -> dict[str, Homes]:
    """Return the homes that this rank wants, in the order of the model, once all ranks are known to want the same.

    Raises:
        ExpertParallelError: on every rank, if one wants others or cannot say; the one that cannot raises its own error.
    """
    homes: dict[str, Homes] = {}
    fault = None
    try:
        homes = _checked(movable, wanted(movable))
    except Exception as error:
        # Whatever it is: the other ranks must hear of it, else they would wait for this one's rows.
        fault = error
    mine = [list(homes), _digest([{name: found.homes for name, (_, found) in movable.items()}, homes])]
    answers: dict[int, Any] = {}
    asked: set[Any] = set()
    # Mostly one exchange: all layers have the same ranks.
    for layer, dispatcher in movable.values():
        groups = _groups(layer, dispatcher)
        if (ranks := tuple(tuple(group.ranks) for group in groups)) not in asked:
            asked.add(ranks)
            answers |= _answers(groups, dispatcher, [fault and str(fault), *mine])
    if (other := _other_answer("experts", fault, mine, answers)) is not None:
        rank, names = other
        raise ExpertParallelError(
            f"expected the same homes of experts on all ranks, got those of {[*homes]} here and of {names}, or other "
            f"homes, on rank {rank}"
        )
    return homes


def _checked(movable: Movable, given: Mapping[str, Sequence[int]]) -> dict[str, Homes]:
    if unknown := [name for name in given if name not in movable]:
        raise ExpertParallelError(f"experts of {unknown[0]!r} do not move; those of {[*movable]} do")
    return {name: check_homes(given[name], movable[name][1].num_experts) for name in movable if name in given}


def _move_layer(name: str, layer: MoE, dispatcher: ReplicatingDispatcher, homes: Homes, states: States) -> None:
    # Nothing moves on any rank: all have agreed on these homes.
    if homes == dispatcher.homes:
        return
    moves = _row_moves(dispatcher, homes)
    with layer.platform.no_grad():
        for local in _agreed_rows(name, layer, dispatcher, states):
            layer.platform.copy_(local, move_rows_data(layer.platform.detach(local), dispatcher.group, 0, moves))
    dispatcher.live_at(homes)
    _guard_state(layer, dispatcher)


def _agreed_rows(name: str, layer: MoE, dispatcher: ReplicatingDispatcher, states: States) -> list[Tensor]:
    """Return this rank's rows that move, once all ranks that have parts of the weights will move the same."""
    fault = None
    moving: list[Tensor] = []
    try:
        for each in WEIGHTS:
            if (weight := getattr(layer.experts, each, None)) is not None:
                moving += _moving(f"{name}.{each}", weight, dispatcher, states)
    except Exception as error:
        # As for the homes.
        fault = error
    mine = [len(moving), _digest([layer.platform.dtype_name(each.dtype) for each in moving])]
    answers = _answers(_groups(layer, dispatcher), dispatcher, [fault and str(fault), *mine])
    if (other := _other_answer(name, fault, mine, answers)) is not None:
        rank, number = other
        raise ExpertParallelError(
            f"{name}: expected gradients and states of the same kinds on all ranks, got {len(moving)} tensors here and "
            f"{number}, or of other dtypes, on rank {rank}"
        )
    return moving


def _other_answer(
    name: str, fault: Exception | None, mine: Sequence[Any], answers: Mapping[int, Any]
) -> tuple[int, Any] | None:
    """Return a rank that has answered otherwise than this one, and the first fact of its answer; None: none has.

    Raises:
        Exception: the fault of this rank.
        ExpertParallelError: an answer begins with the fault of another one.
    """
    if fault is not None:
        raise fault
    for rank, (told, *_) in answers.items():
        if told is not None:
            raise ExpertParallelError(f"{name}: rank {rank} cannot move experts: {told}")
    return next(((rank, facts[0]) for rank, (_, *facts) in answers.items() if facts != mine), None)


def _groups(layer: MoE, dispatcher: ReplicatingDispatcher) -> list[ProcessGroup]:
    """Return the groups through which all ranks that have a part of the layer's weights hear of each other.

    Those of other expert groups are among them: they shard the same rows along another dimension, or replicate them.
    """
    weights = [getattr(layer.experts, each, None) for each in WEIGHTS]
    meshes = [weight.device_mesh for weight in weights if isinstance(weight, DTensor)]
    if not meshes or dispatcher.group.size == 1:
        return [dispatcher.group]
    return [meshes[0].get_group(dim) for dim in range(meshes[0].ndim) if meshes[0].size(dim) > 1]


def _answers(groups: Sequence[ProcessGroup], dispatcher: ReplicatingDispatcher, mine: Any) -> dict[int, Any]:
    """Return a JSON value of every rank of some groups of a mesh, by rank."""
    answers = {dispatcher.group.ranks[dispatcher.group.rank]: mine}
    # One dimension of the mesh after another: each exchange brings the answers of those before.
    for group in groups:
        parts = group.all_gather_bytes(json.dumps(list(answers.items())).encode())
        answers = dict(pair for part in parts for pair in json.loads(part))
    return answers


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _moving(name: str, weight: Tensor, dispatcher: ReplicatingDispatcher, states: States) -> list[Tensor]:
    """Return this rank's rows of a weight, its gradient and its states."""
    platform = dispatcher.platform
    tensors = [weight, platform.get_grad(weight), *states(weight)]
    # Counts of steps and the like belong to the parameter as a whole.
    tensors = [each for each in tensors if each is not None and len(each.shape)]
    for each in tensors:
        if tuple(each.shape) != tuple(weight.shape) or not _is_cut_by_experts(each, dispatcher):
            raise ExpertParallelError(
                f"{name}: expected a weight and states of shape {list(weight.shape)}, cut along dimension 0 over the "
                f"ranks {list(dispatcher.group.ranks)} alone, got one of shape {list(each.shape)} placed "
                f"{getattr(each, 'placements', 'nowhere')}; shard experts along another dimension (expert_shard_dim), "
                "and give the optimizer's tensors as they are laid out"
            )
    moving = [platform.unwrap(each) for each in tensors]
    devices = [str(platform.device_of(each)) for each in moving]
    if len({*devices}) > 1:
        raise ExpertParallelError(
            f"{name}: expected states on the weight's device, {devices[0]}, got them on {sorted({*devices})}; bring "
            "states that wait on the host to the device while experts move"
        )
    return moving


def _guard_state(layer: MoE, dispatcher: ReplicatingDispatcher) -> None:
    """Have the framework's own `state_dict` and `load_state_dict` refuse while experts are away."""
    if dispatcher.is_home:
        for handle in vars(layer).pop(_GUARDS, ()):
            handle.remove()
    elif _GUARDS not in vars(layer):
        register = [getattr(layer, f"register_{way}_pre_hook", None) for way in ("state_dict", "load_state_dict")]
        handles = [each(_refuse_if_away) for each in register if each is not None]
        object.__setattr__(layer, _GUARDS, handles)


def _refuse_if_away(layer: MoE, *_: Any) -> None:
    layer._hp_check_state()


def _is_cut_by_experts(tensor: Tensor, dispatcher: ReplicatingDispatcher) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    cutting = [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard(0)]
    groups = [tensor.device_mesh.get_group(dim).ranks for dim in cutting]
    return [list(ranks) for ranks in groups] == [list(dispatcher.group.ranks)]


def _row_moves(dispatcher: ReplicatingDispatcher, homes: Sequence[int]) -> list[RowMove]:
    """Return the way of each expert's row from its home to the next one, for all ranks."""
    chunk = dispatcher.chunk
    return [
        RowMove(old // chunk, old % chunk, new // chunk, new % chunk, 1)
        for old, new in zip(dispatcher.homes, homes, strict=True)
    ]
