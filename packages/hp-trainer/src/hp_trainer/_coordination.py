"""Steps that all ranks take together, or rank 0 for all: they succeed on every rank or fail on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from hp_dtensor.exceptions import HPError
from hp_trainer.exceptions import describe_exit, describe_machine_error


class Group(Protocol):
    """A group of ranks: the part of the interface of `hp_dtensor.ProcessGroup` that is used here."""

    rank: int

    @property
    def size(self) -> int: ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]: ...


class Alone:
    """The group of a single rank."""

    rank = 0
    size = 1

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


def all_ranks(group: Group, what: str, do: Callable[[], Any], error: type[HPError]) -> list[Any]:
    """Run `do` on every rank and return the results (JSON values) of all ranks, in rank order.

    Args:
        what: the step as a clause for messages, such as "preparing the run".

    Raises:
        HPError: of class `error`, on every rank if it failed on any; the message has the ranks and their errors.
    """
    failure: Exception | SystemExit | None = None
    try:
        answer = {"result": do()}
    except SystemExit as leaving:
        # Code of a plugin may call sys.exit. Without an answer the other ranks would wait until their timeout.
        failure = leaving
        answer = {"error": describe_exit(leaving, f"while {what}")}
    except Exception as caught:
        failure = caught
        answer = {"error": describe_machine_error(caught) or f"{type(caught).__name__}: {caught}"}
    answers = [json.loads(data) for data in group.all_gather_bytes(json.dumps(answer).encode())]
    errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(answers) if "error" in one]
    if errors:
        raise error(f"{what} failed; {'; '.join(errors)}") from failure
    return [one["result"] for one in answers]


def coordinator(group: Group, what: str, do: Callable[[], Any], error: type[HPError]) -> Any:
    """Run `do` on rank 0 only and return its result (a JSON value) on every rank.

    Raises:
        HPError: of class `error`, on every rank if `do` failed.
    """
    return all_ranks(group, what, do if group.rank == 0 else lambda: None, error)[0]
