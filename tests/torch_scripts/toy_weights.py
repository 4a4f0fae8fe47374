"""Weights that fully_shard gathers in eight bits: tensor subclasses with torch's fsdp_pre_all_gather protocol."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

LARGEST = 448.0  # of float8_e4m3fn


class Float8Tensor(torch.Tensor):
    """Values `data / scale`, with the data in float8; a matrix product with it computes in its dtype."""

    def __new__(cls, data, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, data, scale, dtype):
        self._data, self._scale = data, scale

    def to_full_precision(self):
        return self._data.to(self.dtype) / self._scale.to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):
            return cls(args[0]._data, args[0]._scale, args[0].dtype)
        args = tree_map(lambda x: x.to_full_precision() if isinstance(x, Float8Tensor) else x, args)
        return func(*args, **(kwargs or {}))


class Float8Weight(torch.Tensor):
    """A weight in high precision that is sent in float8, scaled by the largest value that any rank has."""

    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)

    def __init__(self, values):
        self._values = values

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        plain = tree_map(lambda x: x._values if isinstance(x, Float8Weight) else x, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        saved = "detach", "split", "slice", "new_zeros", "view", "as_strided", "empty_like", "clone", "_to_copy"
        if func.overloadpacket.__name__ not in saved:
            return result
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, result)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert outer_size[1:] == self.shape[1:]
        assert isinstance(module, nn.Module)
        largest = self._values.abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        scale = LARGEST / largest.clamp(min=1e-12)
        return ((self._values * scale).to(torch.float8_e4m3fn),), (scale,)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        (data,), (scale,) = all_gather_outputs, metadata
        if out is not None:
            assert isinstance(out, Float8Tensor)
            out._scale = scale
            return None
        return Float8Tensor(data, scale, param_dtype), (data,)


def send_in_float8(model: nn.Module) -> nn.Module:
    """Make the weight of every linear layer a `Float8Weight`."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Float8Weight(module.weight.detach()))
    return model
