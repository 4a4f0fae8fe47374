"""Settings of the optimizers that every platform has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hp_trainer._patterns import matches_any
from hp_trainer.config import AdamWConfig, setting
from hp_trainer.exceptions import Problem


def _below_one(**values: float) -> Iterator[Problem]:
    for name, value in values.items():
        if value >= 1:
            yield Problem(path=name, what="out of range", expected="a number < 1", got=str(value))


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`."""

    lr: float = setting(1e-2, help="peak learning rate", above=0)
    momentum: float = setting(0.9, help="decay rate of the velocity; 0: none", minimum=0)
    nesterov: bool = setting(False, help="look ahead by the velocity")
    weight_decay: float = setting(0.0, help="added to the gradient, times the weight", minimum=0)

    def check(self) -> Iterator[Problem]:
        yield from _below_one(momentum=self.momentum)

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of the velocity; see the hook `hp_optimizers`."""
        return elements * itemsize


@dataclass(frozen=True, kw_only=True)
class LionConfig:
    """Lion (Chen et al., 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675)."""

    lr: float = setting(1e-4, help="peak learning rate; a third to a tenth of AdamW's", above=0)
    betas: tuple[float, float] = setting((0.9, 0.99), help="decay rates of the update and of the momentum", minimum=0)
    weight_decay: float = setting(1.0, help="decoupled weight decay; three to ten times AdamW's", minimum=0)

    def check(self) -> Iterator[Problem]:
        yield from _below_one(betas=max(self.betas))

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of the momentum; see the hook `hp_optimizers`."""
        return elements * itemsize


@dataclass(frozen=True, kw_only=True)
class AdamW8bitConfig(AdamWConfig):
    """AdamW with 8-bit moments (Dettmers et al., 2022, "8-bit optimizers via block-wise quantization")."""

    has_plain_state: ClassVar[bool] = False

    block_size: int = setting(256, help="elements that share a scale, along the last dimension", minimum=8)
    min_elements: int = setting(4096, help="parameters with fewer elements keep float32 moments", minimum=1)

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of the codes and scales of both moments; see the hook `hp_optimizers`."""
        if not elements or not shape or math.prod(shape) < self.min_elements:
            return 2 * elements * itemsize
        row = shape[-1] if len(shape) > 1 else elements
        size = min(self.block_size, row)
        blocks = -(-elements // row) * -(-row // size)
        return 2 * blocks * (size + 4)

    def update_bytes(self, held: Sequence[tuple[str, tuple[int, ...], int]], *, is_host: bool) -> int:
        """Return the bytes of float32 copies while one parameter is updated; see the hook `hp_optimizers`."""
        return 40 * max((elements for _, _, elements in held), default=0)


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig:
    """Adafactor (Shazeer and Stern, 2018, "Adaptive learning rates with sublinear memory cost", arXiv 1804.04235)."""

    lr: float = setting(1e-2, help="peak learning rate, relative to the size of the weights", above=0)
    decay_power: float = setting(0.8, help="the second moment decays by 1 - step**-decay_power", above=0, maximum=1)
    eps: float = setting(1e-30, help="added to squared gradients", above=0)
    smallest_scale: float = setting(
        1e-3, help="smallest size of weights that the learning rate is relative to", above=0
    )
    clip_threshold: float = setting(1.0, help="largest root mean square of an update", above=0)
    weight_decay: float = setting(0.0, help="decoupled weight decay", minimum=0)

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of a matrix's row and column, which every rank has whole; see the hook `hp_optimizers`."""
        if len(shape) < 2:
            return elements * itemsize
        return (math.prod(shape[:-1]) + math.prod((*shape[:-2], shape[-1]))) * itemsize


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/) for matrices, AdamW for all else."""

    lr: float = setting(1e-3, help="peak learning rate of both, as AdamW's", above=0)
    momentum: float = setting(0.95, help="decay rate of the running mean of gradients", minimum=0)
    nesterov: bool = setting(True, help="look ahead by the momentum")
    weight_decay: float = setting(0.1, help="decoupled weight decay of both", minimum=0)
    steps: int = setting(5, help="steps of the Newton-Schulz iteration", minimum=1)
    adamw: tuple[str, ...] = setting(
        ("*embed*", "*head*", "*router*", "*gate.weight", "*experts.b?"),
        help="patterns of names of matrices that AdamW updates",
    )
    stacks: tuple[str, ...] = setting(
        ("*experts*",), help="patterns of names of three-dimensional weights that are stacks of matrices"
    )
    betas: tuple[float, float] = setting((0.9, 0.95), help="AdamW's decay rates", minimum=0)
    eps: float = setting(1e-8, help="AdamW's epsilon", above=0)

    def check(self) -> Iterator[Problem]:
        yield from _below_one(momentum=self.momentum, betas=max(self.betas))

    def is_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether Muon, not AdamW, updates a parameter."""
        is_stack = len(shape) == 3 and matches_any(name, self.stacks)
        return (len(shape) == 2 or is_stack) and not matches_any(name, self.adamw)

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of a matrix's momentum, or of AdamW's moments; see the hook `hp_optimizers`."""
        return (1 if self.is_matrix(name, shape) else 2) * elements * itemsize

    def update_bytes(self, held: Sequence[tuple[str, tuple[int, ...], int]], *, is_host: bool) -> int:
        """Return the bytes of all matrices on their way to the ranks that compute with them, and back.

        Directions, messages both ways and updates are as large as the shards; what arrives, is whole and is done as
        large as an owner's matrices. A CPU computes in float32, others in bfloat16. See the hook `hp_optimizers`.
        """
        matrices = [(shape, elements) for name, shape, elements in held if self.is_matrix(name, shape)]
        shards = sum(elements for _, elements in matrices)
        owned = max(shards, max((math.prod(shape) for shape, _ in matrices), default=0))
        return (4 if is_host else 2) * 3 * (shards + owned)
