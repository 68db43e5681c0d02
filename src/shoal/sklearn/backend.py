"""joblib's way to use Shoal's processes: `with parallel_backend("shoal", n_jobs=2)`."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from joblib import register_parallel_backend
from joblib._parallel_backends import FallbackToBackend
from joblib.parallel import ParallelBackendBase, SequentialBackend

from shoal.sklearn.calls import CallPool

NAME = "shoal"


class ShoalBackend(ParallelBackendBase):
    """A pool for as long as a `Parallel` lives. Calls of a process that dies are made by another."""

    supports_retrieve_callback = True
    uses_threads = False
    supports_sharedmem = False

    def __init__(self, on: str = "local", **settings: Any) -> None:
        """`on`: where processes are, as for `shoal train`: `ssh:a,b`, `hosts:FILE` …"""
        super().__init__(**settings)
        self._on = on
        self._pool: CallPool | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """-1: one for each core."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        return n_jobs if n_jobs > 0 else max(1, (os.cpu_count() or 1) + 1 + n_jobs)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **settings: Any) -> int:
        """Start the processes."""
        self.parallel = parallel
        count = self.effective_n_jobs(n_jobs)
        if count == 1 and self._on == "local":
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        if self._pool is None:
            threads = max(1, (os.cpu_count() or 1) // count) if self._on == "local" else None
            self._pool = CallPool(count, threads=threads, on=self._on)
        return count

    def submit(self, func: Callable[[], Any], callback: Callable[[Any], None] | None = None) -> Future[Any]:
        """Have a batch of calls made somewhere."""
        assert self._pool is not None
        future = self._pool.submit(func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """What came of a batch."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """One has failed: nothing else is begun."""
        if self._pool is not None:
            self._pool.forget()

    def terminate(self) -> None:
        """End the processes."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.close()

    def get_nested_backend(self) -> tuple[Any, None]:
        """Calls made in such a process run there one after the other."""
        return SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None


def register() -> None:
    """Make `parallel_backend("shoal")` known."""
    register_parallel_backend(NAME, ShoalBackend)
