"""Torch's process groups outlive a script's own objects.

DDP's reducer may be the last to hold a group that was destroyed. Its destructor then waits for gloo's threads with
Python's lock in hand, and one of them may be waiting for that lock: the script has done everything, and hangs.
A group that Python holds, too, is let go without the lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

_MOST_KEPT = 8
"""Groups of a script that destroys many."""


@contextmanager
def groups_outlive_objects() -> Iterator[None]:
    """Hold the groups that are destroyed in the block until it is over, and what was made in it is gone."""
    kept: deque[Any] = deque(maxlen=_MOST_KEPT)
    destroy: Callable[..., None] = distributed_c10d.destroy_process_group

    @wraps(destroy)
    def destroy_process_group(*args: Any, **named: Any) -> None:
        kept.extend(distributed_c10d._world.pg_map)
        destroy(*args, **named)

    for module in (torch.distributed, distributed_c10d):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
    yield
    # Not where the block raised: what it made lives on in the traceback, and the process ends.
    for module in (torch.distributed, distributed_c10d):
        module.destroy_process_group = destroy  # type: ignore[attr-defined]
    kept.clear()
