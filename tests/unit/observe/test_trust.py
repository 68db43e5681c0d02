"""Code that others could have written is not run because a run folder names it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from helpers.other_user import NOBODY, as_another_user, needs_root
from shoal.errors import SpecError
from shoal.observe import RunFolder
from shoal.observe.trust import trusted_job
from shoal.spec import Job

PARTS = ("folder", "job", "code")


@pytest.fixture
def mine(tmp_path: Path) -> dict[str, Path]:
    """A run folder of this user's, with the code that it names."""
    code = tmp_path / "task.py"
    code.touch(0o644)
    folder = RunFolder.create(tmp_path / "runs", "mine")
    folder.write_job(Job(target=f"{code}:task"))
    return {"folder": folder.path, "job": folder.job, "code": code}


def read(parts: dict[str, Path], *, trust: bool = False) -> Job:
    return trusted_job(RunFolder(parts["folder"]), trust=trust)


def test_what_is_ones_own_is_run(mine: dict[str, Path]) -> None:
    assert read(mine).target == f"{mine['code']}:task"
    mine["code"].unlink()
    assert read(mine).target == f"{mine['code']}:task", "that it is gone, its reader says"


def test_code_of_an_installed_module_is_found_as_python_finds_it(mine: dict[str, Path]) -> None:
    RunFolder(mine["folder"]).write_job(Job(target="package.module:task"))
    assert read(mine).target == "package.module:task"


@needs_root
@pytest.mark.parametrize("part", PARTS)
def test_what_belongs_to_another_user_is_refused(mine: dict[str, Path], part: str) -> None:
    os.chown(mine[part], NOBODY, NOBODY)
    with pytest.raises(
        SpecError, match=f"would run the code .* but {mine[part]} belongs to user nobody .*--trust"
    ):
        read(mine)
    assert read(mine, trust=True).target == f"{mine['code']}:task"


@pytest.mark.parametrize("mode", [0o777, 0o770])
@pytest.mark.parametrize("part", PARTS)
def test_what_others_can_change_is_refused(mine: dict[str, Path], part: str, mode: int) -> None:
    os.chmod(mine[part], mode)
    if mode == 0o770:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another group")
        os.chown(mine[part], -1, NOBODY)
    with pytest.raises(SpecError, match=f"{mine[part]} can be changed by others .mode 0{mode:o}.; look at both"):
        read(mine)
    assert read(mine, trust=True)


def test_ones_own_group_may_write(mine: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where every user has a group to himself, and files are made writable for it."""
    for part in mine.values():
        os.chmod(part, 0o770)
    monkeypatch.setattr("shoal.observe.trust._is_private", lambda gid: gid == os.getegid())
    assert read(mine)


@needs_root
def test_links_to_what_others_own_are_refused(mine: dict[str, Path], tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.json"
    theirs.write_bytes(mine["job"].read_bytes())
    os.chown(theirs, NOBODY, NOBODY)
    mine["job"].unlink()
    mine["job"].symlink_to(theirs)
    with pytest.raises(SpecError, match="belongs to user nobody"):
        read(mine)


@needs_root
def test_what_root_owns_is_run_by_all() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        folder = RunFolder.create(Path(place) / "runs", "mine")
        folder.write_job(Job(target="package.module:task"))
        assert as_another_user(lambda: trusted_job(folder, trust=False).target) == "package.module:task"
