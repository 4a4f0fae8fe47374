"""Messages between the stages of a pipeline: non-blocking sends, and receives that are posted early.

The shapes and structure of a stage's outputs (`MessageLayout`) are sent once per step, before the first micro-batch.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.mesh_layout import MeshAxis
from hp_dtensor.comm.process_group import ProcessGroup, Work
from hp_dtensor.comm.world import World
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement, Replicate, Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_trainer.exceptions import PipelineError
from hp_trainer.pipeline.actions import PRODUCES_INPUT_GRAD, Action, Kind, Schedule

Tensor = Any
# Headers have a fixed size, so that they can be received before their length is known. The rest of a longer header
# follows in a second message.
HEADER_BYTES = 1024
RECEIVES_AHEAD = 4


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Metadata of a tensor, from which the receiver allocates its buffer.

    Attributes:
        shape: shape of the data that is sent; of a DTensor, its local shard.
        requires_grad: whether a gradient is sent back.
        axes: mesh axes of a DTensor as (name, sizes, strides); empty for a plain tensor.
        shards: for each mesh axis of a DTensor the sharded dimension, or None if replicated.
        global_shape: global shape of a DTensor.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    axes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    shards: tuple[int | None, ...] = ()
    global_shape: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Metadata of a stage's output: its tensors and the nested structure that contains them.

    Attributes:
        tensors: metadata in the order of the structure.
        structure: nested `["tuple", ...]`, `["list", ...]`, `["dict", {...}]`, `["tensor"]`, `["value", json]`.
    """

    tensors: tuple[TensorMeta, ...]
    structure: Any

    def to_bytes(self) -> bytes:
        """Return the layout as JSON."""
        return json.dumps([[asdict(each) for each in self.tensors], self.structure]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> MessageLayout:
        """Parse the result of `to_bytes`."""
        tensors, structure = json.loads(data)
        return cls(tuple(TensorMeta(**{k: _tuple(v) for k, v in each.items()}) for each in tensors), structure)

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the structure filled with these tensors."""
        remaining = list(tensors)
        return _rebuild(self.structure, remaining)


def _tuple(value: Any) -> Any:
    """Convert nested lists to tuples, which JSON lacks, so that received layouts compare equal to own ones."""
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def layout_of(platform: Platform, tree: Any, who: str) -> tuple[MessageLayout, list[Tensor]]:
    """Return the layout of a stage's output, and its tensors."""
    tensors: list[Tensor] = []
    structure = _structure(platform, tree, tensors, who)
    return MessageLayout(tuple(_meta(platform, each, who) for each in tensors), structure), tensors


def _structure(platform: Platform, tree: Any, tensors: list[Tensor], who: str) -> Any:
    """Return the nested structure of a stage's output, and append its tensors to `tensors`."""
    if isinstance(tree, platform.Tensor):
        tensors.append(tree)
        return ["tensor"]
    if isinstance(tree, (tuple, list)):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return [kind, [_structure(platform, each, tensors, who) for each in tree]]
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return ["dict", {key: _structure(platform, each, tensors, who) for key, each in tree.items()}]
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return ["value", tree]
    raise PipelineError(
        f"{who} returns a {type(tree).__name__}, which cannot be sent to the next stage; expected tensors, numbers, "
        "strings and None, in tuples, lists and dicts with string keys"
    )


def _rebuild(structure: Any, remaining: list[Tensor]) -> Any:
    """Fill a structure with the first of `remaining` tensors, which are removed from the list."""
    kind, *content = structure
    if kind == "tensor":
        return remaining.pop(0)
    if kind == "value":
        return content[0]
    if kind == "dict":
        return {key: _rebuild(each, remaining) for key, each in content[0].items()}
    items = [_rebuild(each, remaining) for each in content[0]]
    return tuple(items) if kind == "tuple" else items


def _meta(platform: Platform, x: Tensor, who: str) -> TensorMeta:
    """Return the metadata of a tensor to send."""
    shape = platform.local_shape(x)
    requires_grad = platform.requires_grad(x) and platform.is_grad_enabled()
    dtype = platform.dtype_name(x.dtype)
    if not isinstance(x, DTensor):
        return TensorMeta(shape, dtype, requires_grad)
    global_shape: tuple[int, ...] = tuple(x.spec.shape)
    shards = tuple(_shard(placement, x, who) for placement in x.placements)
    axes = tuple((axis.name, axis.sizes, axis.strides) for axis in x.device_mesh.axes)
    return TensorMeta(shape, dtype, requires_grad, axes, shards, global_shape)


def _shard(placement: Placement, x: Any, who: str) -> int | None:
    """Return the sharded dimension, or None if replicated; raise `PipelineError` for other placements."""
    if placement.is_replicate():
        return None
    if type(placement) is Shard:
        return placement.dim
    raise PipelineError(
        f"{who} returns a DTensor with placements {list(x.placements)}; between stages expected Shard or Replicate, "
        "so redistribute it first"
    )


def as_distributed(x: Tensor, meta: TensorMeta, mesh: DeviceMesh | None, who: str) -> Tensor:
    """Wrap a received tensor as a DTensor like the one that was sent, on the ranks of this stage.

    Args:
        mesh: mesh of the pipeline, of which the tensor's mesh axes are part; None if there is none.
    """
    if not meta.axes:
        return x
    if mesh is None:
        raise PipelineError(f"{who} receives a DTensor; give the pipeline a mesh (mesh['pp']), not a process group")
    placements = [Replicate() if dim is None else Shard(dim) for dim in meta.shards]
    axes = [MeshAxis(*axis) for axis in meta.axes]
    return DTensor.from_local(x, mesh.along(axes), placements, shape=meta.global_shape)


def send_header(group: ProcessGroup, layout: MessageLayout, platform: Platform) -> list[tuple[Any, Tensor]]:
    """Start to send a layout to the second rank of a group of two; returns handles with the buffers in use."""
    data = layout.to_bytes()
    # The first 8 bytes are the length of the layout.
    head = len(data).to_bytes(8, "little") + data
    messages = [head[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), head[HEADER_BYTES:]]
    buffers = [platform.from_numpy(np.frombuffer(each, np.uint8).copy()) for each in messages if each]
    return [(group.send(buffer, 1, async_op=True), buffer) for buffer in buffers]


def start_header(group: ProcessGroup, platform: Platform) -> tuple[Work, Tensor]:
    """Post the receive of a layout from the first rank of a group of two."""
    first = platform.empty((HEADER_BYTES,), platform.dtype("uint8"))
    return group.receive(first, 0, async_op=True), first


def receive_header(group: ProcessGroup, platform: Platform, started: tuple[Work, Tensor]) -> MessageLayout:
    """Wait for a layout whose receive is posted, and return it."""
    work, first = started
    work.wait()
    # The host reads it: buffers for the data are allocated from the layout.
    data = platform.to_numpy(first).tobytes()
    length = int.from_bytes(data[:8], "little")
    if length > HEADER_BYTES - 8:
        rest = platform.empty((length + 8 - HEADER_BYTES,), platform.dtype("uint8"))
        group.receive(rest, 0).wait()
        data += platform.to_numpy(rest).tobytes()
    return MessageLayout.from_bytes(data[8 : 8 + length])


Buffers = list[tuple[Work, Tensor]]


@dataclass
class _Sent:
    """Buffers being sent, and the position in the receiver's list of the action that needs them.

    Once the receiver has finished that action, or a later one, the buffers have arrived.
    """

    needed_by: int
    buffers: Buffers


class Transfers:
    """The messages that one rank exchanges with the ranks of neighbouring stages.

    Each ordered pair of ranks has its own process group, so that the two directions do not block each other. Messages
    of a pair are matched by their order of sending. The receiver derives this order from the sender's actions, and sets
    aside messages that it needs later. The first message between two stages in a step is preceded by a header with its
    `MessageLayout`; all micro-batches of the step have this layout. With fixed shapes, all later training steps use the
    layouts of the first one.

    Args:
        rank: this rank's index in the pipeline.
        ranks: the global rank of each index.
        mesh: mesh of the pipeline, for received DTensors; None if there are none.
        fixed_shapes: all steps with a backward have the shapes of the first, which are sent only once.
        receives_ahead: number of receives posted for each peer before they are needed, so that a sender finds a buffer
            ready; 0: each is posted when it is needed.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        ranks: Sequence[int],
        world: World,
        platform: Platform,
        mesh: DeviceMesh | None,
        *,
        fixed_shapes: bool = False,
        receives_ahead: int = RECEIVES_AHEAD,
    ) -> None:
        self.mesh, self._ahead = mesh, receives_ahead
        self._schedule, self._rank, self._ranks = schedule, rank, tuple(ranks)
        self._world, self._platform = world, platform
        self._is_connected = self._keeps_layouts = False
        # Positions in each rank's list: if an action of a peer is finished, so are all earlier ones of that peer.
        self._position = {action: i for actions in schedule.actions for i, action in enumerate(actions)}
        self._backwards = {(a.stage, a.microbatch): a for a in self._position if a.kind in PRODUCES_INPUT_GRAD}
        self._layouts: dict[int, MessageLayout] = {}
        self._headers: dict[int, tuple[Work, Tensor]] = {}
        self._fixed: dict[int, MessageLayout] | None = {} if fixed_shapes else None
        self._sent: dict[int, list[_Sent]] = {}
        self._expected: dict[int, deque[Action]] = {}
        self._arriving: dict[int, dict[Action, Buffers]] = {}

    def start_step(self, *, forward_only: bool = False) -> None:
        """Prepare a step: connect to the neighbours (once), discard old layouts and post the first receives."""
        if not self._is_connected:
            self._connect()
            self._is_connected = True
        # Evaluation may have other shapes than training: it neither uses nor changes the fixed ones.
        keeps_layouts = self._fixed is not None and not forward_only
        self._layouts = dict(self._fixed or ()) if keeps_layouts else {}
        self._keeps_layouts = keeps_layouts
        peers = {source for source, target in _pairs(self._schedule) if target == self._rank}
        self._expected = {peer: deque(self._messages_of(peer, forward_only)) for peer in peers}
        self._arriving = {peer: {} for peer in peers}
        # Those of a start that has failed may be on groups that are closed by now.
        self._headers = {}
        # Before the first computation: a peer that is ahead finds a buffer ready.
        for peer in peers:
            with self._naming(peer, "receiving its first messages"):
                self._receive_ahead(peer)

    def end_step(self) -> None:
        """Wait until all sends have completed."""
        for peer, pending in self._sent.items():
            for each in pending:
                with self._naming(peer, "sending its last messages"):
                    _wait(each.buffers)
        self._sent.clear()
        # Only after a complete step, so that a failed one leaves the fixed shapes as they were.
        if self._keeps_layouts:
            self._fixed = self._layouts

    def reset(self) -> None:
        """Discard pending messages after an error."""
        self._sent.clear()
        self._arriving.clear()
        self._headers.clear()

    def send_forward(self, action: Action, layout: MessageLayout, tensors: Sequence[Tensor]) -> None:
        """Send a stage's outputs (local tensors) to the next stage."""
        stage, microbatch = action.stage, action.microbatch
        peer = self._schedule.rank_of_stage[stage + 1]
        group = self._group(self._rank, peer)
        known = self._layouts.get(stage)
        buffers: Buffers = []
        if known is None:
            # Recorded here too: the gradients that come back have these shapes.
            self._layouts[stage] = layout
            buffers += send_header(group, layout, self._platform)
        elif known != layout:
            raise PipelineError(_changed(stage, microbatch, known, layout, is_fixed=bool(self._fixed)))
        buffers += self._send(group, tensors)
        self._note_sent(peer, Action(stage + 1, Kind.FORWARD, microbatch), buffers)

    def receive_forward(self, action: Action) -> tuple[MessageLayout, list[Tensor]]:
        """Wait for the inputs of a stage from another rank, and return them with their layout."""
        source = action.stage - 1
        peer = self._schedule.rank_of_stage[source]
        with self._naming(peer, "receiving the inputs of", action):
            tensors = self._take(action, peer)
        self._arrived(peer, Action(source, Kind.FORWARD, action.microbatch))
        return self._layouts[source], tensors

    def send_backward(self, action: Action, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of a stage's inputs to the stage before."""
        peer = self._schedule.rank_of_stage[action.stage - 1]
        buffers = self._send(self._group(self._rank, peer), gradients)
        # `B` or `I`, whichever the schedule of the peer has.
        needed_by = self._backwards[action.stage - 1, action.microbatch]
        self._note_sent(peer, needed_by, buffers)

    def receive_backward(self, action: Action) -> list[Tensor]:
        """Wait for the gradients of those outputs of a stage that require one, and return them in order."""
        peer = self._schedule.rank_of_stage[action.stage + 1]
        with self._naming(peer, "receiving the gradients for", action):
            tensors = self._take(action, peer)
        self._arrived(peer, self._backwards[action.stage + 1, action.microbatch])
        return tensors

    def start_receive(self, action: Action) -> None:
        """Post the receive of a message that a computation will need, if its shapes are known by now."""
        if not self._ahead:
            return
        if action.kind is Kind.RECEIVE_FORWARD:
            needed_by, source = Action(action.stage, Kind.FORWARD, action.microbatch), action.stage - 1
        else:
            needed_by, source = self._backwards[action.stage, action.microbatch], action.stage + 1
        peer = self._schedule.rank_of_stage[source]
        with self._naming(peer, "receiving the inputs of", needed_by):
            self._receive_until(needed_by, peer, may_wait=False)
            self._receive_ahead(peer)

    def _take(self, action: Action, peer: int) -> list[Tensor]:
        """Wait for the message that a computation needs, and return its tensors."""
        self._receive_until(action, peer, may_wait=True)
        buffers = self._arriving[peer].pop(action)
        # Posted before waiting: the following messages may arrive in the meantime.
        self._receive_ahead(peer)
        _wait(buffers)
        return [tensor for _, tensor in buffers]

    def _receive_until(self, needed_by: Action, peer: int, *, may_wait: bool) -> None:
        """Post the receives of a peer's messages up to the one that an action needs.

        Args:
            may_wait: block until its shapes are known; False: return before it if they are not.
        """
        expected, arriving = self._expected[peer], self._arriving[peer]
        # In the order of sending, not of need: messages of a pair of ranks are matched by their order.
        while needed_by not in arriving:
            metas = self._metas(expected[0], peer, may_wait)
            if metas is None:
                return
            arriving[expected.popleft()] = self._receive(peer, metas)

    def _receive_ahead(self, peer: int) -> None:
        """Post up to `receives_ahead` receives from a peer, as far as shapes are known."""
        expected, arriving = self._expected[peer], self._arriving[peer]
        while expected and len(arriving) < self._ahead:
            metas = self._metas(expected[0], peer, may_wait=False)
            if metas is None:
                return
            arriving[expected.popleft()] = self._receive(peer, metas)

    def _metas(self, needed_by: Action, peer: int, may_wait: bool) -> Sequence[TensorMeta] | None:
        """Return the metadata of a message's tensors, or None if its header has not been received yet."""
        if needed_by.kind is not Kind.FORWARD:
            # Gradients have no header: they are shaped like the outputs that this rank has sent and that require one.
            sent = self._layouts.get(needed_by.stage)
            return None if sent is None else [meta for meta in sent.tensors if meta.requires_grad]
        source = needed_by.stage - 1
        if source not in self._layouts:
            group = self._group(peer, self._rank)
            if source not in self._headers:
                self._headers[source] = start_header(group, self._platform)
            if not may_wait:
                return None
            # Blocks until the peer has sent its first output. Only a computation that needs the message may wait for
            # it.
            self._layouts[source] = receive_header(group, self._platform, self._headers.pop(source))
        return self._layouts[source].tensors

    def _messages_of(self, peer: int, forward_only: bool) -> Iterator[Action]:
        """Yield the actions of this rank that need a message from a peer, in the order of sending."""
        owners = self._schedule.rank_of_stage
        for action in self._schedule.actions[peer]:
            following, before = action.stage + 1, action.stage - 1
            if action.kind is Kind.FORWARD and following < len(owners) and owners[following] == self._rank:
                yield Action(following, Kind.FORWARD, action.microbatch)
            if action.kind in PRODUCES_INPUT_GRAD and before >= 0 and owners[before] == self._rank and not forward_only:
                yield self._backwards[before, action.microbatch]

    def _receive(self, peer: int, metas: Sequence[TensorMeta]) -> Buffers:
        """Allocate buffers for the next message of a peer and post their receives."""
        group, platform = self._group(peer, self._rank), self._platform
        tensors = [platform.empty(meta.shape, platform.dtype(meta.dtype)) for meta in metas]
        return [(group.receive(tensor, 0, async_op=True), tensor) for tensor in tensors]

    def _send(self, group: ProcessGroup, tensors: Sequence[Tensor]) -> Buffers:
        """Start to send tensors to the second rank of a group."""
        # Detached, so that a pending send does not hold the graph.
        contiguous = [self._platform.contiguous(self._platform.detach(tensor)) for tensor in tensors]
        return [(group.send(tensor, 1, async_op=True), tensor) for tensor in contiguous]

    def _note_sent(self, peer: int, needed_by: Action, buffers: Buffers) -> None:
        """Hold the buffers of a send until `_arrived` or the end of the step."""
        self._sent.setdefault(peer, []).append(_Sent(self._position[needed_by], buffers))

    def _arrived(self, peer: int, made_by: Action) -> None:
        """Complete the sends that a peer has received, since its action `made_by`, whose result arrived, came after.

        Waiting only for such sends frees their memory during the step without blocking.
        """
        finished = self._position[made_by]
        pending = self._sent.get(peer, [])
        for each in pending:
            if each.needed_by <= finished:
                _wait(each.buffers)
        self._sent[peer] = [each for each in pending if each.needed_by > finished]

    def _group(self, source: int, target: int) -> ProcessGroup:
        """Return the process group of messages from one rank of the pipeline to another."""
        # The sender is rank 0 of the group, the receiver rank 1.
        return self._world.group((self._ranks[source], self._ranks[target]))

    def _connect(self) -> None:
        """Connect to all neighbours, by a first broadcast in each group."""
        # Connecting blocks until the peer takes part, so all ranks go through the pairs in the same order.
        for source, target in sorted(_pairs(self._schedule)):
            if self._rank in (source, target):
                peer = target if self._rank == source else source
                with self._naming(peer, "connecting"):
                    one = self._platform.zeros((1,), self._platform.dtype("float32"))
                    self._group(source, target).broadcast(one, 0)

    def _naming(self, peer: int, doing: str, action: Action | None = None) -> _Naming:
        """Return a context in which a communication error is raised as one that names the peer."""
        return _Naming(self, peer, doing, action)

    def failure(self, peer: int, doing: str, error: BaseException) -> PipelineError:
        """Return an error that names the rank with which communication failed."""
        owners = enumerate(self._schedule.rank_of_stage)
        stages = ", ".join(str(stage) for stage, owner in owners if owner == peer)
        return PipelineError(
            f"rank {self._ranks[self._rank]} (rank {self._rank} of the pipeline) failed in {doing}: rank "
            f"{self._ranks[peer]}, which has stages {stages}, has ended or did not respond in time; "
            f"look at its error first. {error}"
        )


class _Naming:
    """Context manager that converts communication errors into ones that name the peer."""

    # A class instead of a generator, which is slower to enter: a step enters one for each message.

    __slots__ = ("_action", "_doing", "_peer", "_transfers")

    def __init__(self, transfers: Transfers, peer: int, doing: str, action: Action | None) -> None:
        self._transfers, self._peer, self._doing, self._action = transfers, peer, doing, action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, (RuntimeError, OSError)) and not isinstance(error, PipelineError):
            doing = self._doing if self._action is None else f"{self._doing} {self._action}"
            raise self._transfers.failure(self._peer, doing, error) from error


def _pairs(schedule: Schedule) -> set[tuple[int, int]]:
    """Return (sender, receiver) for every pair of ranks with neighbouring stages, in both directions."""
    owners = schedule.rank_of_stage
    neighbours = {(a, b) for a, b in itertools.pairwise(owners) if a != b}
    return neighbours | {(b, a) for a, b in neighbours}


def _wait(buffers: Buffers) -> None:
    for work, _ in buffers:
        work.wait()


def _changed(stage: int, microbatch: int, known: MessageLayout, layout: MessageLayout, *, is_fixed: bool) -> str:
    """Return the message of the error for an output whose shapes have changed."""

    def described(each: MessageLayout) -> str:
        return ", ".join(f"{meta.dtype}{list(meta.shape)}" for meta in each.tensors) or "no tensors"

    first = "those of earlier steps" if is_fixed else "the step's first"
    advice = (
        "the pipeline's shapes are fixed, so pad the batch, or create the pipeline with fixed_shapes=False"
        if is_fixed
        else "all micro-batches of a step must have outputs of equal shapes, so make micro-batches equal (pad them, or "
        "change their number); the next step may have other shapes"
    )
    return (
        f"stage {stage} returned {described(layout)} for micro-batch {microbatch} and {described(known)} for {first}; "
        f"{advice}"
    )
