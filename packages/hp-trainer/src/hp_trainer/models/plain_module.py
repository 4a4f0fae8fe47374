"""Unmodified modules of a framework, such as a model of transformers, wrapped for the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.parallelize_module import ParallelStyle, fits, parallelize_module
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from hp_dtensor.tensor.conversions import to_full
from hp_fsdp import fully_shard
from hp_trainer.exceptions import ParallelDimsError, Problem, TrainingError, raise_if_any
from hp_trainer.models.base import TokenLoss, precision_policy

if TYPE_CHECKING:
    from hp_trainer.config import TrainingConfig
    from hp_trainer.parallel import ParallelDims

Tensor = Any
_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class PlainModel(nn.Module):
    """A module that returns logits, trained with data parallelism, FSDP and a tensor-parallel plan.

    Args:
        module: takes ids `[batch, length]` and returns logits `[batch, length, vocabulary]`, alone, first in a tuple,
            or as `logits` of an output. It keeps the initial values it was built with, unless it has an
            `initializer(name, shape)`.
        tp_plan: patterns of module names -> `colwise` or `rowwise`, as in torch's `parallelize_module`. Layers in
            between get plain tensors: this rank's heads or columns.
        fsdp_units: patterns of names of modules that form an FSDP group each; none: the outermost numbered modules.
    """

    def __init__(
        self, module: Any, config: Any, tp_plan: Mapping[str, str] | None = None, fsdp_units: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.config = config
        self.module = module
        self._loss = TokenLoss()
        self._tp_plan, self._units = dict(tp_plan or {}), tuple(fsdp_units)
        # The trainer initializes models with this attribute after sharding; others have their weights already.
        if hasattr(module, "initializer"):
            self.initializer = lambda name, shape: module.initializer(name.removeprefix("module."), shape)

    def forward(self, ids: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        if positions is not None:
            raise TrainingError(
                "a plain module cannot separate packed documents; turn data.packing off, or use model.name=decoder"
            )
        # Evaluation records no gradients; dropout must be off then, as a user's module expects of `eval()`.
        with contextlib.nullcontext() if self.platform.is_grad_enabled() else self._evaluating():
            logits = _logits_of(self.module(ids))
        # The loss is computed in float32, also when the module computes in 16 bits.
        logits = self.ops.cast(logits, self.platform.dtype("float32"))
        return to_full(logits if targets is None else self._loss.summed(self.platform, logits, targets))

    def parallelize(
        self,
        dims: ParallelDims,
        mesh: DeviceMesh,
        training: TrainingConfig | None = None,
        *,
        reshard_after_forward: bool | None = None,
    ) -> None:
        """See `hp_trainer.models.LanguageModel`; rank 0's initial values are broadcast."""
        names = [name for name, _ in self.platform.named_modules(self.module) if name]
        raise_if_any(self._problems(dims, training, names), ParallelDimsError, "a plain module")
        if training is not None:
            self._loss = TokenLoss(training.label_smoothing, training.z_loss)
        # Rank 0's values are used, because each rank's module drew its own. Before sharding: afterwards each rank would
        # have a shard of its own values.
        with self.platform.no_grad():
            for _, tensor in [*self.platform.named_parameters(self), *self.platform.named_buffers(self)]:
                mesh.world.all.broadcast(tensor)
        if dims.tp_enabled:
            plan = {name: _STYLES[style]() for p, style in self._tp_plan.items() for name in _matching(p, names)}
            parallelize_module(self.module, mesh["tp"], plan)
        outer = ("dp_replicate",) if dims.dp_replicate > 1 else ()
        shards, policy = mesh[*outer, "fsdp"], precision_policy(training)
        # Inner groups first, however they are listed: the outer one takes the remaining parameters.
        units = [unit for _, unit in sorted(self.units().items(), key=lambda named: -named[0].count("."))]
        for module in (*units, self):
            fully_shard(module, shards, mp_policy=policy, reshard_after_forward=reshard_after_forward)
            # The loss is already divided by the global number of tokens, so gradients are summed, not averaged.
            module.set_reduce_op_type("sum", recurse=False)
        if training is not None and training.compile:
            for module in units:
                self.platform.compile_module(module, training.compile_backend)

    def units(self) -> dict[str, Any]:
        """Return the modules that form an FSDP group each, by dotted name."""
        modules = {name: module for name, module in self.platform.named_modules(self.module) if name}
        if self._units:
            return {name: modules[name] for pattern in self._units for name in _matching(pattern, list(modules))}
        # `layers.0` of an outer list; modules of an inner list, such as experts, belong to its group.
        numbered = [name for name in modules if name.rpartition(".")[2].isdigit()]
        is_inner = {name: any(name.startswith(f"{other}.") for other in numbered) for name in numbered}
        return {name: modules[name] for name in numbered if not is_inner[name]}

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Switch modules to evaluation in the block, such as dropout, and restore their modes afterwards."""
        # Modules that are in evaluation already, such as frozen ones, must not be in training afterwards.
        trained = [module for _, module in self.platform.named_modules(self.module) if module.training]
        for module in trained:
            module.training = False
        try:
            yield
        finally:
            for module in trained:
                module.training = True

    def after_optimizer_step(self, all_gather_object: Any = None) -> Mapping[str, float]:
        """See `hp_trainer.models.LanguageModel`; there are no metrics."""
        return {}

    def _problems(self, dims: ParallelDims, training: TrainingConfig | None, names: Sequence[str]) -> Any:
        for degree in ("cp", "pp", "ep"):
            if getattr(dims, degree) > 1:
                yield Problem(path=f"parallel.{degree}", what="a plain module does not support it", expected="1")
        if dims.tp_enabled and not self._tp_plan:
            yield Problem(path="parallel.tp_plan", what="tp needs a plan of the layers to shard", expected="a plan")
        if training is not None and training.recompute != "none":
            what = "a plain module recomputes nothing"
            yield Problem(path="training.recompute", what=what, expected="none", got=training.recompute)
        if training is not None and training.offload_activations:
            what = "a plain module has no blocks whose activations could be offloaded"
            yield Problem(path="training.offload_activations", what=what, expected="false", got="true")
        for setting, patterns in (("tp_plan", self._tp_plan), ("fsdp_units", self._units)):
            for pattern in patterns:
                if not _matching(pattern, names):
                    what = f"no module is called {pattern!r}"
                    yield Problem(path=f"parallel.{setting}", what=what, expected=f"such as {', '.join(names[:5])}")


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that match a pattern, in which `*` stands for anything between two dots."""
    return [name for name in names if fits(name, pattern)]


def _logits_of(output: Any) -> Tensor:
    if hasattr(output, "logits"):
        return output.logits
    return output[0] if isinstance(output, (tuple, list)) else output
