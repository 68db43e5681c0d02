"""A run that was put at a URL, fetched to go on here."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

from shoal.checkpoint.wholeness import check_folder
from shoal.errors import CheckpointError, SpecError
from shoal.launch.archive.putting import TASK_FILE
from shoal.launch.archive.store import UrlFolder
from shoal.observe import RunFolder
from shoal.observe.checkpoint_names import MANIFEST, step_of
from shoal.observe.disk import writing


def fetch_run(text: str, root: str | Path, report: Callable[[str], None], *, trust: bool) -> str:
    """Have the run that `URL` or `URL@STEP` names under `root`, with its newest whole checkpoint, or that of a
    step; its folder there. SpecError, in a sentence, where that cannot be."""
    url, step = _parts(text)
    name = url.rpartition("/")[2]
    if not trust:
        raise SpecError(
            f"Whoever can write at {url} decides which code is run here; say --trust (in Python trust=True) if "
            "you trust them."
        )
    folder = Path(root).absolute() / name
    if folder.exists():
        raise SpecError(
            f"Run {name!r} is in {folder} already; go on with --resume {name}, or have it fetched to another "
            "folder with --runs."
        )
    store = UrlFolder(url)
    with writing(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        _fetch(store, made, step, report)
        _have_task(RunFolder(made), folder)
        made.replace(folder)
    except OSError as error:
        raise SpecError(f"Run {name!r} cannot be fetched from {url}: {error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return str(folder)


def _parts(text: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(.*[^/])/*@(\d+)", text, re.ASCII)
    return (found[1], int(found[2])) if found else (text.rstrip("/"), None)


def _fetch(store: UrlFolder, folder: Path, step: int | None, report: Callable[[str], None]) -> None:
    names = store.names()
    if "job.json" not in names:
        raise SpecError(f"There is no run at {store.url}; name the folder that has its job.json.")
    steps = sorted(
        found
        for name in names
        if name.startswith("checkpoints/") and name.endswith(f"/{MANIFEST}")
        if (found := step_of(Path(name).parent)) is not None
    )
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise SpecError(f"{store.url} has no checkpoint of step {step}; there are those of steps {known}.")
    for one in reversed(steps) if step is None else (step,):
        if _fetch_checkpoint(store, folder, [name for name in names if step_of(Path(name).parent) == one], report):
            break
    else:
        raise CheckpointError(f"{store.url} has no whole checkpoint to resume from.")
    for name in names:
        if not name.startswith("checkpoints/"):
            store.get(name, _inside(folder, name))


def _fetch_checkpoint(store: UrlFolder, folder: Path, names: list[str], report: Callable[[str], None]) -> bool:
    """Whether it is whole."""
    for name in names:
        store.get(name, _inside(folder, name))
    path = (folder / names[0]).parent
    try:
        check_folder(path)
    except CheckpointError as error:
        report(f"{error} It was skipped.")
        shutil.rmtree(path)
        return False
    return True


def _inside(folder: Path, name: str) -> Path:
    """A file of the run, wherever somebody says that it is."""
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise SpecError(f"The run has a file called {name!r}, which is no name in a run's folder.")
    return folder / name


def _have_task(made: RunFolder, folder: Path) -> None:
    """Let the job name the code that came with it, where what it names is not here."""
    job = made.read_job()
    path = job.target.partition(":")[0]
    if not path.endswith(".py") or Path(path).is_file() or not (made.path / TASK_FILE).is_file():
        return
    target = json.loads((made.path / TASK_FILE).read_text(encoding="utf-8"))["target"]
    _inside(folder, target)
    made.write_job(replace(job, target=str(folder / "task" / target)))
