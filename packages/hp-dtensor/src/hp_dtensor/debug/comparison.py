"""Comparison of two recordings: equal, within rounding, or the first tensor in which they differ, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hp_dtensor.debug.digest import LENGTH, norm_of, subtract
from hp_dtensor.debug.kinds import MISSING, Kind, Pair, kind_of
from hp_dtensor.debug.recording import OPERATION, PASSES, ROOT, Elements, Event, Recording
from hp_dtensor.exceptions import RecordingError

Key = tuple[str, str]
Events = dict[Key, Event]


def pair_operations(a: Events, b: Events) -> tuple[Events, Events, list[str]]:
    """Return A's and B's events of a step without operations that only one side runs. B's get the names of A's.

    Operations of a module are paired in their order, by name and global shape. The third result describes those of one
    side alone. An operation of A whose values differ between ranks is local to them, and is left out.
    """
    names: dict[str, str] = {}
    notes: list[str] = []
    mine, others = _of_modules(a), _of_modules(b)
    for module in [each for each in mine if each in others]:
        x, y = mine[module], others[module]
        forms = [[_form(each) for each in side] for side in (x, y)]
        blocks = SequenceMatcher(None, forms[0], forms[1], autojunk=False).get_matching_blocks()
        names |= {
            y[block.b + i].name: x[block.a + i].name
            for block in blocks
            for i in range(block.size)
            if not x[block.a + i].digest.replicas
        }
        ends = [(0, 0, 0), *blocks]
        for (i, j, size), (next_i, next_j, _) in pairwise(ends):
            only = x[i + size : next_i], y[j + size : next_j]
            if any(only):
                after = f"after {_short(x[i + size - 1])}" if i + size else "first"
                notes.append(f"{module}: {after} A alone runs {_listed(only[0])}, and B alone {_listed(only[1])}")
    known = set(names.values())
    return (
        {key: event for key, event in a.items() if event.operation is None or event.name in known},
        {
            (key[0], names.get(key[1], key[1])): event
            for key, event in b.items()
            if event.operation is None or event.name in names
        },
        notes,
    )


def _of_modules(events: Events) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in events.values():
        if event.pass_ == "forward" and event.operation is not None:
            found.setdefault(event.operation[0], []).append(event)
    return found


def _form(event: Event) -> tuple[object, ...]:
    assert event.operation is not None
    return event.operation[1], event.digest.shape, event.digest.count


def _short(event: Event) -> str:
    return event.name.partition(OPERATION)[2]


def _listed(events: Sequence[Event]) -> str:
    texts = [_short(each) for each in events]
    return ", ".join([*texts[:4], *(["..."] if len(texts) > 4 else [])]) or "none"


def modules_around(pass_: str, name: str, after: str | None = None) -> tuple[str, ...]:
    """Return the modules whose own operations may have computed a tensor; empty for weights, states and losses.

    These are its module, for a gradient also the module `after`, whose gradient was recorded before it, and all modules
    that contain one of them.

    Examples:
        >>> modules_around("gradient", "layers.1.head.weight")
        ('layers.1.head', 'layers.1', 'layers', '(model)')
    """
    if pass_ not in ("forward", "backward", "gradient"):
        return ()
    inner = name.rpartition(".")[0] if pass_ == "gradient" else name.partition("[")[0]
    starts = [inner, *([after.partition("[")[0]] if after is not None else [])]
    found = [each for start in starts for each in _around(start)]
    return tuple(dict.fromkeys([*found, ROOT]))


def _around(name: str) -> Iterator[str]:
    while name and name != ROOT:
        yield name
        name = name.rpartition(".")[0]


# Outputs of which the difference is printed.
_DEPTHS = 6
# A rounding to nearest changes a number by at most this fraction of it.
UNITS = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
# Chosen, not derived: between two recorded tensors each side rounds some ten times, and growth is estimated from a few
# projections of one perturbation, with an error of up to a factor of three.
ROUNDINGS = 32
# Rounding that explains half of a tensor explains a lost one too, nearly: such a tensor is not checked.
_VACUOUS = 0.5
# Order of the compared tensors of a step.
_ORDER = (*PASSES, "update")
# Relative differences of float64 sums in another order.
_EXACT = 1e-12

Verdict = Literal["equal", "equal where compared", "within rounding", "different", "not comparable"]


@dataclass(frozen=True)
class Difference:
    """Difference of a tensor between A and B.

    Attributes:
        step, pass_, name: the tensor; see `Event`. The pass `update` is the change of a weight in the step.
        relative: norm of the difference, relative to the larger of both norms.
        tolerance: what rounding explains.
        pair: the digests of both sides.
        after: name of the module whose gradient was the last one before this in backward; None elsewhere.
    """

    step: int
    pass_: str
    name: str
    relative: float
    tolerance: float
    pair: Pair
    after: str | None = None

    @property
    def is_explained(self) -> bool:
        """True if rounding explains the difference."""
        return self.relative <= self.tolerance

    @property
    def is_checked(self) -> bool:
        """True if the tolerance is small enough to tell rounding from a lost tensor."""
        return self.tolerance <= _VACUOUS or self.relative <= _EXACT or not self.is_explained

    def __str__(self) -> str:
        return f"step {self.step}, {described(self.pass_, self.name)}"


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        verdict: "equal"; "equal where compared" if a side has tensors that the other one lacks, or that were not
            recorded; "within rounding"; "different"; "not comparable" if neither side is finite from `first` on.
        first: the first difference that rounding does not explain.
        kind: what kind of difference it likely is.
        differences: all compared tensors, in order.
        notes: what could not be compared, and why.
        about: facts of A and of B.
        not_compared: number of tensors that only one side has, or that a side did not record.
        operation: in words, in which operation the first difference arises; see `narrowed`.
        elements: in words, which elements differ on which ranks; see `located`.
    """

    verdict: Verdict
    first: Difference | None
    kind: Kind | None
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    about: tuple[Mapping[str, Any], Mapping[str, Any]]
    not_compared: int = 0
    operation: tuple[str, ...] = ()
    elements: tuple[str, ...] = ()

    @property
    def not_checked(self) -> tuple[Difference, ...]:
        """Tensors of which rounding may explain everything, which may therefore be wrong."""
        return tuple(each for each in self.differences if not each.is_checked)

    def __str__(self) -> str:
        lines = [f"{side}: {_describe(about)}" for side, about in zip("AB", self.about, strict=True)]
        checked = self.differences if self.first is None else self.differences[: self.differences.index(self.first)]
        steps = len({each.step for each in checked if each.step})
        if self.first is None:
            number, of = len(checked) - len(self.not_checked), len(checked) + self.not_compared
            total = f"{number} of {of}" if self.not_compared else f"{number}"
            unchecked = f", {len(self.not_checked)} not checked" if self.not_checked else ""
            lines.append(f"{self.verdict}: {total} tensors of {steps} steps{unchecked}")
        elif self.verdict == "not comparable":
            lines.append(f"not comparable: A and B are not finite from {self.first} on")
        else:
            assert self.kind is not None
            lines += [
                f"different from {self.first} on",
                f"  by      {self.first.relative:.2g} of its norm; rounding explains {self.first.tolerance:.1g}",
                f"  kind    {self.kind.name}",
                f"  likely  {self.kind.cause}",
            ]
        if self.first is not None and self.kind is not None:
            if self.first.after is not None:
                lines.append(f"  module  computed by the backward of what follows it; last equal: {self.first.after}")
            lines += [f"  where   {text}" for text in (*self.kind.where, *self.elements)]
            lines += [f"  within  {text}" for text in self.operation]
            vacuous = sum(not each.is_checked for each in checked)
            known = f", {vacuous} of them not checked" if vacuous else ""
            lines.append(f"  before  {len(checked)} tensors are equal or within rounding{known}")
        if checked and self.verdict != "equal":
            worst = max(checked, key=lambda each: each.relative / max(each.tolerance, _EXACT))
            lines.append(f"  nearest to the limit: {worst}: {worst.relative:.1e} of {worst.tolerance:.1e}")
        if self.verdict != "equal":
            lines += [*_growth(self.differences), *_by_depth(self.differences)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def described(pass_: str, name: str) -> str:
    """Return a tensor in words."""
    if pass_ == "loss":
        return name
    words = {"forward": "forward of", "backward": "gradient of the output of", "gradient": "gradient of"}
    return f"{words.get(pass_, f'{pass_} of')} {name}"


def _describe(about: Mapping[str, Any]) -> str:
    known = [str(value) for key, value in about.items() if isinstance(value, str) and value]
    ranks = about.get("world_size", 1)
    return ", ".join([*known, f"{ranks} rank{'s' if ranks != 1 else ''}", "/".join(about.get("dtypes", ()))])


def _growth(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield a table of the largest difference of each pass and step, and of the largest tolerance there."""
    passes = list(dict.fromkeys(each.pass_ for each in differences if each.step))
    steps = sorted({each.step for each in differences if each.step})
    yield "  largest relative difference (and what rounding explains)"
    yield ("  step  " + "".join(f"{name:<20}" for name in passes)).rstrip()
    for step in steps if len(steps) <= 8 else [*steps[:4], *steps[-4:]]:
        cells = []
        for name in passes:
            found = [each for each in differences if (each.step, each.pass_) == (step, name)]
            worst = max(found, key=lambda each: each.relative / max(each.tolerance, _EXACT), default=None)
            cells.append("" if worst is None else f"{worst.relative:.1e} ({worst.tolerance:.0e})")
        yield (f"  {step:>4}  " + "".join(f"{cell:<20}" for cell in cells)).rstrip()


def _by_depth(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield the differences of some outputs of the last step's forward, from the first one to the last."""
    step = max((each.step for each in differences), default=0)
    found = [each for each in differences if (each.step, each.pass_) == (step, "forward")]
    if len(found) < 2:
        return
    chosen = dict.fromkeys(round(at) for at in np.linspace(0, len(found) - 1, _DEPTHS))
    yield f"  by depth, in the forward of step {step}"
    width = max(len(found[at].name) for at in chosen)
    for at in chosen:
        yield f"    {found[at].name:<{width}}  {found[at].relative:.1e} ({found[at].tolerance:.0e})"


def compare(a: Recording, b: Recording) -> Comparison:
    """Compare two recordings of the same steps from the same weights.

    A difference is explained by rounding up to `ROUNDINGS` times the larger of the rounding unit of the coarsest dtype
    of both sides, and the growth that `measure_growth` has found for the tensor. A weight that both sides have and of
    which one has no gradient differs, unless the other gradient is zero.

    Raises:
        RecordingError: they have no step or no tensor in common, or neither has a measured growth.
    """
    growth = _growth_of(a) or _growth_of(b)
    if not growth:
        raise RecordingError(
            "neither recording knows how rounding grows in this model; record A once more with its initial weights "
            "changed by perturb_weights, and pass both to measure_growth"
        )
    unit = max(UNITS.get(name, 0.0) for side in (a, b) for name in side.about.get("dtypes", ("float32",)))
    notes = list(_missing(a, b))
    found: list[Difference] = []
    unmeasured: list[tuple[int, str, str]] = []
    not_compared = len({name for side in (a, b) for name in side.about.get("unplaced", ())})
    not_compared += sum(len({**a.steps, **b.steps}[step]) for step in a.steps.keys() ^ b.steps.keys())
    of_weights = [_weights(a), _weights(b)]
    for step, of_a, of_b in _common(a, b):
        before: str | None = None
        previous = {name: (dict(of(step - 1))) for name, of in (("a", _lookup(a)), ("b", _lookup(b)))}
        of_a, of_b, only = pair_operations(of_a, of_b)
        notes += only
        _add_missing_gradients(of_a, of_b)
        _add_missing_gradients(of_b, of_a)
        not_compared += len(of_a.keys() ^ of_b.keys())
        for key in sorted(of_a, key=lambda key: _ORDER.index(key[0])):
            event = of_a[key]
            if key not in of_b:
                continue
            unmeasured += [(step, *key)] if step and (step, *key) not in growth else []
            weights = [updated(step).get(key[1]) if key[0] == "update" else None for updated in of_weights]
            pair = Pair(event, of_b[key], previous["a"].get(key), previous["b"].get(key), unit, *weights)
            # Weights before the first step must be equal; their updates are compared later.
            limit = 4 * unit if step == 0 else _limit(growth, unit, (step, *key), math.prod(event.digest.shape))
            relative = pair.relative()
            after = before if key[0] == "backward" else None
            found.append(Difference(step, key[0], key[1], relative, limit, pair, after))
            before = key[1] if relative <= limit and key[0] == "backward" else before
    if not found:
        raise RecordingError(f"the recordings have no tensor of the same step in common; {'; '.join(notes)}")
    if unmeasured:
        notes.append(
            f"growth of rounding is not known of {len(unmeasured)} tensors, for which {ROUNDINGS} roundings are "
            f"allowed: {_some([f'step {at}, {described(*key)}' for at, *key in unmeasured])}"
        )
    vacuous = [str(each) for each in found if not each.is_checked]
    if vacuous:
        notes.append(f"not checked, since rounding explains more than {_VACUOUS:g} of their norm: {_some(vacuous)}")
    first = next((each for each in found if not each.is_explained), None)
    kind, verdict = None, _verdict(first, found, not_compared)
    if first is not None:
        kind = kind_of(first.pair, a.about, b.about, first.step)
    return Comparison(verdict, first, kind, tuple(found), tuple(notes), (a.about, b.about), not_compared)


def narrowed(found: Comparison, again: Comparison) -> Comparison:
    """Return a comparison with the operation in which its first difference arises.

    Args:
        again: of the same runs, with the operations of `modules_around` the first difference recorded in its step.
    """
    first = again.first
    if found.first is None:
        return found
    if first is None:
        return replace(found, operation=("the difference did not occur again: it is not the same in each run",))
    pass_ = "forward" if first.pass_ == "forward" else "backward"
    before = again.differences[: again.differences.index(first)]
    same = [e for e in before if (e.step, e.pass_) == (first.step, pass_) and e.pair.a.operation is not None]
    last = f"the last that agrees is {same[-1].name}" if same else "none agrees before it"
    what = "output" if pass_ == "forward" else "gradient of its output"
    if first.pair.a.operation is not None:
        ranks = "".join(f", {text}" for text in (again.kind.where if again.kind else ()) if text.startswith("ranks"))
        text = f"{first.name}, {what}{ranks}; {last}"
    elif same:
        text = f"the {what} agrees for all {len(same)} operations that A and B share; {last}"
    else:
        text = "A and B share no operation of these modules"
    # What only one side runs there may be the cause.
    modules = {each.pair.a.operation[0] for each in (first, *same[-1:]) if each.pair.a.operation} | {found.first.name}
    notes = [note for note in again.notes if note.partition(OPERATION)[0] in modules]
    # Other names of the same operation are everywhere if the sides have other frameworks.
    after = f": after {same[-1].name.partition(OPERATION)[2]} " if same else ""
    notes = [note for note in notes if after and after in note] or notes
    return replace(found, operation=(text, *notes))


def located(found: Comparison, a: Recording, b: Recording) -> Comparison:
    """Return a comparison with the elements, and their ranks, of the first difference, which A and B have recorded."""
    first = found.first
    if first is None:
        return found
    sides = [_lookup(each)(first.step).get((first.pass_, first.name)) for each in (a, b)]
    if any(side is None or not side.elements for side in sides):
        return found
    full = [_assembled(side) for side in sides]
    rms = max(math.sqrt(float(np.mean(np.square(each)))) if each.size else 0.0 for each in full)
    limit = first.tolerance * np.maximum(rms if math.isfinite(rms) else 0.0, np.abs(full[0]))
    # In this form NaN differs.
    differs, texts = ~(np.abs(full[1] - full[0]) <= limit), []
    for letter, side, other in (("A", sides[0], full[1]), ("B", sides[1], full[0])):
        ranks = {each.rank for each in side.elements}
        if len(ranks) == 1 or not _is_direct(side):
            continue
        wrong = set()
        for each in side.elements:
            at = np.ix_(*each.indices)
            here = ~(np.abs(each.values - other[at]) <= limit[at])
            differs[at] |= here
            wrong |= {each.rank} if here.any() else set()
        if wrong:
            listed = (
                "all ranks" if wrong == ranks else f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, sorted(wrong)))}"
            )
            texts.append(f"they are on {listed} of {letter}")
    if not differs.any():
        return replace(found, elements=("no element alone differs by more than rounding explains",))
    change = np.where(differs, np.nan_to_num(np.abs(full[1] - full[0]), nan=np.inf), -1.0)
    worst = np.unravel_index(int(change.argmax()), change.shape)
    values = f"{full[0][worst]:.6g} in A, {full[1][worst]:.6g} in B"
    text = f"{int(differs.sum())} of {differs.size} elements differ by more than rounding{_listed_indices(differs)}"
    return replace(found, elements=(f"{text}; most at {[int(at) for at in worst]}: {values}", *texts))


def _is_direct(event: Event) -> bool:
    """Return whether each rank has final values, not summands or several calls' contributions."""
    keys = [(each.rank, *(index.tobytes() for index in each.indices)) for each in event.elements]
    return not any(each.summand for each in event.elements) and len(set(keys)) == len(keys)


def _assembled(event: Event) -> np.ndarray:
    """Return the full tensor of recorded elements; of replicas the first rank's."""
    total, owners = np.zeros(event.digest.shape), dict[tuple[Any, ...], int]()
    for each in event.elements:
        key = (each.summand, *(index.tobytes() for index in each.indices))
        if owners.setdefault(key, each.rank) == each.rank:
            total[np.ix_(*each.indices)] += each.values
    return total


def _listed_indices(differs: np.ndarray) -> str:
    """Return the indices of each dimension at which elements differ, in words, where they are not all."""
    texts = []
    for dim, size in enumerate(differs.shape):
        chosen = np.flatnonzero(differs.any(tuple(other for other in range(differs.ndim) if other != dim)))
        if len(chosen) == size:
            continue
        listed = ", ".join(map(str, chosen)) if len(chosen) <= 6 else f"{len(chosen)} from {chosen[0]} to {chosen[-1]}"
        texts.append(f"{listed} of {size} in dimension {dim}")
    return f": {'; '.join(texts)}" if texts else ""


def _verdict(first: Difference | None, found: Sequence[Difference], not_compared: int) -> Verdict:
    if first is not None:
        return "different" if first.pair.is_comparable else "not comparable"
    if all(each.relative <= _EXACT for each in found):
        return "equal where compared" if not_compared else "equal"
    return "within rounding"


def _add_missing_gradients(mine: dict[Any, Event], other: dict[Any, Event]) -> None:
    """Add zero for each gradient that only the other side has of a weight whose update this side has."""
    for (pass_, name), event in other.items():
        if pass_ == "gradient" and (pass_, name) not in mine and ("update", name) in mine:
            zero = replace(event.digest, values=np.zeros(LENGTH), parts=(), replicas=())
            mine[pass_, name] = replace(event, dtype=MISSING, digest=zero)


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")


def _limit(growth: Mapping[Any, float], unit: float, key: tuple[int, str, str], numel: int) -> float:
    """Return the relative difference of a tensor that rounding explains."""
    step, pass_, name = key
    limit = ROUNDINGS * max(unit, growth.get(key, 0.0))
    if pass_ == "update":
        # Optimizers such as Adam divide a gradient by its own size, so that the smallest of N normal numbers, about
        # 1 / N of their root mean square, takes a relative change d of the gradient N times. This is sqrt(N) * d of the
        # update's norm; where more elements are smaller than d, 2 * sqrt(d). One perturbation seldom meets these few.
        change = ROUNDINGS * max(unit, growth.get((step, "gradient", name), 0.0))
        limit = max(limit, min(math.sqrt(numel) * change, 2 * math.sqrt(change)))
    return limit


def measure_growth(a: Recording, perturbed: Recording) -> Recording:
    """Return recording A with the measured growth of rounding; it is not measured where a side is not finite.

    Args:
        perturbed: the same steps as `a`, with initial weights changed by one rounding (`perturb_weights`).

    Raises:
        RecordingError: replicas of A or of the perturbed run differ by more than rounding.
    """
    lookup, steps = _lookup(perturbed), {}
    unit = max(UNITS.get(name, 0.0) for side in (a, perturbed) for name in side.about.get("dtypes", ("float32",)))
    for step, events in a.steps.items():
        other, mine = lookup(step), _lookup(a)(step)
        grown = []
        for event in events:
            # A weight's growth is that of its update, which is compared in its place.
            key = ("update", event.name) if event.pass_ == "weights" and step else event.key
            known = key in other and key in mine
            growth = _growth_between(step, Pair(mine[key], other[key], unit=unit)) if known else None
            grown.append(replace(event, growth=growth))
        steps[step] = grown
    return Recording(dict(a.about), steps)


def _growth_between(step: int, pair: Pair) -> float | None:
    """Return the growth of rounding of a tensor, None if not finite. Replicas that differ by more raise an error."""
    growth = pair.relative(replicas=False)
    limit = ROUNDINGS * max(pair.unit, growth if math.isfinite(growth) else 0.0)
    for side in (pair.a.digest, pair.b.digest):
        ranks = [part.rank for part, change in side.changes() if not norm_of(change, 0) <= limit * side.norm]
        if ranks and side.is_finite:
            raise RecordingError(
                f"growth of rounding cannot be measured: step {step}, {described(pair.a.pass_, pair.a.name)} has other "
                f"values on ranks {', '.join(map(str, ranks))} than on the ranks with the same elements; expected "
                "replicas to be equal. Mend this first, or measure growth on one rank"
            )
    return growth if math.isfinite(growth) else None


def _growth_of(recording: Recording) -> dict[tuple[int, str, str], float]:
    return {
        (step, "update" if event.pass_ == "weights" else event.pass_, event.name): event.growth
        for step, events in recording.steps.items()
        for event in events
        if event.growth is not None
    }


def _lookup(recording: Recording) -> Any:
    """Return a function that returns the events of a step by key, with updates in place of weights."""

    def of_step(step: int) -> dict[tuple[str, str], Event]:
        before = _weights(recording)(step - 1)
        found = {}
        for event in recording.steps.get(step, ()):
            chosen = event
            if event.pass_ == "weights" and step and event.name in before:
                old = before[event.name]
                change = subtract(event.digest, old.digest)
                chosen = Event("update", event.name, event.dtype, change, elements=_changes(event, old))
            elif event.pass_ == "weights" and step:
                continue
            found[chosen.key] = chosen
        return found

    return of_step


def _changes(event: Event, before: Event) -> tuple[Elements, ...]:
    known = {(each.rank, *(index.tobytes() for index in each.indices)): each.values for each in before.elements}
    found = []
    for each in event.elements:
        old = known.get((each.rank, *(index.tobytes() for index in each.indices)))
        found += [] if old is None else [replace(each, values=each.values - old)]
    return tuple(found)


def _weights(recording: Recording) -> Callable[[int], dict[str, Event]]:
    return lambda step: {e.name: e for e in recording.steps.get(step, ()) if e.pass_ == "weights"}


def _common(a: Recording, b: Recording) -> Iterator[tuple[int, dict[Any, Event], dict[Any, Event]]]:
    of_a, of_b = _lookup(a), _lookup(b)
    for step in sorted(a.steps.keys() & b.steps.keys()):
        yield step, of_a(step), of_b(step)


def _missing(a: Recording, b: Recording) -> Iterator[str]:
    """Yield what only one side has, in words."""
    steps = [sorted(side.steps.keys() - other.steps.keys()) for side, other in ((a, b), (b, a))]
    for side, only in zip("AB", steps, strict=True):
        if only:
            yield f"only {side} has steps {only[0]} to {only[-1]}"
    for side, mine, other in (("A", a, b), ("B", b, a)):
        common = (e for step, events in mine.steps.items() if step in other.steps for e in events)
        keys = dict.fromkeys(e.key for e in common if e.operation is None)
        theirs = {e.key for events in other.steps.values() for e in events}
        only_here = [described(*key) for key in keys if key not in theirs]
        if only_here:
            yield f"only {side} has {len(only_here)} of its {len(keys)} tensors: {_some(only_here)}"
        if unplaced := mine.about.get("unplaced"):
            yield (
                f"{side} has not recorded {len(unplaced)} outputs, whose rows are not those of the batch: "
                f"{_some(unplaced)}"
            )
    shapes = [{e.name: e.digest.shape for e in side.steps.get(0, ())} for side in (a, b)]
    other_shape = [name for name, shape in shapes[0].items() if shapes[1].get(name, shape) != shape]
    if other_shape:
        name = other_shape[0]
        raise RecordingError(
            f"A and B are different models: {name} is {list(shapes[0][name])} in A and {list(shapes[1][name])} in B"
        )


def draw(comparison: Comparison, path: str | Path) -> None:
    """Draw the differences by depth, one panel per pass and one line per step. Needs matplotlib."""
    from matplotlib.figure import Figure

    passes = list(dict.fromkeys(each.pass_ for each in comparison.differences if each.step))
    steps = sorted({each.step for each in comparison.differences if each.step})
    figure = Figure(figsize=(9, 2.2 * max(1, len(passes))), layout="constrained")
    panels = figure.subplots(max(1, len(passes)), squeeze=False)[:, 0]
    for panel, name in zip(panels, passes, strict=False):
        for number, step in enumerate(steps):
            found = [each for each in comparison.differences if (each.step, each.pass_) == (step, name)]
            color = f"C{number % 10}"
            panel.plot([max(each.relative, 1e-17) for each in found], ".-", color=color, label=f"step {step}")
            panel.plot([each.tolerance for each in found], ":", color=color)
        panel.set(yscale="log", ylabel=name)
        panel.grid(alpha=0.3)
    panels[0].set(title="relative difference of B from A in the order of computation (dotted: explained by rounding)")
    panels[0].legend(fontsize="small")
    figure.savefig(path)
