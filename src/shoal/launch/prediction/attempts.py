"""One prediction from its first row to its last, however often its workers die meanwhile."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace

from shoal.comm.tcp.addresses import listening_at
from shoal.errors import ShoalError, WorkerFailed
from shoal.launch.engine import Engine
from shoal.launch.engines import engine_for, starter_of
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess, start_zygote
from shoal.launch.prediction.desk import Deliver, PredictionDesk
from shoal.launch.prediction.inflow import Inflow, Source
from shoal.launch.requests import Requests
from shoal.launch.supervisor import Supervisor
from shoal.observe import Bus, Event
from shoal.observe.happenings import LineSaid, Warned
from shoal.spec import Job

_MOST_FRUITLESS = 3
"""Deaths in a row, without a row in between, after which the next one is the last."""


class Prediction:
    """Runs a job that predicts. Rows that were given on are never made again; all others are, where a worker dies.

    A worker that died may have held a part of the model, and the others may wait for it in a pass: so all of them
    begin again, under every strategy.
    """

    def __init__(self, job: Job, source: Source | None, bus: Bus, zygote: ZygoteProcess | None) -> None:
        self._job = job
        self._source = source
        self._bus = bus
        self._zygote = zygote
        self._requests = Requests()
        self._fruitless, self._rows_before = 0, 0

    def stop(self) -> None:
        """Let it end at once; may be called in any thread."""
        self._requests.interrupt()

    def run(self, deliver: Deliver) -> None:
        """Give the rows of all batches to `deliver`, in order; raises what ended it before its time."""
        with ExitStack() as at_end:
            at_end.callback(self._bus.close)
            at_end.enter_context(self._requests)
            inflow = None if self._source is None else Inflow(self._source)
            most_ahead = 2 * self._job.cluster.places + 2
            desk = PredictionDesk(
                deliver, self.stop, most_ahead=most_ahead, inflow=inflow, reached_at=self._desk_address()
            )
            at_end.callback(desk.close)
            is_here = not self._job.cluster.is_remote
            if is_here and self._zygote is None and ZYGOTE_VARIABLE not in os.environ:
                # One for all attempts: the next ones begin in no time.
                self._zygote = at_end.enter_context(start_zygote())
            engine = engine_for(
                self._job.cluster, self._zygote, tell=self._tell, wants_end=lambda: self._requests.wants_end
            )
            try:
                self._run_attempts(desk, engine)
            except ShoalError:
                # Workers are ended, and complain, because rows could not be given on: that is the cause.
                if desk.error is None:
                    raise
            for error in (desk.error, None if inflow is None else inflow.error):
                if error is not None:
                    raise error

    def _tell(self, text: str) -> None:
        self._bus.emit(Event(LineSaid(text=text)))

    def _desk_address(self) -> str:
        """Where workers of other hosts can reach this process; nothing where there are none."""
        cluster = self._job.cluster
        if not cluster.is_remote:
            return ""
        return listening_at(starter_of(cluster, lambda text: None).own_address(cluster.interface), cluster.ports)

    def _run_attempts(self, desk: PredictionDesk, engine: Engine) -> None:
        while True:
            options = {**self._job.options, **desk.options, "first": desk.begin_attempt()}
            job = replace(self._job, options=options)
            try:
                Supervisor(job, self._bus.emit, engine, requests=self._requests).run()
                return
            except WorkerFailed as failure:
                if desk.error is not None or not self._may_begin_again(failure, desk.num_rows):
                    raise
                text = f"{failure} {desk.num_rows:,} rows are there; all workers begin again with the next one."
                self._bus.emit(Event(Warned(text=text)))

    def _may_begin_again(self, failure: WorkerFailed, num_rows: int) -> bool:
        """Not where the next attempt would end in the same way, nor for ever where none brings a row."""
        self._fruitless = 1 if num_rows > self._rows_before else self._fruitless + 1
        self._rows_before = num_rows
        return failure.is_transient and self._fruitless <= _MOST_FRUITLESS
