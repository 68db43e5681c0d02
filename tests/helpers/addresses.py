"""Where a test's sockets listen."""

from __future__ import annotations

import atexit
from functools import cache

from shoal.comm.socket_folder import SocketFolder


def any_address(via: str) -> str:
    """Any free port of loopback ("tcp"), or a Unix socket of any name ("ipc")."""
    return "tcp://127.0.0.1:*" if via == "tcp" else f"ipc://{_folder().path}/*"


@cache
def _folder() -> SocketFolder:
    folder = SocketFolder()
    atexit.register(folder.close)
    return folder
