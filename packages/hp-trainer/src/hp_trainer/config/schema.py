"""The schema of a run's YAML file: one frozen dataclass per section, with help and limits of every setting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hp_trainer.config.settings import Component, component, section, sections, setting
from hp_trainer.exceptions import Problem
from hp_trainer.sizes import EXPECTED as EXPECTED_SIZE
from hp_trainer.sizes import parse_size

TensorParallelStyle = Literal["colwise", "rowwise"]
DTypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the files of the run are written."""

    folder: str | None = setting(None, help="folder of the run; null: runs/<name of the YAML file>-<date and time>")

    def check(self) -> Iterator[Problem]:
        if self.folder == "":
            yield Problem(path="folder", what="empty", expected="a folder, or null", hint="null")


@dataclass(frozen=True, kw_only=True)
class LossScalingConfig:
    """Dynamic loss scaling for float16 (Micikevicius et al., 2018, "Mixed precision training")."""

    enabled: bool = setting(True, help="scale the loss when training.dtype is float16")
    init_scale: float = setting(65536.0, help="initial loss scale", above=0)
    growth_factor: float = setting(2.0, help="factor on the scale after growth_interval steps in a row", minimum=1)
    backoff_factor: float = setting(0.5, help="factor on the scale after an overflow, below 1", above=0)
    growth_interval: int = setting(2000, help="steps without overflow before the scale grows", minimum=1)

    def check(self) -> Iterator[Problem]:
        if self.backoff_factor >= 1:
            yield Problem(
                path="backoff_factor", what="out of range", expected="a number < 1", got=str(self.backoff_factor)
            )


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What to do about a loss that is NaN or infinite, or that spikes. All ranks take the same decision.

    skip: discard the step and continue with the next batch. rollback: restore model and optimizer from the last
    checkpoint and continue with the batch after the one that caused it.
    """

    on_nonfinite: Literal["stop", "skip", "rollback"] = setting(
        "stop", help="action when the loss or the gradient norm is NaN or infinite"
    )
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = setting(
        "ignore", help="action when the loss is spike_sigmas standard deviations above the mean of spike_window steps"
    )
    spike_window: int = setting(128, help="number of previous losses that a new loss is compared with", minimum=2)
    spike_sigmas: float = setting(6.0, help="standard deviations above the mean that count as a spike", above=0)
    max_interventions: int = setting(
        10, help="most steps in a row that are skipped or rolled back before the run stops", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """An exponential moving average of the weights (after Polyak and Juditsky, 1992).

    It needs as much memory as the weights, is sharded as they are, and is part of every checkpoint.
    """

    decay: float | None = setting(
        None, help="decay of the average per step, such as 0.999; null: no average", minimum=0
    )
    evaluate: bool = setting(True, help="evaluate the average instead of the current weights")

    def check(self) -> Iterator[Problem]:
        if self.decay is not None and self.decay >= 1:
            yield Problem(path="decay", what="out of range", expected="a number < 1", got=str(self.decay))


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, batch size, precision and memory of the training."""

    steps: int = setting(help="total number of optimizer steps", minimum=1)
    global_batch_size: int = setting(8, help="samples per optimizer step, over all ranks", minimum=1)
    global_batch_tokens: int | None = setting(
        None, help="tokens per optimizer step, over all ranks, instead of global_batch_size", minimum=1
    )
    micro_batch_size: int | None = setting(
        None, help="samples per rank and forward pass; null: all samples of the rank at once", minimum=1
    )
    micro_batch_tokens: int | None = setting(
        None, help="tokens per rank and forward pass, instead of micro_batch_size", minimum=1
    )
    sequence_length: int = setting(256, help="tokens per sample", minimum=1)
    seed: int = setting(0, help="seed of the initial weights and of the order of samples", minimum=0, maximum=2**63 - 1)
    dtype: DTypeName = setting("float32", help="dtype of the computation; weights and optimizer state stay float32")
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", help="dtype of the gradient reduction over ranks"
    )
    loss_scaling: LossScalingConfig = section(LossScalingConfig, help="loss scaling for float16")
    recompute: Literal["none", "full", "selective"] = setting(
        "none", help="activation recomputation in backward: none, full, or all but the results in recompute_keep"
    )
    recompute_every: int = setting(1, help="recompute every n-th block", minimum=1)
    recompute_blocks: tuple[str, ...] = setting(
        (), help="name patterns of the blocks to recompute, such as layers.1*; empty: all"
    )
    recompute_keep: tuple[Literal["attention", "products", "collectives"], ...] | None = setting(
        None, help="results that selective recomputation saves; null: all that the platform can save"
    )
    activation_budget: str | None = setting(
        None, help="memory for a rank's activations, such as 20GiB; recomputation and offload are chosen to fit"
    )
    activation_costs: Literal["estimated", "measured"] = setting(
        "estimated", help="cost rates that the budget weighs recomputation and copies by; measured: at start-up"
    )
    offload_activations: bool = setting(
        False, help="copy saved activations to host memory; with activation_budget, only where that is cheapest"
    )
    offload_optimizer: bool = setting(
        False, help="keep the optimizer state in host memory and copy it to the device during updates"
    )
    compile: bool = setting(False, help="compile each block (torch.compile); not with parallel.tp > 1")
    compile_backend: str = setting("inductor", help="backend of torch.compile")
    freeze: tuple[str, ...] = setting((), help="name patterns of parameters that are not trained, such as embed.*")
    clip_norm: float | None = setting(1.0, help="clip gradients to this global 2-norm; null: no clipping", above=0)
    ema: EmaConfig = section(EmaConfig, help="exponential moving average of the weights")
    replay_interval: int | None = setting(
        None,
        help="every n-th step is computed twice and compared bit by bit (silent corruption); null: never",
        minimum=1,
    )
    replica_check_interval: int | None = setting(
        None, help="every n-th step the weights of replicas are compared; null: never", minimum=1
    )
    label_smoothing: float = setting(
        0.0, help="probability mass of each target spread evenly over the vocabulary", minimum=0, maximum=0.99
    )
    z_loss: float = setting(
        0.0, help="weight of the z-loss, the squared log-sum-exp of the logits, which keeps them small", minimum=0
    )
    guard: GuardConfig = section(GuardConfig, help="rules for losses that are not finite, or that spike")
    eval_interval: int | None = setting(None, help="steps between evaluations; null: none", minimum=1)
    eval_batches: int | None = setting(4, help="global batches per evaluation; null: all evaluation samples", minimum=1)

    def __post_init__(self) -> None:
        for unit in ("global_batch", "micro_batch"):
            tokens = getattr(self, f"{unit}_tokens")
            if tokens is not None:
                # Converted once, so that the rest of the code knows samples only; a frozen dataclass needs
                # `object.__setattr__`.
                object.__setattr__(self, f"{unit}_size", max(1, tokens // self.sequence_length))

    def check(self) -> Iterator[Problem]:
        for name in ("global_batch_tokens", "micro_batch_tokens"):
            tokens = getattr(self, name)
            # `__post_init__` rounds down, so that this check still has a valid instance to report on.
            if tokens is not None and tokens % self.sequence_length:
                yield Problem(
                    path=name,
                    what=f"not a multiple of sequence_length = {self.sequence_length}",
                    expected=f"a multiple of {self.sequence_length}",
                    got=str(tokens),
                )
        yield from self._memory_problems()
        micro, batch = self.micro_batch_size, self.global_batch_size
        if micro is not None and batch % micro:
            yield Problem(
                path="micro_batch_size",
                what=f"does not divide global_batch_size = {batch}",
                expected=f"a divisor of {batch}",
                got=str(micro),
            )

    def _memory_problems(self) -> Iterator[Problem]:
        if self.activation_budget is not None:
            try:
                parse_size(self.activation_budget)
            except ValueError:
                yield Problem(
                    path="activation_budget", what="not a size", expected=EXPECTED_SIZE, got=self.activation_budget
                )
            if self.recompute != "none":
                what = "training.activation_budget already chooses what is recomputed"
                yield Problem(path="recompute", what=what, expected="none, or no budget", got=self.recompute)
        if self.activation_costs == "measured" and self.activation_budget is None:
            what = "has no effect without training.activation_budget"
            yield Problem(path="activation_costs", what=what, expected="estimated, or a budget", got="measured")
        # Settings without effect are errors: they would be mistaken for savings of memory.
        if self.recompute == "none":
            unused = (("every", self.recompute_every == 1), ("blocks", not self.recompute_blocks))
            for name in [f"recompute_{name}" for name, is_default in unused if not is_default]:
                what = "has no effect with training.recompute = none"
                yield Problem(path=name, what=what, hint="training.recompute=full")
        if self.recompute_keep is not None and self.recompute != "selective" and self.activation_budget is None:
            what = f"has no effect with training.recompute = {self.recompute}"
            yield Problem(path="recompute_keep", what=what, hint="training.recompute=selective")
        if self.recompute_keep == () and self.recompute == "selective":
            what = "selective recomputation that saves no results is full recomputation"
            yield Problem(path="recompute_keep", what=what, expected="some results", hint="training.recompute=full")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, 2019, "Decoupled weight decay regularization")."""

    lr: float = setting(1e-3, help="peak learning rate", above=0)
    betas: tuple[float, float] = setting((0.9, 0.95), help="decay rates of the first and second moment", minimum=0)
    eps: float = setting(1e-8, help="added to the square root of the second moment", above=0)
    weight_decay: float = setting(0.1, help="decoupled weight decay", minimum=0)

    def check(self) -> Iterator[Problem]:
        if max(self.betas) >= 1:
            yield Problem(path="betas", what="out of range", expected="numbers < 1", got=str(list(self.betas)))

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of both moments of a parameter; see the hook `hp_optimizers`."""
        return 2 * elements * itemsize


@dataclass(frozen=True, kw_only=True)
class ParameterGroupConfig:
    """Parameters with a learning rate or weight decay of their own."""

    match: tuple[str, ...] = setting(("*",), help="patterns of parameter names, such as *norm* or layers.0.*")
    max_dims: int | None = setting(None, help="match only parameters with at most n dimensions; null: all", minimum=0)
    lr_factor: float = setting(1.0, help="factor on the learning rate; 0: not updated", minimum=0)
    weight_decay: float | None = setting(None, help="weight decay; null: the optimizer's", minimum=0)


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    """Warm-up and decay of the learning rate, as a factor on the optimizer's rate."""

    kind: Literal["cosine", "wsd", "linear", "constant", "inverse_sqrt"] = setting(
        "cosine", help="shape after warm-up: cosine, linear, warmup-stable-decay, constant, or 1/sqrt(step)"
    )
    warmup_steps: int = setting(0, help="steps of linear warm-up from 0", minimum=0)
    decay_steps: int | None = setting(
        None, help="steps of the final decay of wsd; null: a tenth of all steps", minimum=1
    )
    final_fraction: float = setting(
        0.1, help="learning rate of the last step, as a fraction of the peak", minimum=0, maximum=1
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism, as in `hp_trainer.ParallelDims`. Their product must be the number of ranks."""

    dp_replicate: int = setting(1, help="data parallel replicas of the sharded model (HSDP)", minimum=1)
    dp_shard: int = setting(-1, help="data parallel ranks that shard the weights (FSDP); -1: all remaining ranks")
    cp: int = setting(1, help="context parallel ranks, which shard each sequence", minimum=1)
    cp_method: Literal["auto", "ulysses", "ring", "all_gather"] = setting(
        "auto", help="algorithm of context parallel attention; auto: the cheapest by the cost model"
    )
    ulysses_degree: int | None = setting(
        None, help="cp ranks that exchange heads (Ulysses), the others form rings; null: by cp_method", minimum=1
    )
    tp: int = setting(1, help="tensor parallel ranks", minimum=1)
    pp: int = setting(1, help="pipeline parallel ranks", minimum=1)
    ep: int = setting(1, help="expert parallel ranks; -1: as many as divide both the experts and the ranks")
    etp: int | None = setting(None, help="tensor parallel ranks within an expert, 1 or tp; null: tp", minimum=1)
    expert_mesh: Literal["folded", "peer"] = setting(
        "folded", help="folded: experts reuse the ranks of the dense layers; peer: ep is a mesh axis of its own"
    )
    ep_dispatcher: str = setting(
        "all_to_all",
        help="token dispatcher: all_to_all, all_to_all_int8, all_to_all_fp8, copy_per_expert, all_gather, two_level, "
        "one of a plugin, or auto: the fastest by the cost model",
    )
    ep_chunks: int | None = setting(
        None, help="chunks of tokens whose dispatch overlaps the experts; null: 1, or with auto the fastest", minimum=1
    )
    ep_copies: int = setting(
        0, help="most copies of busy experts on a rank, placed after each step by the measured loads", minimum=0
    )
    ep_move_interval: int | None = setting(
        None, help="steps between moves of busy experts to other ranks, by the measured loads; null: never", minimum=1
    )
    ep_node_size: int | None = setting(None, help="ranks per node, for ep_dispatcher two_level and auto", minimum=1)
    tp_plan: dict[str, TensorParallelStyle] | None = setting(
        None, help="tensor parallel style of each layer of a plain module, by name (* matches one name component)"
    )
    fsdp_units: tuple[str, ...] = setting(
        (), help="modules of a plain module to shard separately (* matches one name component); empty: numbered ones"
    )
    reshard_after_forward: bool | None = setting(
        None,
        help="free gathered weights after forward and gather them again for backward; null: yes, but in a pipeline "
        "once per step",
    )
    reduce_gradients: Literal["step", "micro_batch"] = setting(
        "step", help="reduce gradients once per step, which holds unsharded gradients until then, or per micro-batch"
    )

    @property
    def gathers_for_step(self) -> bool:
        """Whether the ranks of a pipeline gather weights once for all micro-batches of a step."""
        return self.reshard_after_forward is not True and self.reduce_gradients == "step"

    def check(self) -> Iterator[Problem]:
        if self.ep < 1 and self.ep != -1:
            yield Problem(path="ep", what="out of range", expected="-1 or an integer >= 1", got=str(self.ep))
        if self.ep == -1 and self.expert_mesh == "peer":
            yield Problem(path="ep", what="-1 needs expert_mesh = folded", expected="an integer >= 1", got="-1")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Stages and schedule of a pipeline (`parallel.pp` above 1); `hp-train schedule` prints a schedule."""

    schedule: str = setting("1f1b", help="name of the schedule; `hp-train schedule` lists them")
    stages_per_rank: int | None = setting(
        None, help="stages on each rank; null: 2 for schedules that need several, else 1", minimum=1
    )
    microbatches: int | None = setting(
        None, help="micro-batches per step; null: by training.micro_batch_size, or one sample each", minimum=1
    )
    layers: tuple[int, ...] | None = setting(
        None, help="number of layers of each stage; null: balanced by estimated operations", minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept; there is always one after the last step."""

    interval: int | None = setting(None, help="steps between checkpoints; null: only after the last step", minimum=1)
    keep: int | None = setting(2, help="number of newest checkpoints to keep; null: all", minimum=1)
    keep_best: int = setting(0, help="older checkpoints to keep as well, those of lowest evaluation loss", minimum=0)
    background: bool = setting(
        False, help="write checkpoints in the background; training waits only for the copy to host memory"
    )
    folder: str | None = setting(
        None, help="folder of the checkpoints; null: checkpoints/ in the run folder", is_path=True
    )
    storage: Component = component("checkpoint_storages", "local", help="storage of the checkpoints")

    def check(self) -> Iterator[Problem]:
        if self.folder == "":
            yield Problem(path="folder", what="empty", expected="a folder, or null", hint="null")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Trackers of metrics."""

    trackers: tuple[Component, ...] = component(
        "trackers", ("jsonl", "progress", "loss_curve", "expert_loads"), help="trackers of metrics, on rank 0"
    )


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Steps that every rank profiles. The traces are written to `profile/` in the run folder."""

    first: int | None = setting(None, help="first step to profile; null: no profile", minimum=1)
    last: int | None = setting(None, help="last step to profile; null: the same as first", minimum=1)

    def check(self) -> Iterator[Problem]:
        if self.last is not None and (self.first is None or self.last < self.first):
            yield Problem(path="last", what="no step from first to last", got=f"{self.first}, {self.last}")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The ranks that `hp-train` starts on this machine, and timeouts."""

    local_ranks: int | None = setting(
        None, help="ranks to start on this machine; null: one per accelerator, or cpu_ranks without any", minimum=1
    )
    cpu_ranks: int = setting(1, help="ranks to start if local_ranks is null and there is no accelerator", minimum=1)
    timeout_seconds: float = setting(
        300.0, help="longest wait for other ranks, at start-up and in collectives, in seconds", minimum=10
    )
    max_restarts: int = setting(
        0, help="restarts from the newest checkpoint after a failure; the count resets with each checkpoint", minimum=0
    )
    verify_data: float = setting(
        1.0,
        help="fraction of the prepared data, drawn at random, whose checksums a resumed run verifies",
        above=0,
        maximum=1,
    )
    stop_seconds: float = setting(
        120.0, help="longest wait for the current step and its checkpoint after Ctrl-C or SIGTERM, in seconds", above=0
    )


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Text generation by the trained model."""

    prompts: tuple[str, ...] = setting(("def ", "import "), help="prompts to continue after training")
    max_new_tokens: int = setting(200, help="most tokens to generate per prompt", minimum=0)
    temperature: float = setting(0.8, help="sampling temperature; 0: greedy", minimum=0)
    top_k: int | None = setting(40, help="sample among the k most likely tokens; null: all", minimum=1)
    seed: int = setting(0, help="seed of the sampling", minimum=0, maximum=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The configuration of a run."""

    run: RunConfig = section(RunConfig, help="the run folder")
    platform: str | None = setting(
        None, help="torch, mindspore, ...; null: HP_PLATFORM, or the only platform installed"
    )
    model: Component = component("models", "decoder", help="the model and its sizes")
    data: Component = component("datasets", "text", help="the training data")
    training: TrainingConfig = section(help="steps, batch size, precision, memory")
    optimizer: Component = component("optimizers", "adamw", help="the optimizer and its settings")
    parameter_groups: tuple[ParameterGroupConfig, ...] = sections(
        ParameterGroupConfig, help="learning rate and weight decay by parameter name; the first match applies"
    )
    lr_schedule: LrScheduleConfig = section(LrScheduleConfig, help="learning rate schedule")
    parallel: ParallelConfig = section(ParallelConfig, help="degrees of parallelism")
    pipeline: PipelineConfig = section(PipelineConfig, help="stages and schedule of a pipeline")
    checkpoint: CheckpointConfig = section(help="when checkpoints are written and kept")
    metrics: MetricsConfig = section(help="trackers of metrics")
    profile: ProfileConfig = section(ProfileConfig, help="steps to profile")
    launch: LaunchConfig = section(LaunchConfig, help="local ranks and timeouts")
    generate: GenerateConfig = section(GenerateConfig, help="text generation")
