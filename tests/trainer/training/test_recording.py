"""Recorded runs in every layout against one rank, and injected faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from injected_faults import EP, FAULTS, RECORDED, Fault, is_placed, nothing, record, reference
from training_runs import FOUR_RANKS, Lab, losses, tensors

from hp_dtensor.debug import Recording, compare

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
