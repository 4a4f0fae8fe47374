"""Random operations: every rank draws the whole tensor's numbers and keeps its part.

So the numbers are the single-device ones whatever the layout, on any generator (also torch's sequential one
on CPU), and the generators of all ranks stay in step: seed them alike (`manual_seed`) and they remain alike. They are
drawn in the order of a contiguous tensor; torch draws those of a transposed one in the order of its memory, which no
rank knows of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hp_dtensor.rules.factors import Factorization
from hp_dtensor.rules.registry import OpCall, Rule, RuleRegistry, names_for

if TYPE_CHECKING:
    from hp_dtensor.dispatch import LocalCall

Tensor = Any
LINEAR = (frozenset({0}),)


def register(registry: RuleRegistry) -> None:
    registry.register("dropout dropout1d dropout2d dropout3d feature_dropout", "input ...", _rule(_masked))
    registry.register("alpha_dropout feature_alpha_dropout", "input ...", _whole)
    registry.register("rand_like randn_like", "input ...", _rule(_drawn, linear=False))
    registry.register(
        "uniform_ normal_ exponential_ log_normal_ cauchy_ geometric_ random_",
        "input ...",
        _rule(_filled, linear=False),
        in_place=True,
    )
    registry.register("kaiming_uniform_ kaiming_normal_", "tensor ...", _rule(_filled, linear=False), in_place=True)
    registry.register("bernoulli", "input ...", _whole)
    registry.register("multinomial", "input num_samples replacement=False", _multinomial)
    registry.register("bernoulli_", "input p=0.5", _rule(_filled, linear=False), in_place=True)


def _rule(local: Callable[[LocalCall], Any], linear: bool = True) -> Rule:
    def rule(call: OpCall) -> Factorization:
        dims, sizes = names_for("d", call.tensors[0].shape)
        terms = LINEAR if linear else None
        return Factorization((dims,), (dims,), sizes, terms=terms, local=dict.fromkeys(sizes, local))

    return rule


def _masked(call: LocalCall) -> Tensor:
    """Dropout: `x` times this rank's part of what dropout makes of ones."""
    platform, x = call.platform, call.arguments["input"]
    with platform.no_grad():
        mask = _part(call, call.on(platform.ops.ones(call.shape, x.dtype)))
    return platform.ops.mul(x, mask)


def _drawn(call: LocalCall) -> Tensor:
    whole = call.platform.empty(call.shape, call.arguments["input"].dtype)
    return _part(call, call.on(whole))


def _filled(call: LocalCall) -> Tensor:
    platform = call.platform
    x = call.arguments["input"] if "input" in call.arguments else call.arguments["tensor"]
    whole = platform.empty(call.shape, x.dtype)
    call.on(whole)
    platform.copy_(x, _part(call, whole))
    return x


def _part(call: LocalCall, whole: Tensor) -> Tensor:
    offset, shape = call.box
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        whole = call.platform.ops.narrow(whole, dim, start, length)
    return whole


def _whole(call: OpCall) -> Factorization:
    """Every rank draws for the whole: what is dropped gets a value of its own, or it depends on all probabilities."""
    dims, sizes = names_for("d", call.tensors[0].shape)
    return Factorization((dims,), (dims,), sizes, fixed=frozenset(sizes))


def _multinomial(call: OpCall) -> Factorization:
    """Every rank draws for the whole."""
    dims, sizes = names_for("d", call.tensors[0].shape)
    output = (*dims[:-1], ("drawn",))
    sizes = sizes | {"drawn": call["num_samples"]}
    return Factorization((dims,), (output,), sizes, fixed=frozenset(sizes))
