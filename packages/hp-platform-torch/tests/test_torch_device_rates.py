"""Peak rates are found by the longest part of a device's name, and only for 16-bit operands."""

from __future__ import annotations

import pytest

from hp_platform_torch.profiling import peak_flops


@pytest.mark.parametrize(
    ("device", "dtype", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA GH200 480GB", "float16", 989e12),
        ("NVIDIA H20", "bfloat16", 148e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA L40S", "float16", 362e12),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("Ascend910B2", "bfloat16", 353.8944e12),
        ("Ascend910B4-1", "float16", 245.76e12),
        ("Ascend910_9392", "bfloat16", 353.8944e12),
        ("NVIDIA RTX A1000", "bfloat16", None),
        ("NVIDIA RTX A4000", "float16", None),
        ("A card of tomorrow", "bfloat16", None),
    ],
)
def test_rate_of_a_device(device: str, dtype: str, rate: float | None) -> None:
    assert peak_flops(device, dtype) == rate
