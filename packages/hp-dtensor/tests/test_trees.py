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


class Attributes(dict):
    """Shows its items as attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__.update(items, number=len(items))


@dataclasses.dataclass
class Guarded(collections.OrderedDict):
    """As the outputs of transformers' models: a dataclass that is a mapping of what it has, and takes no `update`."""

    logits: Any = None
    hidden: Any = None
    cache: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("update")


def test_mappings_of_other_classes_stay_what_they_are() -> None:
    for tree in (Attributes(logits=Number(1), hidden=(Number(2),)), Guarded(logits=Number(1), hidden=(Number(2),))):
        result = doubled(tree)
        assert type(result) is type(tree)
        assert values(result) == [2, 4]
        assert result.logits is result["logits"]
        assert result.hidden is result["hidden"]
        assert (tree.logits.value, tree["logits"].value) == (1, 1)
    assert doubled(Attributes(a=Number(1), b=Number(2))).number == 2
    assert doubled(Guarded(hidden=Number(1))).logits is None
    assert doubled(collections.defaultdict(list, a=Number(1)))["b"] == []


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
