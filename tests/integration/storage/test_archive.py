"""`--archive URL`: a run that is put at a store while it trains, and goes on from there elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.web_store import WebStore
from shoal.errors import CheckpointError, DiskRefused, SpecError
from shoal.launch.archive import putting
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import start, train
from shoal.observe.checkpoint_names import MANIFEST, folder_name

pytest.importorskip("fsspec", reason="fsspec is not installed: pip install shoal[fsspec]")
TASKS = Path(__file__).parents[2] / "equivalence" / "small_tasks.py"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WebStore]:
    with WebStore(tmp_path / "store") as served:
        yield served


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task in a folder of its own, which another machine would not have."""
    here = tmp_path / "code" / "tasks.py"
    here.parent.mkdir()
    shutil.copy(TASKS, here)
    return here


def settings(task: Path, folder: Path, zygote: ZygoteProcess, **more: Any) -> dict[str, Any]:
    said = {"target": f"{task}:mlp", "args": {"steps": 9}, "workers": 2, "checkpoint": "every=3,keep=2"}
    return said | {"name": "demo", "runs": folder / "runs", "zygote": zygote, **more}


def put(store: WebStore) -> dict[str, bytes]:
    """What lies there, by name."""
    run = store.folder / "runs" / "demo"
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_all_of_a_run_is_there_and_goes_on_elsewhere(
    store: WebStore, task: Path, tmp_path: Path, zygote: ZygoteProcess
) -> None:
    run = train(**settings(task, tmp_path, zygote, archive=store.url), progress=False)
    found = put(store)
    for name in ("job.json", "events.jsonl", "result.json", "report.md", "model.safetensors", "logs/rank-0.log"):
        assert found[name] == (run.folder / name).read_bytes(), name
    kept = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert (
        kept
        == [folder_name(6), folder_name(9)]
        == sorted({name.split("/")[1] for name in found if "step-" in name})
    )
    assert found["task/code/tasks.py"] == TASKS.read_bytes()
    assert not {"coordinator.sqlite", "supervisor.journal"} & set(found)

    shutil.rmtree(task.parent)
    shutil.rmtree(tmp_path / "runs")
    told = tmp_path / "told"
    with told.open("w") as output:
        again = train(
            resume=f"{store.url}/demo@6",
            trust=True,
            runs=tmp_path / "elsewhere",
            zygote=zygote,
            output=output,
            progress=False,
        )
    assert again.folder == tmp_path / "elsewhere" / "demo" and again.digest == run.digest
    assert "resuming demo after step 6" in told.read_text()
    assert put(store)["report.md"] == (again.folder / "report.md").read_bytes(), "it is put there as before"


def test_a_store_that_refuses_in_the_middle_ends_no_training(
    store: WebStore, task: Path, tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putting, "GIVE_UP_S", 0.5)
    monkeypatch.setattr(putting, "RETRY_S", 0.1)
    store.left = 4  # The task, what it is called, the job, and one file of a checkpoint.
    with pytest.raises(
        DiskRefused, match=r"demo lacks the checkpoint of step 6, .*report\.md.* \(.*is full"
    ) as told:
        train(**settings(task, tmp_path, zygote, archive=store.url), progress=False)
    assert "The run came to its end, but not all that it made could be kept" in str(told.value)
    assert (tmp_path / "runs" / "demo" / "model.safetensors").is_file()
    assert not any(name.endswith(MANIFEST) for name in put(store)), "no checkpoint counts that is not whole"
    with pytest.raises(CheckpointError, match="demo has no whole checkpoint to resume from"):
        train(resume=f"{store.url}/demo", trust=True, runs=tmp_path / "elsewhere", zygote=zygote, progress=False)
    assert not list((tmp_path / "elsewhere").iterdir()), "nothing is left behind"


def test_what_a_store_refused_is_put_there_when_it_takes_it_again(
    store: WebStore, task: Path, tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putting, "RETRY_S", 0.1)
    store.left = 3
    with start(**settings(task, tmp_path, zygote, archive=store.url, args={"steps": 4000})) as live:
        for event in live.events():
            if event.kind == "warning" and "refuses what it is given" in event.what.text:
                assert "the disk of this store is full" in event.what.text
                store.left = float("inf")
            elif event.kind == "line" and "takes what it is given again" in event.what.text:
                live.stop()
        run = live.wait()
    assert put(store)["model.safetensors"] == (run.folder / "model.safetensors").read_bytes()


def test_what_cannot_be_is_said_in_a_sentence(task: Path, tmp_path: Path, zygote: ZygoteProcess) -> None:
    for url, sentence in {
        "moon://crater": "archive=moon://crater cannot be used: Protocol not known: moon",
        str(tmp_path): "is no URL; write one as s3://bucket/runs",
        "ftp://me:secret@host/runs": "the URL has a password in it",
    }.items():
        with pytest.raises(SpecError, match=sentence) as told:
            train(**settings(task, tmp_path, zygote, archive=url), progress=False)
        assert "secret" not in str(told.value) and not (tmp_path / "runs").exists()
    kept = (tmp_path / "kept").as_uri()
    train(**settings(task, tmp_path, zygote, archive=kept), progress=False)
    torn = tmp_path / "kept" / "demo" / "checkpoints" / folder_name(9) / "model.bin"
    torn.write_bytes(torn.read_bytes()[:-1])
    for resume, trust, sentence in (
        (f"{kept}/demo", False, f"Whoever can write at {kept}/demo decides which code is run here; say --trust"),
        (f"{kept}/demo", True, r"Run 'demo' is in .* already; go on with --resume demo"),
        (f"{kept}/demo@4", True, "has no checkpoint of step 4; there are those of steps 6, 9"),
        (f"{kept}/other", True, r"There is no run at file:.*/other; name the folder that has its job\.json"),
    ):
        runs = tmp_path / ("runs" if "already" in sentence else "elsewhere")
        with pytest.raises(SpecError, match=sentence):
            train(resume=resume, trust=trust, runs=runs, zygote=zygote, progress=False)
    run = train(resume=f"{kept}/demo", trust=True, runs=tmp_path / "elsewhere", zygote=zygote, progress=False)
    assert run.results["steps"] == 9 and (run.folder / "checkpoints" / folder_name(6)).is_dir(), "9 was torn"
