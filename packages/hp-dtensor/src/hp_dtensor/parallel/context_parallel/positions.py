"""Positions of a sequence that ranks share: every rank learns those of all tokens, once per mask."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention.mask import AttentionMask, host_integers
from hp_dtensor.parallel.context_parallel.cut import SequenceCut
from hp_dtensor.platform.interface import Platform

_MARK = 16
"""Bytes in front of a rank's positions that are equal where the cuts are."""


def positions_of_all(platform: Platform, group: ProcessGroup, cut: SequenceCut, mask: AttentionMask) -> Any:
    """Return the positions `[batch, length]` of all tokens in the order of the sequence; None: the mask has none.

    Raises:
        AttentionError: the ranks' positions put together are not those of documents that follow each other, or the
            ranks have different cuts; on every rank.
    """
    if mask.positions is None:
        return None
    own = np.ascontiguousarray(host_integers(platform, mask.positions))
    mark = hashlib.blake2b(repr(cut).encode(), digest_size=_MARK).digest()
    arrived = group.all_gather_bytes(mark + own.tobytes())
    if others := [rank for rank, part in enumerate(arrived) if part[:_MARK] != arrived[0][:_MARK]]:
        raise AttentionError(
            f"context parallel positions: ranks {others} cut the sequence otherwise than rank 0; rank {group.rank} has "
            f"{cut}. All ranks make the cut of the same whole rows"
        )
    everything = [np.frombuffer(part[_MARK:], np.int64).reshape(len(own), -1) for part in arrived]
    positions = cut.restore(everything, 1)
    _check(positions, cut)
    return positions


def _check(positions: Any, cut: SequenceCut) -> None:
    """Refuse positions that neither go on nor begin again: ranks were given other tokens than the cut gives them."""
    goes_on = (positions[:, 1:] == positions[:, :-1] + 1) | (positions[:, 1:] == 0)
    if goes_on.all():
        return
    row, place = (int(x) for x in np.argwhere(~goes_on)[0])
    owners = [next(r for r in range(cut.ranks) if p in cut.places(r)) for p in (place, place + 1)]
    raise AttentionError(
        f"context parallel positions: in row {row}, token {place} (rank {owners[0]}) has position "
        f"{positions[row, place]} and the next one (rank {owners[1]}) {positions[row, place + 1]}; expected one more, "
        f"or 0 where a document begins. Each rank takes its part of the batch's ids, targets and positions by "
        f"{cut}, and a model is called within `use_cut` of a cut of packed documents"
    )
