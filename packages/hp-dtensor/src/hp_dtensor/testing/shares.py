"""Parts of a long list of cases: a few of them, or the share of one machine of several."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Case = TypeVar("Case")


@dataclass(frozen=True)
class Share:
    """Share `number` (from 1) of `count` disjoint, nearly equal shares that are together everything."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError(f"expected a share N/M with 1 <= N <= M, such as 2/4; got {self}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Share:
        """Return the share that text such as `2/4` names.

        Raises:
            ValueError: it is anything else.
        """
        try:
            number, count = map(int, text.split("/"))
        except ValueError:
            raise ValueError(f"expected a share N/M, such as 2/4; got {text!r}") from None
        return cls(number, count)


ALL = Share()


def chosen(cases: Sequence[Case], limit: int | None = None, share: Share = ALL) -> list[Case]:
    """Return the share's cases, at most `limit` of all, in their order; the same ones each time.

    Drawn, since every nth case of a product of options would have the same last option.
    """
    drawn = list(range(len(cases)))
    if share.count > 1 or (limit is not None and limit < len(cases)):
        random.Random(len(cases)).shuffle(drawn)
    return [cases[i] for i in sorted(drawn[:limit][share.number - 1 :: share.count])]
