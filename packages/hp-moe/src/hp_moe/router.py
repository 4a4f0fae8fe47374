"""Routing: score functions, selection of experts, jitter, recorded choices, and the router itself.

Logits, scores and probabilities are float32 `[tokens, num_experts]` throughout.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy

from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import saved_value
from hp_dtensor.spec.placements import Partial
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.saved_shards import pass_on, saving_shard
from hp_moe.exceptions import ExpertParallelError, MoEConfigError
from hp_moe.losses import attach_loss, is_trained
from hp_moe.routing import check_ids, count_keys

Tensor = Any
Ops = Any
ScoreFunction = Literal["softmax", "sigmoid", "sqrt_softplus", "softmax_of_top_k"]
Selection = Literal["top_k", "sinkhorn", "expert_choice"]
OverSequences = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Scoring:
    """A score function: scores before top-k, weights after it, and probabilities for auxiliary losses.

    Attributes:
        scores: maps (ops, logits) to the scores by which experts are chosen.
        weights: maps (ops, chosen scores `[tokens, top_k]`) to the weights of the experts' outputs.
        probabilities: maps (ops, logits, scores) to a distribution over all experts.
        sums_to_one: whether the weights of a token always sum to one.

    Examples:
        >>> def share(ops, logits, scores):
        ...     return ops.softmax(logits, 1)
        >>> with nn.building(platform):
        ...     router = TokenChoiceTopKRouter(dim=4, num_experts=8, top_k=2)
        >>> router.scoring = Scoring(lambda ops, logits: logits, lambda ops, chosen: chosen, share)
        >>> scores, experts, counts = router(platform.ops.ones((3, 4), platform.dtype("float32")))
        >>> float(platform.to_numpy(scores).sum())  # logits of a gate of zeros
        0.0
    """

    scores: Callable[[Ops, Tensor], Tensor]
    weights: Callable[[Ops, Tensor], Tensor]
    probabilities: Callable[[Ops, Tensor, Tensor], Tensor]
    sums_to_one: bool = False


def normalized(ops: Ops, scores: Tensor) -> Tensor:
    """Divide each row by its sum; a row of zeros stays zero."""
    return ops.div(scores, ops.add(ops.sum(scores, 1, keepdim=True), 1e-20))


def _sqrt_softplus(ops: Ops, logits: Tensor) -> Tensor:
    # softplus(x) = log(exp(0) + exp(x)) as a logsumexp neither overflows nor loses its gradient. The constant keeps the
    # gradient of the square root finite where softplus underflows to 0.
    softplus = ops.logsumexp(ops.stack([logits, ops.zeros_like(logits)], 0), 0)
    return ops.sqrt(ops.add(softplus, 1e-30))


def _same(ops: Ops, scores: Tensor) -> Tensor:
    return scores


def _share(ops: Ops, logits: Tensor, scores: Tensor) -> Tensor:
    return normalized(ops, scores)


SCORINGS: dict[str, Scoring] = {
    # Probabilities of auxiliary losses must be a distribution: the scores if they are a softmax, else their shares.
    "softmax": Scoring(lambda ops, logits: ops.softmax(logits, 1), _same, lambda ops, logits, scores: scores),
    # DeepSeek-V3, arXiv 2412.19437.
    "sigmoid": Scoring(lambda ops, logits: ops.sigmoid(logits), _same, _share),
    # DeepSeek-V4.
    "sqrt_softplus": Scoring(_sqrt_softplus, _same, _share),
    # gpt-oss, arXiv 2508.10925: top-k of the logits, then softmax over the chosen ones.
    "softmax_of_top_k": Scoring(
        _same,
        lambda ops, chosen: ops.softmax(chosen, 1),
        lambda ops, logits, scores: ops.softmax(logits, 1),
        sums_to_one=True,
    ),
}


# Selection over sequences -----------------------------------------------------------------------------------

# A fixed number, unlike Megatron-LM's loop until convergence: a sequence's result then depends neither on the other
# sequences of a batch nor on the layout, and the host does not wait. With logits of deviation 3, the weights of
# experts then differ by some two percent in sequences as long as the number of experts, and by less in longer ones.
# Counts of chosen tokens differ more: only the weights are balanced.
SINKHORN_STEPS = 16


def balanced_logits(ops: Ops, logits: Tensor) -> Tensor:
    """Add one number per expert, and one per token, to the logits of a sequence, such that all experts weigh the same.

    The results are logarithms of the matrix with equal sums of rows and of columns to which Sinkhorn's algorithm scales
    `exp(logits)` (arXiv 2111.04909), up to a number per token, which does not change the order of its experts.

    Args:
        logits: `[sequences, length, num_experts]`.
    """
    # With logarithms instead of products, large logits do not overflow.
    by_expert = logits
    for _ in range(SINKHORN_STEPS):
        by_token = ops.sub(by_expert, ops.logsumexp(by_expert, 2, keepdim=True))
        by_expert = ops.sub(by_token, ops.logsumexp(by_token, 1, keepdim=True))
    return by_expert


def experts_of_choosing_experts(ops: Ops, scores: Tensor, top_k: int) -> Tensor:
    """Let each expert select its best tokens of each sequence (arXiv 2202.09368), the earlier ones of equal scores.

    Args:
        scores: `[sequences, length, num_experts]`.
        top_k: mean number of experts per token.

    Returns:
        int64 `[sequences, length, num_experts]`: the expert's own number where it selects the token, else
        `num_experts`.
    """
    length, num_experts = int(scores.shape[1]), int(scores.shape[2])
    # The argsort of a permutation is its inverse: the rank of each token among those of its sequence.
    rank = ops.argsort(ops.argsort(scores, 1, stable=True, descending=True), 1)
    numbers = ops.add(ops.zeros_like(rank), ops.arange(num_experts, rank.dtype))
    return ops.masked_fill(numbers, ops.ge(rank, expert_capacity(length, top_k, num_experts)), num_experts)


def expert_capacity(length: int, top_k: int, num_experts: int) -> int:
    """Return how many tokens of a sequence each expert selects in expert choice.

    Examples:
        >>> expert_capacity(length=10, top_k=2, num_experts=8)  # 2.5, rounded up
        3
    """
    return -(-top_k * length // num_experts)


# Jitter ---------------------------------------------------------------------------------------------------

# SplitMix64's increment, 2**64 over the golden ratio, and its two mixing steps (shift, factor).
_GOLDEN = numpy.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def uniform_noise(numbers: numpy.ndarray, width: int, seed: int, call: int) -> numpy.ndarray:
    """Return uniform noise in [0, 1), float32 `[tokens, width]`, that depends only on token number, seed and call.

    A token therefore gets the same noise on whichever rank it is routed. Element i of token n is output n * width + i
    of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), a counter-based generator, started from `seed` and `call`.

    Args:
        numbers: global token numbers, int64 `[tokens]`, at least 0.

    Examples:
        >>> both, second = (uniform_noise(np.array(numbers), 3, seed=0, call=5) for numbers in ([7, 8], [8]))
        >>> (both[1] == second[0]).all()
        np.True_
    """
    # SeedSequence mixes seed and call, so that nearby pairs start at unrelated states.
    (start,) = numpy.random.SeedSequence([seed, call]).generate_state(1, numpy.uint64)
    # Counters start at 1: SplitMix64 adds the increment before it mixes.
    index = numbers.astype(numpy.uint64)[:, None] * numpy.uint64(width) + numpy.arange(1, width + 1, dtype=numpy.uint64)
    # SplitMix64 is defined modulo 2**64, which is how NumPy's uint64 arrays overflow.
    mixed = index * _GOLDEN + start
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> numpy.uint64(shift))) * numpy.uint64(factor)
    mixed ^= mixed >> numpy.uint64(31)
    # The upper 24 bits are as many as float32 represents exactly.
    noise: numpy.ndarray = (mixed >> numpy.uint64(40)).astype(numpy.float32) * numpy.float32(2.0**-24)
    return noise


class Tape:
    """The recorded expert choices of one layer, call by call, while they are recorded or replayed."""

    def __init__(self, name: str, calls: list[numpy.ndarray], *, replays: bool) -> None:
        self.name = name
        self.calls = calls
        self.replays = replays
        self.position = 0

    def next(self, num_tokens: int, top_k: int) -> numpy.ndarray:
        """Return the recorded experts of the next call, int64 `[tokens, top_k]`; there must be one of this shape."""
        if self.position == len(self.calls):
            raise ExpertParallelError(f"{self._layer}: only {len(self.calls)} calls were recorded, this is another one")
        experts = self.calls[self.position]
        # Before the position advances, so that the message names this call.
        if experts.shape != (num_tokens, top_k):
            raise ExpertParallelError(
                f"{self._layer}, call {self.position}: recorded with {experts.shape[0]} tokens of {experts.shape[1]} "
                f"experts, this call has {num_tokens} of {top_k}; replay the same batches in the same layout"
            )
        self.position += 1
        return experts

    def check_end(self) -> None:
        """Raise `ExpertParallelError` if calls are left to replay."""
        if self.replays and self.position != len(self.calls):
            raise ExpertParallelError(
                f"{self._layer}: {len(self.calls)} calls were recorded, but only {self.position} were replayed"
            )

    @property
    def _layer(self) -> str:
        return f"routing of layer {self.name!r}"


GroupScore = Literal["top2_sum", "max"]
AuxiliaryLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class TokenChoiceTopKRouter(nn.Module):
    """Router: scores every expert for every token, and selects the best `top_k` experts of each token by default.

    `selection` is one of:

    - `top_k`: the best experts of each token.
    - `sinkhorn`: in training the best experts by logits that are balanced within each sequence (Megatron-LM's Sinkhorn
      routing, after S-BASE, arXiv 2111.04909). Scores weight them, and no gradient flows through the balancing.
      Evaluation selects as `top_k` does.
    - `expert_choice`: each expert selects its best `top_k * length / num_experts` tokens of each sequence, rounded up
      (arXiv 2202.09368). A token has `top_k` experts on average, any number from none to all of them. Whether an
      expert selects a token depends on later tokens of the sequence: a causal model sees some of its future in
      training and evaluation, and cannot generate text.

    Both look at full sequences, so results are the same in any layout and for any micro-batches.

    Args:
        dim: width of a token.
        score_func: function of the float32 logits. `softmax` is over all experts, `sigmoid` and `sqrt_softplus` (square
            root of the softplus) are element-wise. `softmax_of_top_k` selects by logits and weights the selected
            experts by the softmax over their logits (gpt-oss).
        num_expert_groups: number of equal groups of consecutive experts; None for no groups.
        num_limited_groups: number of groups, those with the best `group_score`, that a token selects experts from.
        route_norm: divide a token's scores by their sum.
        route_scale: factor on the scores, after normalization.
        gate_bias: give the gate a trained bias.
        group_score: score of a group: the sum of its two best (biased) scores (`top2_sum`, DeepSeek-V3,
            arXiv 2412.19437) or the best one (`max`, DeepSeek-V2, arXiv 2405.04434).
        jitter: in training, multiply the gate's input by noise, uniform in [1 - jitter, 1 + jitter] (Switch,
            arXiv 2101.03961). The noise is drawn on the host from `jitter_seed`, the call and the token number.
        jitter_seed: seed of the noise; give layers different seeds for different noise.
        force_uniform: assign experts to tokens round-robin, for benchmarks; scores are still the gate's. Each rank
            starts with expert 0 at its own first token: loads are even on every rank, but a token's experts depend on
            the layout.
        hash_vocab_size: select experts by token id, below this number, instead of by score (arXiv 2106.04426). Scores
            still weight the outputs.
        selection: how experts are selected by score, see above.

    Attributes:
        expert_of_id: int64 buffer `[hash_vocab_size, top_k]`, the experts of each token id; an expert may occur twice.
            It is initialized at random and may be overwritten. None if experts are selected by score.

    Raises:
        MoEConfigError: options do not fit together; the message lists all problems.

    Examples:
        >>> with nn.building(platform):
        ...     router = TokenChoiceTopKRouter(dim=4, num_experts=8, top_k=2)
        >>> scores, experts, counts = router(platform.ops.ones((3, 4), platform.dtype("float32")))
        >>> tuple(scores.shape), int(platform.to_numpy(counts).sum())
        ((3, 2), 6)
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        score_func: ScoreFunction = "softmax",
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        route_norm: bool = False,
        route_scale: float = 1.0,
        *,
        gate_bias: bool = False,
        group_score: GroupScore = "top2_sum",
        jitter: float = 0.0,
        jitter_seed: int = 0,
        force_uniform: bool = False,
        hash_vocab_size: int | None = None,
        selection: Selection = "top_k",
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.selection = selection
        self.score_func = score_func
        self.num_expert_groups = num_expert_groups
        self.num_limited_groups = num_limited_groups
        self.route_norm = route_norm
        self.route_scale = route_scale
        self.group_score = group_score
        self.jitter = jitter
        self.jitter_seed = jitter_seed
        self.force_uniform = force_uniform
        self.hash_vocab_size = hash_vocab_size
        self.tapes: list[Tape] = []
        # All problems are reported at once, before any parameter is created.
        problems = list(_problems(self))
        if problems:
            raise MoEConfigError("router: " + "; ".join(problems))
        self.scoring = SCORINGS[score_func]
        if top_k == 1 and (route_norm or self.scoring.sums_to_one):
            # Models of this form exist, so it is no error.
            warnings.warn(
                f"router: {'route_norm' if route_norm else score_func} with top_k = 1 makes every score 1, so the gate "
                "learns from an auxiliary loss alone",
                stacklevel=2,
            )
        self.gate = nn.Linear(dim, num_experts, gate_bias)
        table = None
        if hash_vocab_size is not None:
            # A fixed seed: all ranks create the same table without communication.
            random = numpy.random.Generator(numpy.random.Philox(0))
            table = self.platform.from_numpy(random.integers(num_experts, size=(hash_vocab_size, top_k)))
        self.register_buffer("expert_of_id", table)
        # A buffer, so that checkpoints save it: a resumed run continues with new noise instead of repeating the old.
        calls = self.platform.zeros((1,), self.platform.dtype("int64")) if jitter else None
        self.register_buffer("jitter_calls", calls)

    def forward(
        self,
        x: Tensor,
        expert_bias: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        auxiliary: AuxiliaryLoss | None = None,
        token_numbers: Callable[[], numpy.ndarray] | None = None,
        over_sequences: OverSequences | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Route this rank's own tokens.

        Args:
            x: plain `[tokens, dim]`. The gradient of a distributed gate sums over the tokens of all ranks.
            expert_bias: float32 `[num_experts]`, added to the scores for selection only.
            ids: int64 `[tokens]`, for hash routing.
            auxiliary: maps (logits, probabilities, selected experts, counts) to a 0-d loss, whose gradient is added to
                that of the scores.
            token_numbers: returns the global numbers of the tokens, int64 `[tokens]`, on the host; called only for
                jitter. None: tokens are numbered from 0.
            over_sequences: applies a function of full sequences, `[sequences, length, num_experts]`, to a tensor
                `[tokens, num_experts]` of the tokens, and returns the result for them; called only for `sinkhorn` and
                `expert_choice`. None: the tokens are one sequence.

        Returns:
            top_scores: float32 `[tokens, top_k]`, those of `selected_experts`, differentiable. For `expert_choice` the
                scores of all experts in order, `[tokens, num_experts]`.
            selected_experts: int64 of the same shape; `num_experts` where an expert has not selected the token.
            num_tokens_per_expert: int64 `[num_experts]`.

        Raises:
            ExpertParallelError: hash routing without an id for each token or, on the host, with an id out of range.
        """
        ops, scoring = self.ops, self.scoring
        logits = self._logits(self._jittered(x, token_numbers))
        scores = scoring.scores(ops, logits)
        # Asked for here: `saved_value` computes without gradients, as evaluation does.
        over_sequences = over_sequences or _as_one_sequence(ops)
        if self.selection == "top_k" or (self.selection == "sinkhorn" and not is_trained(self)):
            over_sequences = None
        # Recomputed scores may round differently and select other experts than forward did: the selection is saved.
        selected, counts = saved_value(lambda: self._choose(logits, scores, expert_bias, ids, over_sequences))
        # Each column of expert choice is an expert, selected or not.
        top_scores = scores if self.selection == "expert_choice" else ops.gather(scores, 1, selected)
        top_scores = scoring.weights(ops, top_scores)
        if self.route_norm:
            top_scores = normalized(ops, top_scores)
        if self.route_scale != 1.0:
            top_scores = ops.mul(top_scores, self.route_scale)
        if auxiliary is not None:
            loss = auxiliary(logits, scoring.probabilities(ops, logits, scores), selected, counts)
            top_scores = attach_loss(self.platform, top_scores, loss)
        return top_scores, selected, counts

    @property
    def takes_ids(self) -> bool:
        """True if the next call selects experts by token id."""
        is_replayed = any(tape.replays for tape in self.tapes)
        return self.hash_vocab_size is not None and not self.force_uniform and not is_replayed

    @property
    def num_slots(self) -> int:
        """The number of selected experts of each token, places of experts that have not selected it included."""
        return self.num_experts if self.selection == "expert_choice" else self.top_k

    def _choose(
        self,
        logits: Tensor,
        scores: Tensor,
        expert_bias: Tensor | None,
        ids: Tensor | None,
        over_sequences: OverSequences | None,
    ) -> tuple[Tensor, Tensor]:
        """Return (experts of each token, token counts per expert) for logits and scores `[tokens, num_experts]`."""
        logits, scores = self.platform.detach(logits), self.platform.detach(scores)
        num_tokens, device = int(scores.shape[0]), self.platform.device_of(scores)
        # Every tape advances, and the innermost replay wins.
        replayed = [tape.next(num_tokens, self.num_slots) for tape in self.tapes if tape.replays]
        if replayed:
            selected = self.platform.from_numpy(replayed[-1], device)
        elif self.force_uniform:
            round_robin = numpy.arange(num_tokens * self.top_k).reshape(num_tokens, self.top_k) % self.num_experts
            selected = self.platform.from_numpy(round_robin, device)
        elif self.expert_of_id is not None:
            selected = self._experts_of_ids(ids, num_tokens)
        elif over_sequences is None:
            selected = self._best(scores, expert_bias)
        elif self.selection == "sinkhorn":
            selected = self._best(over_sequences(functools.partial(balanced_logits, self.ops), logits), expert_bias)
        else:
            choose = functools.partial(experts_of_choosing_experts, self.ops, top_k=self.top_k)
            selected = over_sequences(choose, scores)
        # Recorded within `saved_value`: recomputation does not call this again.
        for tape in self.tapes:
            if not tape.replays:
                tape.calls.append(self.platform.to_numpy(selected).copy())
        # Places without an expert are counted as one more, which is left out.
        counts = count_keys(self.platform, selected, self.num_experts + 1)
        return selected, self.ops.narrow(counts, 0, 0, self.num_experts)

    def _best(self, scores: Tensor, expert_bias: Tensor | None) -> Tensor:
        ops = self.ops
        if expert_bias is not None:
            # For the selection only: the weights of the outputs are gathered from the unbiased scores (arXiv
            # 2408.15664).
            scores = ops.add(scores, expert_bias)
        if self.num_expert_groups is not None:
            scores = self._mask_other_groups(scores)
        return ops.cast(ops.topk(scores, self.top_k, 1)[1], self.platform.dtype("int64"))

    def _experts_of_ids(self, ids: Tensor | None, num_tokens: int) -> Tensor:
        check_ids(self.platform, ids, num_tokens, int(self.expert_of_id.shape[0]))
        if num_tokens == 0:
            return self.platform.zeros((0, self.top_k), self.platform.dtype("int64"))
        return self.ops.index_select(plain(self.expert_of_id), 0, ids)

    def _jittered(self, x: Tensor, token_numbers: Callable[[], numpy.ndarray] | None) -> Tensor:
        # Evaluation adds no noise, and does not advance the counter that the noise of later training depends on.
        if not (self.jitter and is_trained(self)):
            return x
        # The counter has advanced since forward, so recomputation would draw other noise: it is saved instead.
        noise = saved_value(
            lambda: self._noise(x, numpy.arange(int(x.shape[0])) if token_numbers is None else token_numbers())
        )
        return self.ops.mul(self.ops.cast(x, noise.dtype), noise)

    def _noise(self, x: Tensor, token_numbers: numpy.ndarray) -> Tensor:
        """Return this call's factors, float32 `[tokens, dim]`, and advance the counter of calls."""
        calls, device = plain(self.jitter_calls), self.platform.device_of(x)
        call = int(self.platform.to_numpy(calls)[0])
        self.platform.copy_(calls, self.platform.from_numpy(numpy.array([call + 1]), device))
        noise = uniform_noise(token_numbers, int(x.shape[1]), self.jitter_seed, call)
        return self.platform.from_numpy((2 * noise - 1) * numpy.float32(self.jitter) + 1, device)

    def _logits(self, x: Tensor) -> Tensor:
        """Return the gate's logits, float32 `[tokens, num_experts]`, for any dtype of `x` and of the gate."""
        # 16 bits would round close scores to ties ("selective precision": Switch, arXiv 2101.03961, section 2.4).
        ops, float32 = self.ops, self.platform.dtype("float32")
        weight, bias = plain(self.gate.weight), plain(self.gate.bias)
        bias = None if bias is None else ops.cast(bias, float32)
        if x.dtype != float32:
            x = pass_on(x, ops.cast(x, float32), lambda gathered: ops.cast(gathered, float32))
        # With three dimensions: where a framework saves copies, `saving_shard` recognizes that of `x` by them.
        rows = pass_on(x, ops.unsqueeze(x, 0))
        return ops.squeeze(saving_shard(ops.linear)(rows, ops.cast(weight, float32), bias), 0)

    def _mask_other_groups(self, scores: Tensor) -> Tensor:
        """Return `scores` with minus infinity for experts outside each token's best groups."""
        ops, groups = self.ops, self.num_expert_groups
        assert groups is not None
        tokens, size = scores.shape[0], self.num_experts // groups
        grouped = ops.reshape(scores, (tokens, groups, size))
        # A group of one expert has no second score.
        counted = min(2 if self.group_score == "top2_sum" else 1, size)
        group_scores = ops.sum(ops.topk(grouped, counted, 2)[0], 2)
        best = ops.topk(group_scores, self.num_limited_groups, 1)[1]
        # `allowed` is 1 for the selected groups and 0 for all others, `[tokens, groups]`.
        allowed = ops.sum(ops.one_hot(ops.cast(best, self.platform.dtype("int64")), groups), 1)
        outside = ops.expand(ops.unsqueeze(ops.eq(allowed, 0), 2), (tokens, groups, size))
        return ops.reshape(ops.masked_fill(grouped, outside, float("-inf")), (tokens, self.num_experts))


def plain(parameter: Tensor | None) -> Tensor | None:
    """Return a parameter or buffer as a plain tensor.

    The gradient of a distributed one is a partial sum on each rank, since ranks use it for different tokens.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)


def _as_one_sequence(ops: Ops) -> OverSequences:
    """Return the `over_sequences` of tokens that are one full sequence."""
    return lambda function, x: ops.squeeze(function(ops.unsqueeze(x, 0)), 0)


def _problems(router: TokenChoiceTopKRouter) -> Iterator[str]:
    experts, top_k = router.num_experts, router.top_k
    groups, limited = router.num_expert_groups, router.num_limited_groups or 0
    if not 1 <= top_k <= experts:
        yield f"top_k must be between 1 and num_experts = {experts}, got {top_k}"
    if router.score_func not in SCORINGS:
        *most, last = map(repr, SCORINGS)
        yield f"score_func must be {', '.join(most)} or {last}, got {router.score_func!r}"
    if not 0 <= router.jitter < 1:
        yield f"jitter must be at least 0 and below 1, got {router.jitter}"
    if router.hash_vocab_size is not None and router.hash_vocab_size < 1:
        yield f"hash_vocab_size must be at least 1 or None, got {router.hash_vocab_size}"
    if router.group_score not in ("top2_sum", "max"):
        yield f"group_score must be 'top2_sum' or 'max', got {router.group_score!r}"
    if router.selection not in get_args(Selection):
        yield f"selection must be 'top_k', 'sinkhorn' or 'expert_choice', got {router.selection!r}"
    elif router.selection != "top_k":
        yield from _selection_problems(router)
    if (groups is None) != (router.num_limited_groups is None):
        yield "num_expert_groups and num_limited_groups must be given together; only one of them is given"
    elif groups is None:
        return
    elif groups < 1 or experts % groups:
        yield f"num_expert_groups must divide num_experts = {experts}, got {groups}"
    elif not 1 <= limited <= groups:
        yield f"num_limited_groups must be between 1 and num_expert_groups = {groups}, got {limited}"
    elif limited * (experts // groups) < top_k:
        yield f"{limited} groups of {experts // groups} experts hold fewer than top_k = {top_k} experts"


def _selection_problems(router: TokenChoiceTopKRouter) -> Iterator[str]:
    """Yield options that `sinkhorn` and `expert_choice` exclude."""
    given = {
        "hash_vocab_size": router.hash_vocab_size is not None,
        "force_uniform": router.force_uniform,
        "num_expert_groups": router.num_expert_groups is not None,
    }
    if router.selection == "expert_choice":
        # A token with one expert would have a score of one, and the gate no gradient.
        given |= {
            "route_norm": router.route_norm,
            f"score_func {router.score_func!r}": router.score_func == "softmax_of_top_k",
        }
    for name, is_given in given.items():
        if is_given:
            yield f"selection {router.selection!r} excludes {name}"
