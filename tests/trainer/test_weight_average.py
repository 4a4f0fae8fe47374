"""The moving average of the weights: its arithmetic, in any layout, through checkpoints, in evaluations and exports."""

from __future__ import annotations

import numpy as np
from training_runs import FOUR_RANKS, Lab, events, losses, tensors

from hp_trainer import cli
from hp_trainer.checkpoint import Box
from hp_trainer.models.hugging_face import ModelDirectory
from hp_trainer.training.optimizer import WeightAverage

SETTINGS = {"training__ema__decay": 0.9, "training__eval_interval": 3, "training__eval_batches": 1}


def averages(run) -> dict[str, np.ndarray]:
    return {name.removeprefix("ema."): value for name, value in tensors(run, ("ema.",)).items()}


def test_the_average_forgets_its_beginning_and_then_keeps_the_share_asked_for(hp_platform):
    weight = hp_platform.Parameter(hp_platform.from_numpy(np.array([4.0, -8.0], np.float32)))
    average = WeightAverage([("x", weight)], 0.5, hp_platform)
    expected = np.array([4.0, -8.0])
    for step, decay in ((1, 2 / 11), (2, 3 / 12), (3, 4 / 13), (14, 0.5), (15, 0.5)):
        values = np.array([step, 2.0], np.float32)
        with hp_platform.no_grad():
            hp_platform.copy_(hp_platform.detach(weight), hp_platform.from_numpy(values))
        average.update(step)
        expected = decay * expected + (1 - decay) * values
        np.testing.assert_allclose(hp_platform.to_numpy(average.state()["x"]), expected, rtol=1e-6)
    with average.in_place():
        np.testing.assert_allclose(hp_platform.to_numpy(hp_platform.detach(weight)), expected, rtol=1e-6)
    np.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.detach(weight)), values)


def test_averages_of_half_precision_weights_are_float32(hp_platform):
    half = hp_platform.dtype("bfloat16")
    weight = hp_platform.Parameter(hp_platform.ops.cast(hp_platform.from_numpy(np.ones(3, np.float32)), half))
    average = WeightAverage([("x", weight)], 0.999, hp_platform)
    with hp_platform.no_grad():
        values = hp_platform.ops.cast(hp_platform.from_numpy(np.full(3, 2.0, np.float32)), half)
        hp_platform.copy_(hp_platform.detach(weight), values)
    for _ in range(10):
        average.update(10**6)
    expected = 2 - 0.999**10
    np.testing.assert_allclose(hp_platform.to_numpy(average.state()["x"]), np.full(3, expected), rtol=1e-6)
    for _ in range(2):
        with average.in_place():
            inside = hp_platform.ops.cast(hp_platform.detach(weight), hp_platform.dtype("float32"))
            # bfloat16 keeps 8 bits.
            np.testing.assert_allclose(hp_platform.to_numpy(inside), expected, rtol=2**-8)
        after = hp_platform.ops.cast(hp_platform.detach(weight), hp_platform.dtype("float32"))
        np.testing.assert_array_equal(hp_platform.to_numpy(after), 2)
    np.testing.assert_allclose(hp_platform.to_numpy(average.state()["x"]), np.full(3, expected), rtol=1e-6)


def test_every_layout_has_the_same_average_and_goes_on_exactly(lab: Lab):
    whole = lab.run("whole", **SETTINGS)
    found, weights = averages(whole), tensors(whole, ("model.",))
    assert {f"model.{name}" for name in found} == {name for name in weights if "expert_bias" not in name}
    assert not np.array_equal(found["embed.weight"], weights["model.embed.weight"])
    plain = lab.run("plain", training__eval_interval=3, training__eval_batches=1)
    assert losses(plain) == losses(whole), "evaluation with the average changes no weight"
    # Groups that stay gathered after an evaluation must not be used by the next step.
    parts = lab.run("parts", FOUR_RANKS["folded"] | {"reshard_after_forward": False}, 4, **SETTINGS)
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-4)
    np.testing.assert_allclose(
        [event["loss"] for event in events(parts, "evaluation")],
        [event["loss"] for event in events(whole, "evaluation")],
        rtol=1e-4,
    )
    again = lab.resume(lab.interrupted_copy(whole, "again"), **SETTINGS)
    assert losses(again) == losses(whole)
    for name, value in averages(again).items():
        np.testing.assert_array_equal(value, found[name])
    moved = lab.resume(lab.interrupted_copy(parts, "moved"), {"dp_shard": 2}, 2, **SETTINGS)
    for name, value in averages(moved).items():
        np.testing.assert_allclose(value, averages(parts)[name], atol=2e-5)


def test_evaluation_uses_the_average_unless_told_not_to(lab: Lab, capsys):
    settings = SETTINGS | {"training__eval_interval": 6, "training__eval_batches": None}
    run = lab.run("run", **settings)
    (averaged,) = events(run, "evaluation")
    other = lab.run("other", training__ema__evaluate=False, **settings)
    (last,) = events(other, "evaluation")
    assert last["loss"] < averaged["loss"] - 1e-3, "six steps are few: the average lags behind"
    for weights, event in (("ema", averaged), ("last", last)):
        assert cli.main(["evaluate", str(run.path), f"--weights={weights}"]) == 0
        assert f"loss {event['loss']:.3f}" in capsys.readouterr().out


def test_a_run_may_begin_to_average_later_and_may_end_it(lab: Lab):
    plain = lab.run("plain")
    begun = lab.resume(lab.interrupted_copy(plain, "begun"), **SETTINGS)
    assert losses(begun) == losses(plain)
    whole = lab.run("whole", **SETTINGS)
    assert averages(begun).keys() == averages(whole).keys()
    ended = lab.resume(lab.interrupted_copy(whole, "ended"))
    assert losses(ended) == losses(plain)
    assert not averages(ended)


def test_weights_that_were_not_averaged_are_refused_by_name(lab: Lab, tmp_path, capsys):
    run = lab.run("run", training__steps=1)
    for command in (["evaluate", str(run.path)], ["export", str(run.path), f"--to={tmp_path / 'out'}"]):
        assert cli.main([*command, "--weights=ema"]) == 2
        assert "has no moving averages of the weights: its run was trained without" in capsys.readouterr().err
    assert cli.main(["evaluate", str(run.path), "--weights=best"]) == 2
    assert "Invalid value for '--weights': 'best' is not one of 'last', 'ema'." in capsys.readouterr().err


def test_a_step_that_overflows_leaves_the_average_alone(lab: Lab, monkeypatch):
    counted = []
    monkeypatch.setattr(WeightAverage, "update", lambda self, num_steps: counted.append(num_steps))
    lab.run("run", training__steps=2, training__dtype="float16", training__loss_scaling__init_scale=1e12, **SETTINGS)
    assert counted == []


def test_the_average_is_the_model_of_an_export(lab: Lab, tmp_path):
    run = lab.run("run", model__num_experts=None, model__qk_norm="none", model__num_dense_layers=0, **SETTINGS)
    assert cli.main(["export", str(run.path), f"--to={tmp_path / 'out'}", "--weights=ema"]) == 0
    directory = ModelDirectory(tmp_path / "out", run.load_config().config.model.options)
    for name, value in averages(run).items():
        np.testing.assert_array_equal(directory.read(name, Box.full(value.shape)), value)
