"""Sorting and counting: the dimension along which values are compared is whole, or only its best are sent."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from hp_dtensor.comm import collectives
from hp_dtensor.rules import partial_reductions
from hp_dtensor.rules.cat_and_split import with_lengths
from hp_dtensor.rules.engine.factors import Factorization, LocalWork, PartialResults, uncut
from hp_dtensor.rules.engine.local_call import LocalCall
from hp_dtensor.rules.engine.notation import by_argument, line
from hp_dtensor.rules.engine.registry import OpCall, RuleRegistry, names_for


def register(registry: RuleRegistry) -> None:
    registry.register("topk", "input k dim=-1 largest=True sorted=True", _topk)
    registry.register(
        "sort", "input dim=-1 descending=False * stable=False", line("... dim! ... -> ... dim ..., ... dim ...")
    )
    registry.register("argsort", "input dim=-1 descending=False * stable=False", line("... dim! ... -> ... dim ..."))
    registry.register("one_hot", "input num_classes=-1", _one_hot, data_dependent=True)
    registry.register("bincount", "input weights=None minlength=0", _bincount, data_dependent=True)
    registry.register(
        "searchsorted",
        "sorted_sequence input * out_int32=False right=False side=None sorter=None",
        by_argument("sorter", {None: line("bounds!, ... -> ...")}),
    )
    registry.register("bucketize", "input boundaries * out_int32=False right=False", line("..., bounds! -> ..."))


def _topk(call: OpCall) -> Factorization:
    """Along a cut dimension the best of each part, then of these, where that is fewer bytes."""
    if not call.tensors[0].shape:
        raise call.whole("a tensor of no dimension")
    dim, k = call.dim(call["dim"]), call["k"]
    rule = with_lengths(call, dim, [k])
    rule = replace(rule, outputs=rule.outputs * 2)
    if k > call.tensors[0].shape[dim] or not partial_reductions.candidates_are_fewer(call, dim, k):
        return rule
    factor = frozenset({f"d{dim}"})
    local = {f"d{dim}": partial_reductions.first_k_of_parts(dim, k)}
    return replace(
        rule,
        cuts=replace(rule.cuts, fixed=rule.cuts.fixed - factor),
        partial=replace(rule.partial, complete=factor),
        work=replace(rule.work, by_factor=local),
    )


def _one_hot(call: OpCall) -> Factorization:
    if call["num_classes"] < 0:
        raise call.refuse("num_classes must be given: otherwise it depends on data of all ranks")
    dims, sizes = names_for("d", call.tensors[0].shape)
    return Factorization(
        (dims,), ((*dims, ("classes",)),), sizes | {"classes": call["num_classes"]}, cuts=uncut({"classes"})
    )


def _bincount(call: OpCall) -> Factorization:
    (spec,) = call.tensors[:1]
    if spec.is_replicated():
        raise call.refuse("the number of bins depends on data")  # which all ranks have: it runs as on one device
    if not call["minlength"] or call["weights"] is not None:
        raise call.refuse("bincount of a cut DTensor needs minlength, which must exceed every value, and no weights")
    dims, sizes = names_for("d", spec.shape)
    return Factorization(
        (dims,),
        ((("bins",),),),
        sizes | {"bins": call["minlength"]},
        cuts=uncut({"bins"}),
        partial=PartialResults(reduced=dict.fromkeys(sizes, "sum")),
        work=LocalWork(by_factor=dict.fromkeys(sizes, functools.partial(_bins_of_part, call))),
    )


def _bins_of_part(refused: OpCall, call: LocalCall) -> Any:
    """Every rank learns of a value beyond the bins, wherever it is."""
    platform, bins = call.platform, call.sizes["bins"]
    counts = call.on(call.arguments["input"])
    most = platform.ops.full((), int(counts.shape[0]), platform.dtype("int64"))
    for group in call.groups["d0"]:
        most = collectives.all_reduce_data(most, group, "max")
    highest = int(platform.to_numpy(most)) - 1
    if highest >= bins:
        raise refused.refuse(f"a value {highest} is beyond minlength={bins}")
    return counts
