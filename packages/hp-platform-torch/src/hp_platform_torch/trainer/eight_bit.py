"""Search for 8-bit codes of optimizer states."""

from __future__ import annotations

import torch

from hp_trainer.optimizers.code_search import CodeSearch


def find_codes(x: torch.Tensor, search: CodeSearch) -> torch.Tensor:
    """Return in which stretch between the bounds of a search each element lies, as uint8; see `FindCodes`."""
    if x.device.type != "cpu":
        return torch.bucketize(x, torch.from_numpy(search.bounds).to(x.device), out_int32=True).to(torch.uint8)
    # On a CPU bucketize takes 20 times as long as the table.
    halves = (x.contiguous().view(torch.int32) >> 16).bitwise_and_(0xFFFF).view(-1)
    codes = torch.from_numpy(search.first).index_select(0, halves).view(x.shape)
    return codes.add_(x > torch.from_numpy(search.next_bound).index_select(0, halves).view(x.shape))
