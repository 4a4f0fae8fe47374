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
    """Moves memory of saved tensors to the host and back, beside the computation where the device can do that.

    Attributes:
        copies_whole_memory: views that lie in one memory share its copy; else each tensor is copied by itself.
    """

    copies_whole_memory = True

    @abstractmethod
    def memory_of(self, x: Tensor) -> tuple[Hashable, int] | None:
        """Return what identifies the memory that a tensor lies in, as long as that lives, and its bytes.

        None where it must stay: memory that parameters are gathered to, or tensors of other kinds.
        """

    @abstractmethod
    def form(self, x: Tensor) -> Hashable:
        """Return what `tensor` needs to make a tensor like `x`: its dtype, and how it lies in its memory."""

    @abstractmethod
    def memory(self, x: Tensor) -> Tensor:
        """Return what is copied of a tensor: the whole memory that it lies in as a flat tensor of bytes, or itself."""

    @abstractmethod
    def to_host(self, memory: Tensor) -> tuple[Tensor, Wait]:
        """Begin to copy memory to the host.

        Once the function beside the copy has returned, the computation may free or write `memory`.
        """

    @abstractmethod
    def to_device(self, host: Tensor) -> tuple[Tensor, Wait]:
        """Begin to copy back; the function beside the copy makes the computation wait for it."""

    @abstractmethod
    def tensor(self, memory: Tensor, form: Hashable) -> Tensor:
        """Return the tensor of a form over what has been copied, outside the graph."""


class SavedOperations:
    """Keeps results of a framework's own operations from a computation to its repetition; the default: of none."""

    def first(self) -> AbstractContextManager[Any]:
        """Keep the results of the operations in the block."""
        return nullcontext()

    def again(self) -> AbstractContextManager[Any]:
        """Take the results of the operations in the block from those that are kept, call by call."""
        return nullcontext()

    def paused(self) -> AbstractContextManager[Any]:
        """Neither keep nor take results in the block, which is within one of `first` and is not repeated."""
        return nullcontext()


class AutogradInterface(ABC):
    """The part of `Platform` that adds nodes to the framework's autograd graph and drives it.

    Attributes:
        splits_backward: whether `split_backward` works.
        repeats_for_saved: whether what `saving` calls in backward may record operations, and what it calls in forward
            may raise an exception that ends it.
    """

    splits_backward: bool = False
    repeats_for_saved: bool = False

    def linear_map(
        self, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return `forward(x)` as one autograd node whose gradient is `backward(grad)`: a linear map and its dual.

        Both take and return plain tensors and run without recording. Differentiating the backward again
        uses `forward` as its dual.
        """
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

        Values needed in backward are kept by the closure, in a `hp_dtensor.comm.saved_tensors.Kept`. Neither function
        is recorded, and a second derivative is refused where a framework could take one.

        Args:
            backward: `backward(*grads)` gets the gradient of a single output, and one or None per output of a tuple;
                it returns one or None per input.
        """
        return self._custom_function(forward, located(backward), *inputs)

    @abstractmethod
    def _linear_map(
        self, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor: ...

    @abstractmethod
    def _custom_function(self, forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Any: ...

    @abstractmethod
    def is_in_backward(self) -> bool:
        """Return whether a backward of the framework called the code that runs now in this thread."""

    @abstractmethod
    def is_for_parameters(self) -> bool:
        """Return whether the backward that runs accumulates gradients of leaves, rather than those asked for by `grad`.

        It is called during a backward only.
        """

    @abstractmethod
    def backward(self, loss: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """Accumulate gradients of every leaf below `loss` (a scalar when `gradient` is None) into `.grad`."""

    @abstractmethod
    def grad(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        output_grads: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor | None]:
        """Return the gradients of `inputs`, touching no `.grad`; None where an input is unused.

        Raises:
            CapabilityError: the framework has no derivative of an operation.
        """

    def split_backward(
        self, outputs: Sequence[Tensor], output_grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], Callable[[], None]]:
        """Run a backward in two parts: return the gradients of leaves `inputs`, and the function that does the rest.

        Once the function has been called, every other leaf has accumulated its gradient as by `backward`.

        Args:
            outputs: plain tensors, in the graph.
            output_grads: their gradients; None for that of a scalar loss.

        Raises:
            CapabilityError: the framework cannot (`splits_backward` is False).
        """
        raise CapabilityError("this platform cannot split a backward; call backward for both parts at once")

    @abstractmethod
    def no_grad(self) -> AbstractContextManager[None]:
        """Record no operations of this thread inside the block."""

    @abstractmethod
    def enable_grad(self) -> AbstractContextManager[None]:
        """Record the operations of this thread inside the block."""

    @abstractmethod
    def is_grad_enabled(self) -> bool:
        """Return whether operations of this thread are recorded."""

    @abstractmethod
    def requires_grad(self, x: Tensor) -> bool:
        """Return whether `x` is part of a graph through which gradients come."""

    @abstractmethod
    def set_requires_grad(self, x: Tensor, flag: bool) -> None:
        """Make a leaf require a gradient, or not."""

    @abstractmethod
    def is_leaf(self, x: Tensor) -> bool:
        """Return whether `x` was made by the user, not by a recorded operation."""

    @abstractmethod
    def get_grad(self, x: Tensor) -> Tensor | None:
        """Return the accumulated gradient of a leaf; a DTensor for a DTensor."""

    @abstractmethod
    def set_grad(self, x: Tensor, grad: Tensor | None) -> None:
        """Replace the accumulated gradient of a leaf."""

    def has_gradient_hooks(self, x: Tensor) -> bool:
        """Return whether users have registered hooks on `x` that are called with its gradient, or after that."""
        return False

    def saved_operations(self, kinds: Collection[str]) -> SavedOperations:
        """Return what keeps results of the framework's own operations from a computation to its repetition.

        Args:
            kinds: some of `hp_dtensor.comm.saved_tensors.KINDS`, whose nodes of ours keep results by themselves.

        Raises:
            CapabilityError: the framework cannot keep one of the kinds: the default for products.
        """
        if "products" in kinds:
            raise CapabilityError(
                "this platform cannot keep products of matrices for a recomputation: nothing takes their place in its "
                "graph; keep attention or collectives, or recompute whole blocks"
            )
        return SavedOperations()

    def saving(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> AbstractContextManager[Any]:
        """Call `pack` with each tensor that operations of this thread save in the block, and keep what it returns.

        Backward calls `unpack` with that, wherever it runs, and computes with the tensor that it returns.

        Raises:
            CapabilityError: the framework lets nobody replace them, which is the default.
        """
        raise CapabilityError("this platform lets nobody replace what its autograd saves for backward")

    def host_copies(self) -> HostCopies:
        """Return what moves tensors that autograd saves to host memory and back.

        Raises:
            CapabilityError: the framework lets nobody replace them, which is the default.
        """
        raise CapabilityError(
            "this platform cannot offload activations: nothing takes the place of what its autograd saves for "
            "backward; recompute blocks instead"
        )

    def random_state(self) -> Any:
        """Return the state of the generators that operations of this rank draw from; the default: there are none."""
        return None

    def set_random_state(self, state: Any) -> None:
        """Restore what `random_state` returned."""

    def is_random_state(self, state: Any) -> bool:
        """Return whether the generators are in the state that `random_state` returned: nothing has been drawn since."""
        return True

    def automatic_precision(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return what makes a block compute in the dtypes of here, whatever automatic mixed precision is on there.

        Within such a block casts of weights are not cached: one that was made while nothing is recorded would be used
        where something is, and hide its gradient. The default: there is no automatic mixed precision.
        """
        return contextlib.nullcontext

    def uncompiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` as it is written, where a compiler of the framework follows the code that calls it.

        What is compiled within it stays so. The default: no compiler does that.
        """
        return function

    def loss_dtype(self, x: Tensor) -> Any:
        """Return the dtype of a loss of logits `x`: theirs, unless automatic mixed precision makes it wider."""
        return x.dtype

    def version(self, x: Tensor) -> int:
        """Return how often the storage of a plain tensor has been written in place, as far as autograd counts that.

        What was derived from `x` and kept is good only as long as the number stays the same.
        """
        return 0
