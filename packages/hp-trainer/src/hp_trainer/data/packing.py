"""Packing: which pieces of which documents stand together in a row."""

from __future__ import annotations

import bisect
from collections import defaultdict

import numpy as np


def cut_documents(starts: np.ndarray, ends: np.ndarray, length: int, *, keep_rest: bool) -> tuple[np.ndarray, ...]:
    """Cut documents into pieces of at most `length` places, each of which predicts the token after it.

    Args:
        starts, ends: of the documents among all tokens, int64 `[documents]`.
        keep_rest: a document that is longer gives further pieces; else it ends after the first.

    Returns:
        First token and number of places of each piece, int64 `[pieces]` both; a piece of n places is n + 1 tokens.
    """
    places = np.maximum(ends - starts - 1, 0)
    counts = -(-places // length) if keep_rest else np.minimum(places, 1)
    document = np.repeat(np.arange(len(starts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[document] + number * length
    return first, np.minimum(length, places[document] - number * length)


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put pieces into rows of `capacity`, the largest first, each into the fullest row that still has room.

    Best-fit decreasing, as in Ding et al., 2024, "Fewer truncations improve language modeling" (arXiv 2404.10830); in
    O(pieces * log(capacity)). Depends on `sizes` and `capacity` alone.

    Args:
        sizes: of each piece, at most `capacity`, int64 `[pieces]`.

    Returns:
        The pieces in the order of their rows, and the place after each row's last piece, int64 both.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # the keys of `by_room` that hold a row, sorted
    # Stable: pieces of equal size keep their order, so that every machine packs the same rows.
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        at = bisect.bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                del rooms[at]
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(piece)
        left = room - size
        if left:
            if not by_room[left]:
                bisect.insort(rooms, left)
            by_room[left].append(row)
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return np.fromiter((piece for row in rows for piece in row), np.int64, len(sizes)), ends
