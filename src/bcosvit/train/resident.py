"""Cached features in the device's own memory, where batches are made of them without workers.

A view is widened to float32 when its batch is asked for, so memory holds what the disk does and
nothing but a few indices travels in a step. Batches are those of `data.Features`, to the last bit.
"""

import gc
import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bcosvit.train.cache import FeatureCache, view_of
from bcosvit.train.data import Batch, Ticket
from bcosvit.train.store import size

SHARE = 0.6
"""Of the free memory, for features that nobody asked to keep there: the model needs room, too."""
SHARE_ON_DEMAND = 0.9
CHUNK = 2**26
"""Bytes that are read at a time."""


class Resident(Dataset[Batch]):
    """Samples of a feature cache, a view of each per epoch, from a copy of it on a device."""

    on_device = True

    def __init__(
        self,
        cache: FeatureCache,
        seed: int,
        device: torch.device | str,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """``progress`` is told how many views have been copied, of how many."""
        self.images, self.views, self.device = len(cache), cache.views, torch.device(device)
        records = self.images * self.views
        self.features = torch.empty(records, *cache.shape, dtype=torch.float16, device=device)
        self.scales = torch.empty(records, 1, 1, 1, device=device)
        self.labels = torch.empty(records, dtype=torch.long, device=device)
        step = max(1, CHUNK // self.features[0].nbytes)
        for start in range(0, records, step):
            stop = min(start + step, records)
            features, scales, labels = cache.stored(start, stop)
            self.features[start:stop] = features.to(device)
            self.scales[start:stop, 0, 0, 0] = scales.to(device)
            self.labels[start:stop] = labels.to(device)
            if progress is not None:
                progress(stop, records)
        # Every epoch moves each image on by a view: one hash per image and run is enough.
        first = [view_of(i, epoch=0, views=self.views, seed=seed) for i in range(self.images)]
        self._first = torch.tensor(first)

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, tickets: list[Ticket]) -> Batch:
        positions = torch.tensor([ticket.position for ticket in tickets])
        epochs = torch.tensor([ticket.epoch for ticket in tickets])
        views = (self._first[positions] + epochs) % self.views
        records = sent(positions * self.views + views, self.device)
        return Batch(
            # The product is of float32: no wider copy is made first.
            self.features.index_select(0, records) * self.scales.index_select(0, records),
            self.labels.index_select(0, records),
            sent(torch.tensor([ticket.weight for ticket in tickets]), self.device),
        )


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, without waiting for what that still has to do."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def free_bytes(device: torch.device) -> int:
    """Memory that samples may share with everything else.

    A CPU's is all that the machine has: most of what is in use there is page cache.
    """
    if device.type == "cuda":
        # What earlier runs of this process have left behind counts as free.
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def shortage(what: str, needed: int, share: float, device: torch.device) -> str | None:
    """Why ``needed`` bytes of ``what`` do not go to the device; None where they do."""
    free = free_bytes(device)
    if needed <= share * free:
        return None
    return f"{size(needed)} of {what} are more than {share:.0%} of the {size(free)} free"


def keeps_on_device(
    wanted: bool | None, needed: int, device: torch.device, say: Callable[[str], None]
) -> bool:
    """Whether ``needed`` bytes of features go to the device; ``wanted`` is ``cache_on_device``."""
    if wanted is False or (wanted is None and device.type != "cuda"):
        return False
    short = shortage("features", needed, SHARE_ON_DEMAND if wanted else SHARE, device)
    if short is None:
        return True
    if wanted:
        raise ValueError(
            f"cache_on_device = True is not allowed on {device}, where {short}; set fewer "
            f"cache_views, or leave it out."
        )
    say(f"Features are read from disk by workers: on {device} {short}.")
    return False
