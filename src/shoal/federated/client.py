"""A client from outside: it reads the newest version, trains on its own data, brings how far it has come, and so
on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.comm.security import RunKey
from shoal.errors import PeerLost, SpecError
from shoal.federated.alone import LoneTraining
from shoal.federated.course import ClientCourse
from shoal.federated.ticket import ClientTicket
from shoal.ps.plain.client import Client
from shoal.ps.plain.tensors import TensorSpec


def take_part(
    target: str,
    ticket: str | Path,
    *,
    args: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    tell: Callable[[str], None] = print,
) -> int:
    """Train a task's model on its own data for a server elsewhere, until that has had enough; how often this
    client has brought something.

    `target` names the task as `shoal.train` does, `ticket` the file that the server wrote. What leaves this
    process is how far the parameters have come, and nothing of the data. Where the server is started anew, the
    client joins again; where none answers within `timeout_s`, it ends.
    """
    found = ClientTicket.load(Path(ticket))
    brought, step = 0, 1
    with tempfile.TemporaryDirectory(prefix="shoal-client-") as folder:
        lone = LoneTraining.of(target, args or {}, Path(folder))
        while True:
            try:
                with _joined(found, lone, timeout_s) as client:
                    course = ClientCourse.of(client.notice)
                    while (values := client.get()) and client.version < course.versions:
                        since = client.version
                        lone.begin_with(values)
                        lone.take_steps(step, course.steps)
                        step += course.steps
                        client.merge(lone.moved_from(values), since)
                        brought += 1
                    return brought
            except PeerLost:
                tell("the server was started anew: joining again")


def _joined(found: ClientTicket, lone: LoneTraining, timeout_s: float) -> Client:
    client = Client(found.address, key=RunKey.from_text(found.key), timeout_s=timeout_s)
    own = {name: TensorSpec.of(param) for name, param in lone.training.replica.trained.items()}
    for name in sorted({*own, *client.names}):
        if (mine := own.get(name)) != (theirs := client.specs.get(name)):
            client.close()
            raise SpecError(
                f"Parameter {name!r} is {mine or 'missing'} in this task's model and {theirs or 'missing'} in the "
                "server's; let the task make the server's model."
            )
    return client
