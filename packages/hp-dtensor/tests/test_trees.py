"""Tensors in the arguments and outputs of functions."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from hp_dtensor.trees import fields_of, map_tensors, tensors_in, with_fields


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


def test_fields_are_replaced_by_name() -> None:
    for tree in (Pair(1, 2), {"first": 1, "second": 2}, collections.OrderedDict(first=1, second=2), Output(1, 2)):
        fields = fields_of(tree)
        assert fields is not None
        first, second, *rest = fields
        changed = with_fields(tree, {second: 5})
        assert type(changed) is type(tree)
        assert fields_of(changed) == {**fields, second: 5}
        assert fields_of(tree)[first] == 1
        assert rest in ([], ["name"])
    assert fields_of((1, 2)) is fields_of(3) is fields_of(Output) is None
