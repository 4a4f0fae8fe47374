"""`torch.compile` with DTensors: operations on them run eagerly, everything else is compiled.

Dynamo would read global shapes where its graphs have local ones, so it leaves operations on DTensors out of its graphs.
It does not trace into functions of hp_dtensor, of hp_fsdp (whose hooks run between compiled forwards) or of hp_moe
(whose sizes depend on the tokens). It does trace into the modules of `hp_dtensor.nn` and the functions of `ops`, which
models call: on the plain weights of an unsharded module they are compiled with the rest of its block.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from hp_platform_torch import optimizer_step
from hp_platform_torch.tensor.dtensor import TorchDTensor

_LEFT_ALONE = ("hp_dtensor", "hp_platform_torch", "hp_fsdp", "hp_moe")
_LOOKED_INTO = (
    "hp_dtensor.parallel.nn",
    "hp_moe.feed_forward",
    "hp_platform_torch.ops.namespace",
    "hp_platform_torch.ops.norms",
    "hp_platform_torch.platform",
)


def prepare_if_loaded() -> None:
    """Prepare dynamo if the program has loaded it. Otherwise `torch.compile` does, since loading takes a second."""
    if "torch._dynamo" in sys.modules:
        _leave_dtensors_out()


def preparing(compile_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_)
    def compile_around_dtensors(*args: Any, **kwargs: Any) -> Any:
        _leave_dtensors_out()
        return compile_(*args, **kwargs)

    return compile_around_dtensors


def _leave_dtensors_out() -> None:
    from torch._dynamo import config

    _leave_them_out_in_every_thread()
    config.nontraceable_tensor_subclasses.add(TorchDTensor)  # this thread may have settings of its own


@functools.cache
def _leave_them_out_in_every_thread() -> None:
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo import config, trace_rules
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    # From torch 2.13 on settings are per thread, and each thread starts with a copy of these.
    config._config["nontraceable_tensor_subclasses"].default.add(TorchDTensor)
    for package in _LEFT_ALONE:
        trace_rules.add(package)
    # Files whose functions dynamo inlines, although it skips their package.
    files = [sys.modules[name].__file__ for name in _LOOKED_INTO if name in sys.modules]
    trace_rules.get_mod_inlinelist().update(str(file) for file in files)
    skipped = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)  # with all that they call
    # Dynamo would trace the methods of the class when a compiled function calls them on a DTensor.
    # Only its own members; those of `torch.Tensor` stay traceable for plain tensors. A compiled optimizer step takes
    # the step of DTensors on local data, whose frames would be compiled again whenever the classes of tensors change.
    for member in (*vars(TorchDTensor).values(), optimizer_step.take_step):
        code = _code_of(member)
        if code is not None:
            set_code_exec_strategy(code, skipped)


def _code_of(member: Any) -> CodeType | None:
    function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
    return getattr(function, "__code__", None)
