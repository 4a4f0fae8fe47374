"""Replacements for MindSpore's saving: files hold whole tensors, which any layout and any platform can load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspore import Parameter, nn

from hp_platform_mindspore.patches.search import first_dtensor
from hp_platform_mindspore.tensor.dtensor import MindSporeDTensor


def saving_whole_tensors(own: Callable[..., Any]) -> Callable[..., Any]:
    """Have `save_checkpoint` gather DTensors; every rank must call it, with a file of its own or the same contents."""

    @functools.wraps(own)
    def convert(save_obj: Any, *args: Any) -> Any:
        if first_dtensor(save_obj) is None:
            return own(save_obj, *args)
        if isinstance(save_obj, dict):
            return own({name: _whole_parameter(name, value) for name, value in save_obj.items()}, *args)
        if isinstance(save_obj, nn.Cell):
            save_obj = [parameter for _, parameter in save_obj.parameters_and_names()]
        named = [x if isinstance(x, dict) else {"name": x.name, "data": x} for x in save_obj]
        return own([{**x, "data": _whole(x["data"])} for x in named], *args)

    return convert


def _whole(x: Any) -> Any:
    return x._spec.mesh.platform.detach(x.full_tensor()) if isinstance(x, MindSporeDTensor) else x


def _whole_parameter(name: str, x: Any) -> Any:
    return Parameter(_whole(x), name=name) if isinstance(x, MindSporeDTensor) else x
