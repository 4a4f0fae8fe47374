"""The parameters of torch's public functions, classes and methods are ours: names, order and defaults."""

from __future__ import annotations

import importlib
import inspect

import pytest

import hp_dtensor
import hp_fsdp
import hp_trainer.pipeline

torch = pytest.importorskip("torch")
pytest.importorskip("hp_platform_torch")
pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="each release has other parameters")

HOMES = {
    "torch.distributed.device_mesh": hp_dtensor,
    "torch.distributed.tensor": hp_dtensor,
    "torch.distributed.tensor.experimental": hp_dtensor,
    "torch.distributed.tensor.parallel": hp_dtensor,
    "torch.distributed.fsdp": hp_fsdp,
    "torch.distributed.checkpoint.state_dict": hp_fsdp,
    "torch.distributed.pipelining": hp_trainer.pipeline,
}
OLDER_FSDP = """
    BackwardPrefetch CPUOffload FullOptimStateDictConfig FullStateDictConfig FullyShardedDataParallel
    LocalOptimStateDictConfig LocalStateDictConfig MixedPrecision OptimStateDictConfig OptimStateKeyType
    ShardedOptimStateDictConfig ShardedStateDictConfig ShardingStrategy StateDictConfig StateDictSettings StateDictType
"""
TYPES_OF_STATES = "FQNS_T PrimitiveType ValueType DictValueType ListDictValueType OptimizerStateType"
TRACING = "Pipe SplitPoint build_stage pipe_split pipeline"
ABSENT = {*OLDER_FSDP.split(), *TYPES_OF_STATES.split(), *TRACING.split()}
"""Public names of torch that are not ours. A stage is written as a module, not traced."""
STEPS_OF_A_STAGE = """
    backward_maybe_with_nosync backward_one_chunk backward_weight_one_chunk clear_runtime_states
    forward_maybe_with_nosync forward_one_chunk get_bwd_recv_ops get_bwd_send_ops get_fwd_recv_ops get_fwd_send_ops
    get_local_bwd_output has_backward perform_reduce_grad scale_grads set_local_bwd_input set_local_fwd_input
"""
SEVERAL_STAGES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
FACTORIES = ("empty", "full", "ones", "rand", "randn", "zeros")
NOT_TAKEN = {
    "DeviceMesh.backend_override": "a mesh has the backend of its platform's kind of device",
    "init_device_mesh.backend_override": "as above",
    "get_model_state_dict.submodules": "on the page",
    "get_optimizer_state_dict.submodules": "on the page",
    "get_state_dict.submodules": "on the page",
    "UnshardHandle.group": "`unshard` alone makes one",
    "Shard.local_shard_size_and_offset": "`Shard.parts` gives the ranges of all ranks",
    "Partial.ALL_REDUCE_OPS": "a table of torch's functions",
    "Partial.LINEAR_REDUCE_OPS": "as above",
    **{f"PipelineStage.{name}": "called by torch's schedules" for name in STEPS_OF_A_STAGE.split()},
    **{f"Schedule{name}.register_custom_function": "on the page of pipelines" for name in SEVERAL_STAGES},
    "StateDictOptions.dsd_fqn_modifiers": "for classes that rename parameters by a method of torch's own",
}
MORE = {"fully_shard.mp_policy", "fully_shard.offload_policy", *(f"{name}.layout" for name in FACTORIES)}
"""Defaults that are other values of the same meaning: a class with more fields, None for none."""


def names(namespace):
    module = importlib.import_module(namespace)
    listed = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == namespace and name[0] != "_"
    ]
    return sorted(name for name in listed if not inspect.ismodule(getattr(module, name)))


def of_ours(namespace, name):
    if name == "DTensor":  # the class of this platform's tensors has what torch.Tensor has
        from hp_platform_torch.tensor.dtensor import TorchDTensor

        return TorchDTensor
    return getattr(HOMES[namespace], name)


def parameters(function):
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    # Methods of DTensor are functions of the tensor `x`.
    return [p for p in found if p.name not in ("self", "cls", "x") and p.name[0] != "_"]


def differences(label, theirs, ours):
    """Yield where a call with torch's arguments would not be understood, or mean another default."""
    expected, found = parameters(theirs), parameters(ours)
    if expected is None or found is None:
        return
    by_name = {p.name: (place, p) for place, p in enumerate(found)}
    for place, p in enumerate(expected):
        path = f"{label}.{p.name}"
        if path in NOT_TAKEN or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if p.name not in by_name:
            yield f"{path}: not taken"
            continue
        at, mine = by_name[p.name]
        if p.kind == p.POSITIONAL_OR_KEYWORD and (mine.kind != p.kind or at != place):
            yield f"{path}: argument {place} there, {mine.kind.description} {at} here"
        if p.default is not p.empty and repr(p.default) != repr(mine.default) and path not in MORE:
            yield f"{path}: default {p.default!r} there, {mine.default!r} here"
    needed = [p.name for p in found if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    extra = {f"{label}.{name}" for name in needed} - {f"{label}.{p.name}" for p in expected} - NOT_TAKEN.keys()
    yield from (f"{path}: needed here only" for path in extra)


def methods(cls):
    bases = [base for base in cls.__mro__ if base.__module__.startswith("torch.distributed")]
    return sorted({name for base in bases for name in vars(base) if name[0] != "_"})


@pytest.mark.parametrize("namespace", HOMES)
def test_what_torch_has_is_called_alike_here(namespace):
    problems = []
    for name in set(names(namespace)) - ABSENT:
        theirs, ours = getattr(importlib.import_module(namespace), name), of_ours(namespace, name)
        problems += differences(name, theirs, ours) if callable(theirs) and theirs is not torch.Tensor else []
        for method in methods(theirs) if inspect.isclass(theirs) else ():
            label = f"{name}.{method}"
            fields = getattr(ours, "__dataclass_fields__", {})
            if label in NOT_TAKEN or method in fields:
                continue
            if not hasattr(ours, method):
                problems.append(f"{label}: not here")
            elif callable(getattr(theirs, method)):
                problems += differences(label, getattr(theirs, method), getattr(ours, method))
    assert sorted(problems) == []
