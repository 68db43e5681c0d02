"""`LiveRun`: a run that goes on, and can be followed, scaled, stopped and waited for."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.comm.words import ScaleWanted
from shoal.errors import DiskRefused, Interrupted, ShoalError, SpecError, WorkerFailed
from shoal.launch.archive.putting import Archive
from shoal.launch.attempts import Attempts
from shoal.launch.control import accepted, is_sensible
from shoal.launch.owner import ZygoteProcess
from shoal.launch.record import Beginning, Record, how_to_go_on, leave_behind, whereabouts
from shoal.launch.requests import Requests
from shoal.observe import Bus, Event, FolderWatch, JsonlSink, RunFolder, Sink
from shoal.observe.happenings import Failed, LineSaid, Warned
from shoal.observe.run_folder import DEFAULT_ROOT
from shoal.observe.wording import FAILED, plural
from shoal.spec import Job
from shoal.spec.checks import require_count

if TYPE_CHECKING:
    from torch import nn

    from shoal.launch.remote.adoption import Adoption

MOST_KEPT_EVENTS = 10_000
_EXIT_S = 10.0
"""How long this process waits at its own end for that of a run which nobody has waited for."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    results: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """One name for the trained model."""
        return str(self.results["digest"])

    @classmethod
    def open(cls, run: str | Path, runs: str | Path = DEFAULT_ROOT) -> Run:
        """An earlier run that came to its end, by its folder or by its name under `runs`."""
        folder = RunFolder.open(run, runs)
        return cls(folder.path, folder.read_result())

    def model(self, *, trust: bool = False) -> nn.Module:
        """The module that the task makes, with its trained weights: in `eval` mode, on the CPU, the caller's own.

        The task's code is run in this process; what others could have written is refused unless you `trust` it.
        """
        from shoal.launch.taking import load_module

        return load_module(self.folder, trust=trust)


class EventStream:
    """A sink whose events other threads read, each from the first on, while they come.

    The newest of them are kept; a reader that falls far behind misses the oldest.
    """

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=MOST_KEPT_EVENTS)
        self._num_told = 0
        self._is_over = False
        self._changed = threading.Condition()

    def handle(self, event: Event) -> None:
        with self._changed:
            self._kept.append(event)
            self._num_told += 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Event]:
        num_read = 0
        while fresh := self._after(num_read):
            num_read = fresh[0]
            yield from fresh[1]

    def _after(self, num_read: int) -> tuple[int, list[Event]] | None:
        """How many events there are, and those after the first so many; None where none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_told > num_read or self._is_over)
            if self._num_told == num_read:
                return None
            first_kept = self._num_told - len(self._kept)
            return self._num_told, list(islice(self._kept, max(0, num_read - first_kept), None))


class LiveRun:
    """A run that goes on: in a thread of its own once it was begun, or in the thread that runs it to its end.

    Left as a `with` block, it is stopped after its step. It ends with this process at the latest.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        shown: Sequence[Sink] = (),
        *,
        stream: EventStream | None = None,
        zygote: ZygoteProcess | None = None,
        at_end: ExitStack | None = None,
        adoption: Adoption | None = None,
    ) -> None:
        """`shown` are told what happens, and so is `stream`, where somebody may follow. `at_end` is closed when
        all is over. `adoption`: a run that goes on, and whose supervisor is gone."""
        self.job = job
        self._folder = folder
        self._shown = shown
        self._stream = stream
        self._zygote = zygote
        self._at_end = at_end or ExitStack()
        self._adoption = adoption
        self._requests = Requests()
        self._num_stops = 0
        self._thread: threading.Thread | None = None
        self._outcome: Run | None = None
        self._error: BaseException | None = None
        self._is_told = False
        """Whether somebody who waited knows of the error."""

    @property
    def folder(self) -> Path:
        """Where the run leaves what it makes."""
        return self._folder.path

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        return self._thread is not None and not self._thread.is_alive()

    # For whoever follows it, in any thread.

    def events(self) -> Iterator[Event]:
        """What happens, from the first event on and while it goes on; ends with the run."""
        return iter(self._stream or ())

    def scale(
        self, *, workers: int | None = None, servers: int | None = None, hosts: str | None = None
    ) -> dict[str, Any]:
        """Change how many workers and servers there are, or hosts (`3`, `+1`, `-1`); tells how many there are,
        where none is given."""
        for name, number in (("workers", workers), ("servers", servers)):
            if number is not None:
                require_count("scale", name, number)
        if not is_sensible(ScaleWanted(workers=workers, servers=servers, hosts=hosts)):
            raise SpecError(f"scale: hosts must be alone, and as 3, +1 or -1, found {hosts!r}.")
        return accepted(self._requests.scale(workers, servers, hosts))

    def stop(self, *, at_once: bool = False) -> None:
        """Let it end after its step, with what it has come to saved; or at once, with what was not saved lost."""
        for _ in range(self._num_stops, 2 if at_once else 1):
            self._num_stops += 1
            self._requests.interrupt()

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait for the end: what came out, also where `stop` has ended it; raises what else has ended it.

        `TimeoutError` where it goes on for longer than `timeout_s`.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"Run {self._folder.name!r} goes on after {timeout_s:g} s.")
        self._is_told = True
        was_asked = isinstance(self._error, Interrupted) and self._num_stops > 0
        if self._outcome is not None and (self._error is None or was_asked):
            return self._outcome
        assert self._error is not None, "begun or run before anybody waits"
        raise self._error

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        was_told = self._is_told
        self.stop()
        try:
            self.wait()
        except KeyboardInterrupt:
            self.stop(at_once=True)
            with suppress(ShoalError):
                self.wait()
            raise
        except Interrupted:
            pass
        except Exception:
            # Whatever ended the block says more, and so does what it has heard of already.
            if kind is None and not was_told:
                raise

    # How it goes on.

    def begin(self) -> LiveRun:
        """Let it go on in a thread of its own."""
        self._thread = threading.Thread(target=self._go, name=f"shoal-{self._folder.name}", daemon=True)
        atexit.register(self._abandon)
        self._thread.start()
        return self

    def run(self) -> Run:
        """Run it to its end in this thread; in the main one, Ctrl-C stops it."""
        self._go()
        return self.wait()

    def _go(self) -> None:
        try:
            with self._at_end:
                self._execute()
        except BaseException as error:
            self._error = error
        finally:
            self._requests.close()
            if self._stream is not None:
                self._stream.close()
            atexit.unregister(self._abandon)

    def _abandon(self) -> None:
        """This process ends, and nobody has waited for the run."""
        self.stop(at_once=True)
        assert self._thread is not None
        self._thread.join(_EXIT_S)

    def _execute(self) -> None:
        """Run the job; whatever happens, the folder tells, or an error says what it lacks."""
        job, folder = self.job, self._folder
        if not folder.job.is_file():
            folder.write_job(job)
        record, beginning = Record(), Beginning(job, folder)
        if self._adoption is not None:
            record.recall(self._adoption.told)
            beginning.is_over = True
        file = JsonlSink(folder.path, lambda text: bus.emit(Event(Warned(text=text))))
        streams = [] if self._stream is None else [self._stream]
        # The last is closed first: whoever fails then is told of to those before it.
        archives = [Archive(folder, job, lambda what: bus.emit(Event(what)))] if "archive" in job.options else []
        bus = Bus([file, record, beginning, *streams, *self._shown, *archives, FolderWatch(folder.path)])
        if self._adoption is not None:
            hosts = plural(len(self._adoption.hosts), "host")
            text = f"taking over {folder.name}, whose supervisor is gone, on {hosts}"
            bus.emit(Event(LineSaid(text=text)))
        stopped: str | None = FAILED
        failure: ShoalError | None = None
        try:
            with self._requests:
                Attempts(job, folder, bus.emit, self._requests, self._adoption).run(self._zygote)
            stopped = None
        except Interrupted as request:
            stopped = "interrupted"
            failure = Interrupted(f"{request} {whereabouts(folder)}")
        except ShoalError as error:
            failure = error
            with suppress(DiskRefused):  # Where the folder itself is lost, the error says so.
                bus.emit(_failed(error))
                if beginning.is_over:
                    folder.demote_model()
            error.args = (f"{error} {how_to_go_on(folder, record.total_steps)}".strip(),)
        finally:
            missing = leave_behind(folder, record, record.ending(stopped), bus)
            missing = " ".join(filter(None, [missing, *(archive.finish() for archive in archives)]))
        if record.results or failure is None:
            self._outcome = Run(folder.path, record.results)
        if failure is not None:
            if archives and missing:
                failure.args = (f"{failure} {missing}",)
            raise failure
        if missing:
            raise DiskRefused(f"The run came to its end, but not all that it made could be kept: {missing}")


def _failed(error: ShoalError) -> Event:
    """The event that tells why a run ended."""
    details, rank = (error.details, error.global_rank) if isinstance(error, WorkerFailed) else ("", None)
    return Event(Failed(message=str(error), traceback=details), rank)
