"""Run a script on a real rank, as it is written or with its import lines changed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent

HOMES = {
    "torch.distributed.device_mesh": "hp_dtensor",
    "torch.distributed.tensor": "hp_dtensor",
    "torch.distributed.tensor.parallel": "hp_dtensor",
    "torch.distributed.fsdp": "hp_fsdp",
    "torch.distributed.checkpoint.state_dict": "hp_fsdp",
    "torch.distributed.pipelining": "hp_trainer.pipeline",
}
"""The modules of torch that have the names a script imports, and ours."""


def with_our_imports(source: str) -> str:
    """Change the module in each `from ... import` line of `HOMES`, and nothing else."""
    for theirs, ours in HOMES.items():
        source = re.sub(rf"^from {re.escape(theirs)} import", f"from {ours} import", source, flags=re.MULTILINE)
    return source


def run_script(name: str, is_ours: bool) -> tuple[list[float], dict[str, Any]]:
    """Return the losses and the full tensors, as nested lists, that the script's `main` gives on this rank."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    path = FOLDER / "scripts" / f"{name}.py"
    source = path.read_text()
    names: dict[str, Any] = {"__name__": name}
    exec(compile(with_our_imports(source) if is_ours else source, str(path), "exec"), names)
    losses, tensors = names["main"]()
    return losses, {key: value.tolist() for key, value in tensors.items()}
