"""Run folders: made, named, refused, found again."""

import errno
import os
import re

import pytest

from shoal.errors import LaunchError, SpecError
from shoal.observe import RunFolder
from shoal.observe.checkpoint_names import find_run
from shoal.observe.disk import write_whole, writing
from shoal.spec import Cluster, Job


@pytest.mark.parametrize(
    ("target", "stem"),
    [
        ("examples/digits.py:task", "digits"),
        ("shop.models.ranker:make", "ranker"),
        ("a b.py", "a-b"),
        ("", "run"),
        (f"{'w' * 250}.py:task", "w" * 40),
    ],
)
def test_default_name_says_what_and_when(tmp_path, target, stem):
    folder = RunFolder.create(tmp_path / "runs", target=target)
    assert re.fullmatch(rf"{stem}-\d{{8}}-\d{{6}}", folder.name)
    assert folder.path.is_dir() and folder.path.is_absolute()


def test_default_names_are_unique(tmp_path):
    names = {RunFolder.create(tmp_path, target="digits.py").name for _ in range(5)}
    assert len(names) == 5


def test_existing_name_is_refused_unless_overwritten(tmp_path):
    first = RunFolder.create(tmp_path, "mine")
    first.write_result({"loss": 1.0})
    first.logs.mkdir()
    (first.logs / "worker-0.log").write_text("old")
    (first.path / "notes.txt").write_text("the user's own")
    with pytest.raises(SpecError, match=r"'mine' is there already.*overwrite"):
        RunFolder.create(tmp_path, "mine")
    again = RunFolder.create(tmp_path, "mine", overwrite=True)
    assert again.result.exists(), "another run may be going on in it"
    again.clear()
    assert not again.result.exists()
    assert not again.logs.exists()
    assert (again.path / "notes.txt").read_text() == "the user's own"


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", "a\nb", "a\0b", "a\udc80b"])
def test_names_stay_inside_the_root(tmp_path, name):
    with pytest.raises(SpecError, match="plain folder name"):
        RunFolder.create(tmp_path, name, overwrite=True)


def test_long_names_are_refused_when_made_and_not_found_when_asked_for(tmp_path):
    with pytest.raises(SpecError, match=r"^Run name 'w{20}'… is 300 bytes long; use one of at most 200"):
        RunFolder.create(tmp_path, "w" * 300)
    assert not list(tmp_path.iterdir())
    assert RunFolder.create(tmp_path, "é" * 100).path.is_dir()
    for name in ("w" * 300, f"{'w' * 300}@5", "a\0b"):
        with pytest.raises(SpecError, match=r"^Run "):
            find_run(name, tmp_path)


def test_root_that_is_a_file_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(SpecError, match="is a file"):
        RunFolder.create(tmp_path / "runs", "mine")


def test_unwritable_root_is_a_sentence():
    # Not even root makes folders in /sys.
    with pytest.raises(LaunchError, match="Run folder /sys/mine: it cannot be written"):
        RunFolder.create("/sys", "mine")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "disk is full"),
        (errno.EROFS, "cannot be written"),
        (errno.EIO, "the disk fails"),
        (errno.ENOENT, "it is not there"),
    ],
)
def test_what_the_disk_refuses_is_a_sentence(tmp_path, code, words):
    with pytest.raises(LaunchError, match=f"{tmp_path}.*{words}"), writing(tmp_path):
        raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("root", ["/proc/nope", "/dev/null/x", "r" * 300])
def test_a_root_that_cannot_be_made_is_a_sentence(tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=f"Run folder .*{root}.*; .*put the run"):
        RunFolder.create(root, "mine")
    with pytest.raises(SpecError, match="'mine'"):
        RunFolder.open("mine", root)


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "result.json"
    write_whole(path, "old")
    (tmp_path / ".result.json.part").symlink_to("/dev/full")
    with pytest.raises(LaunchError, match="disk is full"):
        write_whole(path, "new")
    assert path.read_text() == "old"


def test_job_and_result_are_read_back(tmp_path):
    folder = RunFolder.create(tmp_path, "mine")
    job = Job(target="digits.py", args={"width": 8}, cluster=Cluster(workers=2))
    folder.write_job(job)
    folder.write_result({"loss": 0.5})
    assert folder.read_job() == job
    assert folder.read_result() == {"loss": 0.5}
    assert sorted(path.name for path in folder.path.iterdir()) == ["job.json", "result.json"]


def test_open_by_name_and_by_path(tmp_path):
    folder = RunFolder.create(tmp_path, "mine")
    folder.write_job(Job(target="digits.py"))
    assert RunFolder.open("mine", tmp_path) == folder
    assert RunFolder.open(folder.path) == folder


def test_open_lists_the_runs_there_are(tmp_path):
    with pytest.raises(SpecError, match="no runs yet"):
        RunFolder.open("mine", tmp_path)
    for name in ("b", "a"):
        RunFolder.create(tmp_path, name).write_job(Job(target="digits.py"))
    RunFolder.create(tmp_path, "never-started")
    with pytest.raises(SpecError, match=r"the runs there are: a, b\."):
        RunFolder.open("mine", tmp_path)


def test_missing_result_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"no result\.json"):
        RunFolder.create(tmp_path, "mine").read_result()
