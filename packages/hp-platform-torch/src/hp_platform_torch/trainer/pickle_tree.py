"""Pickles parsed as data: objects and calls are described, and nothing is created or called.

Python's unpickler, even restricted to some classes, sets attributes on objects found by name and allocates memory for
any memo index. This reader knows only the opcodes that dataclasses, containers, numbers and strings need. Its time and
memory grow with the length of the file only.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}
_IGNORED = {"PROTO", "FRAME"}


@dataclass(frozen=True, eq=False)
class Name:
    """A global name of a module, not imported."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """An object that unpickling would create by calling `kind` with `arguments`, and then give a state."""

    kind: Name
    arguments: tuple[Any, ...]
    state: Any = None


class Pairs(list[tuple[Any, Any]]):
    """A dictionary as a list of (key, value); nothing is hashed."""


def read_pickle_tree(data: bytes) -> Any:
    """Return the contents of a pickle: constants, integers, strings, tuples, lists, `Pairs`, `Name` and `Made`.

    Raises:
        ValueError: it is damaged, or has contents of other kinds.

    Examples:
        >>> import pickle
        >>> read_pickle_tree(pickle.dumps({"a": (1, True)}))
        [('a', (1, True))]
    """
    reader = _Reader()
    try:
        # genops decodes opcodes without executing them. O(bytes).
        for opcode, argument, position in pickletools.genops(data):
            # What follows is ignored, as Python's unpickler does.
            if opcode.name == "STOP":
                return reader.stack[-1]
            reader.read(opcode.name, argument, position)
    # Empty stacks, unknown memo indices and arguments of other types.
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError("it is not a valid pickle") from error
    raise ValueError("it ends too early")


class _Reader:
    """State of the parser: the stack of values, the positions of marks in it, and the memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self, opcode: str, argument: Any, position: int) -> None:
        """Process one opcode."""
        if opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode])
        elif opcode in _LITERALS:
            self.stack.append(argument)
        elif opcode in _OPCODES:
            _OPCODES[opcode](self, argument)
        elif opcode not in _IGNORED:
            raise ValueError(f"byte {position} has opcode {opcode}, which metadata do not need")

    def empty_list(self, _: Any) -> None:
        self.stack.append([])

    def empty_pairs(self, _: Any) -> None:
        self.stack.append(Pairs())

    def mark(self, _: Any) -> None:
        self._marks.append(len(self.stack))

    def marked_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._marked()))

    def append(self, _: Any) -> None:
        self._extend([self.stack.pop()])

    def appends(self, _: Any) -> None:
        self._extend(self._marked())

    def set_item(self, _: Any) -> None:
        self._add_pairs(self._last(2))

    def set_items(self, _: Any) -> None:
        self._add_pairs(self._marked())

    def name(self, _: Any) -> None:
        self._push_name(*self._last(2))

    def joined_name(self, argument: str) -> None:
        self._push_name(*argument.split(" ", 1))

    def make(self, _: Any) -> None:
        kind, arguments = self._last(2)
        if type(kind) is not Name or type(arguments) is not tuple:
            raise ValueError("it calls something other than a global name")
        self.stack.append(Made(kind, arguments))

    def build(self, _: Any) -> None:
        made, state = self._last(2)
        # Not on a `Name`: unpickling would set attributes of a class or module then.
        if type(made) is not Made or made.state is not None:
            raise ValueError("it sets the state of something that it did not create, or twice")
        made.state = state
        self.stack.append(made)

    # The memo is a dictionary: an index of 2**32 costs one entry, not an array of that length.
    def memoize(self, index: int | None) -> None:
        # MEMOIZE (protocol 4) numbers entries itself; BINPUT states the index.
        self._memo[len(self._memo) if index is None else index] = self.stack[-1]

    def recall(self, index: int) -> None:
        self.stack.append(self._memo[index])

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("it is not a valid pickle")
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def _marked(self) -> list[Any]:
        start = self._marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def _extend(self, values: list[Any]) -> None:
        # `Pairs` is a subclass of list, so isinstance would accept a dictionary.
        if type(self.stack[-1]) is not list:
            raise ValueError("it appends to something other than a list")
        self.stack[-1].extend(values)

    def _add_pairs(self, flat: list[Any]) -> None:
        if type(self.stack[-1]) is not Pairs or len(flat) % 2:
            raise ValueError("it sets items of something other than a dictionary")
        self.stack[-1].extend(zip(flat[::2], flat[1::2], strict=True))

    def _push_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("it has a global name that is not a string")
        self.stack.append(Name(module, name))


def _tuple_of(count: int) -> Callable[[_Reader, Any], None]:
    return lambda reader, _: reader.stack.append(tuple(reader._last(count)))


_OPCODES: dict[str, Callable[[_Reader, Any], None]] = {
    "EMPTY_LIST": _Reader.empty_list,
    "EMPTY_DICT": _Reader.empty_pairs,
    "MARK": _Reader.mark,
    "TUPLE": _Reader.marked_tuple,
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "APPEND": _Reader.append,
    "APPENDS": _Reader.appends,
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_items,
    "STACK_GLOBAL": _Reader.name,
    "GLOBAL": _Reader.joined_name,
    "REDUCE": _Reader.make,
    "NEWOBJ": _Reader.make,
    "BUILD": _Reader.build,
    "MEMOIZE": _Reader.memoize,
    "BINPUT": _Reader.memoize,
    "LONG_BINPUT": _Reader.memoize,
    "BINGET": _Reader.recall,
    "LONG_BINGET": _Reader.recall,
}
