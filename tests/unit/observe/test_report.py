"""The report says what was trained, how, with what result, and draws it."""

import math
import struct
import sys

import pytest

from shoal.errors import SpecError
from shoal.observe import Bus, Event, JsonlSink, RunFolder, write_report
from shoal.observe.chart import draw_chart, smooth
from shoal.observe.report import command, counted_losses, counted_parts
from shoal.spec import Cluster, Job

JOB = Job(
    target="digits.py:task",
    args={"width": 256, "note": "two words"},
    cluster=Cluster(workers=3, spares=1),
    overrides={"max_steps": 200},
    slots=6,
)


def leave_run(root, events) -> RunFolder:
    folder = RunFolder.create(root, "mine")
    folder.write_job(JOB)
    bus = Bus([JsonlSink(folder.path)])
    for event in events:
        bus.emit(event)
    bus.close()
    return folder


def test_report_tells_the_whole_run(tmp_path, run_events):
    folder = leave_run(tmp_path, run_events)
    assert write_report(folder.path) == folder.report
    text = folder.report.read_text()
    for part in (
        "# mine",
        "finished after 200 steps on 12,800 samples: test loss 0.0104, accuracy 0.9817.",
        "| task | `digits.py:task` |",
        "| `width` | 256 |",
        "| strategy | `data`, 6 slots |",
        "local: 3 workers with 1 thread each, 1 spare",
        "| samples/s | 6,400 |",
        "| 100 | 0.1439 | 0.8647 |",
        "| 1 | 301 MB |",
        "worker 2 was lost: killed by signal 9",
        "worker 2 was replaced by a spare in 0.12 s",
        "| model | /runs/mine/model.safetensors |",
        "| digest | xxh3:0123456789abcdef |",
        "![Loss over the steps](loss.png)",
        command(JOB),
    ):
        assert part in text, part
    header = folder.chart.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", header[16:])
    assert (width, height) == (1040, 728)


def test_report_tells_what_a_gpus_memory_was_taken_for(tmp_path, run_events, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    memory = {"host": 500_000_000, "gpu": 3_000_000_000, "gpu_taken": 4_000_000_000}
    done = Event.of("done", 0, {"results": {"offloaded_bytes": 700_000_000}, "memory": memory})
    text = write_report(leave_run(tmp_path, [*run_events[:-1], done, run_events[-1]]).path).read_text()
    assert "| worker | most memory held | of its GPU | taken from the driver | unused of that |" in text
    assert "| 0 | 500 MB | 3.0 GB | 4.0 GB | 25% |" in text
    assert "The host has 700 MB of what the optimizer keeps" in text and "`expandable_segments:True`" in text


def test_report_tells_what_the_coordinator_decided(tmp_path, run_events):
    decision = Event.of("decision", values={"text": "worker 1 gets less data", "share": 3})
    text = write_report(leave_run(tmp_path, [*run_events, decision]).path).read_text()
    section = text.partition("## What the coordinator decided")[2]
    assert "coordinator: worker 1 gets less data" in section


def test_command_repeats_the_job():
    assert command(JOB) == (
        "shoal train digits.py:task --workers 3 --strategy data --spares 1 --slots 6 --max-steps 200 "
        "--arg width=256 --arg 'note=two words'"
    )


def test_report_without_matplotlib_says_how_to_get_it(tmp_path, run_events, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    folder = leave_run(tmp_path, run_events)
    text = write_report(folder.path).read_text()
    assert "pip install shoal[report]" in text
    assert "loss.png" not in text
    assert not folder.chart.exists()


def test_killed_run_without_numbers_still_reports(tmp_path):
    steps = {"steps": [[1, math.nan], [2, math.inf]], "samples": 2, "lr": 0.1, "total_steps": 9, "epoch": 1}
    folder = leave_run(tmp_path, [Event.of("steps", 0, steps)])
    text = write_report(folder.path).read_text()
    assert "no end: it was killed, or is still running" in text
    assert "| training loss | inf |" in text
    assert folder.chart.exists()


def test_many_evaluations_stay_on_one_page(tmp_path):
    events = [Event.of("evaluation", values={"step": at, "results": {"loss": 1 / at}}) for at in range(1, 101)]
    text = write_report(leave_run(tmp_path, events).path).read_text()
    assert "12 of 100 evaluations" in text
    assert "| 1 | 1.0000 |" in text
    assert "| 100 | 0.0100 |" in text
    assert len(text.splitlines()) < 60


def test_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(SpecError, match="is not a run"):
        write_report(tmp_path)


def test_smoothing_keeps_lines_straight_and_tames_noise():
    line = [(step, 2.0 * step) for step in range(200)]
    assert smooth(line)[5:-5] == [pytest.approx(point) for point in line[5:-5]]
    noise = [(step, 1.0 + (-1) ** step) for step in range(200)]
    assert all(abs(value - 1) < 0.2 for _, value in smooth(noise))
    assert smooth([]) == []


def test_losses_of_steps_that_were_undone_are_not_drawn():
    def told(*steps):
        return Event.of("steps", 0, {"steps": [[step, loss] for step, loss in steps], "samples": 1})

    events = [told((1, 9.0), (2, 8.0)), told((3, 7.0), (4, 6.0))]
    back = Event.of("restarted", None, {"step": 2, "samples": 1, "undone": 2, "seconds": 0.1, "reason": "died"})
    assert counted_losses([*events, back]) == [(1, 9.0), (2, 8.0)]
    assert counted_losses([*events, back, told((3, 5.0))]) == [(1, 9.0), (2, 8.0), (3, 5.0)]


def test_what_losses_are_told_with_is_drawn_by_name(tmp_path):
    def told(*steps):
        values = {"steps": [[step, 1.0] for step, _ in steps], "samples": 1, "parts": [[*step] for step in steps]}
        return Event.of("steps", 0, values)

    events = [told((1, {"ce": 2.0, "kl": 1.0})), told((2, {"ce": 1.5, "kl": 0.5}), (3, {"ce": 1.0, "kl": 0.1}))]
    back = Event.of("restarted", None, {"step": 2, "samples": 1, "undone": 1, "seconds": 0.1, "reason": "died"})
    assert counted_parts([*events, back]) == {"ce": [(1, 2.0), (2, 1.5)], "kl": [(1, 1.0), (2, 0.5)]}
    plain, drawn = tmp_path / "plain.png", tmp_path / "drawn.png"
    draw_chart(plain, "run", [(1, 1.0), (2, 1.0)], [])
    draw_chart(drawn, "run", [(1, 1.0), (2, 1.0)], [], {**counted_parts(events), "none": [(1, None)]})
    assert plain.read_bytes() != drawn.read_bytes()
