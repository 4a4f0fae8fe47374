"""Finding a platform's implementation."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hp_dtensor.exceptions import PlatformError
from hp_fsdp import MixedPrecisionPolicy, get_storage
from hp_fsdp.policies import resolve_policy


class Unserved:
    """A platform that no plugin knows."""

    name = "unserved"

    def dtype(self, name: str) -> str:
        return f"dtype {name}"

    def dtype_name(self, dtype: Any) -> str:
        return str(dtype)

    def is_floating(self, dtype: str) -> bool:
        return dtype.startswith("dtype ")


def test_a_platform_without_implementation_is_named() -> None:
    with pytest.raises(PlatformError, match=r"sharded parameters on platform 'unserved'.*hp_fsdp_parameter"):
        get_storage(cast(Any, Unserved()))


def test_dtypes_of_a_policy_may_be_names() -> None:
    policy = MixedPrecisionPolicy("bfloat16", reduce_dtype=None, output_dtype=float, cast_forward_inputs=False)
    resolved = resolve_policy(cast(Any, Unserved()), policy)
    assert resolved == MixedPrecisionPolicy("dtype bfloat16", None, float, False)
