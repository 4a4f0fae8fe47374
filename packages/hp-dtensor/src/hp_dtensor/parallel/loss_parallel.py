"""`loss_parallel`: cross entropy of logits that stay cut over classes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hp_dtensor.dispatch.implicit_regions import implicit_replication_of
from hp_dtensor.redistribute.explicit import explicit_redistribution_of


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside the block, `cross_entropy` keeps its logits cut over classes, and takes plain targets and weights.

    Follows torch's `torch.distributed.tensor.parallel.loss_parallel`. Plain targets and class weights are taken as
    replicated: every rank gives the same whole ones. Outside the block cross entropy keeps cut logits cut too; inside,
    it raises where it would communicate them. The backward may come after the block.

    Raises:
        ImplicitRedistributionError: from a `cross_entropy` that would communicate its logits.
        RankMismatchError: in `check_mode`, from one whose plain targets differ between ranks.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     logits = zeros(3, 4, device_mesh=mesh, placements=[Shard(1)])  # classes are cut
        ...     targets = distribute_tensor(platform.from_numpy(np.array([0, 1, 2])), mesh, [Replicate()])
        ...     with loss_parallel():
        ...         loss = platform.ops.cross_entropy(logits, targets)
        ...     return round(float(platform.to_numpy(loss.full_tensor())), 4)
        >>> run_ranks(program, 2)[0]
        1.3863
    """
    with explicit_redistribution_of("cross_entropy"), implicit_replication_of("cross_entropy"):
        yield
