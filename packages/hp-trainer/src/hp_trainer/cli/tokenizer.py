"""The command that trains a tokenizer."""

from __future__ import annotations

from pathlib import Path

import click

from hp_trainer.cli.commands import Command
from hp_trainer.data import train_tokenizer


@click.command("tokenizer", cls=Command)
@click.argument("data", metavar="DATA", type=click.Path())
@click.option("--vocab-size", type=int, required=True, metavar="N", help="Number of tokens, at least 257.")
@click.option(
    "--to", type=click.Path(), default="tokenizer.json", show_default=True, metavar="FILE", help="File to write."
)
@click.option("--field", default="text", show_default=True, metavar="NAME", help="Field of records with the text.")
@click.option("--max-bytes", type=int, metavar="N", help="Read only so much text.")
def tokenizer_command(data: str, vocab_size: int, to: str, field: str, max_bytes: int | None) -> int:
    """Train a byte-level BPE tokenizer on the text of DATA, a file or folder.

    The file has the format of the tokenizers library.
    """
    count = train_tokenizer(
        Path(data).expanduser(), Path(to).expanduser(), vocab_size=vocab_size, field=field, max_bytes=max_bytes
    )
    print(f"{to}: {count} tokens; use it with data.tokenizer={to} and model.vocab_size={count}")
    return 0
