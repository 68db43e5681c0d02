"""Any script, started several times in a world of its own, its output live on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from shoal.errors import SpecError, WorkerFailed
from shoal.launch.echo import Echo
from shoal.launch.engine import Engine
from shoal.launch.engines import engine_for
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.requests import Requests
from shoal.launch.supervisor import Supervisor
from shoal.launch.worlds import servers_of
from shoal.observe import Event
from shoal.observe.happenings import LineSaid
from shoal.spec import Cluster, Job
from shoal.spec.vocabulary import Purpose


def run_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    cluster: Cluster,
    strategy: str = "data",
    before: str | None = None,
    variables: Mapping[str, str] | None = None,
    stream: BinaryIO | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    zygote: ZygoteProcess | None = None,
) -> None:
    """Run `script` once per worker, under the variables that torchrun would set, and wait for all.

    `strategy` is that of its Trainers, where they name none. What servers it asks for are started beside the
    workers, and run the script, too. `before` names a module whose `prepare` is called first; `variables` are
    added to the script's environment. Hosts that do not have the script's folder get its sources.
    """
    if not Path(script).is_file():
        raise SpecError(f"There is no script {str(script)!r} in {Path.cwd()}; check the path.")
    job = Job(
        purpose=Purpose.SCRIPT,
        target=str(script),
        strategy=strategy,
        cluster=cluster,
        options={
            "argv": list(arguments),
            **({} if before is None else {"before": before}),
            **({"variables": dict(variables)} if variables else {}),
        },
    )
    if variables and servers_of(job):
        raise SpecError(
            f"--servers holds a key-value store, but the servers of --strategy {strategy} would run the script, "
            "and so use the store, too; give one of the two."
        )
    shown = stream or sys.stdout.buffer
    with ExitStack() as at_end:
        requests = at_end.enter_context(Requests())
        engine: Engine
        if cluster.is_remote:
            engine = engine_for(
                cluster,
                zygote,
                tell=lambda text: on_event(Event(LineSaid(text=text))),
                wants_end=lambda: requests.wants_end,
                show=partial(_show, shown),
            )
        else:
            alone = cluster.workers == 1 and not servers_of(job)
            engine = LocalEngine(zygote, echo=at_end.enter_context(Echo(shown, alone=alone)))
        try:
            Supervisor(job, on_event, engine, requests=requests).run()
        except WorkerFailed as failure:
            # Its traceback was shown when it was printed.
            failure.details = ""
            raise


def _show(stream: BinaryIO, lines: bytes) -> None:
    with suppress(BrokenPipeError):  # Nobody reads any more; the scripts need not care.
        stream.write(lines)
        stream.flush()
