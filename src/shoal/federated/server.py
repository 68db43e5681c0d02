"""The server of clients from outside: holds the model, merges what they bring, tries and saves every version."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from shoal.checkpoint.model_file import load_tensors
from shoal.checkpoint.model_stream import save_tensors
from shoal.comm.security import RunKey
from shoal.errors import CheckpointError, SpecError
from shoal.federated.alone import LoneTraining
from shoal.federated.course import ClientCourse
from shoal.federated.ticket import ClientTicket
from shoal.ps.plain.merging import Merging
from shoal.ps.plain.server import Server

MODEL_NAME = "model.safetensors"
_LOOK_EVERY_S = 0.02
_FAREWELL_S = 30.0
"""How long clients that are there may take to hear that all is over."""


def serve(
    target: str,
    ticket: str | Path,
    *,
    folder: str | Path,
    address: str = "tcp://127.0.0.1:*",
    versions: int = 100,
    steps: int = 10,
    merging: Merging | None = None,
    args: Mapping[str, Any] | None = None,
    resume: bool = False,
    tell: Callable[[str], None] = print,
) -> dict[str, float]:
    """Have clients from outside train a task's model until there are so many versions; what the last one came to
    on the task's test set.

    The `ticket` is written for clients, who need a copy of it and a task with the same model. Every version is
    saved in `folder`; with `resume` the server goes on from the newest there, at the address and with the key of
    the ticket, so that clients that wait for it find it again.
    """
    path, folder, course = Path(ticket), Path(folder), ClientCourse(steps=steps, versions=versions)
    known = ClientTicket.load(path) if resume else None
    with tempfile.TemporaryDirectory(prefix="shoal-server-") as scratch:
        lone = LoneTraining.of(target, args or {}, Path(scratch))
        version = _take_up(lone, folder) if resume else _begin_anew(folder, path)
        if version >= versions:
            raise SpecError(
                f"{folder} has version {version} already, and with versions={versions} none is left to make; ask "
                "for more."
            )
        server = Server(
            dict(lone.training.replica.trained),
            address=known.address if known else address,
            key=RunKey.from_text(known.key) if known else None,
            merging=merging or Merging(),
            version=version,
            notice=course.notice(),
        )
        with server:
            ClientTicket(address=server.address, key=server.key.text).save(path)
            tell(f"serving version {version} at {server.address}; the ticket for clients is {path}")
            results = _follow(server, lone, version, versions, folder, tell)
            _see_off(server)
    return results


def _follow(
    server: Server, lone: LoneTraining, seen: int, last: int, folder: Path, tell: Callable[[str], None]
) -> dict[str, float]:
    """Try and save every new version; of several that come at once the newest."""
    results: dict[str, float] = {}
    while seen < last:
        version, values = server.copies()
        if version == seen:
            time.sleep(_LOOK_EVERY_S)
            continue
        seen = version
        lone.begin_with(values)
        save_tensors(folder / MODEL_NAME, lone.training.replica.module.state_dict(), version=str(version))
        results = lone.evaluate()
        told = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
        tell(f"version {version}: {told}" if told else f"version {version}")
    return results


def _see_off(server: Server) -> None:
    """Those who are there hear with their next question that all is over."""
    end = time.monotonic() + _FAREWELL_S
    while server.present and time.monotonic() < end:
        time.sleep(_LOOK_EVERY_S)


def _begin_anew(folder: Path, ticket: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"The model's folder {folder} cannot be made ({error.strerror}); name another.") from None
    for found in (folder / MODEL_NAME, ticket):
        if found.exists():
            raise SpecError(f"{found} is there already; go on from it with resume, or name another.")
    return 0


def _take_up(lone: LoneTraining, folder: Path) -> int:
    """Give the model the newest version of a folder; its number."""
    path = folder / MODEL_NAME
    if not path.exists():
        return 0  # the server ended before there was one
    lone.training.replica.module.load_state_dict(load_tensors(path))
    with safe_open(path, "pt") as file:
        version = (file.metadata() or {}).get("version", "")
    if not version.isdecimal():
        raise CheckpointError(f"{path} is a model, but of no server's version; name the folder that serve wrote.")
    return int(version)
