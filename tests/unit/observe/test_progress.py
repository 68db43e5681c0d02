"""The progress bar, as a terminal of 80 columns shows it."""

import io
import re

import pytest
from rich.console import Console

from shoal.observe import Event, ProgressSink


@pytest.fixture
def console() -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=80,
        height=24,
        color_system="truecolor",
        legacy_windows=False,
    )


def shown(console: Console) -> str:
    """Every line as it was drawn, and drawn again, without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue().replace("\r", "\n"))


def show(console: Console, events: list[Event]) -> list[str]:
    sink = ProgressSink(console)
    for event in events:
        sink.handle(event)
    sink.close()
    return shown(console).splitlines()


def test_whole_run(console, run_events):
    lines = show(console, run_events)
    assert max(len(line) for line in lines) <= 80
    assert any(line.startswith("3 workers, 1 spare, data") for line in lines)
    assert any("step 100: test loss 0.1439, accuracy 0.8647" in line for line in lines)
    assert any("worker 2 was lost: killed by signal 9" in line for line in lines)
    (bar,) = [line for line in lines if line.startswith("done") and "200/200" in line]
    assert "━━━" in bar
    assert re.search(r"loss 0\.\d{4}  +[\d,]+/s  +epoch 4  +0:00 left", bar)
    after = " ".join(lines[lines.index(bar) :])
    assert "● 0 300 MB" in after
    assert "● 2↻ replaced 302 MB" in after
    for row in ("accuracy +0.9817", "steps +200 ", "seconds +2.5", r"model +/runs/mine/model.safetensors"):
        assert re.search(row, after), row


def test_cursor_is_given_back(console, run_events):
    sink = ProgressSink(console)
    sink.handle(run_events[0])
    assert console.file.getvalue().count("\x1b[?25l") == 1
    sink.close()
    assert console.file.getvalue().count("\x1b[?25h") == 1


def test_draws_at_most_ten_times_a_second(console, run_events):
    now = [100.0]
    sink = ProgressSink(console, clock=lambda: now[0])
    step_events = [event for event in run_events if event.kind == "steps"]
    for event in step_events:
        now[0] += 0.01
        sink.handle(event)
    sink.close()
    assert len(step_events) == 200
    assert 15 <= shown(console).count("left") <= 23


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        (4, "● 0   ● 1   ● 2   ○ 3 lost"),
        (20, f"●●●○{'●' * 16}  20 workers, training"),
        (100, "● 99 training  ○ 1 lost"),
    ],
)
def test_workers_fit_in_one_line(console, workers, text):
    events = [Event.of("world", values={"workers": workers, "spares": 2, "strategy": "data"})]
    events += [Event.of("state", rank, {"state": "training", "step": 0}) for rank in range(workers)]
    events += [Event.of("lost", values={"rank": 3, "reason": "killed"})]
    lines = show(console, events)
    assert max(len(line) for line in lines) <= 80
    workers_line = next(line for line in reversed(lines) if "spares" in line)
    assert text in workers_line
    assert workers_line.rstrip().endswith("+2 spares")


def test_what_users_print_is_not_read_as_markup(console):
    lines = show(console, [Event.of("line", 1, {"text": "x[bold] [/red] done", "level": "info"})])
    assert any("worker 1: x[bold] [/red] done" in line for line in lines)
