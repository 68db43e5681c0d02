"""New runs that begin from old weights, and train on what is new."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from helpers.training import Train, Trained
from shoal.checkpoint.folder import read_folder
from shoal.checkpoint.model_stream import save_tensors
from shoal.errors import ShoalError
from shoal.launch.owner import ZygoteProcess
from shoal.launch.resuming import first_options
from shoal.launch.runs import new_job

SAVE = "every=100"
"""Only the last step is saved."""


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("growing_task.py"), tmp_path, zygote)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, zygote: ZygoteProcess) -> Trained:
    """A run whose weights others begin from, and that has seen all samples."""
    train = Train(Path(__file__).with_name("growing_task.py"), tmp_path_factory.mktemp("first"), zygote)
    return train("task", strategy="data", checkpoint=SAVE)


def begin(train: Train, source: Trained | str, *, skip_seen: bool = True, **said: Any) -> Trained:
    """A new run from the weights of another, of a checkpoint or of a file."""
    name = source if isinstance(source, str) else source.job.run_dir
    options = first_options(name, train.folder, print, skip_seen=skip_seen)
    args = said.pop("args", {})
    cluster = {"workers": said.pop("workers", 1), "threads": 1}
    said = {"cluster": cluster, "checkpoint": SAVE, **said}
    return train.run(new_job(f"{train.tasks}:task", args, options, said))


def read(notes: Path) -> Counter[int]:
    """How often each sample was read since the last time."""
    numbers = Counter(int(line) for line in notes.read_text().split())
    notes.unlink()
    return numbers


def test_weights_come_from_a_run_a_checkpoint_or_a_file(train: Train, tmp_path: Path) -> None:
    """The optimizer and the steps begin anew."""
    old = train("task", strategy="data", checkpoint="every=4")
    four = read_folder(Path(old.job.run_dir) / "checkpoints/step-000000004").model
    save_tensors(tmp_path / "four.safetensors", four)
    sources = ("run-1", "run-1@4", str(tmp_path / "four.safetensors"))
    steps = {"max_steps": 3}
    last, early, file = (begin(train, each, skip_seen=False, overrides=steps) for each in sources)
    assert early.digests() == file.digests() and early.digests() != last.digests()
    assert last.results["steps"] == 3
    assert last.results["loss"] < train("task", strategy="data", overrides=steps).results["loss"]
    with pytest.raises(ShoalError, match="does not fit the task's"):
        begin(train, old, skip_seen=False, args={"width": 2})


@pytest.mark.parametrize("strategy", ["data", "ps:sync=asp"])
def test_only_new_samples_are_trained_on(train: Train, tmp_path: Path, strategy: str) -> None:
    """In the middle of the data, after it has grown, and after it has grown again."""
    notes = tmp_path / "notes"
    args = {"notes": str(notes)}
    words: dict[str, Any] = {"workers": 2, "strategy": strategy}
    first = train("task", **words, **args, checkpoint=SAVE, overrides={"max_steps": 5})
    had = read(notes)
    assert len(had) == 40
    grown = begin(train, first, **words, args={**args, "count": 150})
    assert (grown.results["skipped_seen"], grown.results["samples"]) == (40, 110)
    assert grown.results["audit"]["clean"]
    assert read(notes) == Counter(set(range(150)) - set(had))
    third = begin(train, first, **words, args={**args, "count": 200}, overrides={"max_steps": 9})
    had_then = read(notes)
    rest = begin(train, third, **words, args={**args, "count": 210})
    assert read(notes) == Counter(set(range(210)) - set(had) - set(had_then))
    assert rest.results["skipped_seen"] == 40 + 72


def test_a_resumed_run_keeps_to_the_new_samples(train: Train, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    first = train("task", strategy="data", count=80, checkpoint=SAVE)
    args = {"notes": str(notes), "count": 120}
    second = begin(train, first, args=args, overrides={"max_steps": 2})
    train.resume(second, 2, overrides={"max_steps": 5})
    assert read(notes) == Counter(range(80, 120))


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({}, "--skip-seen leaves nothing to train on: the checkpoint has seen all 96 samples"),
        ({"args": {"count": 50}}, "was trained on 96 samples and now there are 50"),
        ({"overrides": {"fold": "1/2"}}, "--skip-seen and --fold both choose samples"),
        ({"source": "model.safetensors"}, "which only a checkpoint knows"),
        ({"args": {"by_weight": True}}, "and so does the task's sampler"),
    ],
)
def test_what_cannot_be_skipped_is_one_sentence(
    train: Train, first: Trained, said: dict[str, Any], text: str
) -> None:
    source = f"{first.job.run_dir}/{said.pop('source')}" if "source" in said else first
    with pytest.raises(ShoalError, match=text):
        begin(train, source, **said)


def test_of_a_sampler_nobody_knows_what_it_took(train: Train) -> None:
    first = train("task", strategy="data", checkpoint=SAVE, by_weight=True)
    with pytest.raises(ShoalError, match="trained with a sampler, a fold or a stream"):
        begin(train, first)
