"""Dtypes by name, without a framework: what numpy lacks is carried as bits."""

from __future__ import annotations

import numpy as np

from hp_trainer.exceptions import CheckpointError

# name -> (safetensors name, numpy dtype that holds its bits)
_DTYPES = {
    "float64": ("F64", "<f8"),
    "float32": ("F32", "<f4"),
    "float16": ("F16", "<f2"),
    "bfloat16": ("BF16", "<u2"),
    "int64": ("I64", "<i8"),
    "int32": ("I32", "<i4"),
    "int16": ("I16", "<i2"),
    "int8": ("I8", "|i1"),
    "uint8": ("U8", "|u1"),
    "bool": ("BOOL", "|b1"),
}
_BFLOAT16_EXPONENT = np.uint16(0x7F80)  # all ones: NaN or an infinity


def safetensors_name(dtype: str) -> str:
    """Return the name that the safetensors format has for a dtype: `float32` -> `F32`.

    Raises:
        CheckpointError: the dtype cannot be saved.
    """
    return _lookup(dtype)[0]


def storage_dtype(dtype: str) -> np.dtype:
    """Return the numpy dtype that holds the bits: that of the same name, uint16 for bfloat16.

    Raises:
        CheckpointError: the dtype cannot be saved.
    """
    return np.dtype(_lookup(dtype)[1])


def is_finite(values: np.ndarray, dtype: str) -> bool:
    """Return whether an array in its storage dtype holds neither NaN nor infinities; integers never do."""
    if dtype == "bfloat16":
        return not bool(np.any((values & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT))
    return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())


def _lookup(dtype: str) -> tuple[str, str]:
    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype {dtype!r} cannot be saved; expected one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]
