"""One forward and backward of a module on tensors without memory, whose bytes and operations are counted."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_map, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hp_platform_torch.tensor.torch_operation import LocalMode
from hp_trainer.records import CountedParameter, CountedPart, CountedStep


@contextlib.contextmanager
def counted_bytes() -> Iterator[LiveBytes]:
    """Count the bytes that operations of this thread allocate inside the block."""
    live = LiveBytes()
    with LocalMode(live.run):
        yield live


class LiveBytes:
    """Counts the storages that operations create, until they are freed.

    Autograd's backward on the CPU runs in the same thread and is counted too. Views and tensors that existed before
    have no new storage.

    Attributes:
        now: live bytes.
        peak: most live bytes so far.
    """

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and count the storages of its results."""
        self._count_unknown((args, kwargs), is_new=False)
        result = func(*args, **kwargs)
        self._count_unknown(result, is_new=True)
        return result

    def _count_unknown(self, values: Any, *, is_new: bool) -> None:
        for storage in (x.untyped_storage() for x in tree_iter(values) if isinstance(x, torch.Tensor)):
            key = storage._cdata
            if key in self._known:
                continue
            self._known.add(key)
            num_bytes = storage.nbytes() if is_new else 0
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def count_step(
    build: Callable[[], torch.nn.Module],
    run: Callable[[Any], torch.Tensor],
    parts: Callable[[Any], Mapping[str, torch.nn.Module]],
    dtype: str | None = None,
) -> CountedStep:
    """Count a forward and backward; see the hook `hp_step_counter`."""
    # Fake tensors on the CPU, whose fused attention saves what accelerators' kernels save; on the meta device attention
    # would save all scores. Modules are built on the meta device, where `Module.to` and the like work.
    model = build()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), _without_logs():
        _make_fake(model)
        chosen = parts(model)
        # Before the conversion: a trained model stores its weights in these dtypes and only computes in `dtype`.
        itemsizes = [parameter.element_size() for parameter in model.parameters()]
        if dtype is not None:
            _compute_in(getattr(torch, dtype), model, list(chosen.values()))
        flops = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
        with counted_bytes() as live, flops:
            meter = _Meter(model, live)
            for name, module in chosen.items():
                meter.watch(name, module)
            loss = run(model)
            after_forward = live.now
            # Within the modes, so that operations of backward are counted as well.
            loss.backward()
            found = meter.parts()
    last = max((part.after for part in found), default=0)
    return CountedStep(
        parameters=_parameters(model, itemsizes, [chosen[part.name] for part in found]),
        buffers=sum(buffer.untyped_storage().nbytes() for buffer in model.buffers()),
        parts=found,
        after_forward=after_forward,
        outside=max(meter.outside, after_forward, last),
        flops=flops.get_total_flops(),
    )


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Silence torch's log of operations that fail on fake tensors: the caller gets the exception."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _make_fake(model: torch.nn.Module) -> None:
    """Replace a module's tensors by fake tensors on the CPU."""
    # By identity, so that tied weights stay tied and are counted once.
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            with torch.no_grad():
                like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = torch.nn.Parameter(like, tensor.requires_grad) if is_parameter else like
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            held.update({name: fake(value) for name, value in held.items() if isinstance(value, torch.Tensor)})


def _compute_in(dtype: torch.dtype, model: torch.nn.Module, parts: list[torch.nn.Module]) -> None:
    """Convert parameters to a dtype, and cast the inputs of the parts, as mixed precision of sharded modules does."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def cast_inputs(_: Any, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, (args, kwargs))

    for parameter in model.parameters():
        # Through `data`, so that the parameter objects, which modules may share, stay the same.
        parameter.data = parameter.data.to(dtype)
    for module in (model, *parts):
        module.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def _parameters(
    model: torch.nn.Module, itemsizes: list[int], parts: list[torch.nn.Module]
) -> tuple[CountedParameter, ...]:
    part_of = {id(parameter): index for index, part in enumerate(parts) for parameter in part.parameters()}
    return tuple(
        CountedParameter(
            name=name,
            shape=tuple(parameter.shape),
            itemsize=itemsize,
            trainable=parameter.requires_grad,
            part=part_of.get(id(parameter)),
        )
        for (name, parameter), itemsize in zip(model.named_parameters(), itemsizes, strict=True)
    )


@dataclass
class _Watched:
    """Live bytes at the events of one part, as in `CountedPart`; None before the event."""

    before: int | None = None
    after: int = 0
    peak: int | None = None
    end: int = 0
    is_ended: bool = False


class _Mark(torch.autograd.Function):
    """Identity; `event` is called when backward passes."""

    @staticmethod
    def forward(ctx: Any, event: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.event = event
        # Zeros for unused outputs would be counted as memory that a step does not need.
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.event()
        return None, *grads


def _marked(event: Callable[[], None], tree: Any) -> Any:
    """Return the tree with `_Mark` on its tensors that require gradients.

    Torch's own module hooks see neither keyword arguments nor results other than tensors and tuples.
    """
    # One node for all of them, so that `event` is called once.
    leaves, spec = tree_flatten(tree)
    is_marked = [isinstance(x, torch.Tensor) and x.requires_grad for x in leaves]
    if not any(is_marked):
        return tree
    marked = iter(_Mark.apply(event, *(x for x, chosen in zip(leaves, is_marked, strict=True) if chosen)))
    return tree_unflatten([next(marked) if chosen else x for x, chosen in zip(leaves, is_marked, strict=True)], spec)


class _Meter:
    """Reads the live bytes when the forwards and backwards of parts start and end.

    Attributes:
        outside: peak bytes before backward reaches the first part.
    """

    def __init__(self, model: torch.nn.Module, live: LiveBytes) -> None:
        self._model, self._live = model, live
        self._names: list[str] = []
        self._watched: dict[str, _Watched] = {}
        self._in_front = 0
        self.outside = 0

    def watch(self, name: str, module: torch.nn.Module) -> None:
        """Read the bytes at this module's events."""
        self._names.append(name)
        module.register_forward_pre_hook(functools.partial(self._pre_forward, name), with_kwargs=True)
        module.register_forward_hook(functools.partial(self._post_forward, name))

    def parts(self) -> tuple[CountedPart, ...]:
        """Return the readings in forward order, preceded by the parts that forward did not call, with zeros."""
        for name, each in self._watched.items():
            if each.peak is not None and not each.is_ended:  # no input of it requires a gradient
                self._post_backward(name)
        if not any(each.peak is not None for each in self._watched.values()):
            self.outside = self._live.peak - self._gradients()
        uncalled = {name: _Watched() for name in self._names if name not in self._watched}
        return tuple(
            CountedPart(
                name=name,
                before=each.before or 0,
                after=each.after,
                peak=each.peak or 0,
                end=each.end,
                is_reached=each.peak is not None,
            )
            for name, each in {**uncalled, **self._watched}.items()
        )

    def _pre_forward(self, name: str, _: Any, args: Any, kwargs: Any) -> Any:
        each = self._watched.setdefault(name, _Watched())
        # Only the first call: recomputation runs the forward again in backward.
        if each.before is None:
            each.before = self._live.now
        return _marked(functools.partial(self._post_backward, name), (args, kwargs))

    def _post_forward(self, name: str, _: Any, args: Any, output: Any) -> Any:
        self._watched[name].after = self._live.now
        self._live.peak = self._live.now
        return _marked(functools.partial(self._pre_backward, name), output)

    def _pre_backward(self, name: str) -> None:
        if all(each.peak is None for each in self._watched.values()):
            self.outside = self._live.peak
        if self._watched[name].peak is None:
            self._watched[name].peak = 0
        # Gradients of other parts stay allocated during this one's backward and are not its own memory.
        self._in_front = self._gradients()
        self._live.peak = self._live.now

    def _post_backward(self, name: str) -> None:
        each = self._watched[name]
        each.is_ended = True
        each.peak = max(each.peak or 0, self._live.peak - self._in_front)
        each.end = self._live.now - self._gradients()

    def _gradients(self) -> int:
        """Return the bytes of all existing gradients of parameters."""
        gradients = (parameter.grad for parameter in self._model.parameters())
        return sum(grad.untyped_storage().nbytes() for grad in gradients if grad is not None)


# Torch's counter knows the fused attention of accelerators only. It passes shapes, and options that do not count.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: sdpa_backward_flop_count(
        *shapes[:4]
    ),
}
