"""Tokenizers: bytes, and those of the `tokenizers` library (an extra of hp-trainer)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hp_trainer.data.dataset import Spans, Tokenizer
from hp_trainer.exceptions import DataError

# Names that ends of text have in files that do not say which it is, the likeliest first.
_KNOWN_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")


class ByteTokenizer:
    """UTF-8 bytes are the tokens; byte 0, which no text holds, separates documents.

    Attributes:
        vocab_size: 256.
        separator: the token between documents.
        begin: the token that begins a text which has none: a line end.
        around: tokens before and after a document, int64 each.
        fingerprint: `bytes`.
    """

    vocab_size = 256
    separator = 0
    around = (np.zeros(0, np.int64), np.zeros(1, np.int64))
    begin = ord("\n")
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text: uint8 of shape `[bytes]`; non-UTF-8 bytes of a command line stay as they are."""
        return np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become the replacement character."""
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of whole documents, each with its end."""
        return [np.append(self.encode(text), np.uint8(self.separator)) for text in texts]

    def encode_with_spans(self, text: str) -> tuple[np.ndarray, Spans]:
        """Return the tokens of a text and the characters `[begin, end)` that each of them stands for."""
        places = [(i, i + 1) for i, letter in enumerate(text) for _ in letter.encode("utf-8", errors="surrogateescape")]
        return self.encode(text), np.array(places, np.int64).reshape(-1, 2)


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, from its `tokenizer.json`.

    Args:
        path: the file, or a directory that holds it, such as a model's from Hugging Face.
        end: the token after each document; None: the directory's `eos_token`, or the usual name for it.

    Attributes:
        vocab_size: the largest token, and one.
        separator: the token after each document.
        begin: the token that begins a text which has none.
        chat_template: of the directory, as it is written there; None: it has none.
        special_tokens: those that the directory names, such as `bos_token`; a chat template may use them.
        around: tokens before and after a document, int64 each.
        fingerprint: digest of the file and of the end.

    Raises:
        DataError: the library or the file is missing, the file is damaged, or no token ends documents.
    """

    def __init__(self, path: Path, end: str | None = None) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        self._tokenizer = _load(file)
        settings = _settings(file.parent) if path.is_dir() else {}
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{file} holds a tokenizer without tokens")
        self.vocab_size = max(vocabulary.values()) + 1
        self.special_tokens = {name: text for name in _NAMED if (text := _token_text(settings.get(name))) is not None}
        self.chat_template = _chat_template(file.parent, settings) if path.is_dir() else None
        self.separator = _find_end(file, vocabulary, end or self.special_tokens.get("eos_token"))
        before = self._prefix()
        self.around = np.array(before, np.int64), np.array([self.separator], np.int64)
        self.begin = before[0] if before else self.separator
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        self.fingerprint = f"{digest[:32]}, documents end in {self.separator}"

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, those that the tokenizer puts before any text included: int64 `[tokens]`."""
        return np.array([*self.around[0], *self._encode(text).ids], np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without special ones."""
        text: str = self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)
        return text

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of whole documents, each with what comes before a text, and its end."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.concatenate([self.around[0], np.array(one.ids, np.int64), self.around[1]]) for one in encoded]

    def encode_with_spans(self, text: str) -> tuple[np.ndarray, Spans]:
        """Return the tokens of a text and the characters `[begin, end)` of each; special tokens stand in the text."""
        encoded = self._encode(text)
        return np.array(encoded.ids, np.int64), np.array(encoded.offsets, np.int64).reshape(-1, 2)

    def _encode(self, text: str) -> Any:
        # A command line may hold bytes that are no UTF-8.
        sound = text.encode("utf-8", errors="replace").decode("utf-8")
        return self._tokenizer.encode(sound, add_special_tokens=False)

    def _prefix(self) -> list[int]:
        """Return the tokens that the tokenizer's own template puts before a text, such as `<s>`."""
        whole, bare = (self._tokenizer.encode("a", add_special_tokens=added).ids for added in (True, False))
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return list(whole[:at])


_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_tokenizer(path: str | None, end: str | None = None) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json` or of a directory that holds one; bytes where `path` is None.

    Raises:
        DataError: as `FileTokenizer`.
    """
    return ByteTokenizer() if path is None else FileTokenizer(Path(path), end)


def _load(file: Path) -> Any:
    if not file.is_file():
        raise DataError(f"there is no tokenizer {file}; give a tokenizer.json or a directory that holds one")
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"{file} needs the library tokenizers, which cannot be imported here ({error}); install hp-trainer[data]"
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"{file} is damaged or no tokenizer: {error}") from error


def _settings(folder: Path) -> dict[str, Any]:
    """Return what a directory tells of special tokens; `tokenizer_config.json` is the newer of its files."""
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
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        template = next((one.get("template") for one in template if one.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _find_end(file: Path, vocabulary: dict[str, int], end: str | None) -> int:
    if end is not None:
        if end not in vocabulary:
            raise DataError(f"{file} has no token {end!r} to end documents with")
        return vocabulary[end]
    known = next((name for name in _KNOWN_ENDS if name in vocabulary), None)
    if known is None:
        raise DataError(f"{file} does not say which token ends a document; name it with data.end_token")
    return vocabulary[known]
