"""Busy experts moved to other ranks while a run trains, and brought home while its state is saved or loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hp_moe import (
    LoadMetrics,
    expert_placement,
    move_experts,
    place_copies_of_experts,
    return_experts,
    set_expert_placement,
)
from hp_trainer.exceptions import ParallelDimsError, Problem
from hp_trainer.optimizers import set_state
from hp_trainer.training.optimizer import Optimizer, WeightAverage
from hp_trainer.training.setup import RankSetup, raise_everyones

Tensor = Any


class ExpertMoves:
    """The moves of one rank's experts (`parallel.ep_move_interval`); every rank makes them at the same steps.

    Weights, states of the optimizer and moving averages travel with their experts, so that losses are those of experts
    that stay. Checkpoints hold the experts in the order of their numbers: any layout reads them, and a resumed run
    begins with every expert at home.

    Args:
        setup: of this rank; no expert has moved.

    Raises:
        ParallelDimsError: the optimizer keeps states of experts that are not laid out as their weights, on this rank or
            on another of its pipeline.
    """

    def __init__(self, setup: RankSetup) -> None:
        self._model, self._optimizer, self._average = setup.model, setup.optimizer, setup.average
        self._interval = setup.config.parallel.ep_move_interval if setup.dims.ep_enabled else None
        self._names = {id(p): name for name, p in setup.platform.named_parameters(setup.model)}
        self._loads: dict[str, list[int]] = {}
        if self._interval is not None:
            raise_everyones(_state_problems(setup), setup.everyones, ParallelDimsError, "parallel")

    def after_step(self, step: int, loads: Mapping[str, LoadMetrics]) -> None:
        """Count the loads of a step's layers; move experts by those since the last move where that is due.

        Raises:
            ExpertParallelError: experts cannot move; see `hp_moe.move_experts`.
        """
        if self._interval is None:
            return
        for name, load in loads.items():
            before = self._loads.get(name, [0] * len(load.loads))
            self._loads[name] = [one + other for one, other in zip(before, load.loads, strict=True)]
        if step % self._interval == 0 and self._loads:
            counted = {name: LoadMetrics.of(each) for name, each in self._loads.items()}
            states = self._states()
            move_experts(self._model, counted, states, after_layer=states.take_over)
            place_copies_of_experts(self._model, counted)
            self._loads.clear()

    def go_home(self) -> None:
        """Bring all experts home, and forget their loads: what is loaded next is of another time."""
        self._loads.clear()
        if self._interval is not None:
            self._bring_home()

    @contextlib.contextmanager
    def at_home(self) -> Iterator[None]:
        """Bring all experts home in a block, and back afterwards unless it has failed."""
        homes = expert_placement(self._model) if self._interval is not None else {}
        if homes:
            self._bring_home()
        yield
        if homes:
            states = self._states()
            set_expert_placement(self._model, homes, states, after_layer=states.take_over)

    def _bring_home(self) -> None:
        states = self._states()
        return_experts(self._model, states, after_layer=states.take_over)

    def _states(self) -> _TravellingStates:
        return _TravellingStates(self._names, self._optimizer, self._average)


class _TravellingStates:
    """Finds the tensors that travel with a weight: its states of the optimizer, and its average.

    Args:
        names: of the parameters, by `id`.
    """

    def __init__(self, names: Mapping[int, str], optimizer: Optimizer, average: WeightAverage | None) -> None:
        self._names, self._optimizer, self._average = names, optimizer, average
        # 8-bit moments are made as float32 when they are asked for: no more than one layer's at a time.
        self._written: list[tuple[str, str, Tensor]] = []

    def __call__(self, parameter: Tensor) -> Sequence[Tensor]:
        name = self._names[id(parameter)]
        slots = self._optimizer.state().get(name, {})
        self._written.extend((name, slot, tensor) for slot, tensor in slots.items())
        averages = {} if self._average is None else self._average.state()
        return [*slots.values(), *([averages[name]] if name in averages else [])]

    def take_over(self, layer: str) -> None:
        """Tell the optimizer of the states of a layer, which have been written, and let them go."""
        while self._written:
            set_state(self._optimizer, *self._written.pop())


def _state_problems(setup: RankSetup) -> Iterator[Problem]:
    """Yield a problem where rows of an expert's states cannot travel with it, as those of Adafactor."""
    states = setup.optimizer.state()
    for name, parameter in setup.platform.named_parameters(setup.model):
        if ".experts." not in name:
            continue
        shapes = [tuple(tensor.shape) for tensor in states.get(name, {}).values() if len(tensor.shape)]
        if any(shape != tuple(parameter.shape) for shape in shapes):
            yield Problem(
                path="parallel.ep_move_interval",
                what=f"{setup.config.optimizer.name} keeps states of {name} that are not laid out as it is",
                expected="null, or an optimizer whose states have the shape of the weights, such as adamw",
                got=str(setup.config.parallel.ep_move_interval),
                hint="parallel.ep_move_interval=null",
            )
            return
