"""`PaddlePlatform`: the interface of hp-dtensor in terms of PaddlePaddle, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import paddle
from paddle.base import framework

from hp_dtensor.comm.sockets import SocketProcesses
from hp_dtensor.dispatch.interception import build_ops
from hp_dtensor.platform.interface import DTYPE_NAMES, Platform, Removable
from hp_dtensor.spec.tensor_spec import TensorSpec, grad_spec
from hp_dtensor.tensor.gradients import plain_backward_arguments
from hp_platform_paddle import autograd, tensor
from hp_platform_paddle.operations import KERNELS, getitem, same
from hp_platform_paddle.tensor import DTensorParameter, PaddleDTensor

Tensor = paddle.Tensor
Layer = paddle.nn.Layer


class PaddlePlatform(SocketProcesses, Platform):
    """Paddle's eager tensors, with hp-dtensor's sockets between processes."""

    name = "paddle"
    Tensor = Tensor
    Module = Layer
    DTensor = PaddleDTensor
    device_types = ("cpu",)
    dtypes = {name: getattr(paddle, name) for name in DTYPE_NAMES}  # noqa: RUF012
    function_modules = ("paddle", "paddle.nn.functional")
    # Paddle crashes where arguments of the others are missing. None of them takes DTensors.
    shard_names = frozenset(
        "data_ptr copy_ is_same_shape reconstruct_from_ set_string_list set_vocab to_sparse_coo to_sparse_csr".split()
    )
    picks_integers_first = True

    def __init__(self) -> None:
        self.ops = build_ops(self, KERNELS)
        paddle.set_device("cpu")
        autograd.install()
        Tensor.__getitem__ = getitem
        tensor.install(self.ops, self.backward, self.function_modules)

    @staticmethod
    def Parameter(x: Tensor, requires_grad: bool = True) -> Tensor:
        """Return a leaf over the memory of a tensor or DTensor, that layers register."""
        if isinstance(x, PaddleDTensor):
            made: Tensor = DTensorParameter(x._local.detach(), x.spec)
        else:
            made = framework.EagerParamBase.from_tensor(x.detach())
        made.stop_gradient = not requires_grad
        return made

    # Tensors ---------------------------------------------------------------------------------------------

    def from_numpy(self, array: np.ndarray, device: Any = None) -> Tensor:
        # Paddle takes uint16 for bfloat16.
        if array.dtype == np.uint16:
            raise ValueError("Paddle has no uint16; from_bits makes bfloat16 of it")
        return paddle.to_tensor(np.ascontiguousarray(array).reshape(array.shape), place="cpu")

    def from_bits(self, array: np.ndarray, dtype: Any, device: Any = None) -> Tensor:
        if dtype == paddle.bfloat16:
            return paddle.to_tensor(np.ascontiguousarray(array).reshape(array.shape), place="cpu")
        return self.from_numpy(array.view(self.dtype_name(dtype)), device)

    def to_numpy(self, x: Tensor) -> np.ndarray:
        return x.detach().numpy()

    def copy_(self, target: Tensor, source: Tensor) -> None:
        if tuple(target.shape) != tuple(source.shape):
            raise ValueError(f"copy_: expected shape {list(target.shape)}, got {list(source.shape)}")
        with paddle.no_grad():
            paddle.assign(source.detach().cast(target.dtype), output=target.detach())

    def set_data(self, x: Tensor, data: Tensor) -> None:
        x.data = data.detach()

    def contiguous(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            return x.contiguous()
        return x if x.stop_gradient else same(x)

    def detach(self, x: Tensor) -> Tensor:
        return x.detach()

    def strides(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.strides)

    def wrap(self, local: Tensor, spec: TensorSpec) -> PaddleDTensor:
        return PaddleDTensor(local, spec)

    def unwrap(self, x: Tensor) -> Tensor:
        return x._local if isinstance(x, PaddleDTensor) else x

    def manual_seed(self, seed: int) -> None:
        paddle.seed(seed)

    def random(self, distribution: str, shape: Sequence[int], dtype: Any) -> Tensor:
        draw = {"uniform": paddle.rand, "normal": paddle.randn}[distribution]
        return draw(list(shape), dtype="float32").cast(dtype)

    # Autograd --------------------------------------------------------------------------------------------

    def _custom_function(self, forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Any:
        return autograd.custom_function(forward, backward, *inputs)

    def is_in_backward(self) -> bool:
        return autograd.running.depth > 0

    def is_for_parameters(self) -> bool:
        return not autograd.running.for_inputs

    def backward(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        root, seed = plain_backward_arguments(loss, gradient)
        paddle.autograd.backward([root], [seed], retain_graph)

    def grad(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        output_grads: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:
        given = output_grads or [None] * len(outputs)
        roots = [plain_backward_arguments(x, g) for x, g in zip(outputs, given, strict=True)]
        found = autograd.grad([x for x, _ in roots], [self.unwrap(x) for x in inputs], [g for _, g in roots])
        return [None if g is None else self._like(g, x) for x, g in zip(inputs, found, strict=True)]

    def _like(self, gradient: Tensor, x: Tensor) -> Tensor:
        return PaddleDTensor(gradient, grad_spec(x.spec)) if isinstance(x, PaddleDTensor) else gradient

    def recording(self, flag: bool) -> AbstractContextManager[None]:
        return paddle.set_grad_enabled(flag)

    def is_grad_enabled(self) -> bool:
        return paddle.is_grad_enabled()

    def requires_grad(self, x: Tensor) -> bool:
        return not x.stop_gradient

    def set_requires_grad(self, x: Tensor, flag: bool) -> None:
        x.stop_gradient = not flag

    def is_leaf(self, x: Tensor) -> bool:
        return x.is_leaf

    def get_grad(self, x: Tensor) -> Tensor | None:
        return x.grad if isinstance(x, PaddleDTensor) else autograd.gradient_of(x)

    def set_grad(self, x: Tensor, grad: Tensor | None) -> None:
        if isinstance(x, PaddleDTensor):
            x.grad = grad
        else:
            autograd.set_gradient(x, grad)

    def version(self, x: Tensor) -> int:
        return self.unwrap(x).inplace_version

    def random_state(self) -> Any:
        return paddle.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        paddle.set_rng_state(state)

    def rank_state(self) -> Any:
        """Return the state of the generator, of which a process has one: each simulated rank has its own."""
        return paddle.get_rng_state()

    def set_rank_state(self, state: Any) -> None:
        paddle.set_rng_state(state)

    # Modules ---------------------------------------------------------------------------------------------

    def named_modules(self, module: Layer) -> Iterator[tuple[str, Layer]]:
        return module.named_sublayers(include_self=True)

    def named_parameters(
        self, module: Layer, recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return _named(module, "_parameters", recurse, remove_duplicate)

    def named_buffers(self, module: Layer) -> Iterator[tuple[str, Tensor]]:
        return _named(module, "_buffers", True, False)

    def set_parameter(self, module: Layer, name: str, value: Tensor) -> None:
        if name not in module._parameters:
            raise KeyError(f"{type(module).__name__} owns no parameter {name!r}")
        module._parameters[name] = value

    def is_container(self, module: Layer) -> bool:
        return isinstance(module, (paddle.nn.LayerList, paddle.nn.LayerDict))

    def add_forward_pre_hook(self, module: Layer, hook: Callable, prepend: bool = False) -> Removable:
        return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=True)

    def add_forward_hook(
        self, module: Layer, hook: Callable, prepend: bool = False, always_call: bool = False
    ) -> Removable:
        return module.register_forward_post_hook(hook, prepend=prepend, with_kwargs=True, always_call=always_call)

    def has_hooks(self, module: Layer) -> bool:
        return bool(module._forward_pre_hooks or module._forward_post_hooks)


def _named(module: Layer, table: str, recurse: bool, once: bool, prefix: str = "", seen: Any = None) -> Iterator[Any]:
    """Yield what the tables of layers have. With `once`, each tensor once; otherwise shared ones under every name."""
    seen = {} if seen is None else seen
    for name, value in getattr(module, table).items():
        if value is not None and not (once and id(value) in seen):
            seen[id(value)] = value
            yield prefix + name, value
    for name, child in module._sub_layers.items() if recurse else ():
        if child is not None:
            yield from _named(child, table, recurse, once, f"{prefix}{name}.", seen)
