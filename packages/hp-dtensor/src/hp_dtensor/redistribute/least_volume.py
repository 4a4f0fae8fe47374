"""The fewest elements that any sequence of messages must move, and the division of a reduction that needs no more.

Only sums of several contributions and copies are needed: an element that n ranks contribute to takes n - 1
messages to reach a reducer, and one more for every further rank (or group of ranks that will hold it as
partial results) that wants it. A reducer that wants the element saves one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hp_dtensor.redistribute.agreeing_elements import agreeing
from hp_dtensor.redistribute.segments import Placements, product


@dataclass(frozen=True, slots=True)
class Volume:
    """Numbers of elements that all ranks together send.

    Attributes:
        reducing: to sum up partial results.
        moving: to bring what is then complete to where it is wanted.
        reduced: the axes that are summed over.
        divided: further axes whose replicas divide the reduction among them.
    """

    reducing: int
    moving: int
    reduced: tuple[int, ...]
    divided: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.reducing + self.moving


def least_volume(
    shape: Sequence[int], mesh_shape: Sequence[int], source: Placements, target: Placements, linear: bool = True
) -> Volume:
    """Return the fewest elements that one redistribution must send.

    Args:
        linear: partial results are sums, so that an axis may also be reduced on the way to partial again.
    """
    # An element that already lies where it is wanted needs no message; these are all that a plan can save.
    agree = agreeing(shape, mesh_shape, source, target)
    kept = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s.is_partial() and t.is_partial()]
    # Of an axis that is partial before and after, the sum may be taken anyway: then one rank's message replaces one per
    # contribution on the further way.
    choices = _subsets(kept) if linear else iter([()])
    return min(
        (_volume(math.prod(shape), mesh_shape, source, target, agree, anyway) for anyway in choices),
        key=lambda volume: volume.total,
    )


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(len(axes) + 1))


def _volume(
    elements: int,
    mesh_shape: Sequence[int],
    source: Placements,
    target: Placements,
    agree: int,
    anyway: Sequence[int],
) -> Volume:
    """Return the volume with the axes `anyway` reduced although both source and target are partial on them."""
    pairs = list(enumerate(zip(source, target, strict=True)))
    reduced = tuple(a for a, (s, t) in pairs if s.is_partial() and (a in anyway or not t.is_partial()))
    lines = math.prod(mesh_shape[a] for a, (s, t) in pairs if s.is_partial() and t.is_partial() and a not in reduced)
    wanting = product(mesh_shape, [a for a, (_, t) in pairs if t.is_replicate()])
    both = [a for a, (s, t) in pairs if s.is_replicate() and t.is_replicate()]
    parts = product(mesh_shape, reduced)
    # Nothing to reduce: every wanted copy that is not there yet takes one message.
    if parts == 1:
        return Volume(0, lines * (elements * wanting - agree * product(mesh_shape, both)), reduced, ())
    divided = [a for a, (s, t) in pairs if s.is_replicate() and not t.is_replicate()]
    # Replicas that each reduce the same sum send its terms several times. Divided among them, the terms go once, and
    # one message more brings each sum to where it would have been anyway: that is less where a sum has more than two
    # terms, or where something moves in either case.
    if parts > 2 or agree < elements:
        divided += both
        both = []
    replicas = product(mesh_shape, both)
    reducing = lines * replicas * elements * (parts - 1)
    return Volume(reducing, lines * (elements * wanting - replicas * agree), reduced, tuple(divided))
