"""Sharing work between the processes of ``torch.distributed``, with the numbers of a single one.

What is to be done is a list that every process knows; each takes every n-th item and all exchange
their results, which come back in the order of the list. Nothing is averaged on the way, so the
numbers cannot depend on how many processes there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's place among all; a lone one is rank 0 of 1."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> "Ranks":
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """The items that this process works on."""
        return items[self.rank :: self.count]

    def gather(self, results: list[T]) -> list[T]:
        """Everyone's results, one an item, in the items' order, on every process."""
        if self.count == 1:
            return results
        shares: list[list[T]] = [[] for _ in range(self.count)]
        dist.all_gather_object(shares, results)
        total = sum(len(share) for share in shares)
        return [shares[item % self.count][item // self.count] for item in range(total)]
