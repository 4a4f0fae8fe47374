"""Time of a step by a device model: matrix products, memory bandwidth, links, and idle ranks of a pipeline.

All-gathers and reductions of weights overlap with computation and cost what exceeds it; all other exchanges are waited
for. Within a block, products and cheap operations follow each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hp_trainer.models.estimates import Traffic
from hp_trainer.parallel.axes import DENSE_AXES
from hp_trainer.pipeline import ActionSeconds
from hp_trainer.planning.devices import Device
from hp_trainer.planning.memory import Work, cost_of
from hp_trainer.planning.pipeline import bubble
from hp_trainer.planning.shapes import StageBuffers, StepShape, activations_of
from hp_trainer.planning.traffic import message_bytes, stage_traffic


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, by what takes them.

    Attributes:
        products: matrix products, those of attention included.
        recomputation: matrix products that are repeated in backward.
        memory: cheap operations, which are bound by the device's memory bandwidth.
        exchanges: collectives that are waited for, by axis.
        weights: all-gathers and reductions of weights that computation does not hide.
        idle: time in which ranks of the pipeline wait for others.
        update: the optimizer.
        offload: copies of activations to the host and back that computation does not hide.
        forward, weight_grad: the parts of the first three for forwards, and for gradients of weights apart from others.
    """

    products: float
    recomputation: float
    memory: float
    exchanges: dict[str, float] = field(default_factory=dict)
    weights: float = 0.0
    idle: float = 0.0
    update: float
    offload: float
    forward: float
    weight_grad: float

    def parts(self) -> dict[str, float]:
        """Return the seconds by name."""
        parts = {"products": self.products, "recomputation": self.recomputation, "cheap operations": self.memory}
        parts |= {f"exchanges over {axis}": seconds for axis, seconds in self.exchanges.items()}
        parts |= {"offload not hidden": self.offload, "weights not hidden": self.weights}
        return parts | {"pipeline idle": self.idle, "update": self.update}

    @property
    def busy(self) -> float:
        """Seconds of forwards and backwards."""
        return self.products + self.recomputation + self.memory

    @property
    def total(self) -> float:
        """Sum of all seconds."""
        return sum(self.parts().values())


def computation_of(shape: StepShape, stage: StageBuffers, device: Device) -> StepTime:
    """Return the time of a step in which one rank of the pipeline computes, without exchanges and idling."""
    count, rates = shape.num_microbatches, _Rates.of(shape, device)
    cost = cost_of(shape, stage.layers)
    work = Work.of(cost, activations_of(shape).head if stage.part.head else None)
    linear = count * (work.products / rates.products + work.operands / rates.memory)
    products = linear + count * work.attention / rates.attention
    fixed = device.forward_seconds + device.operation_seconds * work.operations
    memory = count * ((work.loss + rates.traffic * work.saved) / rates.memory + fixed)
    again = count * cost.recomputed_attention_flops
    repeated = count * cost.recomputed_flops - again
    recomputation = repeated / rates.products + again / rates.attention
    # Recomputation reads and writes what a forward does, a third of the traffic of forward and backward.
    recomputation += rates.traffic / 3 * count * cost.recomputed_bytes / rates.memory
    busy, forward = products + recomputation + memory, (products + memory) / 3
    # Each byte of weights, gradients and state counts twice: it is read and written.
    update = 2 * (stage.total.shard + stage.total.gradient + stage.total.state) / rates.memory
    if shape.config.training.offload_optimizer:
        # Copies run in both directions at once, and overlap with the update.
        update = max(update, stage.total.state / device.host_bandwidth)
    if copied := cost.saved - cost.on_device:
        ends = cost_of(shape, tuple(shape.last_layers(stage.rank)))
        copied = count * (copied - (ends.saved - ends.on_device)) / device.host_bandwidth
    return StepTime(
        products=products,
        recomputation=recomputation,
        memory=memory,
        update=update,
        # Forward hides copies to the host, backward those to the device.
        offload=max(0.0, copied - forward) + max(0.0, copied - (busy - forward)),
        forward=forward,
        # Attention has no weights. Where blocks are recomputed, all gradients are computed together.
        weight_grad=0.0 if shape.recomputes else count * work.products / 3 / rates.products,
    )


def with_exchanges(shape: StepShape, stage: StageBuffers, device: Device, time: StepTime) -> StepTime:
    """Return the time of a step for one rank of the pipeline without idling, by the time in which it computes."""
    exchanges, overlapping, waited = _exchanges(shape, stage, device)
    if stage.is_pipelined:
        # Messages are sent while the ranks compute, except the first and the last ones, which count as idle time.
        exchanges.pop("pp", None)
    hidden = device.hidden.get("weights", 0.0) * min(overlapping, time.busy)
    return replace(time, exchanges=exchanges, weights=overlapping - hidden + waited)


def with_idle(shape: StepShape, device: Device, time: StepTime) -> StepTime:
    """Return the estimated time of a step for one rank of the pipeline, by its time without idling."""
    if not shape.dims.pp_enabled:
        return time
    waits = sum(time.exchanges.values())
    return replace(time, idle=_idle(shape, device, time.busy + waits, time.forward + waits / 2, time.weight_grad))


@dataclass(frozen=True)
class _Rates:
    """Operations and bytes per second of one rank, and bytes that cheap operations move per saved byte."""

    products: float
    attention: float
    memory: float
    traffic: float

    @classmethod
    def of(cls, shape: StepShape, device: Device) -> _Rates:
        """Return the rates of a rank, which shares the device's processors with others."""
        training, dims = shape.config.training, shape.dims
        # A dtype that the device does not state is assumed to be as slow as its slowest one.
        slowest = min(device.flops.values())
        rate = device.flops.get(training.dtype, slowest)
        linear = rate if device.products_dtype is None else device.flops.get(device.products_dtype, slowest)
        share = device.processor_share(dims.world_size)
        is_ring = dims.cp_enabled and shape.micro_batch_shape.cp_method != "ulysses"
        # Of the blocks that a rank computes, one is of its own keys.
        blocks = (1 + (dims.cp - 1) / device.ring_efficiency) / dims.cp if is_ring else 1.0
        return cls(
            products=share * linear * device.efficiency,
            attention=share * rate * device.attention_efficiency / blocks,
            memory=share * device.memory_bandwidth,
            traffic=device.compiled_traffic if training.compile else device.traffic,
        )


def _exchanges(shape: StepShape, stage: StageBuffers, device: Device) -> tuple[dict[str, float], float, float]:
    """Return the seconds of exchanges by axis, of gathers that overlap with computation, and of other gathers."""
    exchanges: dict[str, float] = {}
    # Gathers that overlap are summed: they share the links, and only what exceeds the computation counts.
    overlapping = waited = 0.0
    for each in stage_traffic(shape, stage):
        seconds = seconds_of(each, shape, device)
        if each.overlaps:
            overlapping += seconds
        # A pipeline that gathers once per step does so outside the schedule, where nothing overlaps and no bubble
        # applies.
        elif stage.is_pipelined and each.axis in ("fsdp", "efsdp", "dp_replicate", "dp_replicate+cp", "cp"):
            waited += seconds
        else:
            exposed = seconds * (1 - _hidden(each.axis, shape, device))
            exchanges[each.axis] = exchanges.get(each.axis, 0.0) + exposed
    return exchanges, overlapping, waited


def _hidden(axis: str, shape: StepShape, device: Device) -> float:
    """Return the share of the exchanges over an axis that computation hides."""
    sizes = shape.micro_batch_shape
    if axis == "cp":
        # Hops of a ring run beside the attention of the blocks before; exchanges of heads do not.
        return device.hidden.get("cp", 0.0) if sizes.cp_method == "ring" else 0.0
    if axis.startswith("ep"):
        # All chunks but one are sent while experts compute another one.
        return device.hidden.get("ep", 0.0) * (sizes.ep_chunks - 1) / sizes.ep_chunks
    return device.hidden.get("tp", 0.0) if axis == "tp" else 0.0


def _idle(shape: StepShape, device: Device, busy: float, forward: float, weight_grad: float) -> float:
    """Return the idle seconds of a rank of a pipeline that computes and exchanges for `busy` seconds.

    Args:
        forward, weight_grad: the part of `busy` for forwards, and for gradients of weights apart from other gradients.
    """
    hop = seconds_of(Traffic("pp", "send", message_bytes(shape), 1), shape, device)
    # A rank with the embedding alone computes nothing. Its times are as good as any others.
    input_grad, weight = ((busy - weight_grad) / forward - 1, weight_grad / forward) if forward else (1.0, 1.0)
    # Rounded to quarters, so that layouts with nearly the same times share a simulation.
    seconds = ActionSeconds(input_grad=round(4 * input_grad) / 4, weight_grad=round(4 * weight) / 4)
    settings = shape.config.pipeline
    bubbles = bubble(settings.schedule, shape.dims.pp, shape.num_microbatches, settings.stages_per_rank, seconds)
    # Where ranks share processors, the others compute while one waits.
    idle = max(0.0, (1 + bubbles) * device.processor_share(shape.dims.world_size) - 1) * busy
    # The second term is a message through all ranks and back.
    return idle + 2 * (shape.dims.pp - 1) * hop


# Links ---------------------------------------------------------------------------------------------------


def seconds_of(traffic: Traffic, shape: StepShape, device: Device) -> float:
    """Return the time of collectives over an axis, by the links between its ranks."""
    strides, sizes = zip(*(_one_axis(each, shape) for each in traffic.axis.split("+")), strict=True)
    latency, bandwidth = device.link(traffic.collective, min(strides), math.prod(sizes))
    # An all-reduce is one call: its ranks wait for each other once, although its bytes are those of two rounds.
    return traffic.count * latency + traffic.bytes / bandwidth


def _one_axis(name: str, shape: StepShape) -> tuple[int, int]:
    """Return the (stride, size) of an axis in the numbering of the job's ranks."""
    dims = shape.dims
    folded = dims.expert_mesh == "folded"
    if name in ("ep_inner", "ep_outer"):
        stride, size = _one_axis("ep", shape)
        node = shape.config.parallel.ep_node_size or 1
        return (stride, node) if name == "ep_inner" else (stride * node, size // node)
    if name == "efsdp" and folded:
        return dims.ep * dims.etp, dims.efsdp_size
    if name == "ep" and folded:
        return dims.etp, dims.ep
    names = {"fsdp": ("dp_shard", "cp") if folded else ("dp_shard",), "efsdp": ("dp_shard",)}.get(name, (name,))
    assert dims.expert_mesh is not None
    # Row-major numbering: the last axis has stride 1.
    strides, stride = {}, 1
    for axis in reversed(DENSE_AXES[dims.expert_mesh]):
        strides[axis] = stride
        stride *= getattr(dims, axis)
    return min(strides[axis] for axis in names), math.prod(getattr(dims, axis) for axis in names)
