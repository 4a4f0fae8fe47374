"""Tasks of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) on an exported model."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hp_trainer.exceptions import EvaluationError


def run_harness(model: Path, tasks: str, more: Sequence[str] = ()) -> int:
    """Run lm-eval on a model in Hugging Face's layout, in a process of its own; return its exit code.

    Args:
        model: directory with `config.json` and weights, as `hp-train export` writes it.
        tasks: names, separated by commas.
        more: further arguments of lm-eval, such as `--limit=10`.

    Raises:
        EvaluationError: lm-eval or transformers is not installed, or the directory holds no model.
    """
    if not (model / "config.json").is_file():
        raise EvaluationError(
            f"{model} holds no exported model (no config.json); write one with `hp-train export RUN --to={model}`"
        )
    missing = [name for name in ("lm_eval", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise EvaluationError(
            f"tasks are run by lm-eval, and {' and '.join(missing)} cannot be imported here; "
            "install it: pip install 'lm_eval[hf]'"
        )
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model}"]
    return subprocess.run([*command, "--tasks", tasks, *more], check=False).returncode
