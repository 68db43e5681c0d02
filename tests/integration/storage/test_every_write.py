"""A disk that fails at any one write: the run ends well with all that was asked for, or says no and can go on."""

from __future__ import annotations

import errno
import json
import os
from itertools import cycle
from pathlib import Path

import pytest

from helpers.commands import SMALL_TASK
from helpers.disk_faults import DiskFaults
from helpers.warm_commands import Answer, WarmCommands
from shoal.checkpoint.model_file import digest, load_tensors
from shoal.checkpoint.wholeness import check_folder
from shoal.errors import CheckpointError
from shoal.observe import read_events

WRITES = "open write pwrite writev fsync fdatasync ftruncate rename mkdir"
DUE = (*range(3, 26, 3), 26)
"""The steps after which a checkpoint is saved."""
POINTS = [
    ("data", "/lock", "write"),
    ("data", ".job.json.part", "write"),
    ("data", "/job.json", "rename"),
    ("data", "events.jsonl", "open"),
    ("data", "/logs/", "open"),
    ("data", ".control.part", "write"),
    ("data", "/checkpoints", "mkdir"),
    ("data", "model.bin", "write"),
    ("data", ".manifest.json.part", "fsync"),
    ("data", "/checkpoints/step-", "rename"),
    ("data", ".model.safetensors.part", "write"),
    ("data", "/model.safetensors", "rename"),
    ("data", ".result.json.part", "write"),
    ("data", ".report.md.part", "fsync"),
    ("ps:servers=2", "coordinator.sqlite", "pwrite"),
    ("ps:servers=2", "coordinator.sqlite-journal", "fdatasync"),
    ("ps:servers=2", ".model.safetensors.part", "fsync"),
]


@pytest.fixture(scope="module")
def reference(shoal: WarmCommands, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the model of a run that nothing befell; lockstep with servers gives the same bits."""
    found = [train(shoal, tmp_path_factory.mktemp("whole"), strategy) for strategy in ("data", "ps:servers=2")]
    digests = {json.loads(one.out)["digest"] for one in found}
    assert len(digests) == 1
    return digests.pop()


def train(shoal: WarmCommands, folder: Path, strategy: str) -> Answer:
    words = ("--workers", "2", "--name", "mine", "--checkpoint", "every=3", "--strategy", strategy, "--json")
    return shoal(folder, "train", str(SMALL_TASK), *words)


def judge(shoal: WarmCommands, folder: Path, answer: Answer, expected: str) -> str:
    """How a run ended whose disk has failed once: `done`, `resumed`, `exported`, `ended` (nothing was saved).

    Every other end is a fault of ours, and fails.
    """
    run = folder / "runs/mine"
    assert answer.status is not None, f"it hangs: {answer.text}"
    assert "Traceback" not in answer.text, answer.text
    model = run / "model.safetensors"
    if model.exists():
        assert digest(load_tensors(model)) == expected
    if answer.status == 0:
        assert answer.result["digest"] == expected and model.exists(), answer.text
        assert json.loads((run / "result.json").read_text())["digest"] == expected
        # One that the disk would not remove may be left besides.
        assert whole_steps(run)[-3:] == list(DUE[-3:]) and (run / "report.md").is_file()
        assert "finished" in [event.kind for event in read_events(run)]
        return "done"
    assert "error: " in answer.err, answer.text
    kept = whole_steps(run)
    if not kept:
        return "ended"
    if model.exists():
        return "done, but for what the error names"
    if kept[-1] == DUE[-1]:
        assert "All steps are taken; the model is also in the last checkpoint" in answer.text, answer.text
        exported = shoal(folder, "checkpoint", "export", "mine", "out.safetensors")
        assert exported.status == 0 and digest(load_tensors(folder / "out.safetensors")) == expected
        return "exported"
    assert f"Go on after step {kept[-1]} with: shoal train --resume mine" in answer.text, answer.text
    again = shoal(folder, "train", "--resume", "mine", "--json")
    assert again.status == 0 and again.result["digest"] == expected, again.text
    return "resumed"


def whole_steps(run: Path) -> list[int]:
    steps = []
    for path in sorted((run / "checkpoints").glob("step-*")) if run.is_dir() else []:
        try:
            steps.append(check_folder(path).step)
        except CheckpointError:
            pass
    return steps


@pytest.mark.parametrize(
    ("strategy", "contains", "operation", "code"),
    [(*point, code) for point, code in zip(POINTS, cycle([errno.ENOSPC, errno.EIO]), strict=False)],
)
def test_one_failed_write_of_each_kind(
    shoal: WarmCommands, disk: DiskFaults, tmp_path: Path, reference: str, strategy, contains, operation, code
) -> None:
    disk.watch(tmp_path, contains=contains, operations=operation)
    disk.fail(1, code=code)
    answer = train(shoal, tmp_path, strategy)
    assert disk.fired == 1 and contains in disk.struck()[0].path
    disk.quiet()
    judge(shoal, tmp_path, answer, reference)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1, 401, 50))
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("strategy", ["data", "ps:servers=2"])
def test_each_write(
    shoal: WarmCommands, disk: DiskFaults, tmp_path: Path, reference: str, strategy: str, code: int, first: int
) -> None:
    table = []
    for number in range(first, first + 50):
        folder = tmp_path / str(number)
        folder.mkdir()
        disk.watch(folder, operations=WRITES)
        disk.fail(number, code=code)
        answer = train(shoal, folder, strategy)
        struck = disk.struck()
        disk.quiet()
        if not struck:
            assert number > 200, f"there were only {disk.seen} writes, too few to show much"
            assert judge(shoal, folder, answer, reference) == "done"
            break
        try:
            outcome = judge(shoal, folder, answer, reference)
        except AssertionError as error:
            outcome = f"WRONG: {error}"
        path = os.path.relpath(struck[0].path, folder / "runs/mine")
        table.append(f"{number} {errno.errorcode[code]} {struck[0].name} {path}: exit {answer.status}, {outcome}")
    print("\n".join(table))
    assert not [line for line in table if "WRONG" in line]
