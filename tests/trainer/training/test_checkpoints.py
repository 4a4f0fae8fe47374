"""A run continues from the newest checkpoint that fits it, and says what it did with those that do not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from training_runs import events, newest, tensors

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.testing import run_ranks
from hp_trainer.checkpoint import Checkpoint, list_set_aside
from hp_trainer.exceptions import DataError, UnfitCheckpointError
from hp_trainer.run import RunFolder, checkpoint_storage
from hp_trainer.training import Trainer, setup


def resume(run, platform, folder: str, choice: str = "newest that fits") -> None:
    trainer = Trainer(run, run.load_config().config, platform, initial_weights=False)
    trainer.resume(folder, choice)
    trainer.run()


def edit_index(checkpoint: Checkpoint, **changes) -> None:
    """Write an index that is sound in form, with another content."""
    file = Path(checkpoint.storage.describe(checkpoint.folder, "index.json"))
    file.write_text(replace(checkpoint.index, **changes).dump())


def without_a_state(checkpoint: Checkpoint) -> dict[str, object]:
    kept = {
        name: tensor for name, tensor in checkpoint.index.tensors.items() if name != "optimizer.norm.weight.exp_avg"
    }
    return {"tensors": kept}


def without_a_position(checkpoint: Checkpoint) -> dict[str, object]:
    return {"state": {name: value for name, value in checkpoint.state.items() if name != "samples"}}


def of_other_data(checkpoint: Checkpoint) -> dict[str, object]:
    return {"state": {**checkpoint.state, "dataset": {"text": "other"}}}


@pytest.mark.parametrize("spoil", [without_a_state, without_a_position, of_other_data])
def test_a_newest_checkpoint_that_does_not_fit_is_set_aside_for_the_one_before(torch_or, lab, capsys, spoil):
    torch_or(spoil is without_a_state)
    degrees = {"pp": 2}
    expected = lab.run("run", degrees, 2)
    run = RunFolder(shutil.copytree(expected.path, lab.folder / "copy"))
    unfit = newest(run)
    edit_index(unfit, **spoil(unfit))
    run_ranks(resume, 2, lab.platform, run, lab.platform, unfit.folder)
    assert [event["step"] for event in events(run, "step")] == [1, 2, 3, 4, 5, 6]
    storage = checkpoint_storage(run, run.load_config().config)
    (aside,) = list_set_aside(storage)
    assert aside.startswith("step-00000006.set-aside-")
    message = capsys.readouterr().err
    assert "hp-train: skipped a checkpoint: " in message
    assert message.count(f"moved {storage.describe(aside)} aside") == 1
    first, second = tensors(expected), tensors(run)
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_checkpoint_that_was_asked_for_is_taken_or_refused(lab):
    run = lab.run("run", training__steps=3)
    unfit = newest(run)
    edit_index(unfit, **without_a_state(unfit))
    with pytest.raises((LaunchError, UnfitCheckpointError), match=r"exp_avg' is missing; .*--reset-optimizer"):
        run_ranks(resume, 1, lab.platform, run, lab.platform, unfit.folder, "exactly")


@pytest.mark.parametrize("change", [{"training__freeze": "[embed.*]"}, {"optimizer__name": "sgd"}], ids=str)
def test_an_optimizer_can_start_again(lab, change):
    """Without its old state: after one step it is the state of a first step, and frozen weights stay."""
    run = lab.run("run", training__steps=3, training__ema__decay=0.5)
    before = tensors(run)
    changes = {"training__steps": 4, **change}
    run.write_config(run.load_config([(name.replace("__", "."), str(value)) for name, value in changes.items()]).config)
    folder = newest(run).folder
    with pytest.raises((LaunchError, UnfitCheckpointError), match=r"the weights fit: .*--reset-optimizer"):
        run_ranks(resume, 1, lab.platform, run, lab.platform, folder)
    run_ranks(resume, 1, lab.platform, run, lab.platform, folder, "without optimizer")
    after = newest(run)
    assert (after.step, after.state["optimizer_steps"], after.state["samples"]) == (4, 1, 32)
    found = tensors(run)
    frozen = "training__freeze" in change
    assert np.array_equal(found["model.embed.weight"], before["model.embed.weight"]) == frozen
    assert any(name.startswith("optimizer.embed.") for name in found) != frozen
    assert not np.array_equal(found["model.norm.weight"], before["model.norm.weight"])


def test_data_that_differ_between_ranks_are_refused_on_all_ranks(lab, monkeypatch, torch_suffices):
    """A new run would train on both; in a resumed one the ranks would wait for each other."""
    run = lab.run("run", {}, 2)
    opened, messages = setup.open_dataset, []

    def of_rank(*arguments):
        rank = current_world(lab.platform).rank
        return replace(opened(*arguments), fingerprint={"text": f"read by rank {rank}"})

    def start() -> None:
        with pytest.raises(DataError) as caught:
            Trainer(run, run.load_config().config, lab.platform)
        messages.append(str(caught.value))

    monkeypatch.setattr(setup, "open_dataset", of_rank)
    run_ranks(start, 2, lab.platform)
    assert messages == 2 * [
        "data.name=text: text is 'read by rank 0' on rank 0 and 'read by rank 1' on rank 1; expected the same data on "
        "every rank: they must not depend on the rank, the process or the time"
    ]
