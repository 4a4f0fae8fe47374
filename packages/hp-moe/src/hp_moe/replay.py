"""Recording the routing of some steps, and taking the same experts again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from hp_moe.exceptions import ExpertParallelError

Array = numpy.ndarray


@dataclass
class RoutingRecord:
    """The experts that this rank's tokens went to, in order of the calls of each layer.

    Attributes:
        calls: layer's name -> int64 `[tokens, top_k]` of each call.

    Example:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> with record_routing(model) as record:
        ...     y = model(platform.ops.ones((3, 4), platform.dtype("float32")))
        >>> record.save("routing.npz")
        >>> [experts.shape for experts in RoutingRecord.load("routing.npz").calls[""]]
        [(3, 2)]
    """

    calls: dict[str, list[Array]] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the record to an `.npz` file."""
        arrays = {f"{name}/{at}": experts for name, calls in self.calls.items() for at, experts in enumerate(calls)}
        with Path(path).open("wb") as file:
            numpy.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> RoutingRecord:
        """Read a record that `save` has written."""
        record = cls()
        with numpy.load(path) as arrays:
            for key in sorted(arrays.files, key=lambda key: int(key.rpartition("/")[2])):
                record.calls.setdefault(key.rpartition("/")[0], []).append(arrays[key])
        return record


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


@contextlib.contextmanager
def record_routing(model: Any) -> Iterator[RoutingRecord]:
    """Record the experts that the tokens of every `MoE` in `model` go to, in the block.

    A recomputation in backward is no call of its own. The choices are read by the host, which waits for the device.

    Example:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> with record_routing(model) as record:
        ...     y = model(platform.ops.ones((3, 4), platform.dtype("float32")))
        >>> [experts.shape for experts in record.calls[""]]  # by the layer's name; this one is the model itself
        [(3, 2)]
    """
    record = RoutingRecord()
    with _taped(model, record, replays=False):
        yield record


@contextlib.contextmanager
def replay_routing(model: Any, record: RoutingRecord) -> Iterator[None]:
    """Send tokens to the recorded experts, call by call; scores are the gate's own for them, with their gradients.

    Raises:
        ExpertParallelError: other layers than recorded, a call with other tokens, too many calls, or too few.

    Example:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> record = RoutingRecord({"": [np.array([[3, 1]])]})
        >>> with replay_routing(model, record), record_routing(model) as again:
        ...     y = model(platform.ops.ones((1, 4), platform.dtype("float32")))
        >>> again.calls[""][0].tolist()
        [[3, 1]]
    """
    with _taped(model, record, replays=True) as tapes:
        yield
        for tape in tapes:
            tape.check_end()


@contextlib.contextmanager
def _taped(model: Any, record: RoutingRecord, *, replays: bool) -> Iterator[list[Tape]]:
    from hp_moe.balance import moe_layers

    layers = moe_layers(model)
    if replays and {*record.calls} != {*layers}:
        raise ExpertParallelError(f"recorded were the layers {sorted(record.calls)}, the model has {sorted(layers)}")
    tapes = [Tape(name, record.calls.setdefault(name, []), replays=replays) for name in layers]
    for layer, tape in zip(layers.values(), tapes, strict=True):
        layer.router.tapes.append(tape)
    try:
        yield tapes
    finally:
        for layer, tape in zip(layers.values(), tapes, strict=True):
            layer.router.tapes.remove(tape)
