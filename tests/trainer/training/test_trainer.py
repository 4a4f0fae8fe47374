"""A run gives the same losses in every layout, complete or interrupted, and stops before anything is spoilt."""

from __future__ import annotations

import math
import re
import signal
import sys
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from training_runs import FOUR_RANKS, STEPS, events, losses, newest, skip_unless_torch_or, tensors, train_rank

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing import run_ranks
from hp_fsdp import FSDPModule
from hp_trainer._coordination import StopRequest
from hp_trainer.data import IGNORED, Rows, SampleOrder, TokenSamples, documents
from hp_trainer.exceptions import CheckpointError, TrainingError
from hp_trainer.launch import job
from hp_trainer.plugins import hookimpl
from hp_trainer.run import RunFolder
from hp_trainer.training import Trainer, open_dataset
from hp_trainer.training import trainer as trainer_module

# float32 sums in another order, carried through six AdamW steps.
CLOSE = {"rtol": 2e-5, "atol": 0}


def assert_same_losses(run, expected):
    np.testing.assert_allclose(losses(run), losses(expected), **CLOSE)


def assert_equal_tensors(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


# One run, any layout -----------------------------------------------------------------------------------------


def test_the_loss_falls_and_everything_is_written_down(lab):
    run = lab.run("one", training__steps=30, training__eval_interval=10)
    assert losses(run)[-1] < losses(run)[0] - 0.5
    assert [event["step"] for event in events(run, "evaluation")] == [10, 20, 30]
    assert [event["folder"] for event in events(run, "checkpoint")] == [f"step-{n:08}" for n in range(3, 31, 3)]
    last = events(run, "step")[-1]
    assert (last["tokens"], last["samples"]) == (8 * 16, 30 * 8)
    assert last["gradient_norm"] > 0
    assert {"max_load_violation", "load_variation", "load_entropy", "dead_experts"} < last["metrics"].keys()
    loads = [value for name, value in last["metrics"].items() if name.startswith("expert_load/")]
    assert sum(loads) / len(loads) == pytest.approx(1.0)
    rates = [event["learning_rate"] for event in events(run, "step")]
    # Two steps of warm-up, the peak, and a tenth of it at the end.
    assert [*rates[:3], rates[-1]] == pytest.approx([5e-3 / 3, 5e-3 * 2 / 3, 5e-3, 5e-4])
    assert rates[-2] > rates[-1]


@pytest.mark.parametrize("name", ["folded", "peer"])
def test_four_ranks_train_and_evaluate_as_one(lab, name):
    """All layouts are in `test_trainer_combinations.py`, without evaluations."""
    skip_unless_torch_or(lab.platform, False)  # elsewhere ranks that share sequences do
    settings = {"training__steps": 4, "training__eval_interval": 2, "training__eval_batches": 2}
    expected = lab.reference("one", **settings)
    run = lab.run("four", FOUR_RANKS[name], 4, **settings)
    assert_same_losses(run, expected)
    for kind, value in (("evaluation", "loss"), ("step", "gradient_norm")):
        got, wanted = ([event[value] for event in events(r, kind)] for r in (run, expected))
        np.testing.assert_allclose(got, wanted, rtol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"model__tie_word_embeddings": True},
        {"model__num_dense_layers": 2},
        {"model__num_shared_experts": 0, "model__load_balance_coeff": None},
        {"training__clip_norm": None},
        {"parallel__reshard_after_forward": False},
        {"parallel__reduce_gradients": "micro_batch", "training__micro_batch_size": 1, "training__clip_norm": 0.5},
    ],
    ids=[
        "tied embeddings",
        "dense layers",
        "no shared expert, no bias",
        "no clipping",
        "weights left unsharded",
        "reduced often",
    ],
)
def test_models_and_settings(lab, settings):
    skip_unless_torch_or(lab.platform, "parallel__reduce_gradients" in settings)
    settings |= {"training__steps": 3}
    expected = lab.reference("one", **settings)
    assert_same_losses(lab.run("four", FOUR_RANKS["folded"], 4, **settings), expected)


@pytest.mark.parametrize(("degrees", "world_size"), [({}, 1), (FOUR_RANKS["folded"], 4)], ids=["1", "4"])
@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_change_nothing(lab, degrees, world_size, size):
    skip_unless_torch_or(lab.platform, False)  # elsewhere "reduced often" has micro-batches on four ranks
    full_value = lab.reference("full", degrees, world_size)
    assert_same_losses(lab.run("parts", degrees, world_size, training__micro_batch_size=size), full_value)


class PartlyTaken(TokenSamples):
    """Samples of which the n-th takes its loss from its first n + 1 places alone, modulo 5: unevenly over ranks."""

    def read(self, indices):
        rows = super().read(indices)
        taken = np.arange(rows.ids.shape[1]) <= indices[:, None] % 5
        return Rows(rows.ids, np.where(taken, rows.targets, IGNORED))

    def num_targets(self, indices):
        return int((indices % 5 + 1).sum())


@pytest.mark.usefixtures("torch_suffices")
def test_the_loss_is_the_mean_over_the_targets_of_all_ranks(lab, monkeypatch):
    monkeypatch.setattr(documents, "TokenSamples", PartlyTaken)
    settings = {"training__steps": 3, "training__eval_interval": 3}
    full_value = lab.run("full", **settings)
    parts = lab.run("parts", FOUR_RANKS["folded"], 4, training__micro_batch_size=2, **settings)
    assert_same_losses(parts, full_value)
    (evaluated,), (expected,) = events(parts, "evaluation"), events(full_value, "evaluation")
    assert evaluated["loss"] == pytest.approx(expected["loss"], rel=2e-5)
    assert evaluated["tokens"] == expected["tokens"] < 4 * 8 * 16 / 3
    # At the first step every token is about as likely, so a mean over all places would be a fifth of this.
    assert losses(full_value)[0] == pytest.approx(losses(lab.run("all places", training__steps=1))[0], rel=0.2)


def test_without_clipping_the_norm_is_the_same(lab):
    settings = {"training__steps": 3}
    free = lab.reference("free", training__clip_norm=None, **settings)
    clipped = lab.run("clipped", training__clip_norm=0.01, **settings)
    first = [events(run, "step")[0]["gradient_norm"] for run in (free, clipped)]
    assert first[0] == first[1] > 0.01
    assert losses(free) != losses(clipped)


def test_evaluation_leaves_training_as_it_is(lab):
    plain = lab.reference("plain")
    evaluated = lab.run("evaluated", training__eval_interval=1, training__eval_batches=2)
    assert losses(evaluated) == losses(plain)
    assert_equal_tensors(tensors(evaluated), tensors(plain))
    assert {event["tokens"] for event in events(evaluated, "evaluation")} == {2 * 8 * 16}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision(torch_or, lab, dtype):
    torch_or(dtype == "float16")
    if lab.platform.name == "mindspore" and dtype == "bfloat16":
        pytest.skip("MindSpore has no bfloat16 products on CPU")
    expected = lab.reference("float32", training__steps=3)
    run = lab.run("mixed", FOUR_RANKS["folded"], 4, training__steps=3, training__dtype=dtype)
    # 8 (bfloat16) or 11 bits of precision.
    np.testing.assert_allclose(losses(run), losses(expected), rtol=2e-2 if dtype == "bfloat16" else 3e-3)
    assert losses(run) != losses(expected)
    assert {tensor.dtype for tensor in newest(run).index.tensors.values()} == {"float32"}


def test_float16_skips_steps_that_overflow_and_goes_on_as_if_uninterrupted(lab):
    settings = {
        "model__num_hidden_layers": 1,
        "training__sequence_length": 8,
        "training__dtype": "float16",
        "training__loss_scaling__init_scale": 2.0**28,
        "training__loss_scaling__growth_interval": 2,
        "training__loss_scaling__backoff_factor": 2.0**-8,
    }
    full_value = lab.run("full", {}, 1, **settings)
    scales = [event["metrics"]["loss_scale"] for event in events(full_value, "step")]
    assert scales[0] == 2.0**20  # the first step overflowed
    assert events(full_value, "step")[0]["gradient_norm"] == "inf"
    assert newest(full_value).state["optimizer_steps"] < STEPS == newest(full_value).step
    resumed = lab.resume(lab.interrupted_copy(full_value, "resumed"), {}, 1, **settings)
    assert losses(resumed) == losses(full_value)
    assert [event["metrics"]["loss_scale"] for event in events(resumed, "step")] == scales
    assert newest(resumed).state["loss_scaling"] == newest(full_value).state["loss_scaling"]
    assert_equal_tensors(tensors(resumed), tensors(full_value))


@pytest.mark.parametrize(("init_scale", "moved"), [(2.0**28, False), (2.0**10, True)])
def test_a_step_that_overflows_leaves_expert_biases_as_they_were(lab, init_scale, moved):
    run = lab.run(
        "one step",
        training__steps=1,
        training__dtype="float16",
        training__loss_scaling__init_scale=init_scale,
        model__load_balance_coeff=0.01,
    )
    assert (newest(run).state["optimizer_steps"] == 1) == moved
    assert np.any(tensors(run)["model.layers.1.moe.expert_bias"] != 0) == moved


# Interrupted runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("degrees", "world_size"), [({}, 1), (FOUR_RANKS["folded"], 4)], ids=["1", "4"])
def test_in_the_same_layout_an_interruption_leaves_no_trace(lab, degrees, world_size):
    full_value = lab.reference("full", degrees, world_size)
    resumed = lab.resume(lab.interrupted_copy(full_value, "resumed"), degrees, world_size)
    assert losses(resumed) == losses(full_value)
    assert len(losses(resumed)) == STEPS
    assert_equal_tensors(tensors(resumed), tensors(full_value))


MOVES = {
    "1 to 4 folded": ({}, 1, FOUR_RANKS["folded"], 4),
    "4 folded to 2 tensor parallel": (FOUR_RANKS["folded"], 4, {"tp": 2}, 2),
    "2 fully sharded to 4 hybrid": ({"dp_shard": 2}, 2, FOUR_RANKS["hybrid"], 4),
    "4 hybrid to 1": (FOUR_RANKS["hybrid"], 4, {}, 1),
    "4 peer to 4 experts sharded": (FOUR_RANKS["peer"], 4, FOUR_RANKS["experts sharded"], 4),
}


@pytest.mark.parametrize(("before", "size", "after", "new_size"), MOVES.values(), ids=MOVES)
def test_in_another_layout_the_losses_go_on(lab, before, size, after, new_size):
    skip_unless_torch_or(lab.platform, before == FOUR_RANKS["folded"])
    expected = lab.reference("one")
    first = lab.interrupted_copy(lab.reference("first", before, size), "resumed")
    resumed = lab.resume(first, after, new_size)
    assert_same_losses(resumed, expected)


@pytest.mark.parametrize(("before", "size", "after", "new_size"), MOVES.values(), ids=MOVES)
def test_all_that_training_changes_moves_to_another_layout_unchanged(lab, before, size, after, new_size):
    skip_unless_torch_or(lab.platform, before in (FOUR_RANKS["hybrid"], FOUR_RANKS["peer"]))
    run = lab.reference("first", before, size)
    saved = tensors(run)
    bias = "model.layers.1.moe.expert_bias"
    assert np.any(saved[bias] != 0)
    slots = {name.rpartition(".")[2] for name in saved if name.startswith("optimizer.")}
    assert slots == {"exp_avg", "exp_avg_sq"}
    folder = newest(run).folder
    run.write_config(lab.config(after, metrics__trackers="[]"))

    def load_and_save():
        trainer = Trainer(run, run.load_config().config, lab.platform)
        trainer.resume(folder)
        trainer.save()

    run_ranks(load_and_save, new_size, lab.platform)
    assert newest(run).folder == f"{folder}-2"
    assert_equal_tensors(tensors(run), saved)


@pytest.mark.usefixtures("torch_suffices")
def test_each_sample_is_read_once_whatever_the_world_size(lab, monkeypatch):
    seen, read = [], TokenSamples.read

    def noted(self, indices):
        seen.append((current_world(lab.platform).rank, *indices))
        return read(self, indices)

    monkeypatch.setattr(TokenSamples, "read", noted)
    run = lab.run("run", FOUR_RANKS["folded"], 4, training__steps=3)
    first = Counter(sample for rank, *samples in seen for sample in samples)
    assert set(first.values()) == {2}, "both ranks of a tensor-parallel pair read the same samples"
    seen.clear()
    lab.resume(run, {"dp_shard": 8}, 8)
    second = Counter(sample for rank, *samples in seen for sample in samples)
    assert set(second.values()) == {1}
    num_samples = len(open_dataset(run, lab.config()).train)
    order = SampleOrder(num_samples, seed=0).samples(0, STEPS * 8)
    assert sorted([*first, *second]) == sorted(order)
    assert len(set(order)) == STEPS * 8
    assert [event["samples"] for event in events(run, "step")] == [8 * (n + 1) for n in range(STEPS)]


class StopAtStep:
    """Asks one rank to stop while a step is under way."""

    def __init__(self, platform, rank, step):
        self.platform, self.rank, self.step = platform, rank, step
        self.requests = {}

    @contextmanager
    def stop_requests(self):
        yield self.requests.setdefault(current_world(self.platform).rank, StopRequest())

    @hookimpl
    def hp_before_step(self, record):
        if record.step == self.step and current_world(self.platform).rank == self.rank:
            self.requests[self.rank].make(signal.SIGTERM)


@pytest.mark.usefixtures("torch_suffices")
def test_a_stop_asked_of_one_rank_stops_all_after_the_step_under_way(lab, plugged, monkeypatch):
    expected = lab.reference("expected")
    stop = StopAtStep(lab.platform, rank=2, step=4)
    monkeypatch.setattr(trainer_module, "stop_requests", stop.stop_requests)
    plugged(stop)
    run = lab.start("run", FOUR_RANKS["folded"])
    ended_by = run_ranks(train_rank, 4, lab.platform, run, lab.platform)
    assert ended_by == [signal.SIGTERM] * 4
    assert newest(run).step == 4
    assert len(losses(run)) == 4
    stop.requests.clear()
    stop.step = None
    assert_same_losses(lab.resume(run, FOUR_RANKS["folded"], 4), expected)


def test_a_stop_in_the_last_step_is_no_stop(lab, plugged, monkeypatch):
    stop = StopAtStep(lab.platform, rank=0, step=STEPS)
    monkeypatch.setattr(trainer_module, "stop_requests", stop.stop_requests)
    plugged(stop)
    run = lab.start("run")
    assert run_ranks(train_rank, 1, lab.platform, run, lab.platform) == [None]
    assert newest(run).step == STEPS


# What ends a run ---------------------------------------------------------------------------------------------


def spoil(platform, x, value):
    """Write `value` into this rank's elements."""
    local = platform.unwrap(x) if isinstance(x, DTensor) else x
    with platform.no_grad():
        platform.copy_(local, platform.from_numpy(np.full(tuple(local.shape), value, np.float32)))


def local_values(lab, trainer):
    with lab.platform.no_grad():
        found = trainer.setup.optimizer.state()
        slots = [slot for name in found for slot in found[name].values()]
        parameters = [p for _, p in lab.platform.named_parameters(trainer.setup.model)]
        plain = [lab.platform.unwrap(x) if isinstance(x, DTensor) else x for x in (*parameters, *slots)]
        return [lab.platform.to_numpy(x).copy() for x in plain]


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_number_that_is_not_finite_on_one_rank_stops_all_before_any_update(lab, what):
    # Without experts: those name the layer in which such numbers come to be.
    run = lab.start("run", {"dp_replicate": 2, "dp_shard": 1}, metrics__trackers="[]", model__num_dense_layers=2)
    messages = {
        "loss": "the loss of step 2 is nan; this step changed nothing",
        "gradient": "the norm of the gradient of step 2 is inf; this step changed nothing",
    }

    def two_steps():
        trainer = Trainer(run, run.load_config().config, lab.platform)
        trainer.train_step(StopRequest())
        is_spoilt = trainer.setup.mesh.world.rank == 1
        _, parameter = next(iter(lab.platform.named_parameters(trainer.setup.model)))
        if what == "loss" and is_spoilt:
            spoil(lab.platform, parameter, math.nan)
        if what == "gradient" and is_spoilt:
            accumulate = trainer._step.accumulate_gradients

            def accumulate_and_spoil(batch):
                loss = accumulate(batch)
                spoil(lab.platform, lab.platform.get_grad(parameter), math.inf)
                return loss

            trainer._step.accumulate_gradients = accumulate_and_spoil
        before = local_values(lab, trainer)
        with pytest.raises(TrainingError) as caught:
            trainer.train_step(StopRequest())
        assert (trainer.progress.step, trainer.setup.optimizer.num_steps) == (1, 1)
        for old, new in zip(before, local_values(lab, trainer), strict=True):
            np.testing.assert_array_equal(new, old)
        return str(caught.value)

    assert all(messages[what] in message for message in run_ranks(two_steps, 2, lab.platform))


def test_hooks_are_told_of_every_event_and_of_the_error_that_ends_the_run(lab, plugged):
    expected_message = []

    class Plugin:
        @hookimpl
        def hp_before_run(self, record):
            expected_message.append(("before run", record.first_step, record.world_size))

        @hookimpl
        def hp_before_step(self, record):
            expected_message.append(("before step", record.step, record.loss))

        @hookimpl
        def hp_after_step(self, record):
            expected_message.append(("after step", record.step))
            if record.step == 2:
                raise OSError("no space left")

        @hookimpl
        def hp_after_evaluation(self, record):
            expected_message.append(("after evaluation", record.step))

        @hookimpl
        def hp_before_checkpoint(self, record):
            expected_message.append(("before checkpoint", record.step, record.folder))

        @hookimpl
        def hp_after_checkpoint(self, record):
            expected_message.append(("after checkpoint", record.step, record.folder))

        @hookimpl
        def hp_on_error(self, record):
            expected_message.append(
                ("error", record.during, record.step, str(record.error).rpartition(": ")[2].partition(" (")[0])
            )

    plugged(Plugin())
    with pytest.raises(LaunchError, match="no space left"):
        lab.run("run", checkpoint__interval=1, training__eval_interval=1)
    assert expected_message == [
        ("before run", 0, 1),
        ("before step", 1, None),
        ("after step", 1),
        ("after evaluation", 1),
        ("before checkpoint", 1, None),
        ("after checkpoint", 1, "step-00000001"),
        ("before step", 2, None),
        ("after step", 2),
        ("error", "training", 2, "no space left"),
    ]
    assert newest_step(lab, "run") == 1


def newest_step(lab, name):
    return newest(RunFolder(lab.folder / name)).step


# What is refused ---------------------------------------------------------------------------------------------


def refused(lab, run, checkpoint, **overrides):
    """Return the error message of training from this checkpoint; the run is left as it is."""
    config = lab.config(**overrides)
    with pytest.raises(LaunchError) as caught:
        run_ranks(train_rank, 1, lab.platform, run, lab.platform, checkpoint, config)
    assert isinstance(caught.value.__cause__, CheckpointError)
    return str(caught.value.__cause__)


def test_a_checkpoint_of_another_model_is_refused_and_the_difference_named(lab):
    run = lab.reference("run", training__steps=1)
    message = refused(lab, run, "step-00000001", model__num_experts=8, model__hidden_size=32)
    assert "is a checkpoint of another model" in message
    assert "hidden_size is 16 there and 32 here" in message
    assert "num_experts is 4 there and 8 here" in message
    assert "head_dim" not in message


@pytest.mark.parametrize(
    ("change", "expected_message"),
    [
        ({"training__sequence_length": 8}, "sequence length is 16 there and 8 here"),
        ({"data__eval_fraction": 0.5}, "training tokens is 3801 there and 2001 here"),
        ({"data__path": "other.txt"}, "text is '"),
    ],
    ids=["length", "split", "text"],
)
def test_a_checkpoint_of_other_data_is_refused_and_the_difference_named(lab, change, expected_message):
    run = lab.reference("run", training__steps=1)
    (lab.folder / "other.txt").write_text("other text " * 400)
    if "data__path" in change:
        change = {"data__path": lab.folder / "other.txt"}
    other = lab.start("other", **change)
    other.checkpoints.rmdir()
    run.checkpoints.rename(other.checkpoints)
    message = refused(lab, other, "step-00000001", **change)
    assert "was trained on other data" in message
    assert expected_message in message


def test_a_rank_without_memory_is_named_with_what_it_holds(lab):
    run = lab.start("run", {"dp_shard": 2}, training__steps=2)

    def rank():
        trainer = Trainer(run, run.load_config().config, lab.platform)
        if trainer.setup.mesh.world.rank == 1:
            step = trainer._step.update
            trainer._step.update = lambda *arguments: _exhausted() if trainer.progress.step == 1 else step(*arguments)
        return trainer.run()

    with pytest.raises(
        LaunchError, match=r"rank 1 has used up its memory in step 2: CUDA out of memory"
    ) as expected_message:
        run_ranks(rank, 2, lab.platform)
    # Sharded over both ranks: float32 weights, as many gradients, and two moments of AdamW.
    found = {
        name: float(size) for size, name in re.findall(r"([\d.]+) KiB of ([a-z ]+)[,;]", str(expected_message.value))
    }
    assert list(found) == ["weights", "gradients", "optimizer state"]
    assert found["gradients"] == pytest.approx(found["weights"], rel=0.1)
    assert found["optimizer state"] == pytest.approx(2 * found["weights"], rel=0.1)
    assert "training.recompute=full" in str(expected_message.value)


def _exhausted() -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")


def test_a_call_of_sys_exit_after_the_last_step_is_no_success(lab, monkeypatch):
    """A local rank that leaves with 0 would pass for one that is done, and the command with it."""
    monkeypatch.setattr(job, "write_samples", lambda *_: sys.exit(0))
    run, name = lab.start("run", training__steps=1), lab.platform.name
    expected_message = (
        rf"something left with SystemExit\(0\) before the run was done, called at {__file__}:\d+; raise an error"
    )

    def rank():
        with pytest.raises(TrainingError, match=expected_message):
            job.run_rank(str(run.path), None, None, name, True)

    run_ranks(rank, 1, lab.platform)


def test_models_that_reduce_gradients_in_their_own_way_need_no_reductions_in_two_parts(lab, monkeypatch):
    """Only `parallel.reduce_gradients=micro_batch` asks for them."""
    skip_unless_torch_or(lab.platform, False)
    monkeypatch.delattr(FSDPModule, "set_requires_all_reduce")
    run = lab.run("run", training__steps=1, training__micro_batch_size=1, checkpoint__interval=None)
    assert len(losses(run)) == 1
