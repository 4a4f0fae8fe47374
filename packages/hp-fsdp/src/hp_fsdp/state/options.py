"""Options of state dicts, and the keys that loading one has not found or not used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class StateDictOptions:
    """Options for making and loading state dicts.

    Attributes:
        full_state_dict: whole plain tensors, gathered one at a time into memory of their own; else what the
            module holds: DTensors that share the parameters' memory.
        cpu_offload: bring each to the host before the next is gathered.
        ignore_frozen_params: leave out parameters that require no gradient; loading does not miss them.
        keep_submodule_prefixes: True; torch's other value belongs to `submodules`, which is not taken.
        strict: loading refuses missing and unexpected keys.
        broadcast_from_rank0: loading takes full tensors of the first rank, one at a time; what the others pass
            is not looked at.
        flatten_optimizer_state_dict: an optimizer's state as one level: `"state.<parameter>.<slot>"` and
            `"param_groups.<parameter>.<option>"`.
        rank0_only: with `full_state_dict`: only the first rank keeps them, the others return an empty dict. None: as
            torch has it, with `cpu_offload`.

    Raises:
        ValueError: `keep_submodule_prefixes=False`.

    Example:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     full = StateDictOptions(full_state_dict=True)
        ...     return {name: tuple(x.shape) for name, x in get_model_state_dict(model, options=full).items()}
        >>> run_ranks(program, 2)[0]
        {'weight': (6, 4)}
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    rank0_only: bool | None = None

    def __post_init__(self) -> None:
        if not self.keep_submodule_prefixes:
            raise ValueError(
                "keep_submodule_prefixes=False goes with submodules=, which is not taken: name the submodule"
            )

    @property
    def drops_elsewhere(self) -> bool:
        """Return whether only the first rank keeps what is gathered."""
        return self.full_state_dict and (self.cpu_offload if self.rank0_only is None else self.rank0_only)


class IncompatibleKeys(NamedTuple):
    """Keys that loading did not find in the state dict, and keys that it did not use."""

    missing_keys: list[str]
    unexpected_keys: list[str]


DEFAULT = StateDictOptions()
