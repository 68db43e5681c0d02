"""The plain parameter server: a desk on an authenticated wire, served by one thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Self

from torch import Tensor, nn

from shoal.comm.security import RunKey
from shoal.comm.socket_folder import SocketFolder
from shoal.errors import SpecError
from shoal.ps.plain.clientele import Caller
from shoal.ps.plain.desk import Desk
from shoal.ps.plain.loop import RequestLoop
from shoal.ps.plain.merging import Merging
from shoal.ps.plain.messages import Request
from shoal.ps.plain.table import MakeOptimizer, ParameterTable
from shoal.spec.checks import require_count

# Each takes five file descriptors, and many systems give a process 1024.
_MOST_CLIENTS = 128


class Server:
    """Holds parameters for clients that read them and send gradients or values.

    with shoal.ps.Server(model, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)) as server:
        server.key.save("ps.key")
        ...  # clients: shoal.ps.Client(server.address, key="ps.key")

    A `with` block serves in a thread of its own; `run` serves in the caller's. The parameters are copied: what
    was given stays as it is, and `server.parameters` are the present ones.

    Args:
        parameters: Tensors by name, or a module, whose named parameters they are.
        optimizer: Makes a torch optimizer for a list of parameters; without one, updates are added.
        address: Where to listen: `tcp://ADDRESS:PORT` (`*` for any free port), `ipc:///FOLDER/NAME` or `ipc://@NAME`;
            by default at a Unix socket in a new folder that only this user can enter. What leaves this host is
            encrypted.
        key: Whom to serve: those who have it. A new one where none is given.
        max_clients: How many clients are served at a time, 128 at most; each costs a connection.
        merging: What is done with differences that clients bring (`Client.merge`), where they bring some.
        version: The one that it begins with, where it goes on for another server.
        notice: Numbers by name that every client is told when it comes.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor] | nn.Module,
        *,
        optimizer: MakeOptimizer | None = None,
        address: str | None = None,
        key: RunKey | None = None,
        max_clients: int = _MOST_CLIENTS,
        merging: Merging | None = None,
        version: int = 0,
        notice: Mapping[str, int] | None = None,
    ) -> None:
        require_count("Server", "max_clients", max_clients, most=_MOST_CLIENTS)
        self.key = key or RunKey.create()
        """What clients need; `key.save(path)` writes it to a file that only its owner can read."""
        self._table = ParameterTable(parameters, optimizer, merging, version)
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._folder = None
        if address is None:
            self._folder = SocketFolder()
            address = f"ipc://{self._folder.path}/server"
        self._loop = _DeskLoop(address, self.key, Desk(self._table, notice), max_clients)
        self.address = self._loop.wire.address
        """Where clients find this server."""

    @property
    def version(self) -> int:
        """How often the parameters were changed."""
        return self._table.version

    @property
    def parameters(self) -> dict[str, Tensor]:
        """A copy of all parameters as they were at one moment."""
        _, values = self._table.copies()
        return {name: value.clone() for name, value in values.items()}

    def copies(self) -> tuple[int, dict[str, Tensor]]:
        """The version and its parameters, of one moment; to be read only."""
        return self._table.copies()

    @property
    def present(self) -> int:
        """Clients that are connected."""
        return self._loop.clientele.present

    @property
    def refused(self) -> int:
        """Packets of those who have the key that were no requests; nothing was done for them."""
        return self._loop.refused

    @property
    def strangers(self) -> int:
        """Connections that ended without having shown the key."""
        return self._loop.wire.strangers

    def start(self) -> None:
        """Serve in a thread until `stop`."""
        thread = threading.Thread(target=self._serve, name=f"shoal-ps {self.address}", daemon=True)
        self._claim(thread)
        thread.start()

    def run(self) -> None:
        """Serve in this thread until somebody calls `stop`, or Ctrl-C is pressed."""
        self._claim(threading.current_thread())
        try:
            self._serve()
        except KeyboardInterrupt:
            pass

    def stop(self) -> None:
        """Serve no more. From another thread than the one that serves, this waits for its end."""
        self._stopping.set()
        if self._thread is None:
            self._close()
        elif self._thread is not threading.current_thread():
            self._ended.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _claim(self, thread: threading.Thread) -> None:
        if self._thread is not None or self._stopping.is_set():
            raise SpecError("A server can be started once, and this one was started or stopped; make a new one.")
        self._thread = thread

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                self._loop.take_in()
        finally:
            self._close()
            self._ended.set()

    def _close(self) -> None:
        self._loop.wire.close()
        if self._folder is not None:
            self._folder.close()


class _DeskLoop(RequestLoop[Request]):
    """Of a desk that answers at once."""

    def __init__(self, address: str, key: RunKey, desk: Desk, max_clients: int) -> None:
        super().__init__(address, key, Request, most_clients=max_clients)
        self._desk = desk

    def on_request(self, request: Request, caller: Caller) -> None:
        if (answer := self._desk.take(request, caller)) is not None:
            self.answer(caller, answer)
