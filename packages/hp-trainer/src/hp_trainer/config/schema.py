"""The schema of a run's YAML file: one frozen dataclass per section, with help and limits of every setting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from hp_trainer.config.sections import Component, FilePath, Registered, Sections, section
from hp_trainer.exceptions import Problem
from hp_trainer.sizes import EXPECTED as EXPECTED_SIZE
from hp_trainer.sizes import parse_size

TensorParallelStyle = Literal["colwise", "rowwise"]
DTypeName = Literal["float32", "bfloat16", "float16"]
DecayRate = Annotated[float, Field(ge=0, lt=1)]


@section
class RunConfig:
    """The folder of the files of the run."""

    folder: str | None = Field(
        None, description="folder of the run; null: runs/<name of the YAML file>-<date and time>"
    )

    def check(self) -> Iterator[Problem]:
        if self.folder == "":
            yield Problem(path="folder", what="empty", expected="a folder, or null", hint="null")


@section
class LossScalingConfig:
    """Dynamic loss scaling for float16 (Micikevicius et al., 2018, "Mixed precision training")."""

    enabled: bool = Field(True, description="scale the loss when training.dtype is float16")
    init_scale: float = Field(65536.0, gt=0, description="initial loss scale")
    growth_factor: float = Field(2.0, ge=1, description="factor on the scale after growth_interval steps in a row")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="factor on the scale after an overflow")
    growth_interval: int = Field(2000, ge=1, description="steps without overflow before the scale grows")


@section
class GuardConfig:
    """Reaction to a loss that is NaN or infinite, or that spikes. All ranks take the same decision.

    skip: discard the step and continue with the next batch. rollback: restore model and optimizer from the last
    checkpoint and continue with the batch after the one that caused it.
    """

    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop", description="action when the loss or the gradient norm is NaN or infinite"
    )
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = Field(
        "ignore",
        description="action when the loss is spike_sigmas standard deviations above the mean of spike_window steps",
    )
    spike_window: int = Field(128, ge=2, description="number of previous losses that a new loss is compared with")
    spike_sigmas: float = Field(6.0, gt=0, description="standard deviations above the mean that count as a spike")
    max_interventions: int = Field(
        10, ge=1, description="most steps in a row that are skipped or rolled back before the run stops"
    )


@section
class EmaConfig:
    """An exponential moving average of the weights (after Polyak and Juditsky, 1992).

    It needs as much memory as the weights, is sharded as they are, and is part of every checkpoint.
    """

    decay: float | None = Field(
        None, ge=0, lt=1, description="decay of the average per step, such as 0.999; null: no average"
    )
    evaluate: bool = Field(True, description="evaluate the average instead of the current weights")


@section
class TrainingConfig:
    """Length, batch size, precision and memory of the training."""

    steps: int = Field(ge=1, description="total number of optimizer steps")
    global_batch_size: int = Field(8, ge=1, description="samples per optimizer step, over all ranks")
    global_batch_tokens: int | None = Field(
        None, ge=1, description="tokens per optimizer step, over all ranks, instead of global_batch_size"
    )
    micro_batch_size: int | None = Field(
        None, ge=1, description="samples per rank and forward pass; null: all samples of the rank at once"
    )
    micro_batch_tokens: int | None = Field(
        None, ge=1, description="tokens per rank and forward pass, instead of micro_batch_size"
    )
    sequence_length: int = Field(256, ge=1, description="tokens per sample")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="seed of the initial weights and of the order of samples")
    dtype: DTypeName = Field(
        "float32", description="dtype of the computation; weights and optimizer state stay float32"
    )
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="dtype of the gradient reduction over ranks"
    )
    loss_scaling: LossScalingConfig = Field({}, validate_default=True, description="loss scaling for float16")
    recompute: Literal["none", "full", "selective"] = Field(
        "none", description="activation recomputation in backward: none, full, or all but the results in recompute_keep"
    )
    recompute_every: int = Field(1, ge=1, description="recompute every n-th block")
    recompute_blocks: tuple[str, ...] = Field(
        (), description="name patterns of the blocks to recompute, such as layers.1*; empty: all"
    )
    recompute_keep: tuple[Literal["attention", "products", "collectives"], ...] | None = Field(
        None, description="results that selective recomputation saves; null: all that the platform can save"
    )
    activation_budget: str | None = Field(
        None, description="memory for a rank's activations, such as 20GiB; recomputation and offload are chosen to fit"
    )
    activation_costs: Literal["estimated", "measured"] = Field(
        "estimated", description="cost rates that the budget weighs recomputation and copies by; measured: at start-up"
    )
    offload_activations: bool = Field(
        False, description="copy saved activations to host memory; with activation_budget, only where that is cheapest"
    )
    offload_optimizer: bool = Field(
        False, description="keep the optimizer state in host memory and copy it to the device during updates"
    )
    compile: bool = Field(False, description="compile each block (torch.compile); not with parallel.tp > 1")
    compile_backend: str = Field("inductor", description="backend of torch.compile")
    freeze: tuple[str, ...] = Field((), description="name patterns of parameters that are not trained, such as embed.*")
    clip_norm: float | None = Field(1.0, gt=0, description="clip gradients to this global 2-norm; null: no clipping")
    ema: EmaConfig = Field({}, validate_default=True, description="exponential moving average of the weights")
    replay_interval: int | None = Field(
        None,
        ge=1,
        description="every n-th step is computed twice and compared bit by bit (silent corruption); null: never",
    )
    replica_check_interval: int | None = Field(
        None,
        ge=1,
        description="the weights of replicas are compared at every n-th step and before each checkpoint; null: never",
    )
    record_steps: int | None = Field(
        None, ge=1, description="record digests of the first n steps in digests.gz, for hp-train diff; null: none"
    )
    record_operations: tuple[str, ...] = Field(
        (), description="modules of which each operation is recorded, in the last recorded step; (model): of the model"
    )
    record_elements: str | None = Field(
        None,
        description="pass and name of a tensor whose elements are recorded too, such as `gradient head.weight`; "
        "null: of none",
    )
    record_only: bool = Field(False, description="end the run after the recorded steps, without a checkpoint")
    perturb_weights: float = Field(
        0.0, ge=0, le=0.01, description="relative change of every initial weight, which shows how rounding grows"
    )
    compare_with: str | None = Field(
        None, description="run or file of digests to compare each step with; both must start from the same weights"
    )
    on_difference: Literal["stop", "warn"] = Field(
        "stop", description="reaction to the first step that differs from compare_with by more than rounding"
    )
    label_smoothing: float = Field(
        0.0, ge=0, le=0.99, description="probability mass of each target spread evenly over the vocabulary"
    )
    z_loss: float = Field(
        0.0, ge=0, description="weight of the z-loss, the squared log-sum-exp of the logits, which keeps them small"
    )
    guard: GuardConfig = Field(
        {}, validate_default=True, description="rules for losses that are not finite, or that spike"
    )
    eval_interval: int | None = Field(None, ge=1, description="steps between evaluations; null: none")
    eval_batches: int | None = Field(4, ge=1, description="global batches per evaluation; null: all evaluation samples")

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
        for name, default in (("record_only", "false"), ("record_operations", "[]"), ("record_elements", "null")):
            if self.record_steps is None and getattr(self, name):
                what = "has no effect without training.record_steps"
                yield Problem(path=name, what=what, expected=default)
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


@section
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, 2019, "Decoupled weight decay regularization")."""

    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.95), description="decay rates of the first and second moment")
    eps: float = Field(1e-8, gt=0, description="added to the square root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay")

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of both moments of a parameter; see the hook `hp_optimizers`."""
        return 2 * elements * itemsize


@section
class ParameterGroupConfig:
    """Parameters with a learning rate or weight decay of their own."""

    match: tuple[str, ...] = Field(("*",), description="patterns of parameter names, such as *norm* or layers.0.*")
    max_dims: int | None = Field(None, ge=0, description="match only parameters with at most n dimensions; null: all")
    lr_factor: float = Field(1.0, ge=0, description="factor on the learning rate; 0: not updated")
    weight_decay: float | None = Field(None, ge=0, description="weight decay; null: the optimizer's")


@section
class LrScheduleConfig:
    """Warm-up and decay of the learning rate, as a factor on the optimizer's rate."""

    kind: Literal["cosine", "wsd", "linear", "constant", "inverse_sqrt"] = Field(
        "cosine", description="shape after warm-up: cosine, linear, warmup-stable-decay, constant, or 1/sqrt(step)"
    )
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up from 0")
    decay_steps: int | None = Field(
        None, ge=1, description="steps of the final decay of wsd; null: a tenth of all steps"
    )
    final_fraction: float = Field(
        0.1, ge=0, le=1, description="learning rate of the last step, as a fraction of the peak"
    )


@section
class ParallelConfig:
    """Degrees of parallelism, as in `hp_trainer.ParallelDims`. Their product must be the number of ranks."""

    dp_replicate: int = Field(1, ge=1, description="data parallel replicas of the sharded model (HSDP)")
    dp_shard: int = Field(-1, description="data parallel ranks that shard the weights (FSDP); -1: all remaining ranks")
    cp: int = Field(1, ge=1, description="context parallel ranks, which shard each sequence")
    cp_method: Literal["auto", "ulysses", "ring", "all_gather"] = Field(
        "auto", description="algorithm of context parallel attention; auto: the cheapest by the cost model"
    )
    ulysses_degree: int | None = Field(
        None, ge=1, description="cp ranks that exchange heads (Ulysses), the others form rings; null: by cp_method"
    )
    tp: int = Field(1, ge=1, description="tensor parallel ranks")
    pp: int = Field(1, ge=1, description="pipeline parallel ranks")
    ep: int = Field(1, description="expert parallel ranks; -1: as many as divide both the experts and the ranks")
    etp: int | None = Field(None, ge=1, description="tensor parallel ranks within an expert, 1 or tp; null: tp")
    expert_mesh: Literal["folded", "peer"] = Field(
        "folded", description="folded: experts reuse the ranks of the dense layers; peer: ep is a mesh axis of its own"
    )
    ep_dispatcher: str = Field(
        "all_to_all",
        description="token dispatcher: all_to_all, all_to_all_int8, all_to_all_fp8, copy_per_expert, all_gather, "
        "two_level, one of a plugin, or auto: the fastest by the cost model",
    )
    ep_chunks: int | None = Field(
        None,
        ge=1,
        description="chunks of tokens whose dispatch overlaps the experts; null: 1, or with auto the fastest",
    )
    ep_copies: int = Field(
        0, ge=0, description="most copies of busy experts on a rank, placed after each step by the measured loads"
    )
    ep_move_interval: int | None = Field(
        None, ge=1, description="steps between moves of busy experts to other ranks, by the measured loads; null: never"
    )
    ep_node_size: int | None = Field(None, ge=1, description="ranks per node, for ep_dispatcher two_level and auto")
    tp_reshard_after_forward: bool = Field(
        True,
        description="save the shards of sequences that tensor parallel ranks gather, and gather them again for "
        "backward; false: save the gathered ones, which sends less",
    )
    tp_plan: dict[str, TensorParallelStyle] | None = Field(
        None,
        description="tensor parallel style of each layer of a plain module, by name (* matches one name component)",
    )
    fsdp_units: tuple[str, ...] = Field(
        (),
        description="modules of a plain module to shard separately (* matches one name component); "
        "empty: numbered ones",
    )
    reshard_after_forward: bool | None = Field(
        None,
        description="free gathered weights after forward and gather them again for backward; null: yes, but in a "
        "pipeline once per step",
    )
    reduce_gradients: Literal["step", "micro_batch"] = Field(
        "step",
        description="reduce gradients once per step, which holds unsharded gradients until then, or per micro-batch",
    )

    @property
    def gathers_for_step(self) -> bool:
        """True if the ranks of a pipeline gather weights once for all micro-batches of a step."""
        return self.reshard_after_forward is not True and self.reduce_gradients == "step"

    def check(self) -> Iterator[Problem]:
        if self.ep < 1 and self.ep != -1:
            yield Problem(path="ep", what="out of range", expected="-1 or an integer >= 1", got=str(self.ep))
        if self.ep == -1 and self.expert_mesh == "peer":
            yield Problem(path="ep", what="-1 needs expert_mesh = folded", expected="an integer >= 1", got="-1")


@section
class PipelineConfig:
    """Stages and schedule of a pipeline (`parallel.pp` above 1); `hp-train schedule` prints a schedule."""

    schedule: str = Field("1f1b", description="name of the schedule; `hp-train schedule` lists them")
    stages_per_rank: int | None = Field(
        None, ge=1, description="stages on each rank; null: 2 for schedules that need several, else 1"
    )
    microbatches: int | None = Field(
        None, ge=1, description="micro-batches per step; null: by training.micro_batch_size, or one sample each"
    )
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, description="number of layers of each stage; null: balanced by estimated operations"
    )


@section
class CheckpointConfig:
    """Intervals and number of checkpoints. There is always one after the last step."""

    interval: int | None = Field(None, ge=1, description="steps between checkpoints; null: only after the last step")
    keep: int | None = Field(2, ge=1, description="number of newest checkpoints to keep; null: all")
    keep_best: int = Field(0, ge=0, description="older checkpoints to keep as well, those of lowest evaluation loss")
    background: bool = Field(
        False, description="write checkpoints in the background; training waits only for the copy to host memory"
    )
    folder: FilePath | None = Field(None, description="folder of the checkpoints; null: checkpoints/ in the run folder")
    storage: Annotated[Component, Registered("checkpoint_storages", "local")] = Field(
        {}, validate_default=True, description="storage of the checkpoints"
    )


@section
class MetricsConfig:
    """Trackers of metrics."""

    trackers: tuple[Annotated[Component, Registered("trackers")], ...] = Field(
        ("jsonl", "progress", "loss_curve", "expert_loads"),
        validate_default=True,
        description="trackers of metrics, on rank 0",
    )
    straggler_factor: float | None = Field(
        1.5,
        gt=1,
        description="name a rank whose own work takes this many times the median of the others, in thirty steps or "
        "more; null: measure nothing",
    )


@section
class ProfileConfig:
    """Steps that every rank profiles. The traces are written to `profile/` in the run folder."""

    first: int | None = Field(None, ge=1, description="first step to profile; null: no profile")
    last: int | None = Field(None, ge=1, description="last step to profile; null: the same as first")

    def check(self) -> Iterator[Problem]:
        if self.last is not None and (self.first is None or self.last < self.first):
            yield Problem(path="last", what="no step from first to last", got=f"{self.first}, {self.last}")


@section
class LaunchConfig:
    """The ranks that `hp-train` starts on this machine, and timeouts."""

    local_ranks: int | None = Field(
        None, ge=1, description="ranks to start on this machine; null: one per accelerator, or cpu_ranks without any"
    )
    cpu_ranks: int = Field(1, ge=1, description="ranks to start if local_ranks is null and there is no accelerator")
    nodes: int | None = Field(
        None,
        ge=1,
        description="machines, on each of which the launcher starts one process, which starts local_ranks ranks and "
        "replaces those that die; further machines are spare; null: what the launcher starts are ranks",
    )
    timeout_seconds: float = Field(
        300.0, ge=10, description="longest wait for other ranks, at start-up and in collectives, in seconds"
    )
    max_restarts: int = Field(
        0,
        ge=0,
        description="restarts from the newest checkpoint after a failure; the count resets with each checkpoint",
    )
    verify_data: float = Field(
        1.0,
        gt=0,
        le=1,
        description="fraction of the prepared data, drawn at random, whose checksums a resumed run verifies",
    )
    stop_seconds: float = Field(
        120.0,
        gt=0,
        description="longest wait for the current step and its checkpoint after Ctrl-C or SIGTERM, in seconds",
    )


@section
class FaultToleranceConfig:
    """Recovery within a job whose local ranks die: a new process takes a rank's place, with a copy from memory.

    On a platform whose processes join a job only once, all ranks start again, each with its copy.
    """

    copies: int | None = Field(
        None,
        ge=0,
        le=1,
        description="copies of each rank's state in memory that outlives it; 0: the replicas (parallel.dp_replicate) "
        "have the same state; null: when a rank dies the job fails, and may be restarted from a checkpoint",
    )
    interval: int = Field(10, ge=1, description="steps between two copies; those since the last one are repeated")
    max_deaths: int = Field(
        10,
        ge=0,
        description="deaths of ranks or machines that are replaced; after a further one the complete replicas "
        "(parallel.dp_replicate) go on alone, or, if there is none, the job saves its state and ends",
    )
    spares: int = Field(
        0,
        ge=0,
        description="processes that wait to take the place of a rank, which saves the start of one; where all ranks "
        "start again, one for each rank",
    )
    stopped_seconds: float = Field(
        10.0, gt=0, description="seconds after which a rank that is stopped, as by SIGSTOP, is killed and replaced"
    )
    node_seconds: float = Field(
        300.0,
        gt=0,
        description="longest wait for a replacement of a lost machine or a dead rank, in seconds; then the complete "
        "replicas go on alone; if there is none, the job saves its state and ends where a machine is lost, and starts "
        "another process where a rank is dead",
    )


@section
class GenerateConfig:
    """Text generation by the trained model."""

    prompts: tuple[str, ...] = Field(("def ", "import "), description="prompts to continue after training")
    max_new_tokens: int = Field(200, ge=0, description="most tokens to generate per prompt")
    temperature: float = Field(0.8, ge=0, description="sampling temperature; 0: greedy")
    top_k: int | None = Field(40, ge=1, description="sample among the k most likely tokens; null: all")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="seed of the sampling")


@section
class TrainerConfig:
    """The configuration of a run."""

    run: RunConfig = Field({}, validate_default=True, description="the run folder")
    platform: str | None = Field(
        None, description="torch, mindspore, ...; null: HP_PLATFORM, or the only platform installed"
    )
    model: Annotated[Component, Registered("models", "decoder")] = Field(
        {}, validate_default=True, description="the model and its sizes"
    )
    data: Annotated[Component, Registered("datasets", "text")] = Field(
        {}, validate_default=True, description="the training data"
    )
    training: TrainingConfig = Field({}, validate_default=True, description="steps, batch size, precision, memory")
    optimizer: Annotated[Component, Registered("optimizers", "adamw")] = Field(
        {}, validate_default=True, description="the optimizer and its settings"
    )
    parameter_groups: Sections[ParameterGroupConfig] = Field(
        (), description="learning rate and weight decay by parameter name; the first match applies"
    )
    lr_schedule: LrScheduleConfig = Field({}, validate_default=True, description="learning rate schedule")
    parallel: ParallelConfig = Field({}, validate_default=True, description="degrees of parallelism")
    pipeline: PipelineConfig = Field({}, validate_default=True, description="stages and schedule of a pipeline")
    checkpoint: CheckpointConfig = Field({}, validate_default=True, description="when checkpoints are written and kept")
    metrics: MetricsConfig = Field({}, validate_default=True, description="trackers of metrics")
    profile: ProfileConfig = Field({}, validate_default=True, description="steps to profile")
    launch: LaunchConfig = Field({}, validate_default=True, description="local ranks and timeouts")
    fault_tolerance: FaultToleranceConfig = Field(
        {}, validate_default=True, description="recovery from ranks that die, within the job"
    )
    generate: GenerateConfig = Field({}, validate_default=True, description="text generation")
