"""What a host leaves behind on its own disk when the supervisor may be gone with its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.comm.host_words import FilePiece, HostWelcomed
from shoal.launch.remote.home import HostHome
from shoal.launch.remote.luggage_names import CODE, RUN
from shoal.launch.remote.pieces import KEPT, cut_folder
from shoal.observe.checkpoint_names import MANIFEST, folder_name, step_folders
from shoal.observe.run_folder import RunFolder
from shoal.spec import Job


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostHome:
    """That of a host which was sent the task and has none of the supervisor's disk."""
    monkeypatch.chdir(tmp_path)  # it goes where the supervisor was, and stays there
    away = tmp_path / "away"
    job = Job(target=f"{away}/sources/task.py", run_dir=f"{away}/runs/demo", checkpoint="every=5,keep=2")
    home = HostHome()
    home.take(FilePiece(name=f"{CODE}/task.py", offset=0, data=b"task", is_last=True))
    home.take(FilePiece(name=f"{RUN}/job.json", offset=0, data=b"{}", is_last=True))
    moved = {job.run_dir: RUN, f"{away}/sources": CODE}
    home.settle(HostWelcomed(job=job.to_json(), folder=str(away), lease_s=1.0, grace_s=1.0, moved=moved))
    return home


def send_copies(home: HostHome, folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint = folder / folder_name(step)
        checkpoint.mkdir(parents=True)
        for name in (MANIFEST, "state"):
            (checkpoint / name).write_text(str(step))
        for piece in cut_folder(checkpoint, f"{KEPT}/{checkpoint.name}"):
            home.take(piece)


def test_the_newest_copies_stay_and_the_task_with_them(home: HostHome, tmp_path: Path) -> None:
    send_copies(home, tmp_path / "made", 5, 10, 15)
    home.is_orphaned = True
    home.close()
    left = RunFolder(tmp_path / "away" / "runs" / "demo")
    assert [path.name for path in step_folders(left.checkpoints)] == [folder_name(10), folder_name(15)]
    assert left.job.read_text() == "{}"
    assert (tmp_path / "away" / "sources" / "task.py").read_text() == "task"
    home.come_back()
    assert not left.path.exists(), "the supervisor was there all the time"


@pytest.mark.parametrize("is_orphaned", [False, True])
def test_nothing_is_left_where_nobody_could_go_on(home: HostHome, tmp_path: Path, is_orphaned: bool) -> None:
    """The run was dismissed; or it has no whole checkpoint."""
    if not is_orphaned:
        send_copies(home, tmp_path / "made", 5)
    home.is_orphaned = is_orphaned
    own = home.path
    home.close()
    assert not (tmp_path / "away").exists() and not own.exists()


def test_what_lies_there_is_not_touched(home: HostHome, tmp_path: Path) -> None:
    send_copies(home, tmp_path / "made", 5)
    (there := tmp_path / "away" / "runs" / "demo").mkdir(parents=True)
    home.is_orphaned = True
    home.close()
    home.come_back()
    assert list(there.iterdir()) == []
