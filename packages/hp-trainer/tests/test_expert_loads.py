"""The heatmap of the experts' loads, from the metrics file."""

from __future__ import annotations

import json

import numpy
import pytest

from hp_moe import LoadMetrics
from hp_trainer.metrics import PictureTracker, draw_expert_loads
from hp_trainer.metrics.pictures import draw_loads, loads_of
from hp_trainer.metrics.tracker import step_scalars
from hp_trainer.models.decoder.decoder import expert_metrics
from hp_trainer.records import StepRecord

LOADS = {"layers.0.moe": [[4, 0, 2], [2, 2, 2]], "layers.3.moe": [[3, 1], [0, 4]]}


def metrics_of(step):
    loads = {
        name: LoadMetrics.of(each[step], dropped=1, sent_bytes=10, aux_losses={"z": float(step)})
        for name, each in LOADS.items()
    }
    return expert_metrics(loads)


def events(steps=2):
    return [{"event": "start"}] + [
        {"event": "step", "step": 5 + at, "loss": 1.0, "metrics": metrics_of(at % 2)} for at in range(steps)
    ]


def test_metrics_of_a_step():
    assert metrics_of(0) == pytest.approx(
        {
            "max_load_violation": 1.0,
            "load_variation": numpy.mean([numpy.std([4, 0, 2]) / 2, 0.5]),
            "load_entropy": -(2 / 3 * numpy.log(2 / 3) + 1 / 3 * numpy.log(1 / 3)) / numpy.log(3),
            "dead_experts": 1,
            "dropped_choices": 2 / 10,
            "expert_bytes_sent": 20,
            "aux_loss/z": 0.0,
            "expert_load/0/0": 2.0,
            "expert_load/0/1": 0.0,
            "expert_load/0/2": 1.0,
            "expert_load/3/0": 1.5,
            "expert_load/3/1": 0.5,
        }
    )
    assert expert_metrics({}) == {}


def test_trackers_with_libraries_get_no_single_experts():
    record = StepRecord(step=1, learning_rate=0.1, tokens=1, samples=1, metrics=metrics_of(1))
    names = step_scalars(record)
    assert names["train/dead_experts"] == 1
    assert names["train/aux_loss/z"] == 1
    assert not any("expert_load/" in name for name in names)


def test_loads_by_layer_expert_and_step():
    steps, loads = loads_of(events())
    assert steps == [5, 6]
    numpy.testing.assert_array_equal(loads["0"], [[2, 1], [0, 1], [1, 1]])
    numpy.testing.assert_array_equal(loads["3"], [[1.5, 0], [0.5, 2]])


@pytest.mark.parametrize("steps", [1, 2, 1000])
def test_the_picture_of_a_run(tmp_path, steps):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(event) + "\n" for event in events(steps)))
    PictureTracker(metrics, tmp_path / "loads.png", draw_expert_loads).finish()
    assert (tmp_path / "loads.png").read_bytes().startswith(b"\x89PNG")


def test_rows_are_experts_and_columns_means_over_steps():
    from matplotlib.figure import Figure

    figure = Figure()
    steps, loads = loads_of(events(800))
    draw_loads(figure, steps, loads)
    (image,) = figure.axes[0].images
    assert image.get_array().shape == (5, 400)
    numpy.testing.assert_allclose(image.get_array()[:, 0], [1.5, 0.5, 1.0, 0.75, 1.25])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "3"]


def test_no_picture_without_experts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"event": "step", "step": 1, "metrics": {}}) + "\n")
    PictureTracker(tmp_path / "metrics.jsonl", tmp_path / "loads.png", draw_expert_loads).finish()
    assert not (tmp_path / "loads.png").exists()
