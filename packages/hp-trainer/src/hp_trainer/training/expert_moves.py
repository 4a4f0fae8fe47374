"""Moves of busy experts to other ranks during training, and their original placement while state is saved or loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hp_moe import (
    LoadMetrics,
    expert_placement,
    move_experts,
    return_experts,
    set_expert_placement,
    update_expert_copies,
)
from hp_trainer.exceptions import Problem
from hp_trainer.optimizers import set_state
from hp_trainer.training.optimizer import Optimizer, WeightAverage
from hp_trainer.training.setup import RankSetup, raise_on_all_ranks

Tensor = Any


class ExpertMoves:
    """Moves experts between ranks (`parallel.ep_move_interval`). Every rank does so at the same steps.

    Weights, optimizer states and moving averages are sent with their experts, so that losses do not change. Checkpoints
    have the experts in their original order: any layout reads them, and a resumed run starts with the original
    placement.
    """

    def __init__(self, setup: RankSetup) -> None:
        self._model, self._optimizer, self._average = setup.model, setup.optimizer, setup.average
        self._interval = setup.config.parallel.ep_move_interval if setup.dims.ep_enabled else None
        # By identity: a move changes the values of parameters, not the objects.
        self._names = {id(p): name for name, p in setup.platform.named_parameters(setup.model)}
        self._loads: dict[str, list[int]] = {}
        if self._interval is not None:
            raise_on_all_ranks(_state_problems(setup), setup.pipeline_group)

    def after_step(self, step: int, loads: Mapping[str, LoadMetrics]) -> None:
        """Add the expert loads of a step, and at the interval move experts by the loads since the last move."""
        if self._interval is None:
            return
        # Summed since the last move: the loads of a single step are too noisy to place experts by.
        for name, load in loads.items():
            before = self._loads.get(name, [0] * len(load.loads))
            self._loads[name] = [one + other for one, other in zip(before, load.loads, strict=True)]
        if step % self._interval == 0 and self._loads:
            counted = {name: LoadMetrics.of(each) for name, each in self._loads.items()}
            states = self._states()
            move_experts(self._model, counted, states, after_layer=states.write_back)
            update_expert_copies(self._model, counted)
            self._loads.clear()

    def reset(self) -> None:
        """Restore the original placement and drop the loads, before another state is loaded."""
        self._loads.clear()
        if self._interval is not None:
            self._restore_placement()

    @contextlib.contextmanager
    def original_placement(self) -> Iterator[None]:
        """Use the original placement inside the block, and the current one again afterwards unless the block raises."""
        placement = expert_placement(self._model) if self._interval is not None else {}
        if placement:
            self._restore_placement()
        yield
        if placement:
            states = self._states()
            set_expert_placement(self._model, placement, states, after_layer=states.write_back)

    def _restore_placement(self) -> None:
        states = self._states()
        return_experts(self._model, states, after_layer=states.write_back)

    def _states(self) -> _MovedStates:
        return _MovedStates(self._names, self._optimizer, self._average)


class _MovedStates:
    """A function that returns the tensors that are moved with a weight: its optimizer states and its moving average."""

    def __init__(self, names: Mapping[int, str], optimizer: Optimizer, average: WeightAverage | None) -> None:
        self._names, self._optimizer, self._average = names, optimizer, average
        # 8-bit moments are converted to float32 on request. `write_back` releases them after each layer.
        self._written: list[tuple[str, str, Tensor]] = []

    def __call__(self, parameter: Tensor) -> Sequence[Tensor]:
        name = self._names[id(parameter)]
        slots = self._optimizer.state().get(name, {})
        self._written.extend((name, slot, tensor) for slot, tensor in slots.items())
        averages = {} if self._average is None else self._average.state()
        return [*slots.values(), *([averages[name]] if name in averages else [])]

    def write_back(self, layer: str) -> None:
        """Pass the moved states of a layer, the last one asked for, to the optimizer, and release them."""
        # Per layer, so that the float32 moments of one layer at a time are in memory.
        while self._written:
            set_state(self._optimizer, *self._written.pop())


def _state_problems(setup: RankSetup) -> Iterator[Problem]:
    """Yield a problem if optimizer states cannot be moved row by row with an expert, such as those of Adafactor."""
    states = setup.optimizer.state()
    for name, parameter in setup.platform.named_parameters(setup.model):
        if ".experts." not in name:
            continue
        shapes = [tuple(tensor.shape) for tensor in states.get(name, {}).values() if len(tensor.shape)]
        if any(shape != tuple(parameter.shape) for shape in shapes):
            yield Problem(
                path="parallel.ep_move_interval",
                what=f"{setup.config.optimizer.name} has states of {name} that do not have its shape",
                expected="null, or an optimizer whose states have the shape of the weights, such as adamw",
                got=str(setup.config.parallel.ep_move_interval),
                hint="parallel.ep_move_interval=null",
            )
            return
