"""`Routing`, the selected experts of the tokens of one call, checks of a layer's inputs, and the capacity of experts.

Each rank checks its own inputs. If ranks exchange tokens, a rank with invalid inputs takes part in the exchange of
sizes, the first collective of a call, and sends an error code with its sizes. So no rank waits forever for one that
raised, and all ranks raise together.

Capacity bounds the tokens of an expert in the micro-batch of all ranks together. The ranks therefore gather all
choices, and the host waits for the device. Dropless routing, the default, does neither."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor
from hp_moe.exceptions import ExpertParallelError, MoEConfigError

Tensor = Any


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts and scores of the tokens of one call.

    Attributes:
        experts: int64 `[tokens, top_k]`, global expert numbers; a token may have the same expert twice.
        counts: int64 `[num_experts]`, number of choices of each expert.
        scores: float32 `[tokens, top_k]`; None if results are not weighted.
        is_expert_major: whether tokens are already sorted by expert and `top_k` is 1.
        has_dropped: whether `experts` may contain `num_experts`, which marks a dropped choice.
        allow_nonfinite: let infinite and NaN scores through.

    Examples:
        >>> experts = platform.from_numpy(np.array([[0, 1], [1, 2]]))  # of two tokens, two each
        >>> routing = Routing(experts, counts=platform.from_numpy(np.array([1, 2, 1])))
        >>> tuple(routing.experts.shape)
        (2, 2)
    """

    experts: Tensor
    counts: Tensor
    scores: Tensor | None = None
    is_expert_major: bool = False
    has_dropped: bool = False
    allow_nonfinite: bool = False

    @classmethod
    def expert_major(cls, platform: Platform, counts: Tensor, num_rows: int, num_experts: int) -> Routing:
        """Return the routing of rows that are already sorted by expert. Reading the counts waits for the device.

        Args:
            counts: number of rows of each expert, an integer tensor `[num_experts]`.
            num_rows: number of rows.
            num_experts: number of experts of all ranks.

        Raises:
            ExpertParallelError: `counts` has another shape, holds negative or non-integer numbers, or does not add up
                to `num_rows`.
        """
        host = platform.to_numpy(counts)
        _check_counts(host, num_rows, num_experts)
        experts = numpy.repeat(numpy.arange(num_experts), host).reshape(-1, 1)
        int64 = platform.ops.cast(counts, platform.dtype("int64"))
        return cls(platform.from_numpy(experts, platform.device_of(counts)), int64, is_expert_major=True)


def count_keys(platform: Platform, keys: Tensor, num_keys: int) -> Tensor:
    """Count how often each key below `num_keys` occurs in an int tensor of any shape: int64 `[num_keys]`."""
    size = int(numpy.prod(keys.shape))
    if size == 0:
        return platform.zeros((num_keys,), platform.dtype("int64"))
    return platform.ops.bincount(platform.ops.reshape(keys, (size,)), num_keys)


class DeviceTable:
    """A table of integers that is copied to each device once, at the first look-up there.

    Args:
        values: integers `[entries, ...]`, at least one entry.

    Examples:
        >>> table = DeviceTable(platform, np.array([5, 7]))
        >>> platform.to_numpy(table.look_up(platform.from_numpy(np.array([[1], [0]])))).tolist()
        [[7], [5]]
    """

    def __init__(self, platform: Platform, values: numpy.ndarray) -> None:
        self.platform = platform
        self._values = values.astype(numpy.int64)
        self._on_device: dict[str, Tensor] = {}

    def look_up(self, index: Tensor) -> Tensor:
        """Return the entries at an int tensor of any shape: int64 `[*index.shape, ...]`.

        Numbers out of range get the nearest entry.
        """
        ops, size, device = self.platform.ops, math.prod(index.shape), self.platform.device_of(index)
        shape = (*index.shape, *self._values.shape[1:])
        if size == 0:
            return self.platform.zeros(shape, self.platform.dtype("int64"), device)
        table = self._on_device.get(str(device))
        if table is None:
            table = self._on_device[str(device)] = self.platform.from_numpy(self._values, device)
        flat = ops.clamp(ops.reshape(index, (size,)), min=0, max=len(self._values) - 1)
        return ops.reshape(ops.index_select(table, 0, flat), shape)


def local_numbers(platform: Platform, num_experts: int, first: int, num_local: int) -> DeviceTable:
    """Return a table from experts to numbers from the first one of a rank; `num_local` for those of other ranks.

    The last entry, at `num_experts`, is for dropped choices, which no rank owns.
    """
    # A key behind all own experts, so that rows of other ranks are sorted to the end.
    numbers = numpy.full(num_experts + 1, num_local)
    numbers[first : first + num_local] = numpy.arange(num_local)
    return DeviceTable(platform, numbers)


def _check_counts(counts: numpy.ndarray, num_rows: int, num_experts: int) -> None:
    """Raise if the counts do not describe the rows."""
    # Grouped products of too few rows would not fail by themselves.
    if counts.shape != (num_experts,):
        raise ExpertParallelError(
            f"num_tokens_per_expert: expected one count for each of {num_experts} experts, got shape "
            f"{list(counts.shape)}"
        )
    if counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ExpertParallelError(
            f"num_tokens_per_expert: expected integers of at least 0, got {counts.tolist()} ({counts.dtype})"
        )
    if counts.sum() != num_rows:
        raise ExpertParallelError(
            f"num_tokens_per_expert: the counts {counts.tolist()} add up to {int(counts.sum())}, but there are "
            f"{num_rows} rows"
        )


# A rank with invalid inputs adds this times its error code to a number of rows that ranks exchange anyway. No rank
# sends as many rows, so both can be decoded.
FAULTY = 1 << 40
_BAD_EXPERTS, _BAD_SCORES, _BAD_INPUTS = 1, 2, 3
_KINDS = {
    _BAD_EXPERTS: "expert numbers out of range, or counts that do not add up to the choices",
    _BAD_SCORES: "scores that are not finite",
    _BAD_INPUTS: "invalid inputs, see the error of that rank",
}
_INTEGERS = ("int64", "int32")


def check_inputs(platform: Platform, x: Tensor, weights: dict[str, Tensor], routing: Routing, num_experts: int) -> None:
    """Check shapes and dtypes, and values on the host; `faults` checks those on an accelerator without waiting."""
    problems = [*_shape_problems(x, weights, routing, num_experts), *_dtype_problems(platform, x, weights, routing)]
    if problems:
        raise ExpertParallelError("; ".join(problems))
    check_values(platform, routing, num_experts)


def check_values(platform: Platform, routing: Routing, num_experts: int) -> None:
    """Check the values of a routing on the host; one on an accelerator is not read."""
    if not routing.is_expert_major and is_on_host(platform, routing.experts):
        problems, nonfinite = [*_value_problems(platform, routing, num_experts)], [*_nonfinite(platform, routing)]
        if problems or nonfinite:
            raise ExpertParallelError("; ".join([*problems, *nonfinite]), only_nonfinite=not problems)


def check_ids(platform: Platform, ids: Tensor | None, num_tokens: int, vocab_size: int) -> None:
    """Check the token ids of hash routing; the values of ids on an accelerator are not read."""
    if ids is None or tuple(ids.shape) != (num_tokens,):
        got = "none" if ids is None else f"shape {list(ids.shape)}"
        raise ExpertParallelError(
            f"hash routing selects experts by token id: expected one for each of {num_tokens} tokens, got {got}; "
            "call the layer with ids"
        )
    if platform.dtype_name(ids.dtype) not in _INTEGERS:
        raise ExpertParallelError(f"ids: expected int64, got {platform.dtype_name(ids.dtype)}")
    if is_on_host(platform, ids):
        numbers = platform.to_numpy(ids)
        bad = numbers[(numbers < 0) | (numbers >= vocab_size)]
        if bad.size:
            raise ExpertParallelError(
                f"ids: expected numbers from 0 to hash_vocab_size - 1 = {vocab_size - 1}, got {bad[0]} "
                f"({bad.size} out of range)"
            )


def faults(platform: Platform, routing: Routing, num_experts: int, rank: int) -> Tensor:
    """Check a routing on its device; return int64 `[1]` to add to a number of rows: 0, or `FAULTY` times a code."""
    ops, int64 = platform.ops, platform.dtype("int64")
    # All comparisons stay on the device: the result is read together with the exchanged sizes.
    experts = ops.reshape(routing.experts, (-1,))
    counted, num_choices = ops.sum(routing.counts), int(experts.shape[0])
    if routing.has_dropped:
        # Dropped choices (`num_experts`) are in no count, so counts and dropped choices add up to all choices.
        counted = ops.add(counted, ops.sum(ops.cast(ops.ge(experts, num_experts), int64)))
    wrong = ops.ne(counted, num_choices)
    if num_choices:
        largest = num_experts if routing.has_dropped else num_experts - 1
        outside = ops.logical_or(ops.lt(ops.amin(experts, 0), 0), ops.gt(ops.amax(experts, 0), largest))
        wrong = ops.logical_or(wrong, outside)
    code = ops.mul(ops.cast(wrong, int64), fault_code(rank, _BAD_EXPERTS) * FAULTY)
    if routing.scores is not None and not routing.allow_nonfinite:
        # Zero times a number that is not finite is NaN, the only value that differs from itself.
        zero = ops.sum(ops.mul(platform.detach(routing.scores), 0.0))
        scores = ops.mul(ops.cast(ops.ne(zero, zero), int64), fault_code(rank, _BAD_SCORES) * FAULTY)
        # One code per rank; wrong experts are reported before scores that are not finite.
        code = ops.where(wrong, code, scores)
    return ops.reshape(code, (1,))


def fault_code(rank: int, kind: int = _BAD_INPUTS) -> int:
    """Return the error code, above 0, of a kind of fault on a rank of the job."""
    # Kinds are 1 to 3, so that a code is never 0 and both parts can be decoded.
    return 4 * rank + kind


@contextlib.contextmanager
def reported_faults(dispatcher: Any, platform: Platform, x: Tensor) -> Iterator[None]:
    """Report an error raised in this context to the ranks of a dispatcher, by a message on the device of `x`."""
    try:
        yield
    except ExpertParallelError:
        # Other ranks are about to exchange sizes and would wait for this one.
        dispatcher.report_fault(fault_code(current_world(platform).rank), platform.device_of(x))
        raise


class RefusedRouting(ExpertParallelError):
    """Error that every rank raises when some ranks reported invalid inputs; `code` is that of the first fault."""

    def __init__(self, codes: Sequence[int]) -> None:
        self.code = codes[0]
        faults_of_ranks = "; ".join(f"rank {code // 4}: {_KINDS[code % 4]}" for code in codes)
        only_nonfinite = all(code % 4 == _BAD_SCORES for code in codes)
        super().__init__(f"routing of {faults_of_ranks}; nothing was sent", only_nonfinite=only_nonfinite)


def refuse_faulty(numbers: Sequence[int]) -> None:
    """Raise, naming ranks and faults, if any rank added an error code to its number of rows."""
    # A number of rows is below FAULTY, so the quotient is the code.
    codes = sorted({int(number) // FAULTY for number in numbers} - {0})
    if codes:
        raise RefusedRouting(codes)


def is_on_host(platform: Platform, x: Tensor) -> bool:
    return str(platform.device_of(x)).startswith("cpu")


def _shape_problems(x: Tensor, weights: dict[str, Tensor], routing: Routing, num_experts: int) -> Iterator[str]:
    dim = int(weights["w1"].shape[2])
    if len(x.shape) != 2 or int(x.shape[1]) != dim:
        yield f"x: expected [tokens, {dim}], got shape {list(x.shape)}"
        return
    experts = tuple(routing.experts.shape)
    if len(experts) != 2 or experts[0] != int(x.shape[0]):
        yield f"routing.experts: expected [{x.shape[0]}, top_k], a row for each token, got shape {list(experts)}"
    if routing.scores is not None and tuple(routing.scores.shape) != experts:
        yield f"routing.scores: expected the shape of experts, {list(experts)}, got {list(routing.scores.shape)}"
    if tuple(routing.counts.shape) != (num_experts,):
        yield f"routing.counts: expected one for each of {num_experts} experts, got shape {list(routing.counts.shape)}"


def _dtype_problems(platform: Platform, x: Tensor, weights: dict[str, Tensor], routing: Routing) -> Iterator[str]:
    name = platform.dtype_name
    # In mixed precision FSDP casts the local tensor of a DTensor, whose own dtype stays the old one.
    local = {key: platform.unwrap(each) if isinstance(each, DTensor) else each for key, each in weights.items()}
    others = {key: name(each.dtype) for key, each in local.items() if each.dtype != x.dtype}
    if others:
        found = ", ".join(f"{key} {dtype}" for key, dtype in others.items())
        yield f"x is {name(x.dtype)}, but the weights are not: {found}; cast one of them, or give FSDP's param_dtype"
    for key in ("experts", "counts"):
        dtype = getattr(routing, key).dtype
        if name(dtype) not in _INTEGERS:
            yield f"routing.{key}: expected int64, got {name(dtype)}"
    if routing.scores is not None and not platform.is_floating(routing.scores.dtype):
        yield f"routing.scores: expected float32, got {name(routing.scores.dtype)}"


def _value_problems(platform: Platform, routing: Routing, num_experts: int) -> Iterator[str]:
    experts, counts = platform.to_numpy(routing.experts), platform.to_numpy(routing.counts)
    largest = num_experts if routing.has_dropped else num_experts - 1
    bad = (experts < 0) | (experts > largest)
    if bad.any():
        token, slot = numpy.argwhere(bad)[0]
        yield (
            f"routing.experts: expected numbers from 0 to {num_experts - 1}, got {experts[token, slot]} for token "
            f"{token}, slot {slot} ({int(bad.sum())} in all)"
        )
    elif (numpy.bincount(experts.reshape(-1), minlength=num_experts)[:num_experts] != counts).any():
        yield (
            f"routing.counts: expected the number of choices of each expert, which sum to "
            f"{int((experts < num_experts).sum())}, got {counts.tolist()}, which sum to {int(counts.sum())}"
        )


def _nonfinite(platform: Platform, routing: Routing) -> Iterator[str]:
    if routing.scores is not None and not routing.allow_nonfinite:
        scores = platform.to_numpy(platform.detach(routing.scores))
        bad = ~numpy.isfinite(scores)
        if bad.any():
            token, slot = numpy.argwhere(bad)[0]
            yield (
                f"routing.scores: expected finite numbers, got {scores[token, slot]} for token {token}, slot {slot} "
                f"({int(bad.sum())} in all); check the layer's input and router.gate.weight"
            )


Array = numpy.ndarray
DropPolicy = Literal["probability", "position"]


@dataclass(frozen=True)
class Capacity:
    """A bound on the number of tokens that choose an expert.

    Attributes:
        factor: the bound as a multiple of the mean number of choices per expert; rounded up.
        drop: which choices are dropped: those with the lowest scores (`probability`) or of the last tokens
            (`position`). Among equal scores the last tokens are dropped. Tokens are ordered by the rank that they are
            given to, then by position in the input. If plain inputs are shards of a sequence (`MoE.sequence_mesh`),
            this is not the order in the sequence, and other choices may be dropped than on one rank: with `position`
            any of them, with `probability` those of equal scores.

    Raises:
        MoEConfigError: the factor is not positive and finite, or `drop` is neither policy.

    Examples:
        >>> with nn.building(platform):
        ...     layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2, capacity=Capacity(1.25))
        >>> layer.capacity.bound(num_tokens=16, top_k=2, num_experts=4)
        10
    """

    factor: float
    drop: DropPolicy = "probability"

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf or self.drop not in ("probability", "position"):
            raise MoEConfigError(
                f"capacity: expected a factor above 0 and drop 'probability' or 'position', got {self.factor} and "
                f"{self.drop!r}"
            )

    def bound(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """Return the maximum number of choices of one expert, for `num_tokens` tokens of all ranks."""
        return math.ceil(self.factor * num_tokens * top_k / num_experts)


@dataclass(frozen=True)
class Choices:
    """The selected experts and scores `[tokens, top_k]` of tokens at `[tokens]` positions of the input, on the host."""

    experts: Array
    scores: Array
    positions: Array

    def encoded(self) -> bytes:
        """Return the arrays as bytes, to be sent to other ranks."""
        return self.experts.tobytes() + self.scores.tobytes() + self.positions.tobytes()

    @classmethod
    def decoded(cls, data: bytes, top_k: int) -> Choices:
        """Parse the result of `encoded`."""
        # 8 bytes of expert and 4 of score for each choice, and 8 of position for each token.
        tokens = len(data) // (top_k * 12 + 8)
        scores_at, positions_at = tokens * top_k * 8, tokens * top_k * 12
        return cls(
            numpy.frombuffer(data[:scores_at], numpy.int64).reshape(tokens, top_k),
            numpy.frombuffer(data[scores_at:positions_at], numpy.float32).reshape(tokens, top_k),
            numpy.frombuffer(data[positions_at:], numpy.int64),
        )


def choices_within_capacity(
    mine: Choices, capacity: Capacity, num_experts: int, group: ProcessGroup | None, block_size: int = 1
) -> Array:
    """Return which choices of this rank are within the capacity; `block_size` ranks of the group share an input."""
    top_k = mine.experts.shape[1]
    # Every rank sorts the choices of all ranks, which replaces a second exchange for the result.
    every = [mine] if group is None else [Choices.decoded(d, top_k) for d in group.all_gather_bytes(mine.encoded())]
    rank = 0 if group is None else group.rank
    lengths = [len(each.positions) for each in every]
    bound = capacity.bound(sum(lengths), top_k, num_experts)
    within = _within_bound(every, lengths, capacity.drop, num_experts, bound, block_size)
    first = sum(lengths[:rank])
    return within[first : first + lengths[rank]]


def _within_bound(
    every: list[Choices], lengths: list[int], drop: DropPolicy, num_experts: int, bound: int, block_size: int
) -> Array:
    """Return for each choice of all ranks whether it is one of the `bound` choices that its expert accepts."""
    experts = numpy.concatenate([each.experts for each in every])
    scores = numpy.concatenate([each.scores for each in every])
    # Ranks that share one input form one block, in which tokens are ordered by position, not by rank.
    block = numpy.repeat(numpy.arange(len(every)) // block_size, lengths)
    positions = numpy.concatenate([each.positions for each in every])
    tokens, top_k = experts.shape
    slots = numpy.arange(top_k)
    keys = [numpy.broadcast_to(key, experts.shape).reshape(-1) for key in (slots, positions[:, None], block[:, None])]
    if drop == "probability":
        keys.append(-scores.reshape(-1))
    # lexsort takes the last key as the primary one: expert, then (for `probability`) score, block, position and slot.
    by_expert = numpy.lexsort([*keys, experts.reshape(-1)])
    counts = numpy.bincount(experts.reshape(-1), minlength=num_experts)
    starts = numpy.concatenate([[0], numpy.cumsum(counts)[:-1]])
    rank_in_expert = numpy.empty(tokens * top_k, numpy.int64)
    # Position in the sorted order minus the start of the expert's choices.
    rank_in_expert[by_expert] = numpy.arange(tokens * top_k) - numpy.repeat(starts, counts)
    return rank_in_expert.reshape(tokens, top_k) < bound
