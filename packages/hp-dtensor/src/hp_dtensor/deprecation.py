"""Deprecation of public names: since when, removed in which version, and what to write instead."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., object])


def deprecated(*, since: str, removal: str, instead: str) -> Callable[[F], F]:
    """Mark a function or class as deprecated: each call warns, and names the replacement.

    `tests/house` fails when a package reaches the version in which the name was to be removed.

    Args:
        since: version of the package that deprecates the name.
        removal: version that will no longer have it.
        instead: what to write in its place.

    Returns:
        A decorator. A function is wrapped; a class keeps its identity, and its `__init__` warns.

    Examples:
        >>> import warnings
        >>> @deprecated(since="0.2.0", removal="0.3.0", instead="`shard_sequence`")
        ... def split_sequence(length):
        ...     return length // 2
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     split_sequence(8)
        4
        >>> str(caught[0].message)
        'split_sequence is deprecated since 0.2.0 and will be removed in 0.3.0: use `shard_sequence`'
    """

    # Any, as the `__init__` of a class, or a function, is replaced by one that warns.
    def mark(target: Any) -> Any:
        message = f"{target.__qualname__} is deprecated since {since} and will be removed in {removal}: use {instead}"
        is_class = isinstance(target, type)
        called = target.__init__ if is_class else target

        @functools.wraps(called)
        def warning(*arguments: object, **options: object) -> object:
            # FutureWarning is shown by default, DeprecationWarning only in `__main__`. Level 2 is the caller's line.
            warnings.warn(message, FutureWarning, stacklevel=2)
            return called(*arguments, **options)

        if is_class:
            target.__init__ = warning
            return target
        return warning

    return mark
