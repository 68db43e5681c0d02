"""The client of a plain parameter server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from torch import Tensor

from shoal.comm.compression import make_compression
from shoal.comm.security import RunKey
from shoal.errors import SpecError
from shoal.ps.plain.line import PATIENCE_S, RequestLine
from shoal.ps.plain.messages import UNCOMPRESSED, Ask, DeskAnswer, Request
from shoal.ps.plain.tensors import Specs, pack, require_fit, require_known, unpack


class Client:
    """Reads and changes the parameters of a `shoal.ps.Server`. One client serves one thread.

    Each change is made once, however often the network makes the client ask. The first thing a client does is
    to meet the server, so one that is made has a server that answers.

    Args:
        address: The server's `address`, letter for letter.
        key: The server's `key`, or the file it was saved in.
        timeout_s: How long to wait for an answer before `CommTimeout`.
        patience_s: How long to wait before asking again.
        compress: How gradients travel: `bf16`, `int8`, `topk:0.01` and so on; what is rounded off one update is
            part of the next.
    """

    def __init__(
        self,
        address: str,
        *,
        key: RunKey | str | Path,
        timeout_s: float = 30.0,
        patience_s: float = PATIENCE_S,
        compress: str = UNCOMPRESSED,
    ) -> None:
        self.version = 0
        """The parameters' version as of the last answer."""
        self._compression = None if compress == UNCOMPRESSED else make_compression(compress)
        self._closed = False
        self._busy = threading.Lock()
        key = key if isinstance(key, RunKey) else RunKey.load(key)
        self._line = RequestLine([address], key, timeout_s=timeout_s, patience_s=patience_s)
        try:
            welcome = self._ask(Request(ask=Ask.HELLO))
        except BaseException:
            self.close()
            raise
        self._specs = welcome.specs
        self.notice = welcome.notice
        """What the server tells every client when it comes."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters on the server."""
        return tuple(self._specs)

    @property
    def specs(self) -> Specs:
        """By name, what they are like."""
        return self._specs

    def get(self, *names: str) -> dict[str, Tensor]:
        """These parameters, or all, as they were at one moment. They are the caller's to change."""
        require_known(names, self._specs)
        names = tuple(dict.fromkeys(names))
        wanted = names or self.names
        num_bytes = sum(self._specs[name].num_bytes for name in wanted)
        with self._alone():
            return unpack(self._ask(Request(ask=Ask.GET, names=names), num_bytes).bulk, wanted, self._specs)

    def update(self, gradients: Mapping[str, Tensor]) -> int:
        """A step of the server's optimizer with these gradients, and none for others; the new version."""
        return self._send(Ask.UPDATE, gradients)

    def store(self, values: Mapping[str, Tensor]) -> int:
        """Set these parameters; the new version."""
        return self._send(Ask.STORE, values)

    def average(self, values: Mapping[str, Tensor], share: float = 0.5) -> int:
        """Move these parameters by `share` of the way to the values, as after local training; the new version."""
        if not 0 < share <= 1:
            raise SpecError(
                f"share is how much of the values to mix in, above 0 and up to 1, found {share}; give such a one."
            )
        return self._send(Ask.AVERAGE, values, share=float(share))

    def merge(self, differences: Mapping[str, Tensor], since: int) -> int:
        """Bring how far this client has come, by all parameters, since it read this version; the one that the
        server has now. It moves once it has as many as its `merging` says."""
        return self._send(Ask.MERGE, differences, since=since)

    def close(self) -> None:
        """Leave. The server forgets this client when it needs the place."""
        self._closed = True
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, ask: Ask, values: Mapping[str, Tensor], *, share: float = 1.0, since: int = 0) -> int:
        require_fit(values, self._specs)
        compression = self._compression if ask is Ask.UPDATE else None
        with self._alone():
            request = Request(
                ask=ask,
                names=tuple(values),
                share=share,
                since=since,
                compress=compression.text if compression else UNCOMPRESSED,
                bulk=pack(values, compression),
            )
            return self._ask(request).version

    def _ask(self, request: Request, awaited_bytes: int = 0) -> DeskAnswer:
        answer = self._line.ask(request, awaited_bytes=awaited_bytes)
        self.version = answer.version
        return answer

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._closed:
            raise SpecError("This client is closed; make a new one.")
        if not self._busy.acquire(blocking=False):
            raise SpecError("A client serves one thread, but another one uses this; make one for each.")
        try:
            yield
        finally:
            self._busy.release()
