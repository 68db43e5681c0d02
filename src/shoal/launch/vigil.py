"""Ends processes that hang, and says how it showed and where they were."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.crew import Hand
from shoal.launch.engine import Member
from shoal.launch.hangs import Finding, HangJudge, Patience
from shoal.launch.stacks import StackSource, collect_stacks, explain_state, find_place, write_stacks
from shoal.launch.succession import Bridge
from shoal.observe.wording import near


class Vigil:
    """Watches over a run's processes. Called from the supervisor's one loop."""

    def __init__(
        self, bridge: Bridge, send_signal: Callable[[Member, int], None], *, unmeasured_s: float | None = None
    ) -> None:
        self._bridge = bridge
        self._send_signal = send_signal
        self._judge = HangJudge(Patience() if unmeasured_s is None else Patience(unmeasured_s=unmeasured_s))

    def next_deadline(self) -> float | None:
        """When to look again."""
        return self._judge.next_look()

    @staticmethod
    def note_stacks(hand: Hand, message: dict[str, Any]) -> None:
        """A process has said how to ask it for its stacks."""
        hand.stacks = StackSource(pid=message["pid"], signum=message["signal"], fd=message["fd"])

    def act(self) -> None:
        """End whoever hangs, once it is known where everybody is."""
        watched = self._bridge.crew.watched()
        findings = self._judge.look([hand.life for hand in watched], time.monotonic())
        if not findings:
            return
        hung = [next(hand for hand in watched if hand.life is finding.life) for finding in findings]
        stacks = self._collect(watched)
        # How far the run is: the last word of a silent one is older than its hang.
        step = max((hand.life.step for hand in watched if hand.is_worker), default=0)
        path = self._keep(watched, stacks, step)
        for hand, finding in zip(hung, findings, strict=True):
            place = find_place(stacks.get(hand.member.pid or 0, "")) or ""
            self._tell(hand, finding, {"step": step, "where": near(place) if place else "", "stacks": path})
        for hand in hung:
            self._bridge.kill(hand)

    def _collect(self, hands: Sequence[Hand]) -> dict[int, str]:
        members = {hand.member.pid: hand.member for hand in hands}

        def ask(source: StackSource) -> None:
            self._send_signal(members[source.pid], source.signum)

        return collect_stacks([hand.stacks for hand in hands if hand.stacks is not None], ask)

    def _keep(self, hands: Sequence[Hand], stacks: dict[int, str], step: int) -> str:
        """Write the stacks to the run folder, where there is one; the file's path."""
        if not self._bridge.job.run_dir or not stacks:
            return ""
        named = [(hand.member.name, stacks[hand.member.pid]) for hand in hands if hand.member.pid in stacks]
        try:
            return str(write_stacks(Path(self._bridge.job.run_dir), step, named))
        except LaunchError as error:
            # The hung one must end all the same.
            self._bridge.emit("warning", None, {"text": f"the stacks could not be kept: {error}"})
            return ""

    def _tell(self, hand: Hand, finding: Finding, circumstances: dict[str, Any]) -> None:
        member, reason = hand.member, _reason(hand, finding)
        hand.hang = f"{reason}, at step {circumstances['step']}"
        if circumstances["where"]:
            hand.hang += f", in {circumstances['where']}"
        if circumstances["stacks"]:
            hand.hang += f" (all stacks are in {near(circumstances['stacks'])})"
        who = {"role": member.role, "rank": member.global_rank}
        told = {**who, "seconds": finding.seconds, "reason": reason, **circumstances}
        self._bridge.emit("hung", member.global_rank if hand.is_worker else None, told)


def _reason(hand: Hand, finding: Finding) -> str:
    """What showed that it hangs."""
    if not finding.is_silent:
        return f"its main thread did not move for {finding.seconds:.1f} s"
    silence = f"it gave no sign of life for {finding.seconds:.1f} s"
    state = explain_state(hand.member.pid) if hand.member.pid is not None else None
    if state is not None:
        return f"{silence}: {state}"
    return f"{silence}: something in it holds Python's lock" if hand.life.has_beaten else silence
