"""What an agent tells its supervisor of the processes on its host, and in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from shoal.comm.host_words import ProcessDeaf, ProcessEnded, ProcessSaid, ProcessStarted
from shoal.launch.messages import Deaf, Ended, News, Said, Started
from shoal.launch.remote.line import HostLine
from shoal.launch.remote.outgoing import OutgoingFiles
from shoal.observe.happenings import CheckpointWritten, Done, Heartbeat, Saved
from shoal.spec.told import Told

_LEAVE_FILES = (CheckpointWritten, Saved, Done)
"""What processes say when there may be files of theirs that the supervisor has not."""


class Teller:
    """Words of one process come in its order, and behind the files that they are about.

    So a checkpoint that the supervisor hears of is on its disk. Other processes' words do not wait for it.
    """

    def __init__(self, line: HostLine | None) -> None:
        """`line`: to the supervisor; None while there is none, and all is kept for the next one."""
        self.outgoing: OutgoingFiles | None = None
        """Files that have to be sent; None where the supervisor has the same disk."""
        self._line = line
        self._late: set[int] = set()
        """Processes whose words wait behind files."""
        self._kept: deque[News] = deque()
        """What was told and may have to be told again."""
        self._num_settled = 0
        """So many things were told before those, and are known."""

    def settle(self, heard: int) -> None:
        """So many things are known for good."""
        while self._kept and self._num_settled < heard:
            self._kept.popleft()
            self._num_settled += 1

    def lose_line(self) -> None:
        """From here on nobody hears."""
        self._line = None

    def move(self, line: HostLine, heard: int) -> int:
        """Another supervisor has come, who knows of so many things: how many are told before what it is told."""
        self.settle(heard)
        self._line = line
        if self.outgoing is not None:
            self.outgoing.begin_again()
        return self._num_settled

    def repeat(self) -> None:
        """Tell all that is not known to be known."""
        self.tell_printed()
        self._tell(list(self._kept))

    def tell(self, news: Iterable[News]) -> None:
        """Tell what has happened."""
        fresh = list(news)
        self._kept += fresh
        self._tell(fresh)

    def _tell(self, news: Iterable[News]) -> None:
        if self._line is None:
            return
        if not self._line.has_bulk:
            self._late.clear()
        for one in news:
            if self.outgoing is not None:
                self._send_files(one, self.outgoing)
                one = _at_home(one, self.outgoing)
            is_beat = isinstance(one, Said) and isinstance(one.word, Heartbeat)
            if one.process in self._late and not is_beat:
                self._line.send_behind([_word_of(one)])
            else:
                self._line.send(_word_of(one))

    def tell_printed(self) -> None:
        """Send what processes have printed."""
        if self.outgoing is not None and self._line is not None:
            for piece in self.outgoing.printed():
                self._line.send(piece)

    def _send_files(self, one: News, outgoing: OutgoingFiles) -> None:
        if isinstance(one, Ended):
            self.tell_printed()
        if isinstance(one, Ended) or (isinstance(one, Said) and isinstance(one.word, _LEAVE_FILES)):
            assert self._line is not None
            self._line.send_behind(outgoing.changes())
            self._late.add(one.process)


def _at_home(one: News, outgoing: OutgoingFiles) -> News:
    match one:
        case Said():
            return Said(one.process, outgoing.at_home(one.word))
        case Ended():
            return replace(one, log_name=outgoing.path_at_home(one.log_name))
    return one


def _word_of(one: News) -> Told:
    match one:
        case Started():
            return ProcessStarted(process=one.process)
        case Said():
            return ProcessSaid(process=one.process, word=one.word.as_message())
        case Deaf():
            return ProcessDeaf(process=one.process)
        case Ended():
            return ProcessEnded(
                process=one.process,
                exit_code=one.exit_code,
                log_name=one.log_name,
                last_output=one.last_output,
                ran_out_of_memory=one.ran_out_of_memory,
            )
