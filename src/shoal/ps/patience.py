"""How long a member waits for an answer before it says the same again."""

from __future__ import annotations

_MARGIN = 2.0
"""So many times what answers take is waited for."""
_FADES = 0.75
"""What a slow answer has taught counts so much less with each one that follows."""
_SLOW = 10e6
"""Bytes a second: a link that nothing is known of is thought to be no slower."""
_MOST_S = 8.0
"""Doubling ends here: a link that was cut and has healed is not left unused for long."""


class AnswerPatience:
    """Longer than answers take; where much is on its way, twice as long each time that it was in vain.

    A stream loses nothing while it holds. What is said again because its answer is slow comes on top of what the
    other side has not worked off yet, and makes the answer slower still: with shards of many megabytes, or over a
    slow link, for ever. Where little is on its way, saying it again costs nothing, and is done at once.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._usual_s = self._bulk_s = 0.0
        self._in_vain = 0
        self._since: float | None = None
        self._is_repeated = False

    def begin(self, now: float, nbytes: int) -> float:
        """Something is said, and so many bytes are on their way; when to say it again, unless an answer comes."""
        self._bulk_s = nbytes / _SLOW
        if self._since is None:
            self._since = now
        return now + self._wait_s

    def note_vain(self) -> None:
        """No answer has come: it is said again."""
        self._in_vain += 1
        self._is_repeated = True

    def answer(self, now: float, *, is_last: bool = True) -> float:
        """An answer has come; when to say again what has none yet."""
        # Which of several questions it answers cannot be told: it says nothing about how long answers take.
        if self._since is not None and not self._is_repeated:
            self._usual_s = max(now - self._since, _FADES * self._usual_s)
            self._in_vain = 0
        self._since = None if is_last else now
        self._is_repeated = False
        return now + self._wait_s

    def begin_anew(self) -> None:
        """Somebody else is to answer from now on: the wait so far says nothing about that one."""
        self._since, self._in_vain, self._is_repeated = None, 0, False

    @property
    def _wait_s(self) -> float:
        bulk_s = min(self._bulk_s * 2 ** min(self._in_vain, 30), max(self._bulk_s, _MOST_S))
        return max(self._least_s + bulk_s, _MARGIN * self._usual_s)
