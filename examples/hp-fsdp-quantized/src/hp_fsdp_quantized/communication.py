"""The three collectives of a group with quantized values, as in ZeRO++ (arXiv 2306.10209)."""

from __future__ import annotations

from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup, Work
from hp_dtensor.platform.interface import Platform
from hp_fsdp import Communication, FullyShardError
from hp_fsdp_quantized.codecs import Codec

Tensor = Any


class QuantizedCommunication(Communication):
    """A `hp_fsdp.Communication` that sends quantized values.

    Args:
        codec: the quantization.
        gather: quantize parameters in all-gathers.
        reduce: quantize gradients in reductions.
        block: number of values that share a scale. Shards need not be a multiple of it.

    Raises:
        FullyShardError: `codec` is not a `Codec`, or `block` is not a positive int.
        CapabilityError: the platform does not support the codec.
    """

    def __init__(
        self, platform: Platform, codec: Codec, *, gather: bool = True, reduce: bool = True, block: int = 256
    ) -> None:
        super().__init__(platform)
        if not isinstance(codec, Codec):
            raise FullyShardError(f"codec: expected a Codec such as Int8(), got {codec!r}")
        if not isinstance(block, int) or isinstance(block, bool) or block < 1:
            raise FullyShardError(f"block: expected a positive number of values, got {block!r}")
        codec.check(platform)
        self.codec = codec
        self.block = block
        self._gathers = gather
        self._reduces = reduce

    def all_gather(self, output: Tensor, shard: Tensor, group: ProcessGroup) -> Work:
        if not self._gathers:
            return super().all_gather(output, shard, group)
        with self.platform.no_grad():
            sent = self._encode(self._rows(shard, 1))
            return _Received(self, self._start_gather(sent, group), group, output, sums=False)

    def reduce_scatter(self, output: Tensor, gradients: Tensor, group: ProcessGroup) -> Work:
        if not self._reduces:
            return super().reduce_scatter(output, gradients, group)
        with self.platform.no_grad():
            sent = self._encode(self._rows(gradients, group.size))
            return _Received(self, self._start_exchange(sent, group), group, output, sums=True)

    def all_reduce(self, shard: Tensor, group: ProcessGroup) -> Work:
        if not self._reduces:
            return super().all_reduce(shard, group)
        with self.platform.no_grad():
            # Each rank sums one of `size` chunks. The last ones may extend beyond the shard.
            numel = -(-shard.shape[0] // group.size)
            padded = self._padded(self._float32(shard), numel * group.size - shard.shape[0], 0)
            sent = self._encode(self._rows(padded, group.size))
            return _AllReduce(self, self._start_exchange(sent, group), group, shard, numel)

    # Blocks ----------------------------------------------------------------------------------------------

    def _float32(self, x: Tensor) -> Tensor:
        return self.platform.ops.cast(x, self.platform.dtype("float32"))

    def _padded(self, x: Tensor, more: int, dim: int) -> Tensor:
        if more == 0:
            return x
        shape = [more if i == dim else size for i, size in enumerate(x.shape)]
        zeros = self.platform.zeros(shape, x.dtype, self.platform.device_of(x))
        return self.platform.ops.cat([x, zeros], dim)

    def _rows(self, flat: Tensor, rows: int) -> Tensor:
        """Return a flat tensor as float32 `[rows * blocks per row, block]`, each row padded with zeros."""
        x = self.platform.ops.reshape(self._float32(flat), (rows, -1))
        return self.platform.ops.reshape(self._padded(x, -x.shape[1] % self.block, 1), (-1, self.block))

    def _encode(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        data, scales = self.codec.encode(self.platform, blocks)
        return self.platform.contiguous(data), self.platform.contiguous(scales)

    def decode(self, received: tuple[Tensor, Tensor], rows: int, numel: int) -> Tensor:
        """Return received blocks as float32 `[rows, numel]`, without the padding."""
        values = self.platform.ops.reshape(self.codec.decode(self.platform, *received), (rows, -1))
        return self.platform.ops.narrow(values, 1, 0, numel)

    # Collectives -----------------------------------------------------------------------------------------

    def _start_gather(self, sent: tuple[Tensor, Tensor], group: ProcessGroup) -> _Messages:
        received = tuple(self._like(x, group.size * x.shape[0]) for x in sent)
        works = [group.all_gather_into(y, x, async_op=True) for y, x in zip(received, sent, strict=True)]
        return _Messages(works, sent, received)

    def _start_exchange(self, sent: tuple[Tensor, Tensor], group: ProcessGroup) -> _Messages:
        received = tuple(self._like(x, x.shape[0]) for x in sent)
        counts = (sent[0].shape[0] // group.size,) * group.size
        works = [
            group.all_to_all_into(y, x, counts, counts, async_op=True) for y, x in zip(received, sent, strict=True)
        ]
        return _Messages(works, sent, received)

    def _like(self, x: Tensor, rows: int) -> Tensor:
        return self.platform.empty((rows, x.shape[1]), x.dtype, self.platform.device_of(x))

    def sum_of(self, received: tuple[Tensor, Tensor], group: ProcessGroup, numel: int) -> Tensor:
        """Return the float32 sum of the values of all ranks, added in rank order."""
        rows = self.decode(received, group.size, numel)
        ops = self.platform.ops
        total = ops.narrow(rows, 0, 0, 1)
        for rank in range(1, group.size):
            total = ops.add(total, ops.narrow(rows, 0, rank, 1))
        return ops.reshape(total, (-1,))

    def gather_sum(self, total: Tensor, group: ProcessGroup, numel: int) -> Tensor:
        """Gather the chunks of a sum from all ranks, quantized once more."""
        messages = self._start_gather(self._encode(self._rows(total, 1)), group)
        return self.platform.ops.reshape(self.decode(messages.wait(), group.size, numel), (-1,))


class _Messages:
    """Bytes and scales that are being sent."""

    def __init__(self, works: list[Work], sent: Any, received: Any) -> None:
        self._works = works
        self._held = sent
        self._received = received

    def wait(self) -> tuple[Tensor, Tensor]:
        for work in self._works:
            work.wait()
        data, scales = self._received
        return data, scales


class _Received:
    """A work whose `wait` decodes the received values, and sums them for a reduction."""

    def __init__(
        self, parent: QuantizedCommunication, messages: _Messages, group: ProcessGroup, output: Tensor, sums: bool
    ) -> None:
        self._parent, self._messages, self._group, self._output, self._sums = parent, messages, group, output, sums

    def wait(self) -> None:
        platform, group = self._parent.platform, self._group
        with platform.no_grad():
            received = self._messages.wait()
            if self._sums:
                values = self._parent.sum_of(received, group, self._output.shape[0])
            else:
                rows = self._parent.decode(received, group.size, self._output.shape[0] // group.size)
                values = platform.ops.reshape(platform.contiguous(rows), (-1,))
            platform.copy_(self._output, platform.contiguous(values))


class _AllReduce:
    """A work whose `wait` sums this rank's chunk of all ranks, and gathers the sums."""

    def __init__(
        self, parent: QuantizedCommunication, messages: _Messages, group: ProcessGroup, shard: Tensor, numel: int
    ) -> None:
        self._parent, self._messages, self._group, self._shard, self._numel = parent, messages, group, shard, numel

    def wait(self) -> None:
        platform = self._parent.platform
        with platform.no_grad():
            total = self._parent.sum_of(self._messages.wait(), self._group, self._numel)
            full = self._parent.gather_sum(total, self._group, self._numel)
            full = platform.ops.narrow(full, 0, 0, self._shard.shape[0])
            platform.copy_(self._shard, platform.contiguous(full))
