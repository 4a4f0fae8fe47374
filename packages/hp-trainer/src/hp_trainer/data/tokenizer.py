"""Tokenizers: bytes, `tokenizer.json` files through the `tokenizers` library, and training of a new tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hp_trainer._files import write_atomically
from hp_trainer.data.dataset import Spans, Tokenizer
from hp_trainer.data.formats import open_reader
from hp_trainer.exceptions import DataError, describe_machine_error

# Usual names of the end token, for files that do not name it. The first one in the vocabulary is used.
_KNOWN_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")


class ByteTokenizer:
    """A tokenizer whose tokens are UTF-8 bytes. Byte 0, which is in no text, separates documents.

    The attributes are those of `Tokenizer`. Generation from an empty prompt starts with a line feed.
    """

    vocab_size = 256
    separator = 0
    around = (np.zeros(0, np.int64), np.zeros(1, np.int64))
    begin = ord("\n")
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of a text: uint8 `[bytes]`. Undecodable command line bytes (surrogates) are preserved."""
        return np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Invalid UTF-8 becomes the replacement character."""
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each document, followed by the separator."""
        return [np.append(self.encode(text), np.uint8(self.separator)) for text in texts]

    def encode_with_spans(self, text: str) -> tuple[np.ndarray, Spans]:
        """Return the tokens of a text and the range of characters `[begin, end)` of each."""
        # Every byte of a character has the span of that character.
        spans = [(i, i + 1) for i, letter in enumerate(text) for _ in letter.encode("utf-8", errors="surrogateescape")]
        return self.encode(text), np.array(spans, np.int64).reshape(-1, 2)


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, loaded from its `tokenizer.json`.

    The attributes are those of `Tokenizer`, and two more.

    Args:
        path: the file, or a directory with it, such as that of a Hugging Face model.
        end: token after each document. None uses the directory's `eos_token`, or a token with a usual name.

    Attributes:
        chat_template: source of the directory's chat template, or None.
        special_tokens: special tokens that the directory names, such as `bos_token`, for chat templates.

    Raises:
        DataError: the library or the file is missing, the file is damaged, or there is no end token.
    """

    def __init__(self, path: Path, end: str | None = None) -> None:
        self._file = file = path / "tokenizer.json" if path.is_dir() else path
        self._tokenizer = _load(file)
        settings = _settings(file.parent) if path.is_dir() else {}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{file} is a tokenizer with an empty vocabulary")
        # Not the number of tokens: vocabularies may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.special_tokens = {name: text for name in _NAMED if (text := _token_text(settings.get(name))) is not None}
        self.chat_template = _chat_template(file.parent, settings) if path.is_dir() else None
        self.separator = _find_end(file, vocabulary, end, self.special_tokens.get("eos_token"))
        # The tokens that the tokenizer's post-processor adds before a text, such as `<s>`. Post-processors are opaque,
        # so a text is compared with and without added tokens.
        with self._panics_named():
            full, bare = (self._tokenizer.encode("a", add_special_tokens=added).ids for added in (True, False))
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        before = list(full[:at])
        self.around = np.array(before, np.int64), np.array([self.separator], np.int64)
        self.begin = before[0] if before else self.separator
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        # The end token may come from a setting, so the file's digest alone does not identify the tokens of a document.
        self.fingerprint = f"{digest[:32]}, documents end in {self.separator}"

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text with the tokens that start a document: int64 `[tokens]`."""
        return np.array([*self.around[0], *self._encode(text).ids], np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without special tokens."""
        text: str = self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)
        return text

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each document, with the tokens `around` it."""
        # The fast variant computes no offsets, which documents do not need.
        with self._panics_named():
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.concatenate([self.around[0], np.array(one.ids, np.int64), self.around[1]]) for one in encoded]

    def encode_with_spans(self, text: str) -> tuple[np.ndarray, Spans]:
        """Return the tokens of a text and the range of characters `[begin, end)` of each, without added tokens."""
        encoded = self._encode(text)
        return np.array(encoded.ids, np.int64), np.array(encoded.offsets, np.int64).reshape(-1, 2)

    def _encode(self, text: str) -> Any:
        # Undecodable bytes of a command line arrive as surrogates, which the library rejects.
        sound = text.encode("utf-8", errors="replace").decode("utf-8")
        with self._panics_named():
            return self._tokenizer.encode(sound, add_special_tokens=False)

    @contextlib.contextmanager
    def _panics_named(self) -> Iterator[None]:
        """Convert a panic of the library to a `DataError` that names the file."""
        try:
            yield
        except BaseException as error:
            # A panic derives from BaseException, and its class cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            reason = "a pattern in it takes exponential time" if "retry-limit" in str(error) else "the library failed"
            raise DataError(f"{self._file} cannot encode a text: {reason} ({error})") from error


_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_tokenizer(path: str | None, end: str | None = None) -> Tokenizer:
    """Load a tokenizer from a `tokenizer.json` or a directory with one. None gives a `ByteTokenizer`.

    Raises:
        DataError: see `FileTokenizer`.
    """
    return ByteTokenizer() if path is None else FileTokenizer(Path(path), end)


def _load(file: Path) -> Any:
    if not file.is_file():
        raise DataError(f"the tokenizer {file} does not exist; expected a tokenizer.json or a directory with one")
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"{file} needs the library tokenizers, which cannot be imported here ({error}); install hp-trainer[data]"
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"{file} is damaged or not a tokenizer: {error}") from error


def _settings(folder: Path) -> dict[str, Any]:
    """Return the special tokens and settings in a directory. `tokenizer_config.json` takes precedence."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if file.is_file():
            try:
                found |= json.loads(file.read_text(encoding="utf-8"))
            except (ValueError, TypeError, RecursionError) as error:
                raise DataError(f"{file} is damaged: {error}") from error
    return found


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is damaged: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = [one for one in template if isinstance(one, dict)]
        template = next((one.get("template") for one in named if one.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _find_end(file: Path, vocabulary: dict[str, int], end: str | None, of_directory: str | None) -> int:
    """Return the token that ends a document: `end`, else the directory's `eos_token`, else one with a usual name."""
    wanted = end or of_directory
    if wanted is not None:
        if wanted not in vocabulary:
            origin = "data.end_token names" if end else "is its directory's eos_token; set data.end_token to one it has"
            raise DataError(f"{file} has no token {wanted!r}, which {origin}")
        return vocabulary[wanted]
    known = next((name for name in _KNOWN_ENDS if name in vocabulary), None)
    if known is None:
        raise DataError(f"{file} names no end token; set it with data.end_token")
    return vocabulary[known]


END = "<|endoftext|>"
_BYTES = 256


def train_tokenizer(path: Path, to: Path, *, vocab_size: int, field: str = "text", max_bytes: int | None = None) -> int:
    """Train a byte-level BPE tokenizer (Sennrich et al., 2016; bytes as in GPT-2) and write it as `tokenizer.json`.

    Args:
        path: file, folder or pattern, as in `data.path`.
        to: file to write.
        vocab_size: maximum number of tokens, including `<|endoftext|>` and the 256 bytes. Short texts give fewer.
        field: field with the text, in files with records.
        max_bytes: stop reading after this number of bytes. None reads all.

    Returns:
        The number of tokens of the vocabulary.

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
    # Taken before training, so that a source without text is an error.
    first = next(texts, None)
    if first is None:
        raise DataError(f"{path} contains no text to train a tokenizer on")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        # All 256 bytes, so that any text can be encoded, also with bytes that training did not see.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain([first], texts), trainer)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        # Not by the library, which replaces the file before the new one is complete.
        write_atomically(to, tokenizer.to_str(pretty=True))
    except OSError as error:
        raise DataError(f"the tokenizer cannot be written to {to}: {describe_machine_error(error) or error}") from error
    count: int = tokenizer.get_vocab_size()
    return count


def _texts(path: Path, field: str, max_bytes: int | None) -> Iterator[str]:
    left = max_bytes
    for record in open_reader(path).records((field,)):
        text = record.text(field)
        if left is not None:
            if left <= 0:
                return
            # Counted in characters here, so the last text may exceed the limit in bytes.
            text = text[:left]
            left -= len(text.encode("utf-8", errors="replace"))
        if text.strip():
            yield text
