"""Time of a step from a device model: products, memory, links, and idle ranks of a pipeline.

Gathers and reductions of weights run while blocks compute, and cost what is left of them; all other exchanges are
waited for. Within a block, products and cheap operations follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_trainer.models.decoder.activations import (
    head_flops_per_token,
    layer_flops_per_token,
    routed_flops_per_token,
    training_flops_per_token,
)
from hp_trainer.parallel.axes import DENSE_AXES
from hp_trainer.planning.devices import Device
from hp_trainer.planning.memory import layer_costs
from hp_trainer.planning.shapes import StageParts, StepShape
from hp_trainer.planning.traffic import Sent, message_bytes, stage_traffic

_POINT_TO_POINT = ("all_to_all", "exchange", "send")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, by what they are for.

    Attributes:
        products: matrix products, attention's included.
        again: operations that recomputation takes a second time.
        memory: cheap operations, which wait for the device's memory.
        exchanges: collectives that are waited for, by axis.
        weights: gathers and reductions of weights that are longer than the computation beside them.
        idle: ranks of the pipeline that wait for others.
        update: the optimizer.
        offload: copies of activations to the host and back that are longer than the computation beside them.
    """

    products: float
    again: float
    memory: float
    exchanges: dict[str, float]
    weights: float
    idle: float
    update: float
    offload: float = 0.0

    def parts(self) -> dict[str, float]:
        """Return the seconds by name."""
        parts = {"products": self.products, "recomputation": self.again, "cheap operations": self.memory}
        parts |= {f"exchanges over {axis}": seconds for axis, seconds in self.exchanges.items()}
        parts |= {"offload not hidden": self.offload, "weights not hidden": self.weights}
        return parts | {"pipeline idle": self.idle, "update": self.update}

    @property
    def total(self) -> float:
        """All seconds together."""
        return sum(self.parts().values())


def step_time(shape: StepShape, parts: StageParts, device: Device, state_bytes: float) -> StepTime:
    """Return the estimated time of a step for the ranks at one place of the pipeline.

    Args:
        state_bytes: of the optimizer's state on a rank, which the update reads and writes.
    """
    rate = device.flops.get(shape.config.training.dtype, min(device.flops.values())) * device.efficiency
    count = shape.num_microbatches
    products = count * _flops(shape, parts) / rate
    again, moved = _again(shape, parts)
    costs = layer_costs(shape)
    kept = sum(costs[layer].saved for layer in parts.layers)
    # Written and read in forward, read and written in backward.
    memory = count * (4 * kept + moved) / device.memory_bandwidth
    again = count * again / rate
    traffic = stage_traffic(shape, parts)
    exchanges: dict[str, float] = {}
    hidden = waited = 0.0
    for each in traffic:
        seconds = seconds_of(each, shape, device)
        if each.hides:
            hidden += seconds
        elif parts.is_pipelined and each.axis in ("fsdp", "efsdp", "dp_replicate", "dp_replicate+cp", "cp"):
            waited += seconds
        else:
            exchanges[each.axis] = exchanges.get(each.axis, 0.0) + seconds
    busy = products + again + memory
    idle = 0.0
    if parts.is_pipelined:
        hop = message_bytes(shape) / _send_rate(shape, device) + device.outer_latency
        inside = busy + sum(seconds for axis, seconds in exchanges.items() if axis != "pp")
        idle = shape.facts.bubble * inside + 2 * (shape.dims.pp - 1) * hop
        # Messages travel while the ranks compute, but for the first and the last ones, which are idle time.
        exchanges.pop("pp", None)
    shards = parts.total("shard") + parts.total("gradient")
    update = (2 * shards + 2 * state_bytes) / device.memory_bandwidth
    if shape.config.training.offload_optimizer:
        # Both directions at once, beside the update.
        update = max(update, state_bytes / device.host_bandwidth)
    copied = count * _copied(shape, parts) / device.host_bandwidth
    # Forward computes a third of the products, and moves half of the bytes that are kept.
    forward = products / 3 + count * 2 * kept / device.memory_bandwidth
    return StepTime(
        products=products,
        again=again,
        memory=memory,
        exchanges=exchanges,
        weights=max(0.0, hidden - busy) + waited,
        idle=idle,
        update=update,
        offload=max(0.0, copied - forward) + max(0.0, copied - (busy - forward)),
    )


def model_flops(shape: StepShape) -> float:
    """Return the operations of a step over all ranks, without what is computed again."""
    training = shape.config.training
    if shape.module is not None:
        return shape.module.flops / shape.micro_batch * training.global_batch_size
    tokens = training.global_batch_size * training.sequence_length
    return tokens * training_flops_per_token(shape.model, training.sequence_length)


def _flops(shape: StepShape, parts: StageParts) -> float:
    """Return the operations of a rank for one micro-batch, forward and backward."""
    if shape.module is not None:
        return shape.module.flops
    length = shape.config.training.sequence_length
    per_token = shape.shared("layer flops", lambda: layer_flops_per_token(shape.model, length))
    total = sum(per_token[layer] for layer in parts.layers)
    if shape.dims.expert_mesh == "peer":
        # Ranks of `ep` compute the same tokens, but for the experts, for which each routes a part of them.
        routed = sum(routed_flops_per_token(shape.model, layer) for layer in parts.layers)
        total -= routed * (1 - 1 / shape.dims.ep)
    if parts.head:
        total += head_flops_per_token(shape.model)
    return total * shape.micro_batch * length / (shape.dims.cp * shape.dims.tp)


def _again(shape: StepShape, parts: StageParts) -> tuple[float, float]:
    """Return the operations and the bytes of what is computed again for one micro-batch."""
    every = layer_costs(shape)
    costs = [every[layer] for layer in parts.layers]
    return sum(each.flops_again for each in costs), sum(each.moved_again for each in costs)


def _copied(shape: StepShape, parts: StageParts) -> float:
    """Return the bytes that a micro-batch sends to the host."""
    costs, ends = layer_costs(shape), shape.ends_of(parts.place)
    return sum(costs[layer].kept - costs[layer].on_device for layer in parts.layers if layer not in ends)


# Links ---------------------------------------------------------------------------------------------------


def seconds_of(sent: Sent, shape: StepShape, device: Device) -> float:
    """Return the time of collectives over an axis, by the links between its ranks."""
    stride, size = _axis(sent.axis, shape)
    inside = min(size, max(1, device.ranks_per_node // stride))
    latency = device.inner_latency if inside == size else device.outer_latency
    if inside == size:
        return sent.bytes / device.inner_bandwidth + sent.count * latency
    if sent.collective in _POINT_TO_POINT:
        near = (inside - 1) / (size - 1)
        rate = near / device.inner_bandwidth + (1 - near) / device.outer_bandwidth
        return sent.bytes * rate + sent.count * latency
    # A ring passes each node once; the ranks of a node share its links outward.
    rate = min(device.inner_bandwidth, device.outer_bandwidth * inside)
    return sent.bytes / rate + sent.count * latency


def _axis(name: str, shape: StepShape) -> tuple[int, int]:
    """Return (distance between neighbours, ranks) of an axis in the numbering of the job's ranks."""
    found = [_one_axis(each, shape) for each in name.split("+")]
    size = 1
    for _, each in found:
        size *= each
    return min(stride for stride, _ in found), max(1, size)


def _one_axis(name: str, shape: StepShape) -> tuple[int, int]:
    dims = shape.dims
    folded = dims.expert_mesh == "folded"
    if name == "efsdp" and folded:
        return dims.ep * dims.etp, dims.efsdp_size
    if name == "ep" and folded:
        return dims.etp, dims.ep
    names = {"fsdp": ("dp_shard", "cp") if folded else ("dp_shard",), "efsdp": ("dp_shard",)}.get(name, (name,))
    assert dims.expert_mesh is not None
    strides, stride = {}, 1
    for axis in reversed(DENSE_AXES[dims.expert_mesh]):
        strides[axis] = stride
        stride *= getattr(dims, axis)
    size = 1
    for axis in names:
        size *= getattr(dims, axis)
    return min(strides[axis] for axis in names), size


def _send_rate(shape: StepShape, device: Device) -> float:
    stride, size = _one_axis("pp", shape)
    return device.inner_bandwidth if stride * size <= device.ranks_per_node else device.outer_bandwidth
