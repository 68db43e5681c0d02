"""What a comparison of strategies looks like: at 80 columns, for programs, and as a picture."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from shoal.bench.laps import BenchRow, Course, Lap
from shoal.bench.picture import draw_bench
from shoal.bench.report import ONE_PROCESS, BenchReport
from shoal.bench.table import bench_table, finding
from shoal.observe.strict_json import to_json


def row(strategy: str, *speeds: float, loss: float = 0.1234) -> BenchRow:
    laps = [
        Lap(samples_per_s=speed, first_step_s=0.31, peak_memory={0: 212_000_000, 1: 1}, loss=loss)
        for speed in speeds
    ]
    return BenchRow(strategy=strategy, laps=tuple(laps))


REPORT = BenchReport(
    target="/nowhere/digits.py",
    workers=2,
    threads=1,
    threads_alone=2,
    batch_size=64,
    course=Course(1200),
    rounds=3,
    alone=row(ONE_PROCESS, 100_000, 110_000, 90_000),
    rows=(
        row("data", 190_000, 200_000, 180_000),
        row("ps:servers=2,sync=ssp:3,shares=speed", 50_000, 60_000, 40_000, loss=float("nan")),
    ),
    left_out={
        "pipeline": "Task: objective= computes the loss in one go, but nobody has all of it; use loss=, or data."
    },
)


def shown(report: BenchReport, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(bench_table(report))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_line_for_each_strategy_fits_80_columns():
    lines = shown(REPORT)
    assert max(map(len, lines)) <= 80
    assert lines[:3] == [
        "/nowhere/digits.py",
        "2 workers, 1 thread each (one process: 2)",
        "1,200 steps of 64 samples, medians of 3 rounds",
    ]
    (heading,) = (line for line in lines if line.startswith("strategy"))
    assert " ".join(heading.split()) == "strategy samples/s spread x one x data 1st step memory loss"
    (data,) = (line for line in lines if line.startswith("data  "))
    assert data.split() == ["data", "190,000", "11%", "1.90", "1.00", "0.31", "s", "212", "MB", "0.1234"]
    (alone,) = (line for line in lines if line.startswith(ONE_PROCESS))
    assert alone.split()[2:6] == ["100,000", "20%", "1.00", "0.53"]
    assert not any("…" in line for line in lines), "a long name is folded, and not cut"
    assert any(line.startswith(REPORT.rows[1].strategy) for line in shown(REPORT, width=120))


def test_who_was_left_out_is_named_with_the_whole_reason():
    text = " ".join(" ".join(shown(REPORT)).split())
    assert "left out pipeline Task: objective= computes the loss in one go, but nobody has all of it; use" in text
    assert "left out" not in " ".join(shown(replace(REPORT, left_out={})))


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (REPORT, "data is fastest: 1.90 times one process."),
        (replace(REPORT, rows=REPORT.rows[1:]), "No strategy is faster than one process here; ps:servers=2"),
        (replace(REPORT, alone=None), "data was fastest so far."),
        (replace(REPORT, rows=()), "No strategy was measured."),
    ],
)
def test_the_last_line_says_what_it_means(report, sentence):
    assert finding(report).plain.startswith(sentence)
    assert max(map(len, shown(report))) <= 80


def test_what_was_broken_off_says_so():
    lines = shown(replace(REPORT, is_broken_off=True, rounds=1))
    assert "Broken off: only what was measured until then is shown." in lines
    assert any("1 round" in line and "medians" not in line for line in lines)


def test_programs_get_every_round():
    found = json.loads(to_json(REPORT.to_dict()))
    assert [each["strategy"] for each in found["rows"]] == [ONE_PROCESS, "data", REPORT.rows[1].strategy]
    data = found["rows"][1]
    assert (data["samples_per_s"], data["ratio_to_one"], data["ratio_to_first"]) == (190_000, 1.9, 1.0)
    assert [each["samples_per_s"] for each in data["rounds"]] == [190_000, 200_000, 180_000]
    assert data["rounds"][0]["peak_memory"] == {"0": 212_000_000, "1": 1}
    assert found["rows"][2]["loss"] is None
    assert (found["steps"], found["warm_up_steps"], found["total_steps"]) == (1200, 120, 1325)
    assert found["left_out"].keys() == {"pipeline"} and found["broken_off"] is False


def test_a_picture_is_drawn(tmp_path):
    for name, report in (("all", REPORT), ("some", replace(REPORT, alone=None))):
        draw_bench(tmp_path / f"{name}.png", report)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "all.png").read_bytes() != (tmp_path / "some.png").read_bytes()
