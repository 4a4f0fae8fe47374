"""`ContextParallel`: the style under which an attention module works on this rank's part of a sequence."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar, Token
from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.saved_tensors import kept
from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention.function import routed_attention
from hp_dtensor.parallel.attention.mask import AttentionMask
from hp_dtensor.parallel.context_parallel.cut import SequenceCut
from hp_dtensor.parallel.context_parallel.function import Method, check_method, context_parallel_attention
from hp_dtensor.parallel.style import ParallelStyle

Tensor = Any
Module = Any
_cut_in_use: ContextVar[SequenceCut | None] = ContextVar("hp_dtensor.parallel.context_parallel.cut", default=None)


@contextlib.contextmanager
def use_cut(cut: SequenceCut | None) -> Iterator[None]:
    """Have models with `ContextParallel` that are called inside take their inputs as parts by `cut`.

    Rows of packed documents are cut differently from batch to batch, so that whoever cuts a batch says how. What is
    computed again in backward is computed with the cut of its forward.

    Args:
        cut: None: the style's own for a length, of rows that are not packed.

    Example:
        >>> cut = ContextParallel().cut(10, 2, positions=np.array([[*range(8), *range(2)]]))
        >>> with use_cut(cut):  # model(cut.take(ids, rank), cut.take(positions, rank))
        ...     cut.documents
        ((8, 2),)
    """
    token = _cut_in_use.set(cut)
    try:
        yield
    finally:
        _cut_in_use.reset(token)


class ContextParallel(ParallelStyle):
    """Have every `attention` inside a module be that of a sequence which the ranks of the mesh share.

    The module, a whole model too, is given this rank's part of the sequence: tokens, targets and positions, as
    `SequenceCut.take` gives them; a cut of packed documents is told by `use_cut`. Rotary angles must come from these
    positions. All else in a model works token by token and is not changed. Parameters stay as they are; their gradients
    are this rank's contribution, to be summed over the mesh (`hp_fsdp.fully_shard` over it does).

    Args:
        method: `"ring"` or `"all_gather"`; see `context_parallel_attention`.
        ulysses_degree: ranks that exchange heads.
        balanced: head and tail chunks, see `SequenceCut`; None: if the mask is causal.
        length: tokens of the whole sequence; None: the ranks exchange how many they have, once per mask.
        whole_without_positions: where a mask has no positions, every rank was given the whole sequence and attends by
            itself, as in generating text; False: such a sequence is cut too.

    Raises:
        AttentionError: no such method.

    Example:
        >>> class SelfAttention(nn.Module):
        ...     def forward(self, x):
        ...         return attention(x, x, x, mask=AttentionMask())
        >>> def program():
        ...     with nn.building(platform):
        ...         model = SelfAttention()
        ...     parallelize_module(model, init_device_mesh("cpu", (2,)), ContextParallel())
        ...     return tuple(model(platform.from_numpy(np.ones((1, 2, 4, 8), "float32"))).shape)
        >>> run_ranks(program, 2)  # of 8 tokens, each rank has 4
        [(1, 2, 4, 8), (1, 2, 4, 8)]
    """

    def __init__(
        self,
        *,
        method: Method = "ring",
        ulysses_degree: int = 1,
        balanced: bool | None = None,
        length: int | None = None,
        whole_without_positions: bool = False,
    ) -> None:
        check_method("ContextParallel", method)
        self.method, self.ulysses_degree, self.balanced, self.length = method, ulysses_degree, balanced, length
        self.whole_without_positions = whole_without_positions

    def cut(self, length: int, ranks: int, causal: bool = True, positions: Any = None) -> SequenceCut:
        """Return the tokens of each rank for a sequence of `length`.

        Args:
            positions: int64 array `[batch, length]` of the whole rows, see `AttentionMask`: the cut is balanced within
                their documents, unless `balanced` is False, and is to be told by `use_cut`; None: by the length alone.

        Raises:
            AttentionError: `ulysses_degree` does not divide the ranks, or positions of another length.
        """
        if positions is not None and np.shape(positions)[1:] != (length,):
            raise AttentionError(
                f"ContextParallel.cut: positions of shape {list(np.shape(positions))}; expected [batch, {length}], "
                "those of whole rows"
            )
        if positions is not None and self.balanced is not False:
            return SequenceCut.of_positions(
                positions, ranks=ranks, ulysses_degree=self.ulysses_degree, even_hops=self.method == "ring"
            )
        balanced = causal if self.balanced is None else self.balanced
        return SequenceCut(length=length, ranks=ranks, ulysses_degree=self.ulysses_degree, balanced=balanced)

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        platform, routes = device_mesh.platform, _Routes()
        self.cut(0, device_mesh.size())  # refuses a degree that does not divide the ranks

        def attend(query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, **options: Any) -> Tensor:
            cut = self._cut_of(query, mask, device_mesh)
            return context_parallel_attention(
                query, key, value, device_mesh, mask=mask, cut=cut, method=self.method, **options
            )

        def is_cut(mask: AttentionMask) -> bool:
            return mask.positions is not None or not self.whole_without_positions

        def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            routes.enter((is_cut, attend))

        def after(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            routes.leave()

        if device_mesh.size() > 1:
            platform.add_forward_pre_hook(module, before, prepend=True)
            platform.add_forward_hook(module, after, always_call=True)
        return module

    def _cut_of(self, query: Tensor, mask: AttentionMask, mesh: DeviceMesh) -> SequenceCut:
        own, group = query.shape[2], mesh.get_group()
        # Backward may compute this again, after the `with` of the cut: `checkpoint` has kept it, and so has the mask
        # where another one repeats (torch's) or the mask was made outside of what is repeated.
        in_use = kept(_cut_in_use.get)
        given: SequenceCut | None = mask.remembered(("cut", group.ranks), lambda: in_use)
        if mask.positions is None and in_use not in (None, given):
            raise AttentionError(
                f"ContextParallel: a mask without positions was used with the cut {given}, and is used again within "
                f"`use_cut` of {in_use}; expected a mask of its own for each forward pass"
            )
        if given is not None:
            return given

        def whole_length() -> int:
            return sum(int(each) for each in group.all_gather_bytes(str(own).encode()))

        length = self.length
        if length is None:
            length = mask.remembered(("length", group.ranks, own), whole_length)
        return self.cut(length, mesh.size(), mask.causal)


class _Routes(threading.local):
    """Forwards of the module that this thread has begun, outermost first."""

    def __init__(self) -> None:
        self._tokens: list[Token[Any]] = []

    def enter(self, route: Any) -> None:
        self._tokens.append(routed_attention.set(route))

    def leave(self) -> None:
        if self._tokens:
            routed_attention.reset(self._tokens.pop())
