"""Training a tokenizer on the text of a dataset: byte-level byte-pair encoding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from hp_trainer.data.formats import open_reader
from hp_trainer.exceptions import DataError

END = "<|endoftext|>"
_BYTES = 256


def train_tokenizer(path: Path, to: Path, *, vocab_size: int, field: str = "text", max_bytes: int | None = None) -> int:
    """Train a byte-level BPE tokenizer (Sennrich et al., 2016; bytes as in GPT-2) and write it as a tokenizer.json.

    Args:
        path: a file, a folder or a pattern, as `data.path`.
        to: the file to write.
        vocab_size: tokens at most, `<|endoftext|>` and the 256 bytes among them; short texts give fewer.
        field: field that holds the text, where files have such.
        max_bytes: stop reading after so many; None: read all.

    Returns:
        The number of its tokens.

    Raises:
        DataError: there is no text, the library is not installed, or the file cannot be written.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise DataError(
            f"training a tokenizer needs the library tokenizers, which cannot be imported here ({error}); install "
            "hp-trainer[data]"
        ) from error
    if vocab_size <= _BYTES:
        raise DataError(f"a vocabulary of bytes and {END} needs at least {_BYTES + 1} tokens, got {vocab_size}")
    texts = _texts(path, field, max_bytes)
    first = next(texts, None)
    if first is None:
        raise DataError(f"{path} holds no text to train a tokenizer on")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain([first], texts), trainer)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(to))
    # The library raises Exception itself.
    except Exception as error:
        raise DataError(f"the tokenizer cannot be written to {to}: {error}") from error
    count: int = tokenizer.get_vocab_size()
    return count


def _texts(path: Path, field: str, max_bytes: int | None) -> Iterator[str]:
    left = max_bytes
    for record in open_reader(path).records((field,)):
        text = record.text(field)
        if left is not None:
            if left <= 0:
                return
            text = text[:left]
            left -= len(text.encode("utf-8", errors="replace"))
        if text.strip():
            yield text
