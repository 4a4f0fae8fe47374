"""Run tests on the CPU, even on machines with an accelerator, unless `HP_DEVICE` is set (`cuda`, `npu`).

Signals have their default actions, also where the process that starts pytest ignores them (a shell that runs it in the
background ignores SIGINT, `nohup` ignores SIGHUP): processes that tests start and interrupt would inherit that.
"""

import os
import signal

os.environ.setdefault("HP_DEVICE", "cpu")  # set before a platform is created; ranks that tests start inherit it

for ignored, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, default)
