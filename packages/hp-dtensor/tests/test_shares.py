"""Shares of the cases of a proof, and what is shown of them."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from hp_dtensor.testing.pytest_plugin import Share, chosen

CASES = list(itertools.product("RSP", repeat=4))
COUNTING = """
import pytest

@pytest.mark.parametrize("number", [3, 1000])
def test_counting(count_cases, hp_share, number):
    assert (hp_share.number, hp_share.count) == (2, 4)
    count_cases("things", number, 1)
    count_cases("others", 1)
"""


@pytest.mark.parametrize("count", [1, 2, 3, 7, 200])
def test_shares_are_disjoint_and_together_everything(count):
    shares = [chosen(CASES, share=Share(number, count)) for number in range(1, count + 1)]
    assert sorted(itertools.chain(*shares)) == sorted(CASES)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("limit", [12, 24])
def test_few_cases_have_every_option_everywhere(limit):
    """Every third case of this product would end with the same letter."""
    few = chosen(CASES, limit)
    assert len(few) == limit
    assert few == chosen(CASES, limit)
    assert [set(letters) for letters in zip(*few, strict=True)] == [set("RSP")] * 4


@pytest.mark.parametrize("text", ["3", "0/2", "3/2", "1/x", ""])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(ValueError, match="expected a share N/M"):
        Share.parse(text)


def test_counts_are_summed_by_label(tmp_path):
    (tmp_path / "test_counting.py").write_text(COUNTING)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--hp-share", "2/4", "test_counting.py"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "cases of the proofs, share 2/4" in shown
    assert "things: 1,003 right, 2 refused as declared\n" in shown
    assert "others: 2 right\n" in shown
    assert "test_counting[3] 3 right, 1 refused as declared" in shown
