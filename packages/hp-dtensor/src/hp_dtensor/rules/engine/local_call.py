"""Record of one call on one rank, which the local functions of rules work on.

It is here and not with the dispatcher that fills it in, so that rules never import the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.rules.engine.factors import Part
from hp_dtensor.spec.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCall:
    """Call of an operation on this rank, as given to a rule's own local function, which runs in place of the operation.

    Attributes:
        name: the operation.
        arguments: by parameter name, tensors local and plain.
        spans: cut factor -> (start, length) of this rank's part.
        lengths: cut factor -> per group, the lengths of its ranks' parts.
        groups: cut factor -> the groups over which it is cut, outermost first.
        parts: cut factor that the rule wants `known` -> the group of all ranks over which it is cut, and the (start,
            length) of each one's part.
        sizes: factor -> its global size.
        output: how the first output is placed, of no dtype.
        on: `on(x, **static)` runs the operation itself with its first argument replaced by the plain tensor `x`,
            and static ones by name.
    """

    platform: Platform
    name: str
    arguments: Mapping[str, Any]
    spans: Mapping[str, tuple[int, int]]
    lengths: Mapping[str, tuple[tuple[int, ...], ...]]
    groups: Mapping[str, tuple[ProcessGroup, ...]]
    parts: Mapping[str, tuple[ProcessGroup, tuple[Part, ...]]]
    sizes: Mapping[str, int]
    output: TensorSpec
    on: Callable[..., Any]
