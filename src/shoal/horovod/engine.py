"""The thread that agrees with the other processes on what to do, and does it, while the script computes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shoal.comm.group import Group
from shoal.errors import ShoalError
from shoal.horovod.common.exceptions import HorovodInternalError
from shoal.horovod.negotiation import Decision, Negotiation, RoundOutcome, Saying, SayingCodec
from shoal.horovod.operations import RowsOfAll, Submission, allreduce_all, do, refusal
from shoal.horovod.parley import Parley
from shoal.horovod.requests import Act, TensorRequest
from shoal.horovod.timeline import TensorTimeline

_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.0001, 0.01
SHUT_DOWN = (
    "Horovod has been shut down here. This was caused by an exception on one of the ranks, or by an attempt to "
    "use a collective after one of the ranks has finished"
)


@dataclass(frozen=True, kw_only=True)
class StallLimits:
    """How long others may be waited for."""

    warn_s: float = 60.0
    """0: nobody is warned."""
    end_s: float = 0.0
    """0: without end."""


class Leaving(Exception):
    """This process leaves a wait, because its script has ended."""


@dataclass(eq=False, kw_only=True)
class Outstanding:
    """Something that this process has asked for."""

    submission: Submission
    done: threading.Event = field(default_factory=threading.Event)
    result: list[torch.Tensor] | list[RowsOfAll] = field(default_factory=list)
    error: HorovodInternalError | None = None

    def end(self, error: HorovodInternalError | None = None) -> None:
        """It is done, or refused."""
        self.error = error
        self.done.set()


class Watch:
    """What a waiting thread looks at now and then: handed to the group, which does not know whose thread waits."""

    def __init__(self, look_elsewhere: Callable[[], None] | None) -> None:
        """`look_elsewhere` raises to give up."""
        self._look_elsewhere = look_elsewhere
        self._local = threading.local()

    def begin(self, engine: SetEngine) -> None:
        """The calling thread is this engine's."""
        self._local.engine = engine

    def look(self) -> None:
        """Raise where waiting is in vain."""
        if self._look_elsewhere is not None:
            self._look_elsewhere()
        engine: SetEngine | None = getattr(self._local, "engine", None)
        if engine is not None:
            engine.look_up()


class SetEngine:
    """Of one process set: the group of its processes, and a thread."""

    def __init__(
        self,
        group: Group,
        parley: Parley,
        watch: Watch,
        limits: StallLimits,
        timeline: TensorTimeline,
        arrange: Callable[[Decision], None],
    ) -> None:
        """`parley`: of the group's processes. `arrange` makes and removes process sets."""
        self.group, self._parley = group, parley
        self._watch, self._limits, self._timeline, self._arrange = watch, limits, timeline, arrange
        self._negotiation = Negotiation(group.ranks)
        self._codec = SayingCodec()
        self._changed = threading.Condition()
        self._news: list[Outstanding] = []
        self._mine: dict[str, Outstanding] = {}
        self._waits_for = ""
        self._joining: Outstanding | None = None
        self._last_joined = -1
        self._failure: HorovodInternalError | None = None
        self._is_stopping = False
        self._entered_at, self._warned_at, self._pause_s = 0.0, 0.0, _LEAST_PAUSE_S
        self._thread = threading.Thread(target=self._live, name="shoal-horovod", daemon=True)
        self._thread.start()

    def submit(self, submission: Submission) -> Outstanding:
        """Ask for something; others must, too."""
        asked, name = Outstanding(submission=submission), submission.request.name
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if name in self._mine:
                raise ValueError(
                    f"Duplicate tensor name: {submission.request.act} of {name!r} was requested, while another "
                    "tensor of this name is being processed; use a different name."
                )
            self._mine[name] = asked
            self._news.append(asked)
            self._changed.notify_all()
        self._timeline.begin(name, f"NEGOTIATE_{submission.request.act.upper()}")
        return asked

    def wait(self, asked: Outstanding) -> None:
        """Return once it is done; raise where it was refused."""
        if not asked.done.is_set():
            self._waits_for = asked.submission.request.name
            try:
                asked.done.wait()
            finally:
                self._waits_for = ""
        if asked.error is not None:
            raise asked.error

    def join(self) -> int:
        """Have nothing to do any more, until nobody has; the index of the one that came last."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            assert self._joining is None, "one thread joins"
            joining = self._joining = Outstanding(submission=Submission(request=_nothing()))
            self._changed.notify_all()
        joining.done.wait()
        if joining.error is not None:
            raise joining.error
        return self._last_joined

    def stop(self) -> None:
        """Leave the others, whatever is open."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def look_up(self) -> None:
        """While this thread waits for the others: whether they still come."""
        if self._is_stopping:
            raise Leaving
        if gone := self._parley.gone():
            raise HorovodInternalError(f"{SHUT_DOWN}: rank {_listed(gone)} has left.")
        waited_s = time.monotonic() - self._entered_at
        missing = self._parley.missing()
        if self._limits.end_s and waited_s > self._limits.end_s and missing:
            raise HorovodInternalError(
                f"{self._stalled(missing, waited_s)} This is more than the limit; giving up."
            )
        if self._limits.warn_s and waited_s - self._warned_at > self._limits.warn_s and missing:
            self._warned_at = waited_s
            print(self._stalled(missing, waited_s), file=sys.stderr, flush=True)

    def _stalled(self, missing: tuple[int, ...], waited_s: float) -> str:
        waiting = sorted(self._negotiation.missing()) or sorted(self._mine) or ["join"]
        return (
            f"Rank {self.group.ranks[self.group.index]} has waited {waited_s:.0f} s for rank {_listed(missing)}, "
            f"which has asked for nothing meanwhile; waiting: {', '.join(waiting[:10])}."
        )

    def _live(self) -> None:
        self._watch.begin(self)
        failure = HorovodInternalError(f"{SHUT_DOWN}.")
        is_aborted = True
        try:
            while self._has_work():
                self._meet()
            is_aborted = False
        except Leaving:
            pass
        except HorovodInternalError as error:
            failure = error
        except ShoalError as error:
            failure = HorovodInternalError(str(error))
        except BaseException as error:
            failure = HorovodInternalError(f"The thread of Horovod's operations has failed: {error!r}")
            raise
        finally:
            self._parley.leave(is_aborted=is_aborted)
            self._fail(failure)

    def _fail(self, failure: HorovodInternalError) -> None:
        with self._changed:
            self._failure = failure
            left, self._mine, self._news = list(self._mine.values()), {}, []
        for asked in [*left, *([self._joining] if self._joining else [])]:
            asked.end(failure)

    def _has_work(self) -> bool:
        with self._changed:
            while not (self._mine or self._joining or self._is_stopping):
                self._changed.wait()
            return not self._is_stopping

    def _meet(self) -> None:
        """A round with the others."""
        with self._changed:
            news, self._news = self._news, []
        self._entered_at, self._warned_at = time.monotonic(), 0.0
        saying = Saying(
            news=tuple(asked.submission.request for asked in news),
            waits_for=self._waits_for,
            joins=self._joining is not None,
        )
        texts = self._parley.meet(self._codec.write(saying))
        outcome = self._negotiation.take(self._codec.read(texts))
        self._carry_out(outcome)
        if outcome.is_quiet:
            with self._changed:
                if not self._news and not self._is_stopping:
                    self._changed.wait(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)
        else:
            self._pause_s = _LEAST_PAUSE_S

    def _carry_out(self, outcome: RoundOutcome) -> None:
        """Everybody does this in the same order."""
        reductions: list[Decision] = []
        for decision in outcome.decisions:
            if error := refusal(decision, self.group):
                self._settle(decision, error=HorovodInternalError(error))
            elif decision.request.act is Act.ALLREDUCE:
                reductions.append(decision)
            else:
                self._do_one(decision)
        if reductions:
            self._reduce(reductions)
        if outcome.last_joined is not None and self._joining is not None:
            joined, self._joining, self._last_joined = self._joining, None, outcome.last_joined
            joined.end()

    def _do_one(self, decision: Decision) -> None:
        asked = self._mine.get(decision.name)
        with self._timeline.during([decision.name], decision.request.act.upper()):
            if decision.request.act in (Act.ADD_SET, Act.REMOVE_SET):
                self._arrange(decision)
                result: list[torch.Tensor] | list[RowsOfAll] = []
            else:
                result = do(decision, None if asked is None else asked.submission, self.group)
        self._settle(decision, result)

    def _reduce(self, decisions: list[Decision]) -> None:
        asked = [self._mine.get(decision.name) for decision in decisions]
        with self._timeline.during([decision.name for decision in decisions], "ALLREDUCE"):
            pairs = [
                (decision.request, None if one is None else one.submission)
                for decision, one in zip(decisions, asked, strict=True)
            ]
            allreduce_all(pairs, self.group)
        for decision, one in zip(decisions, asked, strict=True):
            self._settle(decision, [] if one is None else one.submission.tensors)

    def _settle(
        self,
        decision: Decision,
        result: list[torch.Tensor] | list[RowsOfAll] | None = None,
        error: HorovodInternalError | None = None,
    ) -> None:
        with self._changed:
            asked = self._mine.pop(decision.name, None)
            if asked is not None and asked in self._news:  # refused before it was told
                self._news.remove(asked)
        if asked is not None:
            asked.result = result or []
            asked.end(error)


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def _nothing() -> TensorRequest:
    return TensorRequest(name="join", act=Act.BARRIER)
