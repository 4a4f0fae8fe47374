"""Tensors in the arguments and outputs of modules."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from hp_fsdp._tree import map_tensors, tensors_in


class Number:
    """Stands for a tensor."""

    def __init__(self, value: int) -> None:
        self.value = value


@dataclasses.dataclass(frozen=True)
class Output:
    logits: Number
    hidden: tuple[Number, ...] = ()
    name: str = "output"


Pair = collections.namedtuple("Pair", "first second")


def doubled(tree: Any) -> Any:
    return map_tensors(tree, Number, lambda x: Number(2 * x.value))


def values(tree: Any) -> list[int]:
    return [x.value for x in tensors_in(tree, Number)]


def test_every_container_keeps_its_type_and_order() -> None:
    tree = {
        "list": [Number(1), None],
        "pair": Pair(Number(2), "text"),
        "output": Output(Number(3), (Number(4),)),
        "ordered": collections.OrderedDict(a=Number(5)),
    }
    result = doubled(tree)
    assert values(result) == [2, 4, 6, 8, 10]
    assert isinstance(result["pair"], Pair)
    assert isinstance(result["output"], Output)
    assert isinstance(result["ordered"], collections.OrderedDict)
    assert result["output"].name == "output"
    assert values(tree) == [1, 2, 3, 4, 5]


def test_what_does_not_change_is_the_same_object() -> None:
    tree = [Number(1), {"a": (1, 2)}]
    assert map_tensors(tree, Number, lambda x: x) is tree
