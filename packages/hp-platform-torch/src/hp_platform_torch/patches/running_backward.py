"""Notes on the backward that runs: whether it was told inputs (`inputs=`), and what its failure would mean."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _Running:
    """One call of a backward.

    Attributes:
        is_named: it was told inputs.
        explanations: parts of errors' texts, and the function that returns what to raise instead.
    """

    is_named: bool
    explanations: list[tuple[Sequence[str], Callable[[], Exception | None]]] = field(default_factory=list)


# Thread -> each backward that it waits for, the innermost last.
_waiting: dict[int, list[_Running]] = {}


def are_named() -> bool:
    """Tell whether the innermost backward is that of `torch.autograd.grad` or of `backward(inputs=...)`."""
    own = _waiting.get(threading.get_ident())
    if own:
        return own[-1].is_named
    # A thread of a device works for one of those that wait: where there are several, most likely they do alike.
    others = list(_waiting.values())
    return bool(others) and all(running[-1].is_named for running in others if running)


def explain(texts: Sequence[str], explanation: Callable[[], Exception | None]) -> None:
    """Raise what `explanation` returns where the innermost backward fails with an error that has one of `texts`."""
    own = _waiting.get(threading.get_ident())
    for running in [own] if own else list(_waiting.values()):
        if running:
            running[-1].explanations.append((texts, explanation))


def noting(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.autograd._engine_run_backward` that notes every call while it runs, and explains its errors."""

    @functools.wraps(run)
    def noted(
        outputs: Any, grads: Any, retain_graph: bool, create_graph: bool, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        thread = threading.get_ident()
        calls = _waiting.setdefault(thread, [])
        running = _Running(bool(inputs))
        calls.append(running)
        try:
            return run(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)
        except RuntimeError as error:
            explained = _explained(running, str(error))
            if explained is None:
                raise
            raise explained from error
        finally:
            calls.pop()
            if not calls:
                del _waiting[thread]

    return noted


def _explained(running: _Running, error: str) -> Exception | None:
    found = (explain() for texts, explain in running.explanations if any(text in error for text in texts))
    return next((each for each in found if each is not None), None)
