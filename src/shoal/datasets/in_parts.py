"""`InParts`: data that is gone through, and can be split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal.spec.checks import require_count


class InParts:
    """Data that is gone through in so many parts, of which each process reads its own alone.

    The source must split itself, as for torch's loaders: by `torch.utils.data.get_worker_info()`, or by a method
    `shard(num_shards, index)` as Hugging Face's have it; else every part would be the whole. As many parts as
    workers or more are worth it; the results depend on their number, not on who reads them.
    """

    def __init__(self, source: Any, count: int) -> None:
        require_count("InParts", "count", count)
        self.source = source
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)
