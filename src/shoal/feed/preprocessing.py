"""Loading parts of batches in processes beside the one that trains, which are forked from it."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from shoal.comm.channel import Channel
from shoal.comm.kernel import die_with_parent, name_process
from shoal.errors import LaunchError, PeerLost, TaskError
from shoal.feed.batch_memory import lay_down, pick_up
from shoal.feed.prefetch import WantedPart

Prepared = list[tuple[Any, torch.Tensor | None]]
"""The batches of a part, each with torch's generator as its load has left it; None: as it was."""
Prepare = Callable[[WantedPart], Prepared]
PartName = tuple[int, int, bytes]
"""As `Wanted.name`."""

_PARTS_PER_PROCESS = 2
"""One that it works on, and one that lies ready."""


class Preprocessing:
    """Has processes prepare what is foreseen, in order, a few parts ahead; needs no thread in this one.

    They are forked, so that they read the data set and run the functions that this process has, however these
    were made. A fork copies one thread: locks that others hold stay locked. The only other one by then sends signs
    of life, and no child takes what it may hold. Torch's and the user's pools of threads are left alone as well: a
    child computes with one thread, as in torch's `DataLoader`.
    """

    def __init__(self, prepare: Prepare, count: int) -> None:
        self._processes: list[_Process] = []
        for number in range(count):
            self._processes.append(_Process(prepare, number, self._processes))
        self._preparers: dict[PartName, _Process] = {}
        self._plan: Iterator[WantedPart] = iter(())
        self._taken: set[PartName] = set()

    def foresee(self, coming: Iterable[WantedPart], since: int) -> None:
        """What will be asked for, in this order; parts of steps before `since` will not."""
        for name in [name for name in self._preparers if name[0] < since]:
            self._preparers.pop(name).drop(name)
        self._plan = iter(coming)
        self._taken.clear()
        self._hand_out()

    def take(self, wanted: WantedPart) -> Prepared | None:
        """The part, once it is ready; None where it was not foreseen, or its load has failed."""
        self._taken.add(wanted.name)  # the plan may not have come so far yet
        process = self._preparers.pop(wanted.name, None)
        prepared = None if process is None else process.take(wanted.name)
        self._hand_out()
        return prepared

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.end()

    def _hand_out(self) -> None:
        for process in self._processes:
            process.collect()
        while (idlest := min(self._processes, key=lambda process: process.load)).load < _PARTS_PER_PROCESS:
            try:
                wanted = next(self._plan, None)
            except Exception:  # a sampler of the user's: the step that it is for will meet the same error
                return
            if wanted is None:
                return
            if wanted.name not in self._preparers and wanted.name not in self._taken:
                idlest.ask(wanted)
                self._preparers[wanted.name] = idlest


class _Process:
    """One process, as the training process sees it. It answers in the order in which it was asked."""

    def __init__(self, prepare: Prepare, number: int, older: Iterable[_Process]) -> None:
        self._channel, theirs = Channel.pair()
        self._asked: deque[PartName] = deque()
        self._ready: dict[PartName, Prepared | None] = {}
        self._unwanted: set[PartName] = set()
        self._has_ended = False
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the child writes it once more
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for process in (*older, self):
                process._channel.close()
            _live(parent, number, theirs, prepare)
        theirs.close()

    @property
    def load(self) -> int:
        """Parts that it has in hand."""
        return len(self._asked) + len(self._ready)

    def ask(self, wanted: WantedPart) -> None:
        """Let it prepare this part."""
        fd, header_bytes = lay_down([wanted.step, wanted.slot, wanted.samples, wanted.key])
        try:
            self._channel.send({"header": header_bytes}, [fd])
        except PeerLost:
            raise self._describe_end() from None
        finally:
            os.close(fd)
        self._asked.append(wanted.name)

    def take(self, name: PartName) -> Prepared | None:
        """The part, once it is ready; None: it failed."""
        while name not in self._ready:
            self.collect()
            if name not in self._ready:
                _wait(self._channel)
        return self._ready.pop(name)

    def drop(self, name: PartName) -> None:
        """Nobody will take this part."""
        if name in self._ready:
            del self._ready[name]
        else:
            self._unwanted.add(name)

    def collect(self) -> None:
        """Receive what is ready by now."""
        try:
            while (received := self._channel.poll_with_fds()) is not None:
                message, fds = received
                if message["kind"] == "refused":
                    raise TaskError(message["text"])
                prepared = pick_up(fds[0], message["header"]) if message["kind"] == "prepared" else None
                name = self._asked.popleft()
                if name in self._unwanted:
                    self._unwanted.remove(name)
                else:
                    self._ready[name] = prepared
        except PeerLost:
            raise self._describe_end() from None

    def end(self) -> None:
        """Kill it, as it has nothing to finish."""
        self._channel.close()
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)
            self._wait_for_end()

    def _wait_for_end(self) -> int:
        self._has_ended = True
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _describe_end(self) -> LaunchError:
        code = self._wait_for_end()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return LaunchError(
            f"preprocess: the process {self.pid}, which prepares samples beside worker "
            f"{os.environ.get('SHOAL_RANK', '0')}, {how}; look for its last words in the worker's log, and "
            "use fewer of them where memory is short."
        )


def _live(parent: int, number: int, channel: Channel, prepare: Prepare) -> NoReturn:
    """All that a forked process does. It must never return into the code of the one it was forked from."""
    code = 1
    try:
        die_with_parent(parent, signal.SIGKILL)
        name_process(f"shoal-prepare-{number}")
        torch.set_num_threads(1)
        _serve(channel, prepare)
        code = 0
    except PeerLost:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(channel: Channel, prepare: Prepare) -> None:
    while True:
        _wait(channel)
        received = channel.poll_with_fds()
        if received is None:
            continue
        request, fds = received
        step, slot, samples, key = pick_up(fds[0], request["header"])
        answer, files = _prepared(prepare, WantedPart(step, slot, samples, key))
        channel.send(answer, files)
        for fd in files:
            os.close(fd)


def _prepared(prepare: Prepare, wanted: WantedPart) -> tuple[dict[str, Any], list[int]]:
    try:
        batches = prepare(wanted)
    except Exception:  # the training process does the same again, and raises what the user's own code does
        return {"kind": "failed"}, []
    try:
        fd, header_bytes = lay_down(batches)
    except TaskError as error:
        return {"kind": "refused", "text": str(error)}, []
    return {"kind": "prepared", "header": header_bytes}, [fd]


def _wait(channel: Channel) -> None:
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    poller.poll()
