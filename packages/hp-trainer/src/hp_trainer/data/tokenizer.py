"""Bytes as tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class ByteTokenizer:
    """UTF-8 bytes are the tokens; byte 0, which no text holds, separates documents.

    Attributes:
        vocab_size: 256.
        separator: the token between documents.
    """

    vocab_size = 256
    separator = 0

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text: uint8 of shape `[bytes]`; non-UTF-8 bytes of a command line stay as they are."""
        return np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become the replacement character."""
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")
