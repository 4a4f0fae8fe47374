"""Notes on the backward that runs: torch does not say inside of it whether it was told inputs (`inputs=`)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

# Thread -> for each backward that it waits for, the innermost last, whether it was told inputs.
_waiting: dict[int, list[bool]] = {}


def are_named() -> bool:
    """Tell whether the innermost backward is that of `torch.autograd.grad` or of `backward(inputs=...)`."""
    own = _waiting.get(threading.get_ident())
    if own:
        return own[-1]
    # A thread of a device works for one of those that wait: where there are several, most likely they do alike.
    others = list(_waiting.values())
    return bool(others) and all(named[-1:] != [False] for named in others)


def noting(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.autograd._engine_run_backward` that notes every call while it runs."""

    @functools.wraps(run)
    def noted(
        outputs: Any, grads: Any, retain_graph: bool, create_graph: bool, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        thread = threading.get_ident()
        running = _waiting.setdefault(thread, [])
        running.append(bool(inputs))
        try:
            return run(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)
        finally:
            running.pop()
            if not running:
                del _waiting[thread]

    return noted
