"""Busy experts moved to other ranks while a run trains, and brought home while its state is saved or loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hp_moe import LoadMetrics, expert_homes, move_experts, place_copies_of_experts, return_experts, set_expert_homes
from hp_trainer.exceptions import ParallelDimsError, Problem, raise_if_any
from hp_trainer.optimizers import set_state
from hp_trainer.training.setup import RankSetup

Tensor = Any


class ExpertMoves:
    """The moves of one rank's experts (`parallel.ep_move_interval`); every rank makes them at the same steps.

    Weights, states of the optimizer and moving averages travel with their experts, so that losses are those of experts
    that stay. Checkpoints hold the experts in the order of their numbers: any layout reads them, and a resumed run
    begins with every expert at home.

    Args:
        setup: of this rank; no expert has moved.

    Raises:
        ParallelDimsError: the optimizer keeps states of experts that are not laid out as their weights.
    """

    def __init__(self, setup: RankSetup) -> None:
        self._model, self._optimizer, self._average = setup.model, setup.optimizer, setup.average
        self._interval = setup.config.parallel.ep_move_interval if setup.dims.ep_enabled else None
        self._names = {id(p): name for name, p in setup.platform.named_parameters(setup.model)}
        self._loads: dict[str, list[int]] = {}
        if self._interval is not None:
            raise_if_any(_state_problems(setup), ParallelDimsError, "parallel")

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
            with self._states() as states:
                move_experts(self._model, counted, states)
            place_copies_of_experts(self._model, counted)
            self._loads.clear()

    def go_home(self) -> None:
        """Bring all experts home, and forget their loads: what is loaded next is of another time."""
        self._loads.clear()
        if self._interval is not None:
            with self._states() as states:
                return_experts(self._model, states)

    @contextlib.contextmanager
    def at_home(self) -> Iterator[None]:
        """Bring all experts home in a block, and back afterwards unless it has failed."""
        homes = expert_homes(self._model) if self._interval is not None else {}
        if homes:
            with self._states() as states:
                return_experts(self._model, states)
        yield
        if homes:
            with self._states() as states:
                set_expert_homes(self._model, homes, states)

    @contextlib.contextmanager
    def _states(self) -> Iterator[Any]:
        """Give what finds all tensors that travel with a weight; afterwards the optimizer is told of those written."""
        written: list[tuple[str, str, Tensor]] = []

        def states(parameter: Tensor) -> Sequence[Tensor]:
            name = self._names[id(parameter)]
            slots = self._optimizer.state().get(name, {})
            written.extend((name, slot, tensor) for slot, tensor in slots.items())
            averages = {} if self._average is None else self._average.state()
            return [*slots.values(), *([averages[name]] if name in averages else [])]

        yield states
        for name, slot, tensor in written:
            set_state(self._optimizer, name, slot, tensor)


def _state_problems(setup: RankSetup) -> Iterator[Problem]:
    """Yield a problem where rows of an expert's states cannot travel with it, as those of Adafactor."""
    states = setup.optimizer.state()
    for name, parameter in setup.platform.named_parameters(setup.model):
        shapes = [tuple(tensor.shape) for tensor in states.get(name, {}).values() if len(tensor.shape)]
        if ".experts." in name and any(shape != tuple(parameter.shape) for shape in shapes):
            yield Problem(
                path="parallel.ep_move_interval",
                what=f"{setup.config.optimizer.name} keeps states of {name} that are not laid out as it is",
                expected="null, or an optimizer whose states have the shape of the weights, such as adamw",
                got=str(setup.config.parallel.ep_move_interval),
                hint="parallel.ep_move_interval=null",
            )
            return
