"""The schema of the one YAML file that describes a run."""

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
    """Place of the run's files."""

    folder: str | None = setting(None, help="run folder; null: runs/<name of the YAML file>-<date and time>")

    def check(self) -> Iterator[Problem]:
        if self.folder == "":
            yield Problem(path="folder", what="empty", expected="a folder, or null", hint="null")


@dataclass(frozen=True, kw_only=True)
class LossScalingConfig:
    """Dynamic loss scaling, which float16 needs (Micikevicius et al., 2018, "Mixed precision training")."""

    enabled: bool = setting(True, help="scale the loss where training.dtype is float16")
    init_scale: float = setting(65536.0, help="first factor on the loss", above=0)
    growth_factor: float = setting(2.0, help="factor on the scale after growth_interval good steps", minimum=1)
    backoff_factor: float = setting(0.5, help="factor on the scale after a skipped step, below 1", above=0)
    growth_interval: int = setting(2000, help="steps without overflow before the scale grows", minimum=1)

    def check(self) -> Iterator[Problem]:
        if self.backoff_factor >= 1:
            yield Problem(
                path="backoff_factor", what="out of range", expected="a number < 1", got=str(self.backoff_factor)
            )


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Rules for a loss that is no finite number, or far above those before; all ranks follow them alike.

    skip: nothing is updated, and the run goes on with the next batch. rollback: model and optimizer go back to the last
    checkpoint, and the run goes on from there with the batch after the one that caused it.
    """

    on_nonfinite: Literal["stop", "skip", "rollback"] = setting(
        "stop", help="when the loss or the norm of its gradient is no finite number"
    )
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = setting(
        "ignore", help="when the loss is spike_sigmas standard deviations above the mean of the last spike_window ones"
    )
    spike_window: int = setting(128, help="steps whose losses a spike is compared with", minimum=2)
    spike_sigmas: float = setting(6.0, help="standard deviations above their mean that make a spike", above=0)
    max_interventions: int = setting(
        10, help="steps in a row that may be skipped or gone back on; then the run stops", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """An exponential moving average of the weights, kept beside them (after Polyak and Juditsky, 1992).

    It takes as much memory as the weights, sharded as they are, and is part of every checkpoint.
    """

    decay: float | None = setting(
        None, help="share of the average that a step keeps, such as 0.999; null: no average", minimum=0
    )
    evaluate: bool = setting(True, help="evaluate with the average instead of the last weights")

    def check(self) -> Iterator[Problem]:
        if self.decay is not None and self.decay >= 1:
            yield Problem(path="decay", what="out of range", expected="a number < 1", got=str(self.decay))


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, batch and precision of the training."""

    steps: int = setting(help="optimizer steps of the whole run", minimum=1)
    global_batch_size: int = setting(8, help="samples per optimizer step, over all ranks", minimum=1)
    global_batch_tokens: int | None = setting(
        None, help="tokens per optimizer step, over all ranks, instead of global_batch_size", minimum=1
    )
    micro_batch_size: int | None = setting(
        None, help="samples per rank and forward pass; null: a rank's whole share at once", minimum=1
    )
    micro_batch_tokens: int | None = setting(
        None, help="tokens per rank and forward pass, instead of micro_batch_size", minimum=1
    )
    sequence_length: int = setting(256, help="tokens per sample", minimum=1)
    seed: int = setting(0, help="seed of the initial weights and of the order of samples", minimum=0, maximum=2**63 - 1)
    dtype: DTypeName = setting("float32", help="dtype of computation; weights and optimizer stay float32")
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", help="dtype in which gradients are summed over ranks"
    )
    loss_scaling: LossScalingConfig = section(LossScalingConfig, help="loss scaling of float16")
    recompute: Literal["none", "full", "selective"] = setting(
        "none", help="what blocks compute again in backward: nothing, all, or all but the results in recompute_keep"
    )
    recompute_every: int = setting(1, help="of the blocks, every so-manieth one is recomputed", minimum=1)
    recompute_blocks: tuple[str, ...] = setting(
        (), help="patterns of names of the blocks that are recomputed, such as layers.1*; none: all"
    )
    recompute_keep: tuple[Literal["attention", "products", "collectives"], ...] | None = setting(
        None, help="results that selective recomputation keeps; null: all of them that the platform can keep"
    )
    activation_budget: str | None = setting(
        None, help="bytes that a rank's activations may take, such as 20GiB; what is recomputed or offloaded follows"
    )
    activation_costs: Literal["estimated", "measured"] = setting(
        "estimated", help="rates by which the budget weighs operations and copies; measured: on the devices, at start"
    )
    offload_activations: bool = setting(
        False, help="keep in host memory what blocks save for backward; with a budget, where that is cheapest"
    )
    offload_optimizer: bool = setting(
        False, help="keep the optimizer's state in host memory between updates, copied beside them"
    )
    compile: bool = setting(False, help="compile each block (torch.compile); not with parallel.tp > 1")
    compile_backend: str = setting("inductor", help="the compiler, by torch's name for it")
    freeze: tuple[str, ...] = setting((), help="patterns of names of parameters that are not trained, such as embed.*")
    clip_norm: float | None = setting(1.0, help="largest global 2-norm of gradients; null: no limit", above=0)
    ema: EmaConfig = section(EmaConfig, help="exponential moving average of the weights")
    replay_interval: int | None = setting(
        None, help="steps between steps computed twice and compared, for silent corruption; null: none", minimum=1
    )
    replica_check_interval: int | None = setting(
        None, help="steps between comparisons of the weights of replicas; null: none", minimum=1
    )
    label_smoothing: float = setting(
        0.0, help="share of each target that is spread evenly over all tokens", minimum=0, maximum=0.99
    )
    z_loss: float = setting(
        0.0, help="factor on the squared logarithm of the softmax's sum, which keeps logits small", minimum=0
    )
    guard: GuardConfig = section(GuardConfig, help="rules for losses that are not finite, or spikes")
    eval_interval: int | None = setting(None, help="steps between evaluations; null: none", minimum=1)
    eval_batches: int | None = setting(
        4, help="global batches per evaluation; null: all samples kept for it", minimum=1
    )

    def __post_init__(self) -> None:
        for unit in ("global_batch", "micro_batch"):
            tokens = getattr(self, f"{unit}_tokens")
            if tokens is not None:
                object.__setattr__(self, f"{unit}_size", max(1, tokens // self.sequence_length))

    def check(self) -> Iterator[Problem]:
        for name in ("global_batch_tokens", "micro_batch_tokens"):
            tokens = getattr(self, name)
            if tokens is not None and tokens % self.sequence_length:
                yield Problem(
                    path=name,
                    what=f"samples have sequence_length = {self.sequence_length} tokens",
                    expected=f"a multiple of {self.sequence_length}",
                    got=str(tokens),
                )
        yield from self._memory_problems()
        micro, batch = self.micro_batch_size, self.global_batch_size
        if micro is not None and batch % micro:
            yield Problem(
                path="micro_batch_size",
                what=f"global_batch_size = {batch} is no multiple of it",
                expected=f"a divisor of {batch}",
                got=str(micro),
            )

    def _memory_problems(self) -> Iterator[Problem]:
        if self.activation_budget is not None:
            try:
                parse_size(self.activation_budget)
            except ValueError:
                yield Problem(
                    path="activation_budget", what="no size", expected=EXPECTED_SIZE, got=self.activation_budget
                )
            if self.recompute != "none":
                what = "activation_budget chooses what is recomputed"
                yield Problem(path="recompute", what=what, expected="none, or no budget", got=self.recompute)
        if self.activation_costs == "measured" and self.activation_budget is None:
            what = "costs are weighed only to stay within training.activation_budget"
            yield Problem(path="activation_costs", what=what, expected="a budget beside it", got="measured")
        if self.recompute == "none":
            unused = (("every", self.recompute_every == 1), ("blocks", not self.recompute_blocks))
            for name in [f"recompute_{name}" for name, is_default in unused if not is_default]:
                what = "training.recompute = none recomputes no block"
                yield Problem(path=name, what=what, hint="training.recompute=full")
        if self.recompute_keep is not None and self.recompute != "selective" and self.activation_budget is None:
            what = f"training.recompute = {self.recompute} keeps no results"
            yield Problem(path="recompute_keep", what=what, hint="training.recompute=selective")
        if self.recompute_keep == () and self.recompute == "selective":
            what = "selective recomputation that keeps nothing is full recomputation"
            yield Problem(path="recompute_keep", what=what, expected="some results", hint="training.recompute=full")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, 2019, "Decoupled weight decay regularization")."""

    lr: float = setting(1e-3, help="peak learning rate", above=0)
    betas: tuple[float, float] = setting((0.9, 0.95), help="decay rates of the two moments", minimum=0)
    eps: float = setting(1e-8, help="added to the root of the second moment", above=0)
    weight_decay: float = setting(0.1, help="decoupled weight decay", minimum=0)

    def check(self) -> Iterator[Problem]:
        if max(self.betas) >= 1:
            yield Problem(path="betas", what="out of range", expected="numbers < 1", got=str(list(self.betas)))

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of both moments; see the hook `hp_optimizers`."""
        return 2 * elements * itemsize


@dataclass(frozen=True, kw_only=True)
class ParameterGroupConfig:
    """Parameters whose learning rate or weight decay is another than the optimizer's."""

    match: tuple[str, ...] = setting(("*",), help="patterns of names, such as *norm* or layers.0.*")
    max_dims: int | None = setting(None, help="only parameters of so many dimensions at most; null: all", minimum=0)
    lr_factor: float = setting(1.0, help="factor on the learning rate; 0 leaves them as they are", minimum=0)
    weight_decay: float | None = setting(None, help="their weight decay; null: the optimizer's", minimum=0)


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    """The learning rate as a multiple of the optimizer's, from warm-up to the last step."""

    kind: Literal["cosine", "wsd", "linear", "constant", "inverse_sqrt"] = setting(
        "cosine", help="after warm-up: cosine or linear decay, warm-up-stable-decay, constant, or by the root of steps"
    )
    warmup_steps: int = setting(0, help="steps of linear warm-up from 0", minimum=0)
    decay_steps: int | None = setting(None, help="wsd: steps of the final decay; null: a tenth", minimum=1)
    final_fraction: float = setting(0.1, help="fraction of the peak at the last step", minimum=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The fields of `hp_trainer.ParallelDims`; their product is checked against the number of ranks."""

    dp_replicate: int = setting(1, help="replicas of the sharded model", minimum=1)
    dp_shard: int = setting(-1, help="data-parallel ranks that share the weights; -1: what is left")
    cp: int = setting(1, help="context parallel ranks, which share each sequence", minimum=1)
    cp_method: Literal["auto", "ulysses", "ring", "all_gather"] = setting(
        "auto", help="how they share it: heads travel, keys and values travel or are gathered; auto: what costs least"
    )
    ulysses_degree: int | None = setting(
        None, help="how many of the cp ranks exchange heads; null: as cp_method says", minimum=1
    )
    tp: int = setting(1, help="tensor parallel ranks", minimum=1)
    pp: int = setting(1, help="ranks of a pipeline, each with its stages of the model", minimum=1)
    ep: int = setting(1, help="expert parallel ranks; -1: as many as divide both the experts and the ranks")
    etp: int | None = setting(None, help="tensor parallel ranks in an expert, 1 or tp; null: tp", minimum=1)
    expert_mesh: Literal["folded", "peer"] = setting(
        "folded", help="folded: experts re-use the dense ranks; peer: ep is an axis of its own"
    )
    ep_dispatcher: str = setting(
        "all_to_all",
        help="how tokens travel to experts: all_to_all, all_to_all_int8, all_to_all_fp8, copy_per_expert, all_gather, "
        "two_level, a plugin's, or auto: the quickest by the cost model",
    )
    ep_chunks: int | None = setting(
        None, help="parts that tokens travel in, while experts work; null: 1, with auto what costs least", minimum=1
    )
    ep_copies: int = setting(
        0, help="copies of busy experts that a rank takes at most, placed after each step by its loads", minimum=0
    )
    ep_move_interval: int | None = setting(
        None, help="steps between moves of busy experts to other ranks, by the loads measured; null: none", minimum=1
    )
    ep_node_size: int | None = setting(None, help="ranks of a node, for ep_dispatcher two_level and auto", minimum=1)
    tp_plan: dict[str, TensorParallelStyle] | None = setting(
        None, help="of a plain module: names of its layers (* for one part) and how tp cuts each"
    )
    fsdp_units: tuple[str, ...] = setting(
        (), help="of a plain module: names of the modules gathered one by one (* for one part); none: its numbered ones"
    )
    reshard_after_forward: bool | None = setting(
        None,
        help="free gathered weights after forward and gather them again for backward; null: yes, but once in a step of "
        "a pipeline",
    )
    reduce_gradients: Literal["step", "micro_batch"] = setting(
        "step", help="sum them over ranks once, which keeps whole ones until then, or after each micro-batch"
    )

    @property
    def gathers_for_step(self) -> bool:
        """True if the ranks of a pipeline gather weights once for all micro-batches of a step."""
        return self.reshard_after_forward is not True and self.reduce_gradients == "step"

    def check(self) -> Iterator[Problem]:
        if self.ep < 1 and self.ep != -1:
            yield Problem(path="ep", what="out of range", expected="-1 or a whole number >= 1", got=str(self.ep))
        if self.ep == -1 and self.expert_mesh == "peer":
            yield Problem(path="ep", what="-1 needs expert_mesh = folded", expected="a whole number >= 1", got="-1")


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Stages and schedule of a pipeline (`parallel.pp` above 1); `hp-train schedule` shows one."""

    schedule: str = setting("1f1b", help="order of forwards and backwards: a name that `hp-train schedule` lists")
    stages_per_rank: int | None = setting(
        None, help="stages on each rank; null: 2 for schedules that need several, else 1", minimum=1
    )
    microbatches: int | None = setting(
        None, help="micro-batches of a step; null: by training.micro_batch_size, or one sample each", minimum=1
    )
    layers: tuple[int, ...] | None = setting(
        None, help="layers of each stage, in order; null: even in estimated operations", minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many stay; there is always one after the last step."""

    interval: int | None = setting(None, help="steps between checkpoints; null: one at the end", minimum=1)
    keep: int | None = setting(2, help="newest checkpoints to keep; null: all", minimum=1)
    keep_best: int = setting(0, help="older checkpoints to keep beside them, of the lowest evaluation loss", minimum=0)
    background: bool = setting(
        False, help="write while training goes on, which waits for the copy to host memory alone"
    )
    folder: str | None = setting(
        None, help="folder of the checkpoints; null: checkpoints/ in the run folder", is_path=True
    )
    storage: Component = component("checkpoint_storages", "local", help="where checkpoints live")

    def check(self) -> Iterator[Problem]:
        if self.folder == "":
            yield Problem(path="folder", what="empty", expected="a folder, or null", hint="null")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Trackers of loss, speed and learning rate."""

    trackers: tuple[Component, ...] = component(
        "trackers", ("jsonl", "progress", "loss_curve", "expert_loads"), help="trackers of metrics, run by rank 0"
    )


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Steps that every rank profiles, into `profile/` of the run folder."""

    first: int | None = setting(None, help="first step to profile; null: none", minimum=1)
    last: int | None = setting(None, help="last step to profile; null: the first alone", minimum=1)

    def check(self) -> Iterator[Problem]:
        if self.last is not None and (self.first is None or self.last < self.first):
            yield Problem(path="last", what="no step lies between first and last", got=f"{self.first}, {self.last}")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The ranks that `hp-train` starts by itself on this machine."""

    local_ranks: int | None = setting(
        None, help="ranks to start here; null: one for each accelerator, or cpu_ranks where there is none", minimum=1
    )
    cpu_ranks: int = setting(1, help="ranks to start where local_ranks is null and there is no accelerator", minimum=1)
    timeout_seconds: float = setting(
        300.0, help="longest wait for the other ranks to join; below 10 none could start", minimum=10
    )
    max_restarts: int = setting(
        0, help="restarts of the ranks from the newest checkpoint after failures without a new one between", minimum=0
    )
    verify_data: float = setting(
        1.0,
        help="part of the prepared data, drawn anew, that a resumed run compares with its digests",
        above=0,
        maximum=1,
    )
    stop_seconds: float = setting(
        120.0, help="longest wait for the step under way and its checkpoint after Ctrl-C or SIGTERM", above=0
    )


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """The text that the trained model writes."""

    prompts: tuple[str, ...] = setting(("def ", "import "), help="prompts continued after training")
    max_new_tokens: int = setting(200, help="tokens to add to a prompt", minimum=0)
    temperature: float = setting(0.8, help="divides the logits; 0: always the likeliest token", minimum=0)
    top_k: int | None = setting(40, help="draw among so many likeliest tokens; null: all", minimum=1)
    seed: int = setting(0, help="seed of the draws", minimum=0, maximum=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """A whole run: what is trained, on what, how, where."""

    run: RunConfig = section(RunConfig, help="the run folder")
    platform: str | None = setting(
        None, help="torch, mindspore, ...; null: HP_PLATFORM, or the only platform installed"
    )
    model: Component = component("models", "decoder", help="the model and its sizes")
    data: Component = component("datasets", "text", help="what it is trained on")
    training: TrainingConfig = section(help="steps, batch, precision")
    optimizer: Component = component("optimizers", "adamw", help="the optimizer and its settings")
    parameter_groups: tuple[ParameterGroupConfig, ...] = sections(
        ParameterGroupConfig, help="other rates and weight decay by names of parameters; the first that matches holds"
    )
    lr_schedule: LrScheduleConfig = section(LrScheduleConfig, help="learning rate over the run")
    parallel: ParallelConfig = section(ParallelConfig, help="degrees of every kind of parallelism")
    pipeline: PipelineConfig = section(PipelineConfig, help="stages and schedule of a pipeline")
    checkpoint: CheckpointConfig = section(help="when checkpoints are written and kept")
    metrics: MetricsConfig = section(help="trackers of loss, speed and learning rate")
    profile: ProfileConfig = section(ProfileConfig, help="steps to profile")
    launch: LaunchConfig = section(LaunchConfig, help="local ranks")
    generate: GenerateConfig = section(GenerateConfig, help="text sampled from the model")
