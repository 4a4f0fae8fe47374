"""Recorded runs in every layout against one rank, injected faults, and a live run that follows a reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from injected_faults import EP, FAULTS, RECORDED, Fault, is_placed, nothing, record, reference
from training_runs import FOUR_RANKS, Lab, losses, tensors, train_rank

from hp_dtensor.debug import Recording, compare
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.testing import run_ranks

# The kinds of parallelism, on few ranks.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    **{name: (degrees, 4) for name, degrees in FOUR_RANKS.items()},
    "uneven": ({"dp_shard": 3}, 3),
    "ring": ({"cp": 2, "cp_method": "ring", "tp": 2, "etp": 1}, 4),
    "pipeline": ({"pp": 2, "dp_shard": 2}, 4),
}
ELSEWHERE = {"folded", "pipeline"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, platform: Any) -> Lab:
    """One for all tests, which share references."""
    return Lab(tmp_path_factory.mktemp("recorded"), platform)


@pytest.fixture(scope="module")
def references(lab: Lab) -> Any:
    known: dict[str, Recording] = {}

    def of(**settings: Any) -> Recording:
        key = str(sorted(settings.items()))
        if key not in known:
            known[key] = reference(lab, f"reference-{len(known)}", **settings)
        return known[key]

    return of


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_differs_by_more_than_rounding(lab: Lab, references: Any, torch_or: Any, name: str) -> None:
    torch_or(name in ELSEWHERE)
    degrees, size = LAYOUTS[name]
    # Its nodes run twice in a split backward.
    split = {"pipeline__schedule": "zero_bubble_h1"} if "pp" in degrees and lab.platform.splits_backward else {}
    run = lab.run(f"layout-{name}", degrees, size, **RECORDED, **split)
    found = compare(references(), Recording.load(run.digests_file))
    assert found.verdict == "within rounding", str(found)
    # Far from the limit, or another seed might pass it.
    assert max(each.relative / each.tolerance for each in found.differences) < 0.5
    # Tokens of a router are not those of the batch where ranks share them.
    assert all("router" in note for note in found.notes)


def test_micro_batches_and_recomputation_differ_by_rounding_only(lab: Lab, references: Any) -> None:
    for name, settings in {
        "micro": {"training__micro_batch_size": 2},
        "recomputed": {"training__recompute": "full"},
    }.items():
        found = compare(references(), record(lab, name, **settings))
        assert found.verdict != "different", str(found)
        assert not found.notes


def test_losses_of_experts_are_compared(lab: Lab, references: Any, torch_suffices: None) -> None:
    losses = {"model__router_z_loss": 1e-3, "model__sequence_aux_loss": 1e-3}
    fault = Fault(nothing, "loss", (), (), EP, 2, losses)
    expected = references(**losses)
    for verdict, found in {
        "equal": compare(expected, record(lab, "same losses", **losses)),
        "within rounding": compare(expected, record(lab, "losses on ranks", fault)),
    }.items():
        assert found.verdict == verdict, str(found)
        assert [each.name for each in found.differences if (each.step, each.pass_) == (1, "loss")] == [
            "mean loss",
            "token counts of layers.1.moe",
            "sequence loss of layers.1.moe",
            "z loss of layers.1.moe",
        ]


def test_recording_changes_no_bit(lab: Lab) -> None:
    settings = {"training__steps": 3}
    plain = lab.run("plain", FOUR_RANKS["folded"], 4, **settings)
    recorded = lab.run("recorded", FOUR_RANKS["folded"], 4, training__record_steps=3, **settings)
    assert losses(plain) == losses(recorded)
    after = tensors(recorded)
    for name, values in tensors(plain).items():
        np.testing.assert_array_equal(values, after[name], err_msg=name)


@pytest.mark.parametrize("name", FAULTS)
def test_an_injected_fault_is_named_and_its_kind(lab: Lab, references: Any, torch_or: Any, name: str) -> None:
    torch_or(name in {"doubled reduction", "missing all-reduce"})
    fault = FAULTS[name]
    expected = references(**fault.settings)
    recorded = record(lab, f"fault-{name}", fault)
    found = compare(expected, recorded)
    # A fault of A is found as well.
    assert compare(recorded, expected).verdict == found.verdict
    assert is_placed(fault, found), str(found)
    assert found.kind is not None
    assert found.kind.name in fault.kinds, str(found)


def test_modules_without_recorded_operations_are_refused(lab: Lab, torch_suffices: None) -> None:
    for name, message in {
        "layers.1.atention": "the model has no module 'layers.1.atention'; expected names such as layers.1.attention",
        "layers.1.moe.experts": "rows of experts have an order of their own on each rank; expected .*'layers.1.moe'",
    }.items():
        run = lab.start(name, {"pp": 2}, **RECORDED, training__record_operations=f"[{name}]")
        with pytest.raises(LaunchError, match=message):
            run_ranks(train_rank, 2, lab.platform, run, lab.platform)
    # All names that cannot be recorded are reported at once.
    several = RECORDED | {"training__record_operations": "[layers.1.atention,layers.1.moe,layers.1.moe.experts]"}
    run = lab.start("several", {"pp": 2}, **several)
    with pytest.raises(LaunchError, match=r"'layers\.1\.atention'.*\n.*'layers\.1\.moe\.experts' cannot"):
        run_ranks(train_rank, 2, lab.platform, run, lab.platform)
    # A rank of a pipeline has the modules of its stages only.
    lab.run("both stages", {"pp": 2}, 2, **RECORDED, training__record_operations="[layers.0.attention,layers.1.moe]")


def test_a_live_run_stops_at_the_first_step_that_differs(
    lab: Lab, references: Any, capfd: pytest.CaptureFixture[str], torch_suffices: None
) -> None:
    path = lab.folder / "reference.gz"
    references().save(path)
    following = {"training__compare_with": str(path), "training__steps": 4}
    capfd.readouterr()
    lab.run("follows", {"dp_shard": 2}, 2, **following)
    # Once, and on one rank only.
    assert capfd.readouterr().err.count("reference.gz ends at step 2; steps from 3 on are not compared") == 1
    # Step 2 has another learning rate; step 3 is not in the reference.
    other = lab.start("stops", {"dp_shard": 2}, lr_schedule__warmup_steps=4, **following)
    with pytest.raises(LaunchError, match=r"step 1 differs from .*reference.gz \(A\)") as error:
        run_ranks(train_rank, 2, lab.platform, other, lab.platform)
    assert "update of embed.weight" in str(error.value)
    assert "times A: a wrong divisor or scale" in str(error.value)


def test_a_reference_without_growth_is_refused(lab: Lab, torch_suffices: None) -> None:
    path = lab.folder / "no-growth.gz"
    record(lab, "no-growth").save(path)
    run = lab.start("refused", {"dp_shard": 2}, training__compare_with=str(path))
    with pytest.raises(LaunchError, match=r"hp-train diff CONFIG --record=FILE"):
        run_ranks(train_rank, 2, lab.platform, run, lab.platform)


def test_a_live_run_may_warn_once(
    lab: Lab, references: Any, capfd: pytest.CaptureFixture[str], torch_suffices: None
) -> None:
    path = lab.folder / "reference.gz"
    references().save(path)
    settings = {"training__compare_with": str(path), "training__on_difference": "warn", "training__steps": 4}
    lab.run("warns", None, 1, lr_schedule__warmup_steps=4, **settings)
    assert capfd.readouterr().err.count("differs from") == 1
