"""Rules for losses that are no finite numbers, or spikes; every rank sees the same numbers and decides alike.

Checks for silent data corruption: a step computed twice, and the weights of replicas compared, bit by bit.

Of thousands of accelerators some compute wrongly now and then without any sign (Dixit et al., 2021, "Silent Data
Corruptions at Scale").
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, Literal

import numpy as np

from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.dtensor import DTensor
from hp_moe import ExpertParallelError
from hp_trainer._coordination import all_ranks
from hp_trainer.config import GuardConfig
from hp_trainer.data import Batch
from hp_trainer.exceptions import CheckpointError, SilentCorruptionError, TrainingError
from hp_trainer.training.setup import RankSetup
from hp_trainer.training.step import OptimizerStep

Action = Literal["go on", "stop", "skip", "rollback"]

_ADVICE = (
    "; this step changed nothing. Go on from the last checkpoint with a lower optimizer.lr or training.clip_norm, or "
    "with training.dtype=float32 if it is another; if it comes again, from an earlier one: `hp-train checkpoints RUN` "
    "lists them, `hp-train resume RUN --from-step=N` takes one"
)


@dataclass(frozen=True)
class Verdict:
    """Decision about a step before it updates anything.

    Attributes:
        action: to take.
        reason: a clause that names the number; empty where the step goes on.
    """

    action: Action
    reason: str = ""

    def __str__(self) -> str:
        way = "the step is skipped" if self.action == "skip" else "the run goes back to its last checkpoint"
        return f"{self.reason}; {way} (training.guard)"


GO_ON = Verdict("go on")


def nonfinite_scores(error: Exception, step: int) -> TrainingError | None:
    """Return what to tell of scores of experts that are no finite numbers; None: the error is another."""
    if isinstance(error, ExpertParallelError) and error.only_nonfinite:
        return TrainingError(f"step {step}: {error}{_ADVICE}")
    return None


class LossGuard:
    """Judges the loss and the norm of the gradient of each step.

    Args:
        config: the rules.
    """

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._interventions = 0

    def judge_loss(self, loss: float, step: int) -> Verdict:
        """Return the decision about a step with this loss.

        Raises:
            TrainingError: the rule is to stop, or steps in a row have been given up too often.
        """
        if not math.isfinite(loss):
            return self._decide(self._config.on_nonfinite, f"the loss of step {step} is {loss}")
        if self._config.on_spike != "ignore" and len(self._losses) == self._config.spike_window:
            mean, deviation = fmean(self._losses), pstdev(self._losses)
            if loss > mean + self._config.spike_sigmas * deviation:
                return self._decide(
                    self._config.on_spike,
                    f"the loss of step {step} is {loss:.4g}, far above the mean {mean:.4g} of the last "
                    f"{len(self._losses)} steps, whose standard deviation is {deviation:.2g}",
                )
        return GO_ON

    def judge_norm(self, norm: float, step: int) -> Verdict:
        """Return the decision about a step whose gradient has this norm; see `judge_loss`."""
        if math.isfinite(norm):
            return GO_ON
        return self._decide(self._config.on_nonfinite, f"the norm of the gradient of step {step} is {norm}")

    def accept(self, loss: float) -> None:
        """Note the loss of a step that updated the weights."""
        self._interventions = 0
        self._losses.append(loss)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs in order to decide alike, as JSON values."""
        losses = [] if self._config.on_spike == "ignore" else list(self._losses)
        return {"losses": losses, "interventions": self._interventions}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned.

        Raises:
            CheckpointError: it is something else.
        """
        try:
            losses, self._interventions = [float(loss) for loss in state["losses"]], int(state["interventions"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"a checkpoint is damaged: state.guard: {error!r}") from error
        self._losses.clear()
        self._losses.extend(losses)

    def keep_count(self, of: int) -> None:
        """Count on from `of` steps given up in a row: going back must not begin the count anew."""
        self._interventions = of

    @property
    def interventions(self) -> int:
        """Steps in a row that were skipped or gone back on."""
        return self._interventions

    def _decide(self, action: Action, reason: str) -> Verdict:
        if action == "stop":
            raise TrainingError(reason + _ADVICE)
        self._interventions += 1
        if self._interventions > self._config.max_interventions:
            raise TrainingError(
                f"{reason}, after {self._config.max_interventions} steps in a row that were given up "
                f"(training.guard.max_interventions){_ADVICE}"
            )
        return Verdict(action, reason)


Tensor = Any
Module = Any

_LOSS = "the loss"


class CorruptionChecks:
    """The checks of one rank; every rank makes them at the same steps."""

    def __init__(self, setup: RankSetup, step: OptimizerStep) -> None:
        self._setup, self._step = setup, step
        self._platform = setup.platform

    def accumulate_gradients_twice(self, batch: Batch, step: int) -> Tensor:
        """Do `OptimizerStep.accumulate_gradients` twice; return the loss of the second time, which differs in no bit.

        Kernels whose sums depend on the order in which threads come (atomics) differ by themselves.

        Raises:
            SilentCorruptionError: on every rank when any rank's loss or gradients differ; names the ranks.
        """
        buffers = self._copied_buffers()
        self._step.seed_random_numbers(step)
        first = self._digests(self._step.accumulate_gradients(batch))
        # The second time must begin as the first did: without gradients, with the same buffers and random numbers.
        self._step.discard()
        self._restore(buffers)
        self._step.seed_random_numbers(step)
        loss = self._step.accumulate_gradients(batch)
        second = self._digests(loss)
        differ = [name for name in {**first, **second} if first.get(name) != second.get(name)]
        found = all_ranks(self._setup.mesh.world.all, "comparing a step with itself", lambda: differ[:3], TrainingError)
        if any(found):
            raise SilentCorruptionError(f"step {step} computed twice is not the same: {_describe(found)}")
        return loss

    def compare_replicas(self, step: int) -> None:
        """Compare the weights of ranks that hold the same ones.

        Raises:
            SilentCorruptionError: on every rank when replicas differ; names the ranks that differ from most others.
        """
        world = self._setup.mesh.world.all
        found = all_ranks(world, "comparing replicas", self._weights, TrainingError)
        odd = odd_ranks(found)
        if odd:
            who = ", ".join(str(rank) for rank in odd)
            raise SilentCorruptionError(
                f"after step {step} the weights of rank {who} are not those of its replicas. Its device or memory may "
                "be faulty: leave the machine out, and go on from a checkpoint before the last comparison"
            )

    def _weights(self) -> dict[str, int]:
        """Return one digest of this rank's weights for each set of ranks that hold the same ones."""
        digests: dict[str, int] = {}
        for _, parameter in self._platform.named_parameters(self._setup.model):
            place = _place(parameter)
            digests[place] = zlib.crc32(self._bytes(parameter), digests.get(place, 0))
        return digests

    def _digests(self, loss: Tensor) -> dict[str, int]:
        """Return the digests of a loss and of all gradients, by the parameter's name."""
        found = {_LOSS: zlib.crc32(self._bytes(loss))}
        for name, parameter in self._platform.named_parameters(self._setup.model):
            gradient = self._platform.get_grad(parameter)
            if gradient is not None:
                found[f"the gradient of {name}"] = zlib.crc32(self._bytes(gradient))
        return found

    def _bytes(self, tensor: Tensor) -> memoryview:
        local = local_of(self._platform, tensor)
        values = np.ascontiguousarray(self._platform.to_numpy(self._platform.detach(local)))
        return values.reshape(-1).view(np.uint8).data

    def _copied_buffers(self) -> list[Tensor]:
        """Return copies of what a forward pass may change, as the number of a router's draws of noise."""
        return [self._platform.ops.clone(self._platform.detach(buffer)) for buffer in self._buffers()]

    def _restore(self, buffers: list[Tensor]) -> None:
        with self._platform.no_grad():
            for buffer, value in zip(self._buffers(), buffers, strict=True):
                self._platform.copy_(buffer, value)

    def _buffers(self) -> list[Tensor]:
        return [local_of(self._platform, buffer) for _, buffer in self._platform.named_buffers(self._setup.model)]


def _describe(differing: list[list[str]]) -> str:
    """Return where two computations of a step differ, from the names that each rank has found to differ."""
    # Gradients are sums over ranks, which all get from the one that is wrong; a loss is a rank's own.
    own = [str(rank) for rank, names in enumerate(differing) if _LOSS in names]
    first = next(names for names in differing if names)
    where = f"rank {', '.join(own)} in {_LOSS}" if own else f"{', '.join(first)}, summed over the ranks that hold it"
    why = "A device computes wrongly, or a kernel depends on the order of its threads"
    return f"{where}. {why}; this step changed nothing"


def _place(parameter: Tensor) -> str:
    """Return a name that those ranks share which hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return "whole"
    spec, coordinate = parameter.spec, parameter.spec.mesh.get_coordinate()
    assert coordinate is not None
    shard = [at for at, placement in zip(coordinate, spec.placements, strict=True) if not placement.is_replicate()]
    # A mesh of other ranks, as that of another pipeline stage, holds other parameters.
    first = spec.mesh.rank_at((0,) * spec.mesh.ndim)
    return f"{first} {spec.mesh.shape} {spec.placements} {shard}"


def odd_ranks(digests: list[Mapping[str, int]]) -> list[int]:
    """List the ranks whose digest is not that of most ranks with the same name; of equally many, all are."""
    odd: set[int] = set()
    for group in _by_name(digests):
        counts = Counter(digest for _, digest in group).most_common()
        if len(counts) > 1:
            is_tie = counts[0][1] == counts[1][1]
            odd.update(rank for rank, digest in group if is_tie or digest != counts[0][0])
    return sorted(odd)


def _by_name(digests: list[Mapping[str, int]]) -> Iterator[list[tuple[int, int]]]:
    groups: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank, found in enumerate(digests):
        for name, digest in found.items():
            groups[name].append((rank, digest))
    yield from groups.values()
