"""A model of transformers as a reference: its options, and the decoder's names of its modules and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from hp_dtensor.debug.recording import OPERATION
from hp_trainer.config import section
from hp_trainer.models.hugging_face.architectures import read_architecture
from hp_trainer.models.hugging_face.tensor_map import build_tensor_map

if TYPE_CHECKING:
    from hp_dtensor.debug import Recording
    from hp_trainer.models.decoder import DecoderConfig

# The wrapper of a plain module has it under this name.
_WRAPPED = "module."


@section
class TransformersConfig:
    """A model of transformers, computed by its own code."""

    path: str = Field(description="directory of the model")


def reference_names(folder: Path, options: DecoderConfig) -> dict[str, str]:
    """Return the decoder's name of each parameter and module that a model of transformers stores alike.

    Names are missing where one tensor of transformers has several of the decoder, such as stacked experts.

    Args:
        options: the decoder's options for this directory.
    """
    architecture, _, _ = read_architecture(folder)
    assert architecture is not None
    names: dict[str, str] = {}
    for ours, mapped in build_tensor_map(options, architecture.model_type, fused=True).items():
        [piece, *others] = mapped.pieces
        if not others and piece.shape == mapped.shape and piece.axes == tuple(range(len(mapped.shape))):
            names[piece.source] = ours
            for module, own in _modules(piece.source, ours):
                names.setdefault(module, own)
    for name, ours in list(names.items()):
        # Transformers never updates the bias that balances experts, and scales within the embedding.
        if ours.endswith("expert_bias") or (ours == "embed" and options.scale_embeddings):
            del names[name]
    return names


def _modules(theirs: str, ours: str) -> Iterator[tuple[str, str]]:
    """Yield the names of the module that has a parameter, and of the modules around it, in both models."""
    their_parts, our_parts = theirs.split(".")[:-1], ours.split(".")[:-1]
    yield ".".join(their_parts), ".".join(our_parts)
    # Blocks have a number in both; within one, the parts of a block contain the rest.
    numbers = [next((at for at, part in enumerate(p) if part.isdigit()), None) for p in (their_parts, our_parts)]
    if numbers[0] is None or numbers[1] is None:
        return
    for inside in (1, 2):
        at = [number + inside for number in numbers if number is not None]
        if inside == 1 or (len(their_parts) > at[0] and len(our_parts) > at[1]):
            yield ".".join(their_parts[: at[0]]), ".".join(our_parts[: at[1]])


def their_modules(modules: Iterable[str], names: dict[str, str]) -> list[str]:
    """Return the names in the trained model of transformers of the decoder's modules that it has alike.

    Args:
        names: see `reference_names`.
    """
    theirs = {ours: name for name, ours in names.items()}
    return [_WRAPPED + theirs[each] for each in modules if each in theirs]


def with_our_names(recording: Recording, names: dict[str, str]) -> Recording:
    """Return a recording of a model of transformers under the names of the decoder.

    Args:
        names: see `reference_names`.
    """
    steps = {}
    for step, events in recording.steps.items():
        renamed = []
        for event in events:
            name, slot = event.name.removeprefix(_WRAPPED), ""
            if event.pass_ == "state":
                name, _, slot = name.rpartition(".")
            operation = ""
            if event.operation is not None:
                name, operation = name.split(OPERATION)
                operation = OPERATION + operation
            # Attention and experts of transformers return a tuple, of which the first one is the output.
            elif event.pass_ in ("forward", "backward"):
                name = name.removesuffix("[0]")
            ours = names.get(name)
            own = f"{ours}.{slot}" if slot else f"{ours}{operation}"
            renamed.append(replace(event, name=event.name if ours is None else own))
        steps[step] = renamed
    about = dict(recording.about)
    if "unplaced" in about:
        outputs = [name.removeprefix(_WRAPPED).removesuffix("[0]") for name in about["unplaced"]]
        about["unplaced"] = [names.get(name, name) for name in outputs]
    return type(recording)(about, steps)
