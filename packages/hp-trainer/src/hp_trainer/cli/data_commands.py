"""Commands about data: training a tokenizer, evaluating a model."""

from __future__ import annotations

from pathlib import Path

from hp_dtensor.platform.selection import get_platform
from hp_trainer.cli.arguments import Parser, parse
from hp_trainer.cli.shared import newest, open_run, refuse, refuse_settings
from hp_trainer.data import train_tokenizer
from hp_trainer.evaluation import measure_perplexity, measure_perplexity_on, run_harness
from hp_trainer.plugins import registries


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


def evaluate_command(given: list[str]) -> int:
    """Print the perplexity of a run's model, or run the tasks of lm-eval on an exported one.

    `hp-train evaluate RUN [--data...]`, `hp-train evaluate DIRECTORY --tasks A,B`.
    """
    parser = Parser(prog="hp-train evaluate", add_help=False)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--tasks", metavar="A,B")
    options, overrides = parse(parser, given)
    if options.tasks is not None:
        return run_harness(Path(options.run), options.tasks, [f"--{name}={value}" for name, value in overrides])
    run, config = open_run(options.run, overrides)
    given_data = [name for name, _ in overrides if name.startswith("data.")]
    checkpoint = newest(run, config)
    arguments = (run, config, get_platform(config.platform), checkpoint)
    if given_data:
        source = registries().datasets.get(config.data.name).build(config.data.options)
        refuse([problem.within("data") for problem in source.problems()], "evaluate")
        found = measure_perplexity_on(*arguments, evaluation_only="data.eval" in given_data)
    else:
        found = measure_perplexity(*arguments)
    print(
        f"step {checkpoint.step}: loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.4g}, "
        f"over {found.tokens:,} tokens"
    )
    return 0
