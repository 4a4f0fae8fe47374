"""Replacements around `torch.autograd.Function`, whose backward gets local gradients of what forward saw whole.

Notes on the backward that runs: whether it was told inputs (`inputs=`), and what its failure would mean.
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
from hp_platform_torch.tensor.operations import is_intercepting

Tensor = torch.Tensor

_TRANSPARENT = ("torch.utils.checkpoint", "torch.distributed.fsdp", "torch.distributed._composable")
"""Modules whose functions hand on what they get, or run forward and backward on DTensors again."""


def asking_for_dtensors(apply: Any) -> Any:
    """Return `Function.apply` that refuses DTensors, but in torch's own checkpoints and module hooks."""
    plain = getattr(apply, "__func__", apply)  # torch 2.15's is C++'s own class method, which takes the class as it is

    @functools.wraps(plain)
    def asked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, TorchDTensor):
                break
        else:
            return plain(cls, *args, **kwargs)
        if not is_intercepting():  # the shard is meant
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
        f"{cls.__qualname__}.apply on {x.spec!r}: torch hands the backward of an autograd.Function plain local "
        f"gradients, whatever its forward got. Let it work on local tensors, with the placements said: "
        f"hp_dtensor.local_map({cls.__qualname__}.apply, out_placements, in_placements)."
    )


def _refuse_contributions(outputs: Any) -> None:
    """Refuse results whose contributions have other gradients than the whole: all partial ones but sums.

    The backward of a reentrant checkpoint would take the one for the other.
    """
    for x in tree_leaves(outputs):
        if isinstance(x, TorchDTensor) and x.requires_grad and not has_gradient(x.spec):
            raise ShardingRuleError(
                f"torch.utils.checkpoint with use_reentrant=True of a function that returns {x.spec!r}: its backward "
                "would take gradients of contributions for those of the whole. Redistribute the result to Replicate() "
                "or Shard, or say use_reentrant=False."
            )


def giving_shards(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Unwrap the gradients that a reentrant checkpoint returns: DTensors, where autograd takes local ones."""

    @functools.wraps(backward)
    def giving(*args: Any) -> tuple[Any, ...]:
        return tuple(map(unwrap, backward(*args)))

    return giving


def _with_dtensor_hooks(outputs: tuple[Tensor, ...], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Let hooks registered on the identity that carries a module's backward hooks get gradients as DTensors."""
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
