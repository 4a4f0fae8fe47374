"""Run tests on the CPU, even on machines with an accelerator, unless `HP_DEVICE` is set (`cuda`, `npu`)."""

import os

os.environ.setdefault("HP_DEVICE", "cpu")  # set before a platform is created; ranks that tests start inherit it
