"""The calls of one layer's router, being recorded or replayed."""

from __future__ import annotations

import numpy

from hp_moe.exceptions import ExpertParallelError

Array = numpy.ndarray


class Tape:
    """The calls of one layer, being recorded or replayed."""

    def __init__(self, name: str, calls: list[Array], *, replays: bool) -> None:
        self.name = name
        self.calls = calls
        self.replays = replays
        self.position = 0

    def next(self, num_tokens: int, top_k: int) -> Array:
        """Return the experts of the next call.

        Raises:
            ExpertParallelError: there are no more calls, or this one had another number of tokens or experts.
        """
        if self.position == len(self.calls):
            raise ExpertParallelError(f"{self._layer}: only {len(self.calls)} calls were recorded; this is one more")
        experts = self.calls[self.position]
        if experts.shape != (num_tokens, top_k):
            raise ExpertParallelError(
                f"{self._layer}, call {self.position}: recorded were {experts.shape[0]} tokens of {experts.shape[1]} "
                f"experts, this call has {num_tokens} of {top_k}; replay the same batches in the same layout"
            )
        self.position += 1
        return experts

    def check_end(self) -> None:
        if self.replays and self.position != len(self.calls):
            raise ExpertParallelError(
                f"{self._layer}: {len(self.calls)} calls were recorded, and only {self.position} were made again"
            )

    @property
    def _layer(self) -> str:
        return f"routing of layer {self.name!r}"
