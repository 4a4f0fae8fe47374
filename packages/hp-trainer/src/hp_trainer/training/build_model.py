"""Building of the model that a configuration names, on one rank and not laid out yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.init import init_empty_weights
from hp_trainer._patterns import matches_any
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import ConfigError, Problem, raise_if_any
from hp_trainer.models.decoder import DecoderConfig
from hp_trainer.models.decoder.lora import is_adapter
from hp_trainer.models.plain_module import PlainModel
from hp_trainer.plugins import registries


@contextlib.contextmanager
def without_data(config: TrainerConfig, platform: Platform) -> Iterator[None]:
    """Make parameters without data in the block, where the platform can: a rank gets memory for its shards alone.

    Only for the decoder, whose parameters get their values later; others may compute with theirs while they are built.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(config.model.options, DecoderConfig):
            # MindSpore has such tensors from 2.10 on.
            with contextlib.suppress(CapabilityError):
                stack.enter_context(init_empty_weights(platform))
        yield


def build_plain_model(
    config: TrainerConfig,
    platform: Platform,
    *parts: Any,
    everyones: Callable[[Any], list[Any]] = lambda fact: [fact],
) -> Any:
    """Return the model of a configuration, its parameters plain.

    A module without a `parallelize` of its own is wrapped as `PlainModel`. Its own initial values come from the run's
    seed.

    Args:
        parts: given on to what builds the model: the parts of a pipeline stage.
        everyones: returns a JSON value of every rank of a pipeline, whose stages together have all parameters; default:
            this rank has them all.

    Raises:
        ConfigError: a plan for a plain module, and a model that lays itself out.
    """
    platform.manual_seed(config.training.seed)
    with nn.building(platform):
        model = registries().models.get(config.model.name, platform.name).build(config.model.options, platform, *parts)
    _freeze(model, config, platform, everyones)
    parallel = config.parallel
    if not hasattr(model, "parallelize"):
        with nn.building(platform):
            return PlainModel(model, config.model.options, parallel.tp_plan, parallel.fsdp_units)
    if parallel.tp_plan or parallel.fsdp_units:
        path = "parallel.tp_plan" if parallel.tp_plan else "parallel.fsdp_units"
        what = f"model.name = {config.model.name} lays itself out"
        raise ConfigError([Problem(path=path, what=what, expected="null", hint="leave it out")], "parallel")
    return model


def _freeze(model: Any, config: TrainerConfig, platform: Platform, everyones: Callable[[Any], list[Any]]) -> None:
    """Take the gradients of what is not trained: all but adapters where there are any, and `training.freeze`.

    Raises:
        ConfigError: a pattern that no parameter matches, or nothing is left to train.
    """
    lora = getattr(config.model.options, "lora", None)
    adapters_alone = lora is not None and lora.rank is not None
    named = dict(platform.named_parameters(model))
    for name, parameter in named.items():
        if (adapters_alone and not is_adapter(name)) or matches_any(name, config.training.freeze):
            platform.set_requires_grad(parameter, False)
    # A stage of a pipeline has some of the parameters only.
    facts = everyones({name: bool(platform.requires_grad(parameter)) for name, parameter in named.items()})
    is_trained = {name: trained for part in facts for name, trained in part.items()}
    raise_if_any(_freeze_problems(is_trained, config.training.freeze), ConfigError, "training.freeze")


def _freeze_problems(is_trained: dict[str, bool], patterns: Iterable[str]) -> Iterator[Problem]:
    unused = [pattern for pattern in patterns if not any(matches_any(name, [pattern]) for name in is_trained)]
    if unused:
        some = ", ".join(list(is_trained)[:4])
        yield Problem(path="training.freeze", what=f"no parameter is called {', '.join(unused)}", expected=f"as {some}")
    if not any(is_trained.values()):
        yield Problem(path="training.freeze", what="nothing is left to train")
