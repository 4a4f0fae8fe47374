"""Run tests on the CPU, even on machines with an accelerator, unless `HP_DEVICE` is set (`cuda`, `npu`).

Signals have their default actions, also where the process that starts pytest ignores them (a shell that runs it in the
background ignores SIGINT, `nohup` ignores SIGHUP): processes that tests start and interrupt would inherit that.
"""

import gc
import importlib.util
import os
import signal
from typing import Any

import pytest

os.environ.setdefault("HP_DEVICE", "cpu")  # set before a platform is created; ranks that tests start inherit it

for ignored, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, default)


def pytest_collection_finish() -> None:
    """Exempt imported modules and collected tests from garbage collection: each collection would take 0.3 s.

    Those of new objects take a twentieth of the time of simulated ranks with Python's threshold of 700.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


# What ranks and commands import before their first step. torch imports its symbolic shapes in the first backward from a
# gradient, and its compiler in an optimizer's first step: two seconds each.
IMPORTED = ("hp_fsdp", "hp_moe", "hp_trainer.training", "hp_trainer.cli.train", "hp_trainer.models.hugging_face")
IMPORTED_FOR = {"torch": ("torch.fx.experimental.symbolic_shapes", "torch._dynamo")}


@pytest.fixture(scope="session")
def imported_modules(hp_platform: Any) -> list[str]:
    """Modules that processes of `fork_server` have imported: those of the packages that are installed."""
    found = [name for name in IMPORTED if importlib.util.find_spec(name.partition(".")[0]) is not None]
    return [*found, *IMPORTED_FOR.get(hp_platform.name, ())]
