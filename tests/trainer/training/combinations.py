"""All combinations of parallel axes on up to eight ranks, a sample of them, and their comparison with one rank.

Compared are the losses and the norms of gradients of all steps, and after two of them the weights and both moments of
AdamW: its updates hardly depend on the scale of a gradient, norms and moments do.

Every sample is of other tokens and of another number of targets. Dense models have tied embeddings, and several
documents in a sample; those with experts have neither.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from training_runs import Lab, events, losses, tensors, train_rank

from hp_dtensor.launch import RankPool
from hp_dtensor.platform.selection import get_platform
from hp_trainer.data import IGNORED, Rows, TokenSamples, documents
from hp_trainer.pipeline import schedule_names
from hp_trainer.run import RunFolder

MOST_RANKS = 8
FAMILIES = {
    "gpipe": "one stage",
    "1f1b": "one stage",
    "interleaved_1f1b": "several stages",
    "zero_bubble_h1": "split backward",
    "interleaved_zero_bubble": "several stages, split backward",
    "zero_bubble_v": "V, split backward",
    "dualpipe_v": "V, split backward",
}
EXPERTS = 4
STEPS = 2  # after which weights and moments are compared
SAMPLES = 24  # eight ranks that hold data, three micro-batches each

# float32 has 6e-8 of relative precision; sums in other orders are carried through 20 updates by AdamW, which divides by
# the root of squared gradients. These are about ten times the largest differences seen, on either platform.
CLOSE_STEPS = {"rtol": 1e-5, "atol": 0}  # losses and norms of gradients
CLOSE_TENSORS = 1e-4  # of the largest element of a weight or moment


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Degrees of all axes, the model, and the micro-batches of a rank's step."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    cp_method: str | None = None
    ulysses_degree: int | None = None
    tp: int = 1
    pp: int = 1
    schedule: str | None = None
    experts: bool = False
    ep: int = 1
    etp: int = 1
    expert_mesh: str = "folded"
    parts: int = 1

    @property
    def num_ranks(self) -> int:
        peers = self.ep if self.expert_mesh == "peer" else 1
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp * peers

    @property
    def num_layers(self) -> int:
        """Two for each rank of a pipeline, as some schedules give it two stages."""
        return 2 * self.pp

    def degrees(self) -> dict[str, Any]:
        """Return the settings under `parallel`."""
        chosen = asdict(self)
        for name in ("schedule", "experts", "parts"):
            del chosen[name]
        if self.ep == 1:
            del chosen["etp"], chosen["expert_mesh"]
        return {name: value for name, value in chosen.items() if value is not None}

    def traits(self) -> dict[str, Any]:
        """Return the choices whose pairs a sample covers; degrees above one count as one choice.

        Schedules count by what they ask of the other axes: several stages of a rank, the split of its backward.
        """
        return {
            "replicas": self.dp_replicate > 1,
            "shards": self.dp_shard > 1,
            "sequence": (self.cp_method, (self.ulysses_degree or 1) > 1),
            "tensor": (self.tp > 1, self.etp > 1),
            "stages": FAMILIES.get(self.schedule, self.schedule),
            "model": (self.experts, self.ep > 1 and self.expert_mesh),
            "accumulation": self.parts,
        }

    def __str__(self) -> str:
        message = {name: value for name, value in asdict(self).items() if value not in (1, None, False)}
        if self.ep == 1:
            message.pop("expert_mesh")
        model = "experts" if self.experts else "dense"
        return " ".join([model, *(f"{name}={value}" for name, value in message.items())])


def all_combinations() -> list[Combination]:
    """Return every combination of two to eight ranks, tensor parallel over at most the four key-value heads."""
    found = []
    degrees = [2**i for i in range(MOST_RANKS.bit_length())]
    for replicas, shards, cp, tp, pp in itertools.product(degrees, repeat=5):
        if tp > 4 or replicas * shards * cp * tp * pp > MOST_RANKS:
            continue
        dense = {"dp_replicate": replicas, "dp_shard": shards, "tp": tp, "pp": pp}
        for way, schedule, experts, parts in itertools.product(
            _ways_of_sequences(cp), schedule_names() if pp > 1 else [None], _placements(shards, cp, tp), (1, 3)
        ):
            each = Combination(**dense, **way, schedule=schedule, **experts, parts=parts)
            if 1 < each.num_ranks <= MOST_RANKS:
                found.append(each)
    return found


def _ways_of_sequences(cp: int) -> list[dict[str, Any]]:
    """Return the settings by which `cp` ranks share sequences: one way for all, or heads within and one way between."""
    if cp == 1:
        return [{}]
    ways = [{"cp": cp, "cp_method": method} for method in ("ring", "all_gather", "ulysses")]
    within = [2**i for i in range(1, cp.bit_length() - 1)]
    both = [{"cp": cp, "cp_method": method, "ulysses_degree": n} for n in within for method in ("ring", "all_gather")]
    return ways + both


def _placements(shards: int, cp: int, tp: int) -> list[dict[str, Any]]:
    """Return the settings of a dense model, of experts on every rank, and of experts over these ranks or over peers."""
    found: list[dict[str, Any]] = [{}, {"experts": True, "etp": tp}]
    for ep, etp in itertools.product((2, EXPERTS), sorted({1, tp})):
        if shards * cp * tp % (ep * etp) == 0:
            found.append({"experts": True, "ep": ep, "etp": etp})
        found.append({"experts": True, "ep": ep, "etp": etp, "expert_mesh": "peer"})
    return found


def pairs_of(combination: Combination) -> set[tuple[Any, ...]]:
    """Return each two of a combination's traits, and its schedule."""
    return {*itertools.combinations(combination.traits().items(), 2), ("schedule", combination.schedule)}


def traits_of(combination: Combination) -> set[tuple[Any, ...]]:
    """Return a combination's traits."""
    return set(combination.traits().items())


def covering(
    combinations: list[Combination], properties: Callable[[Combination], set[tuple[Any, ...]]]
) -> Iterator[Combination]:
    """Yield few of the combinations that together have every property which any of them has."""
    shuffled = random.Random(0).sample(combinations, len(combinations))
    shuffled.sort(key=lambda each: each.num_ranks * each.parts)  # of those that add as much the one of least work
    # Pairs and not a dictionary: a combination's hash is that of all its fields.
    found = [(each, properties(each)) for each in shuffled]
    missing = set().union(*(added for _, added in found))
    while missing:
        best, added = max(found, key=lambda each: len(each[1] & missing))
        missing -= added
        yield best


class UnevenSamples(TokenSamples):
    """Samples of which each takes its loss from other places: between a third of them and all."""

    def read(self, indices: np.ndarray) -> Rows:
        rows = super().read(indices)
        return Rows(rows.ids, np.where(self._taken(indices), rows.targets, IGNORED))

    def num_targets(self, indices: np.ndarray) -> int:
        return int(self._taken(indices).sum())

    def _taken(self, indices: np.ndarray) -> np.ndarray:
        index = indices[:, None]
        taken: np.ndarray = (np.arange(self._length) + index) % 3 <= index % 7 % 3
        return taken


class UnevenDocuments(UnevenSamples):
    """Those samples as several documents each, of lengths that follow from the sample's index."""

    def read(self, indices: np.ndarray) -> Rows:
        rows = super().read(indices)
        return Rows(rows.ids, rows.targets, np.arange(self._length) % (indices[:, None] % 7 + 3))


@dataclass(frozen=True)
class Outcome:
    """Results of a run that are compared.

    Attributes:
        losses: of all steps.
        norms: of the gradients of all steps.
        tensors: weights and the optimizer's state after `STEPS` steps; of fewer steps, none.
    """

    losses: list[float]
    norms: list[float]
    tensors: dict[str, np.ndarray]

    @classmethod
    def of(cls, run: RunFolder) -> Outcome:
        norms = [event["gradient_norm"] for event in events(run, "step")]
        return cls(losses(run), norms, tensors(run, step=STEPS) if len(norms) >= STEPS else {})


# One rank's, by platform, experts, layers and steps.
_expected: dict[tuple[str, bool, int, int], Outcome] = {}


Pool = Callable[[int], RankPool]
"""Real ranks by their number, as the fixture `rank_pool` gives them."""


def train(
    lab: Lab,
    name: str,
    combination: Combination,
    steps: int,
    num_layers: int | None = None,
    pool: Pool | None = None,
) -> Outcome:
    """Train a combination.

    Args:
        num_layers: of the model; None: as many as the combination needs.
        pool: of real ranks; None: on simulated ones.
    """
    options = options_of(combination, num_layers or combination.num_layers)
    run = lab.start(name, combination.degrees(), training__steps=steps, **options)
    if pool is None:
        with uneven_samples(combination.experts):
            lab.train(run, combination.num_ranks)
    else:
        pool(combination.num_ranks).run(train_real_rank, run.path, lab.platform.name, combination.experts)
    return Outcome.of(run)


def train_real_rank(run: Path, platform: str, experts: bool) -> None:
    """Train one of several processes' part of a run."""
    with uneven_samples(experts):
        train_rank(RunFolder(run), get_platform(platform))


def uneven_samples(experts: bool) -> AbstractContextManager[Any]:
    """Give training those samples that belong to the model."""
    return mock.patch.object(documents, "TokenSamples", UnevenSamples if experts else UnevenDocuments)


def options_of(combination: Combination, num_layers: int) -> dict[str, Any]:
    """Return the settings besides the degrees."""
    share = SAMPLES // (combination.dp_replicate * combination.dp_shard)
    options: dict[str, Any] = {
        "model__num_hidden_layers": num_layers,
        "model__num_attention_heads": 8,
        "model__num_key_value_heads": 4,
        "model__head_dim": 4,
        "training__global_batch_size": SAMPLES,
        "training__micro_batch_size": share // combination.parts,
        "lr_schedule__kind": "constant",
        "checkpoint__interval": STEPS,
    }
    if not combination.experts:
        options |= {"model__num_experts": None, "model__num_dense_layers": num_layers, "model__num_shared_experts": 0}
        options["model__tie_word_embeddings"] = True
    if combination.schedule is not None:
        options["pipeline__schedule"] = combination.schedule
    return options


def expected(lab: Lab, combination: Combination, steps: int) -> Outcome:
    """Return the outcome of the same model on one rank that takes each global batch at once; trained once a process."""
    key = (lab.platform.name, combination.experts, combination.num_layers, steps)
    if key not in _expected:
        one = Combination(experts=combination.experts)
        _expected[key] = train(lab, f"one {len(_expected)}", one, steps, combination.num_layers)
    return _expected[key]


def assert_close(found: Outcome, wanted: Outcome) -> None:
    """Compare a combination with one rank, within the tolerances of this module."""
    np.testing.assert_allclose(found.losses, wanted.losses, **CLOSE_STEPS, err_msg="losses")
    np.testing.assert_allclose(found.norms, wanted.norms, **CLOSE_STEPS, err_msg="norms of gradients")
    assert found.tensors.keys() == wanted.tensors.keys()
    assert any(name.startswith("optimizer.") for name in wanted.tensors)
    for name, value in wanted.tensors.items():
        atol = CLOSE_TENSORS * float(np.abs(value).max())
        np.testing.assert_allclose(found.tensors[name], value, rtol=0, atol=atol, err_msg=name)


def assert_same_bits(again: Outcome, found: Outcome) -> None:
    """Compare the first steps of a run, run again, with it, bit by bit."""
    steps = len(again.losses)
    assert (again.losses, again.norms) == (found.losses[:steps], found.norms[:steps])
    for name, value in again.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], value, err_msg=name)


def check(lab: Lab, combination: Combination, steps: int, repeated: int = 0, pool: Pool | None = None) -> None:
    """Train a combination for some steps as one rank does, and some of them, if any, once more with equal bits."""
    found = train(lab, "shared", combination, steps, pool=pool)
    assert_close(found, expected(lab, combination, steps))
    if repeated:
        assert_same_bits(train(lab, "again", combination, repeated, pool=pool), found)
