"""Tensors inside the arguments and outputs of functions: lists, tuples, mappings and dataclasses of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def map_tensors(tree: Any, tensor_type: type, function: Callable[[Any], Any]) -> Any:
    """Return `tree` with `function` applied to its tensors. Containers without a change are returned, not copied."""
    if isinstance(tree, tensor_type):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(item, tensor_type, function) for item in tree]
        return tree if _same(items, tree) else like_sequence(tree, items)
    if isinstance(tree, Mapping):
        values = [map_tensors(value, tensor_type, function) for value in tree.values()]
        return tree if _same(values, tree.values()) else _like_mapping(tree, values)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {
            field.name: map_tensors(getattr(tree, field.name), tensor_type, function)
            for field in dataclasses.fields(tree)
            # `replace` refuses the other fields, which the class computes itself.
            if field.init
        }
        same = all(value is getattr(tree, name) for name, value in changes.items())
        return tree if same else dataclasses.replace(tree, **changes)
    return tree


def flattened(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of nested lists, tuples and mappings, and a function that rebuilds the tree from new ones."""
    if isinstance(tree, Mapping):
        children: list[Any] = list(tree.values())
    elif isinstance(tree, (list, tuple)):
        children = list(tree)
    else:
        return [tree], lambda leaves: leaves[0]
    parts = [flattened(child) for child in children]

    def rebuilt(leaves: Sequence[Any]) -> Any:
        items, start = [], 0
        for own, rebuild in parts:
            items.append(rebuild(leaves[start : start + len(own)]))
            start += len(own)
        return _like_mapping(tree, items) if isinstance(tree, Mapping) else like_sequence(tree, items)

    return [leaf for own, _ in parts for leaf in own], rebuilt


def fields_of(tree: Any) -> dict[str, Any] | None:
    """Return the values that a mapping, named tuple or dataclass holds, by name; None for anything else."""
    if isinstance(tree, Mapping):
        return dict(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return dict(zip(tree._fields, tree, strict=True))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def with_fields(tree: Any, changes: Mapping[str, Any]) -> Any:
    """Return a mapping, named tuple or dataclass like `tree` with some of its values replaced."""
    if isinstance(tree, Mapping):
        return _like_mapping(tree, [changes.get(key, value) for key, value in tree.items()])
    if isinstance(tree, tuple):
        return like_sequence(tree, [*{**(fields_of(tree) or {}), **changes}.values()])
    return dataclasses.replace(tree, **changes)


def tensors_in(tree: Any, tensor_type: type) -> list[Any]:
    """Return the tensors of `tree`, in order."""
    if isinstance(tree, tensor_type):
        return [tree]
    found: list[Any] = []

    def note(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    map_tensors(tree, tensor_type, note)
    return found


def _same(new: list[Any], old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def like_sequence(old: list[Any] | tuple[Any, ...], items: Sequence[Any]) -> Any:
    """Return a list, tuple or named tuple like `old`, of `items`."""
    return type(old)(*items) if hasattr(old, "_fields") else type(old)(items)


def _like_mapping(old: Mapping[Any, Any], values: list[Any]) -> Any:
    if not isinstance(old, dict):
        return type(old)(zip(old, values, strict=True))  # type: ignore[call-arg]
    # A subclass may refuse `update`, and its `copy` be a plain dict.
    new = copy.copy(old)
    for key, value in zip(old, values, strict=True):
        new[key] = value
    # Such a class may also hold its values as attributes.
    attributes = getattr(new, "__dict__", {})
    attributes.update({name: new[name] for name, value in attributes.items() if name in old and value is old[name]})
    return new
