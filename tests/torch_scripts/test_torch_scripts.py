"""Scripts written for torch run here with changed import lines, and give torch's numbers.

Each script is run twice on the same ranks: as it is written, and with the modules of its import lines changed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hp_platform_torch")

import on_ranks  # noqa: E402

RANKS = {
    "checkpoint": 2,
    "fabric_like": 2,
    "float8_like": 2,
    "fsdp_transformer": 2,
    "loss_parallel": 2,
    "pipelining": 2,
    "resume": 2,
    "state_dicts": 2,
    "tensor_parallel": 2,
    "tied_weights": 2,
    "two_dimensional": 4,
}


def test_every_script_is_run():
    assert sorted(RANKS) == sorted(path.stem for path in (Path(__file__).parent / "scripts").glob("*.py"))


@pytest.mark.parametrize("script", RANKS)
def test_only_import_lines_change(script):
    source = (Path(__file__).parent / "scripts" / f"{script}.py").read_text()
    pairs = zip(source.splitlines(), on_ranks.with_our_imports(source).splitlines(), strict=True)
    changed = [(theirs, ours) for theirs, ours in pairs if theirs != ours]
    assert changed
    assert all(theirs.startswith("from torch.distributed") and " import " in ours for theirs, ours in changed)


@pytest.mark.real_ranks
@pytest.mark.parametrize("script", RANKS)
def test_a_script_gives_torchs_numbers(rank_pool, script):
    ranks = rank_pool(RANKS[script])
    ours, theirs = (ranks.run(on_ranks.run_script, script, is_ours) for is_ours in (True, False))
    for (losses, tensors), (expected_losses, expected_tensors) in zip(ours, theirs, strict=True):
        # Sums over ranks and blocks in another order; after three optimizer steps a few of float32's last bits.
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
        assert tensors.keys() == expected_tensors.keys()
        for name, values in tensors.items():
            torch.testing.assert_close(
                torch.tensor(values), torch.tensor(expected_tensors[name]), rtol=1e-4, atol=1e-6, msg=name
            )
