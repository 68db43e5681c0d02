"""The plain log: few lines, no control characters, the whole story."""

import io

from shoal.observe import Event, PlainSink


def test_whole_run_reads_as_lines(run_events):
    stream = io.StringIO()
    # A clock that ticks when it is read: a line each hundred events or so, besides the evaluations' four.
    now = iter(range(10**6))
    sink = PlainSink(stream, interval_s=100, clock=lambda: float(next(now)))
    for event in run_events:
        sink.handle(event)
    sink.close()
    text = stream.getvalue()
    assert {letter for letter in text if not letter.isprintable()} == {"\n"}
    lines = text.splitlines()
    assert lines[0] == "3 workers, 1 spare, data"
    assert "step 100: test loss 0.1439, accuracy 0.8647" in lines
    assert "worker 2 was lost: killed by signal 9" in lines
    assert "worker 2 was replaced by a spare in 0.12 s" in lines
    assert 5 <= sum("  epoch " in line and "  loss " in line for line in lines) <= 8
    table = dict(line.split(maxsplit=1) for line in lines[-10:] if not line.startswith("  test"))
    assert table["accuracy"] == "0.9817"
    assert table["samples"] == "12,800"
    assert table["samples/s"] == "6,400"
    assert table["model"] == "/runs/mine/model.safetensors"
    assert table["digest"] == "xxh3:0123456789abcdef"


def test_lines_come_at_intervals():
    stream, now = io.StringIO(), [0.0]
    sink = PlainSink(stream, interval_s=2, clock=lambda: now[0])
    for step in range(1, 101):
        now[0] = step / 10
        values = {"steps": [[step, 0.5]], "samples": step, "lr": 0.1, "total_steps": 100, "epoch": 1}
        sink.handle(Event.of("steps", 0, values, time=now[0]))
    assert len(stream.getvalue().splitlines()) == 5
    assert stream.getvalue().splitlines()[-1] == "step 81/100  epoch 1  loss 0.5000  10 samples/s  0:02 left"


def test_no_step_is_shown_twice():
    stream = io.StringIO()
    sink = PlainSink(stream, interval_s=2, clock=lambda: 0.0)
    for step in (8, 16):
        values = {"steps": [[step, 0.5]], "samples": step, "lr": 0.1, "total_steps": 16, "epoch": 1}
        sink.handle(Event.of("steps", 0, values, time=step))
        sink.handle(Event.of("evaluation", 0, {"step": step, "results": {"loss": 0.4}}, time=step))
    shown = [line.split("  ")[0] for line in stream.getvalue().splitlines()]
    assert shown == ["step 8/16", "step 8: test loss 0.4000", "step 16/16", "step 16: test loss 0.4000"]


def test_stopped_run_says_how_far_it_came(run_events):
    stream = io.StringIO()
    sink = PlainSink(stream)
    for event in run_events[:80]:
        sink.handle(event)
    sink.handle(Event.of("stopped", values={"reason": "Ctrl-C"}))
    assert "stopped: Ctrl-C" in stream.getvalue()
    assert " of 200\n" in stream.getvalue()
