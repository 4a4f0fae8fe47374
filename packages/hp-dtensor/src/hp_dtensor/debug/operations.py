"""Operations of a module's forward: which of both sides belong together, and in which one the sides part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from hp_dtensor.debug.recording import OPERATION, ROOT, Event

Key = tuple[str, str]
Events = dict[Key, Event]


def pair_operations(a: Events, b: Events) -> tuple[Events, Events, list[str]]:
    """Return the events of a step of both sides with the operations that both run, under the names of A.

    Operations of a module are paired in their order, by name and global shape. The third result says in words which
    ones only one side runs. An operation of A whose ranks have different values is local to them, and is left out.
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
    """Return the modules whose own operations may have computed a tensor; none: no module's forward has.

    These are its module, for a gradient also the module whose gradient was recorded before it, and all around both.

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
