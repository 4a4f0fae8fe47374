"""Our process groups in calls of torch.distributed: `dist.all_reduce(x, group=mesh.get_group())`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_platform_torch.comm.torch_groups import as_torchs


def taking_our_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch.distributed that also takes our groups, as torch's around the same connections."""

    @functools.wraps(function)
    def taking(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, ProcessGroup) for each in (*args, *kwargs.values())):
            args = tuple(as_torchs(each) for each in args)
            kwargs = {name: as_torchs(each) for name, each in kwargs.items()}
        return function(*args, **kwargs)

    return taking
