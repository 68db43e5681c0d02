"""`run`: a training function that is called again where its world has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from shoal.horovod.elastic.place import elastic_world
from shoal.horovod.runtime import init, shutdown
from shoal.horovod.torch.elastic.state import ElasticState

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Call `func(state, …)` until it ends: from the last commit where a worker has died, from where it is where
    some have come. A world that cannot change raises what happens."""

    @functools.wraps(func)
    def wrapper(state: ElasticState, *args: Any, **kwargs: Any) -> T:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                if elastic_world() is None:
                    raise
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            shutdown()
            init()
            state.on_reset()

    return wrapper
