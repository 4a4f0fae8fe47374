"""Tests run on the CPU also where there is an accelerator, unless `HP_DEVICE` asks for one (`cuda`, `npu`)."""

import os

os.environ.setdefault("HP_DEVICE", "cpu")  # before a platform is made; ranks that tests start inherit it
