"""Faults that are injected into a run, each with where and as what `hp-train diff` should find it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from training_runs import Lab

from hp_dtensor.debug import Comparison, Recording, measure_growth
from hp_dtensor.testing import run_ranks
from hp_trainer.run import RunFolder
from hp_trainer.training import Trainer

Inject = Callable[[Trainer, int], None]
RECORDED = {
    "training__guard__on_nonfinite": "skip",
    "training__record_steps": 2,
    "training__record_only": "true",
    "training__steps": 4,
}


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        inject: called on every rank with the trainer and the rank, before the first step.
        pass_, names: where it should be found first; any of the names.
        kinds: acceptable kinds.
        degrees, world_size: layout of the run with the fault.
        settings: of both runs.
    """

    inject: Inject
    pass_: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]
    degrees: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    step: int | None = None


def record(lab: Lab, name: str, fault: Fault | None = None, **more: Any) -> Recording:
    """Record a run with a fault, or one on one rank without."""
    settings = {**RECORDED, **(fault.settings if fault else {}), **more}
    run = lab.start(name, fault.degrees if fault else None, **settings)
    size = fault.world_size if fault else 1
    run_ranks(_train, size, lab.platform, run, lab.platform, fault.inject if fault else None, timeout_seconds=900)
    return Recording.load(run.digests_file)


def reference(lab: Lab, name: str, **settings: Any) -> Recording:
    """Record a run without fault, with the growth of rounding."""
    perturbed = record(lab, f"{name}-perturbed", training__perturb_weights=2.0**-24, **settings)
    return measure_growth(record(lab, name, **settings), perturbed)


def is_placed(fault: Fault, found: Comparison) -> bool:
    """Return whether the right tensor was named."""
    first = found.first
    return (
        first is not None
        and (first.pass_, fault.step or first.step) == (fault.pass_, first.step)
        and first.name in fault.names
    )


def _train(run: RunFolder, platform: Any, inject: Inject | None) -> None:
    trainer = Trainer(run, run.load_config().config, platform)
    if inject is not None:
        inject(trainer, trainer.setup.mesh.world.rank)
    trainer.run()


def nothing(trainer: Trainer, rank: int) -> None:
    """No fault: a layout alone."""


# Gradients ------------------------------------------------------------------------------------------------


def on_gradient(
    name: str, change: Callable[[np.ndarray, int], np.ndarray], steps: tuple[int, ...] = (1, 2), ranks: Any = None
) -> Inject:
    """Replace the local gradient of a parameter by `change(local, rank)`."""

    def inject(trainer: Trainer, rank: int) -> None:
        platform, unscale, step = trainer.setup.platform, trainer._step.scaler.unscale_, [0]

        def unscale_(parameters: Any) -> None:
            unscale(parameters)
            step[0] += 1
            found = dict(platform.named_parameters(trainer.setup.model)).get(name)
            if found is None or step[0] not in steps or (ranks is not None and rank not in ranks):
                return
            local = local_of(platform, platform.get_grad(found))
            values = change(platform.to_numpy(local).copy(), rank).astype(np.float32)
            platform.copy_(local, platform.from_numpy(np.ascontiguousarray(values)))

        trainer._step.scaler.unscale_ = unscale_

    return inject


def local_of(platform: Any, x: Any) -> Any:
    return platform.unwrap(x) if hasattr(x, "_spec") else x


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16, to nearest."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def stale(name: str, ranks: Any = None) -> Inject:
    """The gradient of the second step is that of the first."""
    kept: dict[int, np.ndarray] = {}

    def change(x: np.ndarray, rank: int) -> np.ndarray:
        return kept.setdefault(rank, x)

    return on_gradient(name, change, (1, 2), ranks)


def swapped(name: str) -> Inject:
    """Ranks 0 and 1 exchange their shards of a gradient."""

    def inject(trainer: Trainer, rank: int) -> None:
        group = trainer.setup.mesh.world.all

        def change(x: np.ndarray, _: int) -> np.ndarray:
            gathered = group.all_gather_bytes(x.tobytes())
            return np.frombuffer(gathered[rank ^ 1], x.dtype).reshape(x.shape)

        on_gradient(name, change)(trainer, rank)

    return inject


def summand(x: np.ndarray, rank: int) -> np.ndarray:
    """A part of the gradient that is another one on each of two ranks."""
    share = np.random.default_rng(0).uniform(-1, 2, x.shape)
    return x * (share if rank == 0 else 1 - share)


# Forward and backward -------------------------------------------------------------------------------------


def on_output(name: str, change: Callable[[np.ndarray], np.ndarray], ranks: Any = None) -> Inject:
    """Add to a module's output, so that it has the values `change(local)`; its gradient stays right."""

    def inject(trainer: Trainer, rank: int) -> None:
        platform = trainer.setup.platform

        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            local = local_of(platform, output)
            values = platform.to_numpy(local).copy()
            more = platform.from_numpy((change(values.copy()) - values).astype(np.float32))
            added = platform.wrap(more, output.spec) if hasattr(output, "_spec") else more
            return platform.ops.add(output, added)

        found = dict(platform.named_modules(trainer.setup.model)).get(name)
        if found is not None and (ranks is None or rank in ranks):
            platform.add_forward_hook(found, hook)

    return inject


def on_output_gradient(name: str, factor: float) -> Inject:
    """Scale the gradient that a module's backward gets, and with it all that it computes."""

    def inject(trainer: Trainer, rank: int) -> None:
        platform = trainer.setup.platform

        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            return platform.linear_map(output, lambda x: platform.ops.clone(x), lambda g: platform.ops.mul(g, factor))

        found = dict(platform.named_modules(trainer.setup.model)).get(name)
        if found is not None:
            platform.add_forward_hook(found, hook)

    return inject


def border(x: np.ndarray) -> np.ndarray:
    """The first positions of the second shard of a sequence see other tokens."""
    x[:, :2] = x[:, :2][:, ::-1] * 0.9
    return x


def attribute(name: str, attribute: str, value: Any) -> Inject:
    """A module has another constant."""

    def inject(trainer: Trainer, rank: int) -> None:
        found = dict(trainer.setup.platform.named_modules(trainer.setup.model)).get(name)
        if found is not None:
            setattr(found, attribute, value)

    return inject


def loss_of_a_rank(trainer: Trainer, rank: int) -> None:
    """The loss that is reported is divided by the ranks once more."""
    agree = trainer._step.agree
    trainer._step.agree = lambda loss, *stop, **others: agree(
        trainer.setup.platform.ops.div(loss, 2.0), *stop, **others
    )


# Weights and updates --------------------------------------------------------------------------------------


def after_update(change: Callable[[Trainer, int], None], step: int = 1) -> Inject:
    """Call `change(trainer, rank)` after the update of a step, before its weights are recorded."""

    def inject(trainer: Trainer, rank: int) -> None:
        update, number = trainer._step.update, [0]

        def changed(learning_rate: float) -> bool:
            done = update(learning_rate)
            number[0] += 1
            if number[0] == step:
                change(trainer, rank)
            return done

        trainer._step.update = changed

    return inject


def exchange_experts(trainer: Trainer, rank: int) -> None:
    platform = trainer.setup.platform
    for name, parameter in platform.named_parameters(trainer.setup.model):
        if name == "layers.1.moe.experts.w2":
            local = local_of(platform, platform.detach(parameter))
            values = platform.to_numpy(local).copy()
            values[[0, 1]] = values[[1, 0]]
            platform.copy_(local, platform.from_numpy(values))


def restored(name: str, ranks: Any = None) -> Inject:
    """A weight, on some ranks, is not updated."""

    def inject(trainer: Trainer, rank: int) -> None:
        platform = trainer.setup.platform
        parameter = dict(platform.named_parameters(trainer.setup.model))[name]
        before = platform.to_numpy(local_of(platform, platform.detach(parameter))).copy()

        def change(trainer: Trainer, rank: int) -> None:
            if ranks is None or rank in ranks:
                platform.copy_(local_of(platform, platform.detach(parameter)), platform.from_numpy(before))

        after_update(change)(trainer, rank)

    return inject


def no_bias_update(trainer: Trainer, rank: int) -> None:
    after = trainer.setup.model.after_optimizer_step

    def without_bias(*args: Any) -> Any:
        platform = trainer.setup.platform
        buffers = {name: b for name, b in platform.named_buffers(trainer.setup.model) if name.endswith("expert_bias")}
        before = {name: platform.ops.clone(buffer) for name, buffer in buffers.items()}
        metrics = after(*args)
        now = dict(platform.named_buffers(trainer.setup.model))
        for name, value in before.items():
            platform.copy_(now[name], value)
        return metrics

    trainer.setup.model.after_optimizer_step = without_bias


def optimizer_epsilon(trainer: Trainer, rank: int) -> None:
    """The optimizer of the run with the fault has another epsilon."""
    from hp_trainer.training.setup import build_optimizer

    options = dataclasses.replace(trainer.config.optimizer.options, eps=1e-3)
    config = dataclasses.replace(
        trainer.config, optimizer=dataclasses.replace(trainer.config.optimizer, options=options)
    )
    optimizer = build_optimizer(config, trainer.setup.platform, trainer.setup.model)
    trainer._step.optimizer = optimizer
    object.__setattr__(trainer.setup, "optimizer", optimizer)


def tied_copy_lost(trainer: Trainer, rank: int) -> None:
    """The last stage's gradient of the tied embedding is not added to the first one's."""
    trainer.setup.pipeline.tied.sum_gradients = lambda: None


def other_dropout(trainer: Trainer, rank: int) -> None:
    """Rank 1 draws other random numbers for the dropout of attention."""
    if rank == 1:
        trainer.setup.model._seed = 12345


TWO = {"dp_shard": 2}
EP = {"dp_shard": 2, "ep": 2}
Q = "layers.1.attention.q_proj.weight"
W2 = "layers.0.feed_forward.w2.weight"
REPLICAS = {"dp_replicate": 2, "dp_shard": 1}
TIED = {"model__tie_word_embeddings": "true"}
DROPOUT = {"model__attention_dropout": 0.2}
FIRST = "embed.weight"
EXPERTS = "layers.1.moe.experts.w1"  # both ranks have a part of it

FAULTS: dict[str, Fault] = {
    "doubled reduction": Fault(on_gradient(Q, lambda x, _: 2 * x), "gradient", (Q,), ("factor",), TWO, 2),
    "averaged": Fault(on_gradient(W2, lambda x, _: x / 2), "gradient", (W2,), ("factor",), TWO, 2),
    "wrong divisor": Fault(on_output_gradient("head", 1.25), "backward", ("norm", "head"), ("factor",), TWO, 2),
    "missing all-reduce": Fault(on_gradient(Q, summand), "gradient", (Q,), ("missing reduction",), REPLICAS, 2),
    "stale shard": Fault(stale(EXPERTS, (1,)), "gradient", (EXPERTS,), ("stale",), EP, 2, step=2),
    "stale gradient": Fault(stale(W2), "gradient", (W2,), ("stale",), TWO, 2, step=2),
    "swapped shards": Fault(swapped(EXPERTS), "gradient", (EXPERTS,), ("permutation",), EP, 2),
    "shard lost": Fault(on_gradient(EXPERTS, lambda x, _: 0 * x, ranks=(1,)), "gradient", (EXPERTS,), ("lost",), EP, 2),
    "dtype of the reduction": Fault(on_gradient(Q, lambda x, _: to_bfloat16(x)), "gradient", (Q,), ("dtype",), TWO, 2),
    "replica differs": Fault(
        on_gradient(Q, lambda x, _: 1.5 * x, ranks=(1,)), "gradient", (Q,), ("replicas differ",), REPLICAS, 2
    ),
    "not a number": Fault(on_gradient(Q, lambda x, _: x * np.nan), "gradient", (Q,), ("not finite",), TWO, 2, step=1),
    "output doubled": Fault(
        on_output("layers.0.feed_forward.w2", lambda x: 2 * x),
        "forward",
        ("layers.0.feed_forward.w2",),
        ("factor",),
        {"tp": 2, "etp": 1},
        2,
    ),
    "summand of a rank lost": Fault(
        on_output("layers.0.feed_forward.w2", lambda x: x * 0, (1,)),
        "forward",
        ("layers.0.feed_forward.w2",),
        ("lost",),
        {"tp": 2, "etp": 1},
        2,
    ),
    "mask at a border": Fault(
        on_output("layers.0.attention", border, (1,)),
        "forward",
        ("layers.0.attention",),
        ("border",),
        {"cp": 2, "cp_method": "ulysses"},
        2,
    ),
    "epsilon of a norm": Fault(
        attribute("layers.1.ffn_norm", "eps", 1e-4), "forward", ("layers.1.ffn_norm",), ("formula", "factor"), TWO, 2
    ),
    "loss of a rank": Fault(loss_of_a_rank, "loss", ("mean loss",), ("factor",), TWO, 2),
    "epsilon of the optimizer": Fault(optimizer_epsilon, "update", (FIRST,), ("formula", "values"), TWO, 2),
    "dropped router bias": Fault(no_bias_update, "update", ("layers.1.moe.expert_bias",), ("lost",), TWO, 2),
    "experts exchanged": Fault(
        after_update(exchange_experts), "update", ("layers.1.moe.experts.w2",), ("permutation",)
    ),
    "weight not updated": Fault(restored(Q), "update", (Q,), ("lost",), TWO, 2, step=1),
    "replica not updated": Fault(
        restored(Q, (1,)), "update", (Q,), ("replicas differ", "lost", "stale"), REPLICAS, 2, step=1
    ),
    "gradient of a tied copy lost": Fault(
        tied_copy_lost, "gradient", (FIRST,), ("missing reduction",), {"pp": 2}, 2, TIED
    ),
    "other dropout on a rank": Fault(
        other_dropout, "forward", ("layers.0.attention.o_proj",), ("random numbers",), TWO, 2, DROPOUT
    ),
}
