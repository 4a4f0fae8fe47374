"""A model of transformers as a reference: its options, and the decoder's names of its modules and parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from hp_dtensor.debug.recording import OPERATION
from hp_trainer.config import section
from hp_trainer.models.decoder import DecoderConfig
from hp_trainer.models.hugging_face.architectures import read_architecture
from hp_trainer.models.hugging_face.tensor_map import Piece, build_tensor_map

if TYPE_CHECKING:
    from hp_dtensor.debug import Recording
    from hp_dtensor.platform.interface import Platform

Tensor = Any

# The wrapper of a plain module has it under this name.
_WRAPPED = "module."


@section
class TransformersConfig:
    """A model of transformers, computed by its own code."""

    path: str = Field(description="directory of the model")


def reference_names(folder: Path, options: DecoderConfig) -> dict[str, str]:
    """Return transformers' names of tensors and modules -> the decoder's, where both have the same tensor."""
    names: dict[str, str] = {}
    for ours, piece in _pieces(folder, options):
        if _is_alike(piece):
            names[piece.source] = ours
            for module, own in _modules(piece.source, ours):
                names.setdefault(module, own)
    for name, ours in list(names.items()):
        # Transformers never updates the bias that balances experts, and scales within the embedding.
        if ours.endswith("expert_bias") or (ours == "embed" and options.scale_embeddings):
            del names[name]
    return names


def reference_views(
    folder: Path, options: DecoderConfig, platform: Platform
) -> Callable[[str, Tensor], dict[str, Tensor]]:
    """Return a function from a parameter of transformers (name, tensor) to the decoder's tensors within it, by name.

    These are views of the given tensor, which may also be a gradient or optimizer state of the parameter's shape. The
    result is empty where the decoder has the same tensor.
    """
    found: dict[str, dict[str, Piece]] = {}
    for ours, piece in _pieces(folder, options):
        if not _is_alike(piece):
            found.setdefault(_WRAPPED + piece.source, {})[ours] = piece

    def views(name: str, x: Tensor) -> dict[str, Tensor]:
        pieces = found.get(name, {})
        return {
            ours: platform.ops.permute(x[piece.slices], piece.order)
            for ours, piece in pieces.items()
            if tuple(x.shape) == piece.shape
        }

    return views


def views_of_model(options: object, platform: Platform) -> Callable[[str, Tensor], dict[str, Tensor]] | None:
    """Return `reference_views` of a model of transformers whose architecture the decoder knows; None of others."""
    if not isinstance(options, TransformersConfig):
        return None
    folder = Path(options.path)
    of_decoder, _ = DecoderConfig.read_directory(folder)
    return reference_views(folder, DecoderConfig(**of_decoder), platform) if of_decoder else None


def _pieces(folder: Path, options: DecoderConfig) -> Iterator[tuple[str, Piece]]:
    """Yield the decoder's tensors by name, each with its location in the model of transformers in memory."""
    architecture, _, _ = read_architecture(folder)
    assert architecture is not None
    for ours, mapped in build_tensor_map(options, architecture.model_type, fused=True).items():
        # Experts are stacked in memory.
        [piece] = mapped.pieces
        yield ours, piece


def _is_alike(piece: Piece) -> bool:
    """Return whether both models have the same tensor: not a slice, not transposed."""
    return piece.shape == piece.box.shape and piece.order == tuple(range(len(piece.shape)))


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
    """Return the names of modules of the decoder in the trained model of transformers, by `reference_names`."""
    theirs = {ours: name for name, ours in names.items()}
    return [_WRAPPED + theirs[each] for each in modules if each in theirs]


def their_tensor(key: tuple[str, str], names: dict[str, str]) -> tuple[str, str]:
    """Return the pass and name of a decoder's tensor in the trained model of transformers, by `reference_names`."""
    theirs = {ours: name for name, ours in names.items()}
    # An optimizer's state has the name of a parameter and of a slot.
    name, slot = (key[1], "") if key[0] != "state" else key[1].rsplit(".", 1)
    found = _WRAPPED + theirs[name] if name in theirs else name
    return key[0], f"{found}.{slot}" if slot else found


def with_our_names(recording: Recording, names: dict[str, str]) -> Recording:
    """Return a recording of a model of transformers under the names of the decoder, by `reference_names`."""
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
