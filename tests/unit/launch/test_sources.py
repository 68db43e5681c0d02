"""Which files travel with a task."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.comm.host_words import FilePiece
from shoal.errors import ProtocolError
from shoal.launch.remote import sources
from shoal.launch.remote.pieces import PIECE_BYTES, Arrivals, cut
from shoal.launch.remote.sources import lacking, sources_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = tmp_path / "work"
    for name in (
        "task.py",
        "nets/deep.py",
        "words.txt",
        "__pycache__/task.pyc",
        ".git/config",
        ".env",
        "notes/a.md",
    ):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(name)
    for name in ("runs/one/job.json", "runs/one/model.bin", "venv/pyvenv.cfg", "venv/lib.py"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(name)
    (base / "large.bin").write_bytes(bytes(sources.MOST_FILE_BYTES + 1))
    return base


def names_of(target: str) -> set[str]:
    found = sources_of(target)
    assert found is not None and not found.objection
    return set(found.files)


def test_sources_and_small_data_travel(folder: Path) -> None:
    expected = {"work/task.py", "work/nets/deep.py", "work/words.txt", "work/notes/a.md"}
    assert names_of(f"{folder}/task.py:task") == expected


def test_what_is_ignored_stays(folder: Path) -> None:
    (folder / ".shoalignore").write_text("# not these\nnotes/\n*.txt\n")
    assert names_of(f"{folder}/task.py") == {"work/task.py", "work/nets/deep.py"}


def test_the_whole_package_of_a_file_travels(folder: Path) -> None:
    for where in (folder, folder / "nets"):
        (where / "__init__.py").touch()
    assert "work/words.txt" in names_of(f"{folder}/nets/deep.py:task")


def test_what_is_installed_stays() -> None:
    assert sources_of("json:task") is None and sources_of("torch.nn:task") is None
    assert sources_of("no_such_module:task") is None


def test_too_much_is_refused_with_the_names_of_the_largest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_BYTES", 2000)
    (folder / "words.txt").write_bytes(bytes(3000))
    found = sources_of(f"{folder}/task.py")
    assert found is not None and set(found.files) == {"work/task.py"}
    assert "the largest are work/words.txt (0.0 MB)" in found.objection and ".shoalignore" in found.objection


def test_hosts_say_what_they_lack(folder: Path) -> None:
    found = sources_of(f"{folder}/task.py")
    assert found is not None and lacking(found.root, found.files) == []
    (folder / "words.txt").write_text("others")
    (folder / "nets" / "deep.py").unlink()
    assert set(lacking(found.root, found.files)) == {"work/words.txt", "work/nets/deep.py"}
    again = sources_of(f"{folder}/task.py")
    assert again is not None and again.digest != found.digest


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 5])
def test_files_arrive_whole(size: int, tmp_path: Path) -> None:
    file, there = tmp_path / "file", tmp_path / "there"
    file.write_bytes(bytes(number % 251 for number in range(size)))
    arrivals, pieces = Arrivals(there), list(cut(file.open("rb"), "a/b"))
    for piece in pieces[:-1]:
        arrivals.take(piece)
    assert not (there / "a/b").exists()
    arrivals.take(pieces[-1])
    assert (there / "a/b").read_bytes() == file.read_bytes()
    assert [one.name for one in (there / "a").iterdir()] == ["b"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../elsewhere", "a/../../b", ""])
def test_no_file_lies_elsewhere(name: str, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="would not lie in"):
        Arrivals(tmp_path / "there").take(FilePiece(name=name, offset=0, data=b"x", is_last=True))
