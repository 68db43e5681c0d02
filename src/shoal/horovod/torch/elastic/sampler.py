"""Which samples of an epoch are left, whoever has trained on the others."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from shoal.horovod.runtime import current


class ElasticSampler(Sampler[int]):
    """Deals what is left of an epoch over the ranks that there are.

    Ranks train in step, so a batch that one has recorded all have: each records everybody's part of it. So what a
    rank has trained on up to the last commit is known though it died.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch: nothing of it was trained on."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have trained on this batch since the last reset."""
        for rank in range(self.num_replicas):
            self.record_indices(self._part(rank)[batch_idx * batch_size : (batch_idx + 1) * batch_size])

    def record_indices(self, indices: Iterable[int]) -> None:
        """These were trained on."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's samples of a batch."""
        return self._part(self.rank)[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and what of it is done."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there, in this world."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Deal what is left over the ranks of this world."""
        runtime = current()
        self.num_replicas, self.rank = runtime.world.world_size, runtime.rank
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = [index for index in order if index not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        # All ranks take equally many steps: the first samples come twice where it does not come out.
        padding = self.total_size - len(self.remaining_indices)
        self.indices = self.remaining_indices + self.remaining_indices[:padding]

    def _part(self, rank: int) -> list[int]:
        return self.indices[rank : self.total_size : self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self._part(self.rank))

    def __len__(self) -> int:
        return self.num_samples
