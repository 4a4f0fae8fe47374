"""Shares of the cases of a proof."""

from __future__ import annotations

import itertools

import pytest

from hp_dtensor.testing.pytest_plugin import Share, chosen

CASES = list(itertools.product("RSP", repeat=4))


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
