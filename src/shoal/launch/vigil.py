"""Ends processes that hang, and says how it showed and where they were."""

from __future__ import annotations

import re
import signal
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.launch.crew import Hand
from shoal.launch.hangs import Finding, HangJudge, Patience
from shoal.launch.messages import Sight, StacksTaken, TakeStacks
from shoal.launch.succession import Bridge
from shoal.observe.happenings import Hung
from shoal.observe.wording import near

_SIGHT_TIMEOUT_S = 5.0
"""How long hosts may take to say where processes are; who hangs is ended then all the same."""
_UNSEEN = Sight()
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_SHOAL = f"{Path(__file__).resolve().parents[1]}/"
_LIBRARIES = tuple(
    f"{folder}/" for name, folder in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")
)


@dataclass(frozen=True)
class Case:
    """Who was found to hang, and is ended once it is known where everybody is."""

    findings: Sequence[tuple[Hand, Finding]]
    step: int
    until: float


class Vigil:
    """Watches over a run's processes. A part of the supervisor's machine."""

    def __init__(self, bridge: Bridge, *, unmeasured_s: float | None = None) -> None:
        self._bridge = bridge
        self._judge = HangJudge(Patience() if unmeasured_s is None else Patience(unmeasured_s=unmeasured_s))
        self._case: Case | None = None

    def next_deadline(self) -> float | None:
        """When to look again."""
        return self._judge.next_look() if self._case is None else self._case.until

    def act(self) -> None:
        """Look for those who hang, and ask where everybody is."""
        if self._case is not None:
            if self._bridge.now >= self._case.until:
                self.conclude(StacksTaken({}))
            return
        watched = self._bridge.crew.watched()
        findings = {
            id(one.life): one for one in self._judge.look([hand.life for hand in watched], self._bridge.now)
        }
        for hand in watched:
            if hand.is_deaf:
                findings[id(hand.life)] = Finding(hand.life, is_silent=False, seconds=hand.life.still_s)
        if not findings:
            return
        found = [(hand, findings[id(hand.life)]) for hand in watched if id(hand.life) in findings]
        # How far the run is: the last word of a silent one is older than its hang.
        step = max((hand.life.step for hand in watched if hand.is_worker), default=0)
        self._case = Case(found, step, self._bridge.now + _SIGHT_TIMEOUT_S)
        self._bridge.ask(TakeStacks({hand.number: hand.name for hand in watched}, step))

    @property
    def case(self) -> Case | None:
        """Who was found to hang, while it is not known where everybody is."""
        return self._case

    def reopen(self, case: Case) -> None:
        """These were found to hang, by a supervisor that is gone."""
        self._case = case
        names = {hand.number: hand.name for hand in self._bridge.crew.watched()}
        self._bridge.ask(TakeStacks(names, case.step))

    def conclude(self, taken: StacksTaken) -> None:
        """It is known where everybody is: tell of those who hang, and end them."""
        if self._case is None:
            return
        case, self._case = self._case, None
        there = [(hand, finding) for hand, finding in case.findings if hand.is_alive]
        for hand, finding in there:
            self._tell(hand, finding, case.step, taken.sights.get(hand.number, _UNSEEN), taken.path)
        for hand, _ in there:
            self._bridge.signal(hand, signal.SIGKILL)

    def _tell(self, hand: Hand, finding: Finding, step: int, sight: Sight, path: str) -> None:
        reason = _reason(hand, finding, sight.state)
        frame = find_frame(sight.stacks)
        where = near(frame) if frame else ""
        hand.hang = f"{reason}, at step {step}"
        if where:
            hand.hang += f", in {where}"
        if path:
            hand.hang += f" (all stacks are in {near(path)})"
        told = Hung(
            role=hand.role,
            rank=hand.global_rank,
            step=step,
            seconds=finding.seconds,
            reason=reason,
            where=where,
            stacks=path,
        )
        self._bridge.emit(told, hand.rank)


def _reason(hand: Hand, finding: Finding, state: str | None) -> str:
    """What showed that it hangs."""
    if hand.is_deaf:
        return "it reads nothing of what it is told"
    if not finding.is_silent:
        return f"its main thread did not move for {finding.seconds:.1f} s"
    silence = f"it gave no sign of life for {finding.seconds:.1f} s"
    if state is not None:
        return f"{silence}: {state}"
    return f"{silence}: something in it holds Python's lock" if hand.life.has_beaten else silence


def find_frame(text: str) -> str | None:
    """`file:line in function` of the innermost frame of the main thread that is the user's own, if there is one.

    Where all frames are a library's the innermost that is not ours; None where there are no frames.
    """
    main_thread = text.split("\n\n")[-1]  # The oldest comes last.
    frames = list(_FRAME.finditer(main_thread))
    outside = [frame for frame in frames if not frame["file"].startswith(("<", _SHOAL))]
    own = [frame for frame in outside if not frame["file"].startswith(_LIBRARIES)]
    for frame in (*own, *outside, *frames):
        return f"{frame['file']}:{frame['line']} in {frame['function']}"
    return None
