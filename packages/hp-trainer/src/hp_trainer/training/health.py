"""Checks of a run's health: losses that are not finite or spike, and silent data corruption.

Every rank sees the same losses and norms, so all take the same decision. Silent corruption is found by computing a step
twice and by comparing the weights of replicas, bit by bit: among thousands of accelerators some occasionally compute
wrong results without any error (Dixit et al., 2021, "Silent Data Corruptions at Scale").
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
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
from hp_trainer.exceptions import SilentCorruptionError, TrainingError, UnfitCheckpointError
from hp_trainer.training.setup import RankSetup
from hp_trainer.training.state import named_state
from hp_trainer.training.step import OptimizerStep

Action = Literal["go on", "stop", "skip", "rollback"]

_ADVICE = (
    "; this step changed nothing. Continue from the last checkpoint with a lower optimizer.lr or training.clip_norm, "
    "or with training.dtype=float32; if it happens again, from an earlier checkpoint: `hp-train checkpoints RUN` "
    "lists them, `hp-train resume RUN --from-step=N` uses one"
)


@dataclass(frozen=True)
class Verdict:
    """The decision about a step, before it updates anything; its reason is empty if the step continues."""

    action: Action
    reason: str = ""

    def __str__(self) -> str:
        consequence = "the step is skipped" if self.action == "skip" else "the run goes back to its last checkpoint"
        return f"{self.reason}; {consequence} (training.guard)"


GO_ON = Verdict("go on")


def nonfinite_scores(error: Exception, step: int) -> TrainingError | None:
    """Return the error to raise for router scores that are not finite; None: the error has another cause."""
    if isinstance(error, ExpertParallelError) and error.only_nonfinite:
        return TrainingError(f"step {step}: {error}{_ADVICE}")
    return None


class LossGuard:
    """Judges loss and gradient norm of each step; `interventions` steps in a row were skipped or rolled back."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self.interventions = 0

    def judge_loss(self, loss: float, step: int) -> Verdict:
        """Return the decision about a step with this loss."""
        if not math.isfinite(loss):
            return self._decide(self._config.on_nonfinite, f"the loss of step {step} is {loss}")
        if self._config.on_spike != "ignore" and len(self._losses) == self._config.spike_window:
            mean, deviation = fmean(self._losses), pstdev(self._losses)
            # Only upwards: a sudden lower loss is no reason to discard a step.
            if loss > mean + self._config.spike_sigmas * deviation:
                return self._decide(
                    self._config.on_spike,
                    f"the loss of step {step} is {loss:.4g}, far above the mean {mean:.4g} of the last "
                    f"{len(self._losses)} steps, whose standard deviation is {deviation:.2g}",
                )
        return GO_ON

    def judge_norm(self, norm: float, step: int) -> Verdict:
        """Return the decision about a step with this gradient norm; see `judge_loss`."""
        if math.isfinite(norm):
            return GO_ON
        return self._decide(self._config.on_nonfinite, f"the norm of the gradient of step {step} is {norm}")

    def accept(self, loss: float) -> None:
        """Record the loss of a step that is not discarded."""
        self.interventions = 0
        self._losses.append(loss)

    def state(self) -> dict[str, Any]:
        """Return the state with which a resumed run takes the same decisions, as JSON values."""
        # Without a rule for spikes the window is unused, and would only make the index of each checkpoint longer.
        losses = [] if self._config.on_spike == "ignore" else list(self._losses)
        return {"losses": losses, "interventions": self.interventions}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state` returned."""
        try:
            # Converted completely before `_losses` is cleared, so that a damaged state changes nothing there.
            losses, self.interventions = [float(loss) for loss in state["losses"]], int(state["interventions"])
        except (KeyError, TypeError, ValueError) as error:
            raise UnfitCheckpointError(f"a checkpoint is damaged: state.guard: {error!r}") from error
        self._losses.clear()
        self._losses.extend(losses)

    def _decide(self, action: Action, reason: str) -> Verdict:
        if action == "stop":
            raise TrainingError(reason + _ADVICE)
        # Counted in a row: `accept` resets it, so a run that recovers is never stopped by old interventions.
        self.interventions += 1
        if self.interventions > self._config.max_interventions:
            raise TrainingError(
                f"{reason}, after {self._config.max_interventions} steps in a row that were discarded "
                f"(training.guard.max_interventions){_ADVICE}"
            )
        return Verdict(action, reason)


Tensor = Any
Module = Any

_LOSS = "the loss"


class CorruptionChecks:
    """The checks for silent corruption. Every rank makes them at the same steps."""

    def __init__(self, setup: RankSetup, step: OptimizerStep) -> None:
        self._setup, self._step = setup, step
        self._platform = setup.platform

    def accumulate_gradients_twice(self, batch: Batch, step: int) -> Tensor:
        """Run it twice and compare all bits; ranks that differ are named. Atomic sums fail this check too."""
        # A forward may change buffers, such as a router's count of noise draws.
        buffers = [self._platform.ops.clone(self._platform.detach(buffer)) for buffer in self._buffers()]
        self._step.seed_random_numbers(step)
        first = self._digests(self._step.accumulate_gradients(batch))
        # The second run starts from the same state: no gradients, the same buffers and random numbers.
        self._step.discard()
        with self._platform.no_grad():
            for buffer, value in zip(self._buffers(), buffers, strict=True):
                self._platform.copy_(buffer, value)
        self._step.seed_random_numbers(step)
        loss = self._step.accumulate_gradients(batch)
        second = self._digests(loss)
        differ = [name for name in {**first, **second} if first.get(name) != second.get(name)]
        found = all_ranks(self._setup.mesh.world.all, "comparing a step with itself", lambda: differ[:3], TrainingError)
        # Every rank has the differences of all ranks and raises, so that no rank waits in the next collective.
        if any(found):
            raise SilentCorruptionError(f"step {step} computed twice is not the same: {_describe(found)}")
        return loss

    def compare_replicas(self, step: int) -> None:
        """Compare the weights of replicas by digests. Every rank raises the error, which names those that differ."""
        weights = self._platform.named_parameters(self._setup.model)
        self._compare(step, "weights", (parameter for _, parameter in weights))

    def compare_saved(self, step: int) -> None:
        """Compare all states of replicas before one of them saves and all load it; see `compare_replicas`."""
        setup = self._setup
        # Buffers are left out: those of normalizations may differ between replicas.
        buffers = {f"model.{name}" for name, _ in self._platform.named_buffers(setup.model)}
        state = named_state(self._platform, setup.model, setup.optimizer, setup.average)
        # A plain tensor of an optimizer does not say which ranks have the same one: stages of a pipeline differ.
        compared = (
            each
            for name, each in state
            if name not in buffers and (isinstance(each, DTensor) or name.startswith("model."))
        )
        self._compare(step, "weights or optimizer states", compared)

    def _compare(self, step: int, what: str, tensors: Iterable[Tensor]) -> None:
        world = self._setup.mesh.world.all
        found = all_ranks(world, "comparing replicas", lambda: self._replica_digests(tensors), TrainingError)
        odd = odd_ranks(found)
        if odd:
            who = ", ".join(str(rank) for rank in odd)
            raise SilentCorruptionError(
                f"after step {step} the {what} of rank {who} differ from its replicas. Its device or memory may be "
                "faulty: exclude the machine. Checkpoints are compared before they are written: continue from the "
                "newest one"
            )

    def _replica_digests(self, tensors: Iterable[Tensor]) -> dict[str, int]:
        """Return a digest of this rank's tensors for each key of `_replica_group`."""
        digests: dict[str, int] = {}
        for tensor in tensors:
            group = _replica_group(tensor)
            # Chained over tensors: a rank sends one digest per group, not one per tensor.
            digests[group] = zlib.crc32(self._bytes(tensor), digests.get(group, 0))
        return digests

    def _digests(self, loss: Tensor) -> dict[str, int]:
        """Return the digests of a loss and of all gradients, by name of the parameter."""
        found = {_LOSS: zlib.crc32(self._bytes(loss))}
        for name, parameter in self._platform.named_parameters(self._setup.model):
            gradient = self._platform.get_grad(parameter)
            if gradient is not None:
                found[f"the gradient of {name}"] = zlib.crc32(self._bytes(gradient))
        return found

    def _bytes(self, tensor: Tensor) -> memoryview:
        local = local_of(self._platform, tensor)
        # Bytes, not values: NaN differs from itself, and -0.0 equals 0.0.
        values = np.ascontiguousarray(self._platform.to_numpy(self._platform.detach(local)))
        return values.reshape(-1).view(np.uint8).data

    def _buffers(self) -> list[Tensor]:
        return [local_of(self._platform, buffer) for _, buffer in self._platform.named_buffers(self._setup.model)]


def _describe(differing: list[list[str]]) -> str:
    """Return where two computations of a step differ, given the differing names of each rank."""
    # A wrong gradient spreads to all ranks by the reduction. The loss is local, so it identifies the rank.
    own = [str(rank) for rank, names in enumerate(differing) if _LOSS in names]
    first = next(names for names in differing if names)
    where = f"rank {', '.join(own)} in {_LOSS}" if own else f"{', '.join(first)}, summed over its ranks"
    why = "A device computes wrong results, or a kernel depends on the order of its threads"
    return f"{where}. {why}; this step changed nothing"


def _replica_group(tensor: Tensor) -> str:
    """Return a key that two ranks share only if they have the same shard of each tensor with this key."""
    if not isinstance(tensor, DTensor):
        return "replicated"
    spec, coordinate = tensor.spec, tensor.spec.mesh.get_coordinate()
    assert coordinate is not None
    shard = [at for at, placement in zip(coordinate, spec.placements, strict=True) if not placement.is_replicate()]
    # A mesh with other ranks, such as that of another pipeline stage, has other parameters.
    first = spec.mesh.rank_at((0,) * spec.mesh.ndim)
    return f"{first} {spec.mesh.shape} {spec.placements} {shard}"


def odd_ranks(digests: list[Mapping[str, int]]) -> list[int]:
    """Return the ranks that differ from most of their replica group (in a tie all), by the digests of each rank."""
    groups: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank, found in enumerate(digests):
        for name, digest in found.items():
            groups[name].append((rank, digest))
    odd: set[int] = set()
    for group in groups.values():
        counts = Counter(digest for _, digest in group).most_common()
        if len(counts) > 1:
            # With two replicas there is no majority, and either may be wrong.
            is_tie = counts[0][1] == counts[1][1]
            odd.update(rank for rank, digest in group if is_tie or digest != counts[0][0])
    return sorted(odd)
