"""Loading parts of batches in processes beside the one that trains, which are forked from it."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
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
"""As `WantedPart.name`."""

_PARTS_PER_PROCESS = 2
"""One that it works on, and one that lies ready."""
_DEATHS_OF_A_PART = 2
"""A part at which so many processes were killed would kill the next one, too."""
_ADVICE = "; look for its last words in the worker's log, and use fewer loaders where memory is short."


class Loaders:
    """Has processes prepare what is foreseen, in order, a few parts ahead; needs no thread in this one.

    They are forked, so that they read the data set and run the functions that this process has, however these
    were made. A fork copies one thread: locks that others hold stay locked. The only other one by then sends signs
    of life, and no child takes what it may hold. Torch's and the user's pools of threads are left alone as well: a
    child computes with one thread, as in torch's `DataLoader`. One that is killed is followed by another, forked
    from what this process has become; `reading` is held meanwhile, so that no thread is inside the data set.
    """

    def __init__(
        self, prepare: Prepare, count: int, reading: AbstractContextManager[Any], warn: Callable[[str], None]
    ) -> None:
        self._loaders: list[_Loader] = []
        for number in range(count):
            self._loaders.append(_Loader(prepare, number, self._loaders, reading, warn))
        self._preparers: dict[PartName, _Loader] = {}
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
        loader = self._preparers.pop(wanted.name, None)
        prepared = None if loader is None else loader.take(wanted.name)
        self._hand_out()
        return prepared

    def close(self) -> None:
        """End the processes."""
        for loader in self._loaders:
            loader.end()

    def _hand_out(self) -> None:
        for loader in self._loaders:
            loader.collect()
        while (idlest := min(self._loaders, key=lambda loader: loader.load)).load < _PARTS_PER_PROCESS:
            try:
                wanted = next(self._plan, None)
            except Exception:  # a sampler of the user's: the step that it is for will meet the same error
                return
            if wanted is None:
                return
            if wanted.name not in self._preparers and wanted.name not in self._taken:
                idlest.ask(wanted)
                self._preparers[wanted.name] = idlest


class _Loader:
    """One process, as the training process sees it. It answers in the order in which it was asked.

    Where it is killed, another one is asked for the same parts: what they hold follows from their key alone.
    """

    def __init__(
        self,
        prepare: Prepare,
        number: int,
        all_of_them: list[_Loader],
        reading: AbstractContextManager[Any],
        warn: Callable[[str], None],
    ) -> None:
        self._prepare = prepare
        self._number = number
        self._all = all_of_them
        self._reading = reading
        self._warn = warn
        self._asked: deque[WantedPart] = deque()
        self._ready: dict[PartName, Prepared | None] = {}
        self._unwanted: set[PartName] = set()
        self._deaths: Counter[PartName] = Counter()
        self._start()

    def _start(self) -> None:
        self._channel, theirs = Channel.pair()
        self._has_ended = False
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the child writes it once more
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for loader in {*self._all, self}:
                loader._channel.close()
            _live(parent, self._number, theirs, self._prepare)
        theirs.close()

    @property
    def load(self) -> int:
        """Parts that it has in hand."""
        return len(self._asked) + len(self._ready)

    def ask(self, wanted: WantedPart) -> None:
        """Let it prepare this part."""
        self._asked.append(wanted)
        try:
            self._send(wanted)
        except PeerLost:
            self._replace()

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
                name = self._asked.popleft().name
                if name in self._unwanted:
                    self._unwanted.remove(name)
                else:
                    self._ready[name] = prepared
        except PeerLost:
            self._replace()

    def end(self) -> None:
        """Kill it, as it has nothing to finish."""
        self._channel.close()
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)
            self._wait_for_end()

    def _send(self, wanted: WantedPart) -> None:
        fd, header_bytes = lay_down([wanted.step, wanted.slot, wanted.samples, wanted.key])
        try:
            self._channel.send({"header": header_bytes}, [fd])
        finally:
            os.close(fd)

    def _replace(self) -> None:
        """Have another process do what this one was asked for; `LaunchError` where a part has killed too many."""
        while True:
            how = self._describe_end()
            self._asked = deque(wanted for wanted in self._asked if wanted.name not in self._unwanted)
            self._unwanted.clear()
            if self._asked:  # it was at the first of them
                self._deaths[self._asked[0].name] += 1
                if self._deaths[self._asked[0].name] >= _DEATHS_OF_A_PART:
                    raise LaunchError(f"loaders: {how}{_ADVICE}")
            self._warn(f"loaders: {how}; another one reads on.")
            self._channel.close()
            with self._reading:
                self._start()
            try:
                for wanted in self._asked:
                    self._send(wanted)
                return
            except PeerLost:
                continue

    def _wait_for_end(self) -> int:
        self._has_ended = True
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _describe_end(self) -> str:
        code = self._wait_for_end()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        worker = os.environ.get("SHOAL_RANK", "0")
        return f"the process {self.pid}, which prepares samples beside worker {worker}, {how}"


def _live(parent: int, number: int, channel: Channel, prepare: Prepare) -> NoReturn:
    """All that a forked process does. It must never return into the code of the one it was forked from."""
    code = 1
    try:
        die_with_parent(parent, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that trains
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
