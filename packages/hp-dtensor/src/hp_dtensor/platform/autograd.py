"""The autograd part of `Platform`: custom nodes, gradients of leaves, backward, and saved tensors in host memory."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.recording import is_recording, located

Tensor: TypeAlias = Any
Wait = Callable[[], None]


class HostCopies(ABC):
    """Copies saved tensors to host memory and back, overlapped with computation where the device supports it.

    Attributes:
        copies_full_storage: whether views of one storage share one copy. Otherwise each tensor is copied separately.
    """

    # Views of one storage, such as queries, keys and values of one projection, would otherwise be copied several times.
    copies_full_storage = True

    @abstractmethod
    def memory_of(self, x: Tensor) -> tuple[Hashable, int] | None:
        """Return a key for the storage of a tensor, unique while that storage lives, and its size in bytes.

        None for tensors that must stay on the device: views of gathered parameters, and unsupported kinds of tensors.
        """

    @abstractmethod
    def form(self, x: Tensor) -> Hashable:
        """Return the dtype and the layout in storage of `x`, from which `tensor` rebuilds it."""

    @abstractmethod
    def memory(self, x: Tensor) -> Tensor:
        """Return the tensor to copy: the full storage of `x` as flat bytes, or `x` itself."""

    @abstractmethod
    def to_host(self, memory: Tensor) -> tuple[Tensor, Wait]:
        """Start a copy to the host. Return it, and a function that waits until `memory` may be freed or written."""

    @abstractmethod
    def to_device(self, host: Tensor) -> tuple[Tensor, Wait]:
        """Start a copy back to the device. Return it, and a function that makes the computation wait for it."""

    @abstractmethod
    def tensor(self, memory: Tensor, form: Hashable) -> Tensor:
        """Return the tensor with the given form in copied memory, outside the autograd graph."""


class SavedOperations:
    """Saves results of the framework's own operations for recomputation. The default saves none."""

    def first(self) -> AbstractContextManager[Any]:
        """Save the results of the operations in the block, the first forward."""
        return nullcontext()

    def again(self) -> AbstractContextManager[Any]:
        """Replace the operations in the block, the recomputation, by their saved results in the order of the calls."""
        return nullcontext()

    def paused(self) -> AbstractContextManager[Any]:
        """Save nothing in the block, which is inside a block of `first` and is not recomputed."""
        return nullcontext()


class AutogradInterface(ABC):
    """The part of `Platform` for autograd: custom nodes, backward, gradients and saved tensors.

    Attributes:
        splits_backward: whether `split_backward` works.
        recomputes_on_unpack: whether the `unpack` of `saving` may record operations, and its `pack` may raise an
            exception that ends the forward.
    """

    splits_backward: bool = False
    recomputes_on_unpack: bool = False

    def linear_map(
        self, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return `forward(x)`, a linear map, as one autograd node with the backward `backward(grad)`, its dual.

        Both functions take and return plain tensors and run without recording. The backward of `backward` is `forward`.
        """
        # Forward too: it is the backward of the backward. Redistributions call this often, so wrapping is left out
        # where nothing is recorded.
        if is_recording():
            forward, backward = located(forward), located(backward)
        return self._linear_map(x, forward, backward)

    def custom_function(
        self,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        *inputs: Tensor,
    ) -> Any:
        """Return `forward(*inputs)`, a tensor or a tuple of tensors, as one autograd node.

        Values needed in backward are saved by the closure in a `hp_dtensor.comm.saved_tensors.SavedTensors`. Neither
        function is recorded, and second derivatives are refused.

        Args:
            backward: `backward(*grads)` gets the gradient of a single output, or one gradient or None per output of a
                tuple. It returns one gradient or None per input.
        """
        # Only the backward is wrapped: the forward runs now, at its own place.
        return self._custom_function(forward, located(backward), *inputs)

    # Recording is in the methods above, which all platforms share; a platform supplies the autograd node itself.

    def _linear_map(
        self, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        # Without second derivatives, which need a node whose backward is recorded.
        return self._custom_function(forward, backward, x)

    @abstractmethod
    def _custom_function(self, forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Any: ...

    @abstractmethod
    def is_in_backward(self) -> bool:
        """Return whether this thread is running inside a backward of the framework."""

    def needs_first_operand(self) -> bool:
        """Return whether the product whose saved tensor is being read needs the values of its first operand.

        They are needed only for the gradient of the second operand, which the first part of `split_backward` does not
        compute. Called only while a saved tensor is read; by default True.
        """
        return True

    @abstractmethod
    def is_for_parameters(self) -> bool:
        """Return whether the running backward accumulates into leaves, rather than being a call of `grad`.

        Called only during a backward.
        """

    @abstractmethod
    def backward(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """Accumulate the gradients of `loss` into the `.grad` of all leaves. Without `gradient`, `loss` is a scalar.

        Both may be DTensors: `hp_dtensor.tensor.gradients.plain_backward_arguments` returns them as plain tensors.
        """

    @abstractmethod
    def grad(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        output_grads: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients of `inputs`, or None for unused ones, without changing any `.grad`.

        Of DTensors they are DTensors; see `backward` and `get_grad`.

        Raises:
            CapabilityError: the framework has no derivative of an operation.
        """

    def split_backward(
        self, outputs: Sequence[Tensor], output_grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], Callable[[], None]]:
        """Compute the gradients of the leaves `inputs`, and return them with a function that runs the rest of backward.

        That function accumulates the gradients of all other leaves, as `backward` does.

        Args:
            outputs: plain tensors in the autograd graph.
            output_grads: their gradients. None for a scalar loss.

        Raises:
            CapabilityError: `splits_backward` is False.
        """
        raise CapabilityError("this platform cannot split a backward; call backward instead")

    @abstractmethod
    def recording(self, flag: bool) -> AbstractContextManager[None]:
        """Record the operations of this thread inside the block, or do not."""

    def no_grad(self) -> AbstractContextManager[None]:
        """Do not record operations of this thread inside the block."""
        return self.recording(False)

    def enable_grad(self) -> AbstractContextManager[None]:
        """Record the operations of this thread inside the block."""
        return self.recording(True)

    @abstractmethod
    def is_grad_enabled(self) -> bool:
        """Return whether operations of this thread are recorded."""

    @abstractmethod
    def requires_grad(self, x: Tensor) -> bool:
        """Return whether `x` requires a gradient."""

    @abstractmethod
    def set_requires_grad(self, x: Tensor, flag: bool) -> None:
        """Set whether a leaf requires a gradient."""

    @abstractmethod
    def is_leaf(self, x: Tensor) -> bool:
        """Return whether `x` is a leaf: created by the user, not by a recorded operation."""

    @abstractmethod
    def get_grad(self, x: Tensor) -> Tensor | None:
        """Return the accumulated gradient of a leaf. For a DTensor it is a DTensor.

        Its spec is `hp_dtensor.spec.tensor_spec.grad_spec` of the leaf's: replicated where the leaf is partial.
        """

    @abstractmethod
    def set_grad(self, x: Tensor, grad: Tensor | None) -> None:
        """Replace the accumulated gradient of a leaf, of the same kind and spec as `get_grad` returns."""

    def has_gradient_hooks(self, x: Tensor) -> bool:
        """Return whether users have registered hooks on the gradient of `x` or on its accumulation."""
        return False

    def add_gradient_hook(self, x: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Call `hook(gradient)` when backward has computed the gradient of `x`. For a DTensor it is a DTensor."""
        x.register_hook(hook)

    def saved_operations(self, kinds: Collection[str]) -> SavedOperations:
        """Return an object that saves results of the framework's own operations for recomputation.

        Args:
            kinds: some of `hp_dtensor.comm.saved_tensors.KINDS`. Custom nodes of these kinds save their own results.

        Raises:
            CapabilityError: the framework cannot save one of the kinds. By default these are products.
        """
        # Products are the framework's own operations. The other kinds run in custom nodes, which save their results
        # themselves.
        if "products" in kinds:
            raise CapabilityError(
                "this platform cannot save matrix products for recomputation, because nothing can replace them in its "
                "graph; save attention or collectives, or recompute full blocks"
            )
        return SavedOperations()

    def saving(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> AbstractContextManager[Any]:
        """Replace each tensor that operations of this thread save in the block by `pack(tensor)`.

        Backward calls `unpack` on that value, in any thread, and uses the tensor that it returns.

        Raises:
            CapabilityError: the framework has no saved tensor hooks, which is the default.
        """
        raise CapabilityError("this platform has no hooks for the tensors that its autograd saves for backward")

    def saving_hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
        """Return `pack` and `unpack` of the innermost hooks, of `saving` or of the program, that are active here.

        None: there are none, or the framework cannot tell, which is the default.
        """
        return None

    def host_copies(self) -> HostCopies:
        """Return the object that copies saved tensors to host memory and back.

        Raises:
            CapabilityError: the framework has no saved tensor hooks, which is the default.
        """
        raise CapabilityError(
            "this platform cannot offload activations: it has no hooks for the tensors that its autograd saves for "
            "backward; recompute blocks instead"
        )

    def random_state(self) -> Any:
        """Return the state of this rank's random generators. By default there are none.

        Required where `random` or the framework's own operations draw numbers: recomputation repeats them.
        """
        return None

    def set_random_state(self, state: Any) -> None:
        """Restore a value of `random_state`."""

    def is_random_state(self, state: Any) -> bool:
        """Return whether the generators still have the state of `random_state`, because nothing was drawn since.

        False is always right, and the state is then restored. This is the default of platforms with `random_state`.
        """
        return state is None

    def automatic_precision(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return a factory of contexts that restore the current automatic mixed precision, whatever is active later.

        Inside such a context, casts of weights are not cached: a cast made without recording would be reused with
        recording and hide the gradient. By default there is no automatic mixed precision.
        """
        return contextlib.nullcontext

    def uncompiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` excluded from a compiler of the framework that traces its callers.

        Code that is compiled inside `function` stays compiled. By default there is no such compiler.
        """
        return function

    def loss_dtype(self, x: Tensor) -> Any:
        """Return the dtype of a loss of the logits `x`: theirs, or a wider one under automatic mixed precision."""
        return x.dtype

    def version(self, x: Tensor) -> int:
        """Return autograd's version counter of a plain tensor or a shard: the number of in-place writes to its storage.

        A value derived from `x` and saved is valid only while the counter is unchanged.
        """
        return 0
