"""Rows as they come: from inputs without an end, in order, and all of them though workers are killed."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
from pathlib import Path
from queue import Queue
from typing import Any

import fragile_task
import numpy as np
import pytest
import torch

import shoal
from helpers.commands import GUARD_S, command, environment
from shoal.checkpoint.model_stream import save_tensors
from shoal.errors import WorkerFailed
from shoal.launch.owner import ZygoteProcess
from shoal.spec import Job

WEIGHTS = torch.tensor([[10.0, 0.5]])
KILLS = fragile_task.KILLS


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, as far as it takes to predict; `marks` in it tells of deaths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "runs" / "fragile"
    (folder / "marks").mkdir(parents=True)
    save_tensors(folder / "model.safetensors", {"weight": WEIGHTS})
    job = Job(target=f"{Path(fragile_task.__file__)}:task", args={"marks": str(folder / "marks")})
    (folder / "job.json").write_text(job.to_json())
    return folder


def well(number: int) -> torch.Tensor:
    """A sample of which nobody dies."""
    return torch.tensor([float(number), 1.0])


def expected(inputs: torch.Tensor) -> np.ndarray:
    return (inputs @ WEIGHTS.T).numpy()


@pytest.mark.parametrize("strategy", ["data", pytest.param("sharded", marks=pytest.mark.long)])
def test_an_input_without_end_is_read_as_far_as_rows_are_wanted(
    run: Path, zygote: ZygoteProcess, strategy: str
) -> None:
    taken = list[int]()

    def endless() -> Any:
        for number in itertools.count():
            taken.append(number)
            yield well(number)

    rows = shoal.predictions(run, endless(), workers=2, strategy=strategy, zygote=zygote)
    for number, row in zip(range(100), rows, strict=False):
        assert row.tolist() == [10.0 * number + 0.5]
    rows.close()
    assert len(taken) < 1000, "what is read ahead has a bound"


@pytest.mark.parametrize("strategy", ["data", "sharded"])
def test_a_row_does_not_wait_for_the_next_sample(run: Path, zygote: ZygoteProcess, strategy: str) -> None:
    """What is asked next may depend on what came out."""
    given: Queue[torch.Tensor | None] = Queue()
    rows = shoal.predictions(run, iter(given.get, None), workers=2, strategy=strategy, zygote=zygote)
    for number in range(5):
        given.put(well(number))
        assert next(rows).tolist() == [10.0 * number + 0.5]
    given.put(None)
    assert list(rows) == []


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("data", "values"),
        ("sharded", "file"),
        *(pytest.param(*row, marks=pytest.mark.long) for row in (("data", "file"), ("sharded", "values"))),
    ],
)
def test_killed_workers_lose_no_row(run: Path, zygote: ZygoteProcess, strategy: str, kind: str) -> None:
    inputs, said = fragile_task.inputs(), io.StringIO()
    np.save("new.npy", inputs.numpy())
    path = shoal.predict(
        run,
        "out.npy",
        input="new.npy" if kind == "file" else iter(inputs),
        workers=2,
        strategy=strategy,
        progress=False,
        output=said,
        zygote=zygote,
    )
    np.testing.assert_allclose(np.load(path), expected(inputs))
    assert {int(mark.name) for mark in (run / "marks").iterdir()} == set(KILLS), "each was fatal once"
    assert "all workers begin again with the next one" in said.getvalue()


def test_who_dies_of_the_same_sample_again_and_again_is_not_followed_for_ever(
    run: Path, zygote: ZygoteProcess
) -> None:
    job = json.loads((run / "job.json").read_text())
    (run / "job.json").write_text(json.dumps({**job, "args": {**job["args"], "always": True}}))
    rows = shoal.predictions(run, iter(fragile_task.inputs()), zygote=zygote)
    found = list[float]()
    with pytest.raises(WorkerFailed):
        found.extend(row.item() for row in rows)
    assert found == expected(fragile_task.inputs())[: len(found)].flatten().tolist()
    assert len(found) <= KILLS[0]


def test_what_the_input_raises_is_raised_after_the_rows_before_it(run: Path, zygote: ZygoteProcess) -> None:
    def failing() -> Any:
        yield well(1)
        raise OSError("the line is dead")

    rows = shoal.predictions(run, failing(), zygote=zygote)
    assert next(rows).tolist() == [10.5]
    with pytest.raises(OSError, match="the line is dead"):
        next(rows)


def test_lines_in_rows_out(run: Path, zygote: ZygoteProcess) -> None:
    """`tail -f new.jsonl | shoal predict …`: each row is there before the next line comes."""
    words = command("predict", str(run), "--input", "-", "--plain")
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(zygote),
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for line, row in (("[1, 1]", [10.5]), ("2, 1", [20.5])):
            print(line, file=process.stdin, flush=True)
            assert json.loads(process.stdout.readline()) == row
        process.stdin.close()
        assert process.wait(GUARD_S) == 0
        assert process.stdout.read() == ""
