"""The call orders in which the flat buffers of a model take part: those of their shards and of their replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hp_dtensor.comm.process_group import ProcessGroup
from hp_fsdp._engine.call_order import ACTIONS, REDUCES, CallOrder, Group, copy_of, order_of
from hp_fsdp._engine.used_parameters import UsedParameters


class BufferActions:
    """Records what this rank begins with one flat buffer, in the call orders of its process groups."""

    def __init__(self) -> None:
        self._among_shards: tuple[CallOrder, int] | None = None
        self._among_replicas: tuple[CallOrder, int] | None = None

    def join(
        self, group: Group, parameters: Sequence[str], shard_group: ProcessGroup, replicate_group: ProcessGroup | None
    ) -> None:
        """Take the next number in each of the two call orders; every rank's buffers join in the same order."""
        shards, replicas = order_of(shard_group), order_of(replicate_group)
        self._among_shards = (shards, shards.join(group, parameters)) if shards is not None else None
        self._among_replicas = (replicas, replicas.join(group, parameters)) if replicas is not None else None

    def record(self, action: int) -> None:
        """Record an action among the shards that begins now."""
        if self._among_shards is not None:
            order, number = self._among_shards
            order.record(number * len(ACTIONS) + action)

    def record_reduction(self, used: UsedParameters | None, among_replicas: bool) -> None:
        """Record a reduction that begins now.

        Args:
            used: to be completed when ranks have compared; None: the gradients are not stored yet.
            among_replicas: it communicates over the replicate axis, too.
        """
        if self._among_shards is not None:
            order, number = self._among_shards
            order.record(number * len(ACTIONS) + REDUCES, used)
        if among_replicas and self._among_replicas is not None:
            order, number = self._among_replicas
            order.record(number * len(ACTIONS) + REDUCES, used, is_second=self._among_shards is not None)

    @property
    def orders(self) -> list[CallOrder]:
        """The call orders in which the buffer takes part."""
        return [*self.first_orders, *self.second_orders]

    @property
    def first_orders(self) -> list[CallOrder]:
        """The call order among the shards; among the replicas, where nothing is sharded."""
        first = self._among_shards or self._among_replicas
        return [first[0]] if first is not None else []

    @property
    def second_orders(self) -> list[CallOrder]:
        """The call order among the replicas of shards, to be compared when that among the shards has been."""
        both = self._among_shards is not None and self._among_replicas is not None
        return [self._among_replicas[0]] if both and self._among_replicas is not None else []


class CallOrders:
    """The call orders in which the buffers of one model take part.

    Those among replicas of shards come second: which parameters some rank of a shard group has used is known when its
    comparison is over, and goes to the replicas with theirs. So the parameters that any rank has used are known on all.
    One that is both, of parameters with different meshes, is compared both times.
    """

    def __init__(self, buffers: Iterable[BufferActions]) -> None:
        actions = list(buffers)
        self._first = list(dict.fromkeys(order for each in actions for order in each.first_orders))
        self._second = list(dict.fromkeys(order for each in actions for order in each.second_orders))
        self._errors_raised = {order: order.error for order in (*self._first, *self._second)}
        self._second_phase = ""

    def start_comparing(self, phase: str) -> None:
        """Begin to compare the call orders, at the end of a `phase`: forward or backward."""
        for order in self._first:
            order.start_comparing(phase)
        self._second_phase = phase

    def check(self, timeout_seconds: float | None = None) -> None:
        """Wait for the comparisons under way; without a limit of time, also for those among replicas of shards.

        Raises:
            CallOrderError: ranks have begun different things, with this model or another one that has the same ranks.
            CommunicationError: a comparison failed.
        """
        for order in self._first:
            order.check(timeout_seconds)
        # Also where ranks of this shard group have parted: its replicas know nothing of it, and wait for these.
        if timeout_seconds is None and self._second_phase:
            phase, self._second_phase = self._second_phase, ""
            for order in self._second:
                order.start_comparing(phase, is_second=True)
        for order in self._second:
            order.check(timeout_seconds)
        for order, raised in self._errors_raised.items():
            if order.error is not None and order.error is not raised:
                self._errors_raised[order] = order.error
                raise copy_of(order.error)
