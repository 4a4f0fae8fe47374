"""`NumpyPlatform`: what hp_dtensor needs of a framework, in terms of NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hp_dtensor.comm.sockets import SocketProcesses
from hp_dtensor.dispatch.interception import build_ops
from hp_dtensor.platform.interface import DTYPE_NAMES, Platform, Removable
from hp_dtensor.spec.tensor_spec import TensorSpec, grad_spec
from hp_dtensor.tensor.gradients import plain_backward_arguments
from hp_platform_numpy import kernels, module, tape
from hp_platform_numpy.tensor import FLOATING, Array, NumpyDTensor, Tensor, alias, as_dtype


class NumpyPlatform(SocketProcesses, Platform):
    """NumPy, with sockets between processes."""

    name = "numpy"
    Tensor = Tensor
    Parameter = staticmethod(module.parameter)
    Module = module.Module
    DTensor = NumpyDTensor
    device_types = ("cpu",)
    dtypes = {name: name for name in DTYPE_NAMES}  # noqa: RUF012

    def __init__(self) -> None:
        self.ops = build_ops(self, kernels.KERNELS)
        self._random = np.random.default_rng()

    # Dtypes and plain tensors ----------------------------------------------------------------------------

    def from_numpy(self, array: Array, device: Any = None) -> Tensor:
        return Tensor(array if array.flags.writeable else array.copy())

    def to_numpy(self, x: Tensor) -> Array:
        return (x.data.view(np.uint32) >> 16).astype(np.uint16) if x.dtype == "bfloat16" else x.data

    def from_bits(self, array: Array, dtype: str, device: Any = None) -> Tensor:
        if dtype == "bfloat16":
            return Tensor(np.asarray(array.astype(np.uint32) << 16, np.uint32).view(np.float32), dtype)
        return Tensor(array.view(dtype))

    def copy_(self, target: Tensor, source: Tensor) -> None:
        if math.prod(target.data.shape) != math.prod(source.data.shape):
            raise ValueError(f"copy_: expected shape {list(target.data.shape)}, got {list(source.data.shape)}")
        target.data[...] = as_dtype(source.data, target.dtype).reshape(target.data.shape)

    def set_data(self, x: Tensor, data: Tensor) -> None:
        x.data = data.data

    def contiguous(self, x: Tensor) -> Tensor:
        return x if x.data.flags.c_contiguous else kernels.clone(x)

    def detach(self, x: Tensor) -> Tensor:
        return alias(x)

    # Autograd --------------------------------------------------------------------------------------------

    def _custom_function(self, forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Any:
        with tape.recording(False):
            made = forward(*map(alias, inputs))
        outputs = [alias(x) for x in (made if isinstance(made, tuple) else (made,))]
        if tape.is_recording() and any(x.requires_grad for x in inputs):
            node = tape.Node(inputs, lambda gradients: _own_gradients(backward, outputs, gradients), len(outputs))
            for index, output in enumerate(outputs):
                if output.dtype in FLOATING:
                    output.node, output.index, output.requires_grad = node, index, True
        return tuple(outputs) if isinstance(made, tuple) else outputs[0]

    def is_in_backward(self) -> bool:
        return tape.is_walking()

    def is_for_parameters(self) -> bool:
        return not tape.is_for_inputs()

    def backward(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        walk = tape.Walk()
        root, seed = plain_backward_arguments(loss, gradient)
        walk.run([root], [np.ones_like(root.data) if seed is None else seed.data])
        for leaf, found in walk.leaves.values():
            before = 0 if leaf.grad is None else leaf.grad.data
            leaf.grad = Tensor(before + found, leaf.dtype)
        for callback in walk.at_end:
            callback()

    def grad(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        output_grads: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:
        given = output_grads or [None] * len(outputs)
        roots = [plain_backward_arguments(x, g) for x, g in zip(outputs, given, strict=True)]
        walk = tape.Walk(inputs)
        walk.run([x for x, _ in roots], [np.ones_like(x.data) if g is None else g.data for x, g in roots])
        for callback in walk.at_end:
            callback()
        found = [walk.gradient_of(x) for x in inputs]
        return [None if g is None else self._like(Tensor(g, x.dtype), x) for x, g in zip(inputs, found, strict=True)]

    def _like(self, gradient: Tensor, x: Tensor) -> Tensor:
        return self.wrap(gradient, grad_spec(x.spec)) if isinstance(x, NumpyDTensor) else gradient

    def recording(self, flag: bool) -> AbstractContextManager[None]:
        return tape.recording(flag)

    def is_grad_enabled(self) -> bool:
        return tape.is_recording()

    def requires_grad(self, x: Tensor) -> bool:
        return x.requires_grad

    def is_leaf(self, x: Tensor) -> bool:
        return x.node is None

    def set_requires_grad(self, x: Tensor, flag: bool) -> None:
        x.requires_grad = flag

    def get_grad(self, x: Tensor) -> Tensor | None:
        return None if x.grad is None else self._like(x.grad, x)

    def set_grad(self, x: Tensor, grad: Tensor | None) -> None:
        x.grad = None if grad is None else alias(grad)

    # DTensor ---------------------------------------------------------------------------------------------

    def wrap(self, local: Tensor, spec: TensorSpec) -> NumpyDTensor:
        wrapped = _same_place(local, NumpyDTensor)
        wrapped._spec = spec
        return wrapped

    def unwrap(self, x: Tensor) -> Tensor:
        return _same_place(x, Tensor) if isinstance(x, NumpyDTensor) else x

    # Modules ---------------------------------------------------------------------------------------------

    def named_modules(self, module_: module.Module) -> Iterator[tuple[str, module.Module]]:
        return module.named_modules(module_)

    def named_parameters(
        self, module_: module.Module, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        for prefix, owner in module.all_modules(module_) if recurse else [("", module_)]:
            for name, found in owner.parameters.items():
                if remove_duplicate and id(found) in seen:
                    continue
                seen.add(id(found))
                yield (f"{prefix}.{name}" if prefix else name), found

    def set_parameter(self, module_: module.Module, name: str, value: Tensor) -> None:
        if name not in module_.parameters:
            raise KeyError(f"{type(module_).__name__} owns no parameter {name!r}")
        module_.parameters[name] = value

    def named_buffers(self, module_: module.Module) -> Iterator[tuple[str, Tensor]]:
        for prefix, owner in module.all_modules(module_):
            for name, found in owner.buffers.items():
                if found is not None:
                    yield (f"{prefix}.{name}" if prefix else name), found

    def add_forward_pre_hook(self, module_: module.Module, hook: Callable, prepend: bool = False) -> Removable:
        return module.Handle(module_.pre_hooks, hook, prepend)

    def add_forward_hook(
        self, module_: module.Module, hook: Callable, prepend: bool = False, always_call: bool = False
    ) -> Removable:
        return module.Handle(module_.post_hooks, hook, prepend, always_call)

    def has_hooks(self, module_: module.Module) -> bool:
        return bool(module_.pre_hooks or module_.post_hooks)

    # Randomness ------------------------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def random(self, distribution: str, shape: Sequence[int], dtype: str) -> Tensor:
        draw = {"uniform": self._random.random, "normal": self._random.standard_normal}[distribution]
        return Tensor(draw(tuple(shape)), dtype)

    def random_state(self) -> Any:
        return self._random.bit_generator.state

    def set_random_state(self, state: Any) -> None:
        self._random.bit_generator.state = state

    def rank_state(self) -> np.random.Generator:
        """Return the generator: each simulated rank has its own."""
        return self._random

    def set_rank_state(self, state: np.random.Generator) -> None:
        self._random = state


def _same_place(x: Tensor, kind: type) -> Any:
    """Make another kind of tensor of `x`, of the same memory and, through an identity, in the same graph."""
    made = alias(x, kind)
    if x.requires_grad and tape.is_recording():
        made.node, made.requires_grad = tape.Node([x], lambda gradients: gradients), True
    return made


def _own_gradients(
    backward: Callable[..., Any], outputs: Sequence[Tensor], gradients: Sequence[Array | None]
) -> list[Array | None]:
    given = [None if g is None else Tensor(g, x.dtype) for g, x in zip(gradients, outputs, strict=True)]
    found = backward(*given)
    listed = found if isinstance(found, (list, tuple)) else [found]
    return [None if g is None else g.data for g in listed]
