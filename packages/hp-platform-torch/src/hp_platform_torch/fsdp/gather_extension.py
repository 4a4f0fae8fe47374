"""Weights of tensor subclasses that define `fsdp_pre_all_gather` and `fsdp_post_all_gather`, torch's protocol.

The protocol is described in `torch.distributed.fsdp._fully_shard._fsdp_param`; float8 training of torchao uses it. A
subclass must do what torch's `fully_shard` requires, and hold its values in one plain tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hp_dtensor.exceptions import CapabilityError
from hp_fsdp.storage import GATHER_METHODS, GatherExtension
from hp_platform_torch.tensor.torch_operation import NoGrad

Tensor = torch.Tensor

_PLAIN = torch.Tensor, torch.nn.Parameter


def find_extension(parameter: Tensor) -> TorchGatherExtension | None:
    """Return the gather that a parameter's class defines, or None.

    Raises:
        CapabilityError: the class defines one of the two methods only, or one with other arguments; or its values are
            not in one tensor.
    """
    # Without either method it is an ordinary weight.
    missing = [name for name in GATHER_METHODS if not hasattr(parameter, name)]
    if len(missing) == len(GATHER_METHODS):
        return None
    kind = type(parameter)
    if missing:
        raise CapabilityError(f"{kind.__name__} has one of {' and '.join(GATHER_METHODS)}, and lacks {missing[0]}")
    if any(not hasattr(kind, name) for name in GATHER_METHODS):
        raise CapabilityError(
            f"{' / '.join(GATHER_METHODS)} have been set on the weight itself, and its shards would lack them. Define "
            "them in a tensor subclass"
        )
    count = len(inspect.signature(getattr(parameter, GATHER_METHODS[0])).parameters)
    if count not in (1, 5):
        raise CapabilityError(
            f"{kind.__name__}.fsdp_pre_all_gather takes {count} arguments, expected (mesh), or (mesh, outer_size, "
            "outer_stride, module, mp_policy)"
        )
    return TorchGatherExtension(parameter, takes_mesh_only=count == 1)


class TorchGatherExtension(GatherExtension):
    """`GatherExtension` of one weight."""

    def __init__(self, parameter: Tensor, takes_mesh_only: bool) -> None:
        self.kind = type(parameter).__name__
        self._full = parameter.detach()
        self._takes_mesh_only = takes_mesh_only
        # For a weight that has its own memory: torch's operations return instances without these attributes.
        self._attributes = {name: value for name, value in vars(parameter).items() if name != "_is_param"}
        self._size = self._full.size()
        self._strides = tuple(torch.empty(self._size, device="meta").stride())  # those of a contiguous tensor
        self._holder = _attribute_of_values(self._full)
        # Only for a weight with memory of its own: a wrapper class may refuse operations that it does not implement.
        own = self._full.as_subclass(torch.Tensor) if self._holder is None else None
        self.values = getattr(self._full, str(self._holder)).detach() if own is None else own
        self._shard: Any = None
        self._metadata: Any = None
        self._unsharded: Tensor | None = None
        self._inner: list[Tensor] = []

    def split(self, num_shards: int, index: int) -> None:
        # The class's own operations copy the other attributes of an instance. torch's fully_shard uses them too.
        with NoGrad():
            chunks = torch.chunk(self._full, num_shards, dim=0)
            self._shard = chunks[index] if index < len(chunks) else chunks[0].narrow(0, 0, 0)
        del self._full, self.values

    def inputs(self, shard: Tensor, mesh: Any, module: Any, mp_policy: Any) -> list[Tensor]:
        shard = shard.detach()
        if self._holder is not None:
            setattr(self._shard, self._holder, shard)
        elif self._shard.data_ptr() != shard.data_ptr() or not self._shard.numel():
            self._attributes.update(vars(self._shard))
            self._shard = shard.as_subclass(type(self._shard))
            vars(self._shard).update(self._attributes)
        more = () if self._takes_mesh_only else (self._size, self._strides, module, mp_policy)
        with NoGrad():
            inputs, self._metadata = self._shard.fsdp_pre_all_gather(mesh, *more)
            return [x.contiguous() for x in inputs]

    def unsharded(self, outputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        metadata, self._metadata = self._metadata, None
        with NoGrad():
            if self._unsharded is None:
                made, inner = self._shard.fsdp_post_all_gather(tuple(outputs), metadata, dtype)
                self._inner = [each for each in inner if _storage(each) not in set(map(_storage, outputs))]
                self._unsharded = made if made.size() == self._size else made.as_strided(self._size, self._strides)
                return self._unsharded
            # Tensors of the weight that autograd has saved are valid: the class writes the same values again.
            with torch.autograd._unsafe_preserve_version_counter(tuple(self._inner)):
                self._shard.fsdp_post_all_gather(tuple(outputs), metadata, dtype, out=self._unsharded)
            return self._unsharded

    def inner_tensors(self) -> list[Tensor]:
        return self._inner


def _attribute_of_values(weight: Tensor) -> str | None:
    """Return the attribute of a wrapper subclass that holds its values. None if the weight itself holds them.

    Raises:
        CapabilityError: they are not in one plain tensor of the weight's shape and dtype, as in a weight that is stored
            quantized.
    """
    kind = type(weight)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return None
    found = [
        name
        for name, value in _attributes(weight)
        if type(value) in _PLAIN and value.shape == weight.shape and value.dtype == weight.dtype
    ]
    if len(found) == 1:
        return found[0]
    got = f"{len(found)} ({', '.join(found)})" if found else "none"
    raise CapabilityError(
        f"{kind.__name__} does not hold its values in one tensor: expected one attribute with a plain tensor of "
        f"{list(weight.shape)}, {weight.dtype}, which the optimizer updates, got {got}"
    )


def _attributes(weight: Tensor) -> Iterator[tuple[str, Any]]:
    names = dict.fromkeys(vars(weight)) if hasattr(weight, "__dict__") else {}
    for kind in type(weight).__mro__:
        slots = vars(kind).get("__slots__", ())
        names.update(dict.fromkeys((slots,) if isinstance(slots, str) else slots))
    yield from ((name, getattr(weight, name, None)) for name in names)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
