"""Replacements around `torch.autograd.Function` and the backward engine.

The backward of an `autograd.Function` gets local gradients of tensors that its forward got as DTensors, so it is
refused. The engine's replacement records each running backward: whether it has `inputs=`, and how to explain its
errors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.spec.tensor_spec import TensorSpec, has_gradient
from hp_platform_torch.tensor.dtensor import TorchDTensor, unwrap, unwrap_gradient, wrap_gradient
from hp_platform_torch.tensor.torch_operation import is_intercepting

Tensor = torch.Tensor

_TRANSPARENT = ("torch.utils.checkpoint", "torch.distributed.fsdp", "torch.distributed._composable")
"""Modules whose functions return their inputs, or run forward and backward on DTensors again."""


def refusing_dtensors(apply: Any) -> Any:
    """Return a `Function.apply` that refuses DTensors, except in torch's own checkpoints and module hooks."""
    plain = getattr(apply, "__func__", apply)  # in torch 2.15 a class method of C++

    @functools.wraps(plain)
    def asked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Plain calls first and without a helper: every custom function of the program passes here.
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, TorchDTensor):
                break
        else:
            return plain(cls, *args, **kwargs)
        if not is_intercepting():  # inside `LocalOperations` DTensors stand for their shards
            return plain(cls, *args, **kwargs)
        if cls is BackwardHookFunction:
            return _with_dtensor_hooks(plain(cls, *args), args)
        if not cls.__module__.startswith(_TRANSPARENT):
            _refuse_function(cls, x)
        outputs = plain(cls, *args, **kwargs)
        if cls is CheckpointFunction:
            _refuse_contributions(outputs)
        return outputs

    return classmethod(asked)


def _refuse_function(cls: type, x: TorchDTensor) -> NoReturn:
    raise ShardingRuleError(
        f"{cls.__qualname__}.apply on {x.spec!r}: torch passes the backward of an autograd.Function plain local "
        f"gradients, even if its forward got DTensors. Call it on local tensors and state the placements: "
        f"hp_dtensor.local_map({cls.__qualname__}.apply, out_placements, in_placements)."
    )


def _refuse_contributions(outputs: Any) -> None:
    """Raise for partial results with another reduction than a sum.

    The gradient of their contributions differs from that of the reduced value, and the backward of a reentrant
    checkpoint would confuse the two.
    """
    for x in tree_leaves(outputs):
        if isinstance(x, TorchDTensor) and x.requires_grad and not has_gradient(x.spec):
            raise ShardingRuleError(
                f"torch.utils.checkpoint with use_reentrant=True of a function that returns {x.spec!r}: its backward "
                "would use gradients of contributions as those of the reduced value. Redistribute the result to "
                "Replicate() or Shard, or pass use_reentrant=False."
            )


def returning_local_gradients(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward that unwraps the DTensor gradients of a reentrant checkpoint: autograd expects local ones."""

    @functools.wraps(backward)
    def giving(*args: Any) -> tuple[Any, ...]:
        return tuple(map(unwrap, backward(*args)))

    return giving


def _with_dtensor_hooks(outputs: tuple[Tensor, ...], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Wrap hooks registered on the identity node of a module's backward hooks, so that they get DTensor gradients."""
    specs = [x._spec if isinstance(x, TorchDTensor) else None for x in inputs]
    node = next((x.grad_fn for x in outputs if x.grad_fn is not None), None)
    if node is not None:
        register = node.register_hook
        node.register_hook = lambda hook: register(_on_dtensors(hook, specs))  # type: ignore[method-assign]
    return outputs


def _on_dtensors(hook: Callable[..., Any], specs: Sequence[TensorSpec | None]) -> Callable[..., Any]:
    def hooked(*grads: tuple[Tensor | None, ...]) -> Any:
        changed = hook(*(_placed(several, specs) for several in grads))
        if changed is None:
            return None
        listed = changed if isinstance(changed, tuple) else (changed,)
        return tuple(x if spec is None else unwrap_gradient(spec, x) for x, spec in zip(listed, specs, strict=True))

    return hooked


def _placed(grads: tuple[Tensor | None, ...], specs: Sequence[TensorSpec | None]) -> tuple[Tensor | None, ...]:
    return tuple(
        x if x is None or spec is None else wrap_gradient(spec, x) for x, spec in zip(grads, specs, strict=True)
    )


@dataclass(slots=True)
class _Running:
    """One running backward.

    Attributes:
        is_named: it has `inputs=`.
        explanations: (substrings of error messages, function that returns the error to raise instead).
    """

    is_named: bool
    explanations: list[tuple[Sequence[str], Callable[[], Exception | None]]] = field(default_factory=list)


# Thread -> the backwards that it has called and that have not returned, innermost last.
_running: dict[int, list[_Running]] = {}


def are_named() -> bool:
    """Return True if the innermost running backward is `torch.autograd.grad` or `backward(inputs=...)`."""
    own = _running.get(threading.get_ident())
    if own:
        return own[-1].is_named
    # A device thread of the engine works for one of the calling threads. If there are several, it is not known which:
    # assume that they all do the same.
    others = list(_running.values())
    return bool(others) and all(running[-1].is_named for running in others if running)


def explain(texts: Sequence[str], explanation: Callable[[], Exception | None]) -> None:
    """Raise what `explanation` returns if the innermost backward fails with an error that contains one of `texts`."""
    own = _running.get(threading.get_ident())
    for running in [own] if own else list(_running.values()):
        if running:
            running[-1].explanations.append((texts, explanation))


def recording_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `_engine_run_backward` that records each call while it runs, and replaces errors by explanations."""

    @functools.wraps(run)
    def noted(
        outputs: Any, grads: Any, retain_graph: bool, create_graph: bool, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        thread = threading.get_ident()
        calls = _running.setdefault(thread, [])
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
                del _running[thread]

    return noted


def _explained(running: _Running, error: str) -> Exception | None:
    found = (explain() for texts, explain in running.explanations if any(text in error for text in texts))
    return next((each for each in found if each is not None), None)
