"""Peak rates of matrix products, from the makers' data sheets: dense, 16-bit operands, 32-bit sums."""

from __future__ import annotations

import re

# Parts of the names that the driver gives, of which the longest counts: `NVIDIA H100 PCIe` is no `H100`. In TFLOP/s.
_TERAFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "B200": 2250.0,
    "B100": 1750.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "T4": 65.0,
    "MI300X": 1307.4,
}
# These have no matrix units for bfloat16.
_FLOAT16_ALONE = ("V100", "T4")


def peak_flops(device: str, dtype: str) -> float | None:
    """Return the peak rate of a device in floating-point operations per second, or None where it is not known.

    Args:
        device: its name as the driver tells it, `NVIDIA H100 80GB HBM3`.
        dtype: name of the operands' dtype; the rates of float32 depend on what is allowed to be rounded.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    # Followed by a digit it is another device's: an RTX A1000 is no A100.
    part = max((each for each in _TERAFLOPS if re.search(rf"{each}(?!\d)", device)), key=len, default=None)
    if part is None or (part in _FLOAT16_ALONE and dtype == "bfloat16"):
        return None
    return _TERAFLOPS[part] * 1e12
