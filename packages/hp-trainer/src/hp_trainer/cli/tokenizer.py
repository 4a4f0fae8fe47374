"""The command `hp-train tokenizer`."""

from __future__ import annotations

from pathlib import Path

from hp_trainer.cli.arguments import Parser, parse
from hp_trainer.cli.shared import refuse_settings
from hp_trainer.data import train_tokenizer


def tokenizer_command(given: list[str]) -> int:
    """Train a tokenizer on text: `hp-train tokenizer DATA --vocab-size N [--to FILE]`."""
    parser = Parser(prog="hp-train tokenizer", add_help=False)
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N")
    parser.add_argument("--to", default="tokenizer.json", metavar="FILE")
    parser.add_argument("--field", default="text", metavar="NAME")
    parser.add_argument("--max-bytes", type=int, metavar="N")
    options, overrides = parse(parser, given)
    refuse_settings("tokenizer", overrides)
    count = train_tokenizer(
        Path(options.data).expanduser(),
        Path(options.to).expanduser(),
        vocab_size=options.vocab_size,
        field=options.field,
        max_bytes=options.max_bytes,
    )
    print(f"{options.to}: {count} tokens; use it with data.tokenizer={options.to} and model.vocab_size={count}")
    return 0
