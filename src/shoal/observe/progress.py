"""The progress bar: one live line for the run, one for its workers, everything else above them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.observe import wording
from shoal.observe.events import Event
from shoal.observe.happenings import Finished, Stopped
from shoal.observe.summary import RunSummary
from shoal.spec.vocabulary import State

_MOST_PER_SECOND = 10

_LOOKS = {
    State.STARTING: ("○", "dim"),
    State.READY: ("●", "cyan"),
    State.TRAINING: ("●", "green"),
    State.EVALUATING: ("●", "blue"),
    State.SAVING: ("●", "magenta"),
    State.DONE: ("●", "dim green"),
    State.LOST: ("○", "bold red"),
    State.REPLACED: ("●", "yellow"),
}
_LINE_STYLES = {
    "world": "bold",
    "warning": "yellow",
    "fault": "bold magenta",
    "lost": "red",
    "replaced": "yellow",
    "restarted": "yellow",
    "decision": "magenta",
    "checkpoint": "dim",
    "failed": "bold red",
    "stopped": "yellow",
    "evaluation": "cyan",
}


class ProgressSink:
    """Shows a run on a terminal.

    It draws only when an event comes and at most ten times a second: no thread, and no cost to speak of.
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = Console() if console is None else console
        self._summary = RunSummary()
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._draw)
        self._live.start()
        self._clock = clock
        self._drawn_at = clock()

    def handle(self, event: Event) -> None:
        """Show what this event changes."""
        self._summary.add(event)
        if wording.is_raised(event):
            return
        text = wording.line(event)
        if isinstance(event.what, Finished | Stopped):
            self._end(event, text)
        elif text is not None:
            # Printing redraws the live lines beneath, too.
            self._console.print(Text(text, style=_LINE_STYLES.get(event.kind, "")), soft_wrap=True)
        elif self._clock() >= self._drawn_at + 1 / _MOST_PER_SECOND:
            self._live.refresh()
            self._drawn_at = self._clock()

    def close(self) -> None:
        """Leave the live lines as they last were, below everything else, and give the cursor back."""
        # Without a bar they say nothing that is worth keeping.
        self._live.transient = not self._summary.total_steps
        self._live.stop()

    def _end(self, event: Event, text: str | None) -> None:
        self._live.stop()
        if text is not None:
            self._console.print(Text(text, style=_LINE_STYLES[event.kind]), soft_wrap=True)
        self._console.print(Text(), _final_table(self._summary))

    def _draw(self) -> RenderableType:
        lines: list[RenderableType] = [_run_line(self._summary)]
        if self._summary.workers:
            # Not padded to the full width: the terminal's `^C` would not fit, and push everything up a line.
            lines.append(_workers_line(self._summary, self._console.width))
        return Group(*lines)


def _run_line(summary: RunSummary) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    columns: list[RenderableType] = [Text(summary.state, style="bold")]
    # As wide as the longest state, so that the bar keeps its place.
    grid.add_column(no_wrap=True, min_width=len(State.EVALUATING))
    if summary.total_steps:
        grid.add_column(ratio=1)
        columns.append(ProgressBar(total=summary.total_steps, completed=summary.step))
        for text, style in _figures(summary):
            grid.add_column(no_wrap=True, justify="right")
            columns.append(Text(text, style=style))
    grid.add_row(*columns)
    return grid


def _figures(summary: RunSummary) -> list[tuple[str, str]]:
    figures = [(f"{summary.step}/{summary.total_steps}", "")]
    if summary.loss is not None:
        figures.append((f"loss {wording.number(summary.loss)}", "cyan"))
    figures.append((f"{wording.rate(summary.speed.samples_per_s)}/s", "green"))
    if summary.epoch:
        figures.append((f"epoch {summary.epoch}", "dim"))
    return [*figures, (f"{wording.duration(summary.seconds_left)} left", "yellow")]


def _workers_line(summary: RunSummary, width: int) -> Text:
    """Each worker with its number and memory; fewer words each where they would not fit in one line."""
    usual = Counter(worker.state for worker in summary.workers.values()).most_common(1)[0][0]
    for make in (_workers_in_full, _workers_as_dots):
        line = make(summary, usual)
        if line.cell_len <= width:
            return line
    return _workers_counted(summary)


def _workers_in_full(summary: RunSummary, usual: State) -> Text:
    line = Text("  ")
    for rank, worker in sorted(summary.workers.items()):
        mark, style = _LOOKS.get(worker.state, _LOOKS[State.READY])
        again = "↻" if worker.replacements else ""
        line.append(mark, style).append(f" {rank}{again} ")
        if worker.state != usual or worker.state == State.LOST:
            line.append(f"{worker.state} ", style)
        if worker.rss and worker.state != State.LOST:
            line.append(f"{wording.memory(worker.rss)} ", "dim")
        line.append("  ")
    return _with_spares(line, summary)


def _workers_as_dots(summary: RunSummary, usual: State) -> Text:
    line = Text("  ")
    for _, worker in sorted(summary.workers.items()):
        line.append(*_LOOKS.get(worker.state, _LOOKS[State.READY]))
    line.append(f"  {len(summary.workers)} workers, {usual}, ")
    line.append(wording.memory(sum(worker.rss for worker in summary.workers.values())), "dim")
    return _with_spares(line, summary)


def _workers_counted(summary: RunSummary) -> Text:
    line = Text("  ")
    for state, num in Counter(worker.state for worker in summary.workers.values()).most_common():
        line.append(*_LOOKS.get(state, _LOOKS[State.READY])).append(f" {num} {state}  ")
    return _with_spares(line, summary)


def _with_spares(line: Text, summary: RunSummary) -> Text:
    line.rstrip()
    return line.append(f"  +{wording.plural(summary.spares, 'spare')}", "dim") if summary.spares else line


def _final_table(summary: RunSummary) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    scores = len(summary.results)
    for position, (name, value) in enumerate(wording.final_rows(summary)):
        table.add_row(f"  {name}", Text(value, style="bold cyan" if position < scores else ""))
    return table
