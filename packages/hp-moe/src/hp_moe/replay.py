"""Recording of the experts that a model selects, and replay of recorded selections."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from hp_moe.exceptions import ExpertParallelError
from hp_moe.load_balance import moe_layers
from hp_moe.router import Tape

Array = numpy.ndarray


@dataclass
class RoutingRecord:
    """The experts selected for this rank's tokens, by layer and call.

    Attributes:
        calls: layer name -> selected experts of each call, int64 `[tokens, top_k]`.

    Examples:
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
        arrays: dict[str, Any] = {
            f"{name}/{at}": experts for name, calls in self.calls.items() for at, experts in enumerate(calls)
        }
        # A file of this name is replaced only by a complete one.
        draft = Path(f"{path}.draft")
        with draft.open("wb") as file:
            numpy.savez(file, **arrays)
        draft.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> RoutingRecord:
        """Read a record written by `save`."""
        record = cls()
        with numpy.load(path) as arrays:
            # By number: as text, call 10 would come before call 2.
            for key in sorted(arrays.files, key=lambda key: int(key.rpartition("/")[2])):
                record.calls.setdefault(key.rpartition("/")[0], []).append(arrays[key])
        return record


@contextlib.contextmanager
def record_routing(model: Any) -> Iterator[RoutingRecord]:
    """Record the experts that every `MoE` in `model` selects while the context is active.

    Recomputation in backward is not recorded as a call. Each call copies its selection to the host, which waits for the
    device.

    Examples:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> with record_routing(model) as record:
        ...     y = model(platform.ops.ones((3, 4), platform.dtype("float32")))
        >>> [experts.shape for experts in record.calls[""]]  # by the layer's name; this one is the model itself
        [(3, 2)]
    """
    record = RoutingRecord()
    with _with_tapes(model, record, replays=False):
        yield record


@contextlib.contextmanager
def replay_routing(model: Any, record: RoutingRecord) -> Iterator[None]:
    """Select the recorded experts, call by call; scores and their gradients are still the gate's.

    Raises:
        ExpertParallelError: the record has a layer that the model lacks, a call has another shape, or the number of
            calls differs.

    Examples:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> record = RoutingRecord({"": [np.array([[3, 1]])]})
        >>> with replay_routing(model, record), record_routing(model) as again:
        ...     y = model(platform.ops.ones((1, 4), platform.dtype("float32")))
        >>> again.calls[""][0].tolist()
        [[3, 1]]
    """
    with _with_tapes(model, record, replays=True) as tapes:
        yield
        # Not in a `finally`: an error in the context is raised instead of the missing calls.
        for tape in tapes:
            tape.check_end()


@contextlib.contextmanager
def _with_tapes(model: Any, record: RoutingRecord, *, replays: bool) -> Iterator[list[Tape]]:
    """Give the router of every layer a tape over the record while the context is active."""
    layers = moe_layers(model)
    # A layer without calls is not in a file.
    if not {*record.calls} <= {*layers}:
        raise ExpertParallelError(f"the record has the layers {sorted(record.calls)}, the model has {sorted(layers)}")
    tapes = [Tape(name, record.calls.setdefault(name, []), replays=replays) for name in layers]
    for layer, tape in zip(layers.values(), tapes, strict=True):
        layer.router.tapes.append(tape)
    try:
        yield tapes
    finally:
        for layer, tape in zip(layers.values(), tapes, strict=True):
            layer.router.tapes.remove(tape)
