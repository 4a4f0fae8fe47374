"""Whether the backward that runs was told the inputs whose gradients it is for: torch does not say so inside of it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

# Of each thread that waits for backwards, one within another, whether each was told inputs.
_waiting: dict[int, list[bool]] = {}


def are_named() -> bool:
    """Whether it is that of `torch.autograd.grad` or of `backward(inputs=...)`; of several, the innermost."""
    own = _waiting.get(threading.get_ident())
    if own:
        return own[-1]
    # A thread of a device works for one of those that wait: where there are several, most likely they do alike.
    others = list(_waiting.values())
    return bool(others) and all(named[-1:] != [False] for named in others)


def noting(run: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.autograd._engine_run_backward`, of which every call is noted."""

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
