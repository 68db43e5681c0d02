"""What was compiled is kept for this user, between runs, and made by one worker of a host for all of them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TORCHS_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_LOCK = "one-compiles.lock"


def use_cache() -> Path:
    """Let torch keep what it compiles in this user's own folder; where the user has named one, there."""
    if not os.environ.get(_TORCHS_VARIABLE):
        os.environ[_TORCHS_VARIABLE] = str(cache_folder())
    folder = Path(os.environ[_TORCHS_VARIABLE])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def cache_folder() -> Path:
    """Where it is by default. Code is loaded from there: nobody else may write to it."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "shoal" / "compiled"


@contextmanager
def one_compiles() -> Iterator[None]:
    """Wait until no other process of this host compiles: what it has made is then found in the cache. Whoever is
    killed lets go."""
    with (use_cache() / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
