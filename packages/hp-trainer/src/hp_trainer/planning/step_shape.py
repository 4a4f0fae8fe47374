"""Sizes of a step on one rank: what every part of the plan is computed from."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import PlanError
from hp_trainer.models import DecoderConfig, DecoderParts
from hp_trainer.parallel import ParallelDims
from hp_trainer.planning.module_facts import CountModule, ModuleFacts
from hp_trainer.planning.pipeline_facts import PipelineFacts, pipeline_facts
from hp_trainer.training.stages import cut_layers, num_microbatches

T = TypeVar("T")
Memo = dict[Hashable, Any]
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class StepShape:
    """A configuration under a layout, with the sizes that follow from both.

    Attributes:
        config: of the run; its model is the decoder, unless there is a `module`.
        dims: degrees of parallelism, which fit the model and the batch.
        is_host: the device is a CPU, which computes experts in one operation in float32 alone.
        memo: what many layouts of one configuration have in common, see `shared`.
        module: of a user's own module, what was counted of it.
    """

    config: TrainerConfig
    dims: ParallelDims
    is_host: bool = False
    memo: Memo = field(default_factory=dict, repr=False, compare=False)
    module: ModuleFacts | None = None

    @classmethod
    def of(
        cls,
        config: TrainerConfig,
        dims: ParallelDims,
        memo: Memo | None = None,
        *,
        is_host: bool = False,
        count_module: CountModule | None = None,
    ) -> StepShape:
        """Return the shape of a configuration's step.

        Args:
            memo: of other layouts of the same configuration; None: there are none.
            count_module: counts a user's own module for so many samples of a forward; None: the model is the decoder.

        Raises:
            PlanError: the model does not tell its parameters.
        """
        shape = cls(config, dims, is_host, {} if memo is None else memo)
        if count_module is not None:
            return replace(shape, module=count_module(shape.micro_batch))
        if not isinstance(config.model.options, DecoderConfig):
            raise PlanError(
                f"model {config.model.name!r} does not tell its parameters and operations before it is built; plans "
                "are made for the decoder (model.name=decoder), whose options describe many architectures"
            )
        return shape

    def shared(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what `compute` gave for the first layout with this key, which holds all that the result depends on.

        The configuration itself is left out: layouts of one configuration alone share a memo.
        """
        if key not in self.memo:
            self.memo[key] = compute()
        found: T = self.memo[key]
        return found

    @property
    def model(self) -> DecoderConfig:
        """The model's options."""
        options = self.config.model.options
        assert isinstance(options, DecoderConfig)
        return options

    @functools.cached_property
    def samples(self) -> int:
        """Samples of a step that one rank reads."""
        return self.config.training.global_batch_size // self.dims.dp_size

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Forwards and backwards of a step."""
        if self.dims.pp_enabled:
            return num_microbatches(self.config, self.dims)
        return self.samples // (self.config.training.micro_batch_size or self.samples)

    @functools.cached_property
    def facts(self) -> PipelineFacts:
        """Facts of the pipeline's schedule."""
        settings = self.config.pipeline
        number, stages = self.num_microbatches, settings.stages_per_rank
        return _facts(settings.schedule, self.dims.pp, number, stages, recomputes=self.recomputes)

    def parts_of(self, place: int) -> DecoderParts:
        """Return the parts of the model at a place of the pipeline."""
        owners = self.facts.rank_of_stage
        return self.shared(("parts", owners, place), lambda: self._parts_of(owners, place))

    def _parts_of(self, owners: tuple[int, ...], place: int) -> DecoderParts:
        layers = self._cut(len(owners))
        mine = [stage for stage, owner in enumerate(owners) if owner == place]
        return DecoderParts(
            embed=0 in mine,
            layers=tuple(layer for stage in mine for layer in layers[stage]),
            head=len(owners) - 1 in mine,
        )

    def block_name(self, layer: int) -> str:
        """Return the name of a block, or of a part of a user's own module."""
        return f"layers.{layer}" if self.module is None else self.module.names[layer]

    def ends_of(self, place: int) -> frozenset[int]:
        """Return the last layer of each stage at a place of the pipeline, whose activations are not offloaded."""
        if not self.dims.pp_enabled:
            return frozenset({(self.model.num_hidden_layers if self.module is None else len(self.module.blocks)) - 1})
        owners = self.facts.rank_of_stage
        stages = self._cut(len(owners))
        return frozenset(max(stages[each]) for each, owner in enumerate(owners) if owner == place and stages[each])

    def _cut(self, num_stages: int) -> list[range]:
        return self.shared(("cut", num_stages), lambda: cut_layers(self.config, num_stages))

    @functools.cached_property
    def micro_batch(self) -> int:
        """Samples of one forward."""
        return self.samples // self.num_microbatches

    @property
    def itemsize(self) -> int:
        """Bytes of an element in computation."""
        return _ITEMSIZE[self.config.training.dtype]

    @property
    def reduce_itemsize(self) -> int:
        """Bytes of an element of gradients that are summed over ranks."""
        training = self.config.training
        return 4 if training.dtype == "float32" else _ITEMSIZE[training.reduce_dtype]

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of one forward on the context parallel rank that has most."""
        return self.micro_batch * math.ceil(self.config.training.sequence_length / self.dims.cp)

    @property
    def fuses_experts(self) -> bool:
        """True if all experts are computed in one operation, which keeps less."""
        return not self.is_host or self.config.training.dtype == "float32"

    @property
    def recomputes(self) -> bool:
        """True if some blocks are computed again in backward."""
        training = self.config.training
        return training.recompute != "none" or training.activation_budget is not None

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same shard: replicas, and in the peer mesh the ranks that share a sequence."""
        peer = self.dims.expert_mesh == "peer"
        return self.dims.dp_replicate * (self.dims.cp if peer else 1)


_facts = functools.lru_cache(maxsize=512)(pipeline_facts)
