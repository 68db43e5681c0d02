"""Where a job begins: read from a checkpoint, or from a saved model, as whole as this worker needs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from shoal.checkpoint.aside import split_aside
from shoal.checkpoint.folder import read_folder
from shoal.checkpoint.listing import read_manifest
from shoal.checkpoint.model_file import load_tensors
from shoal.checkpoint.snapshot import Snapshot
from shoal.checkpoint.stored import ModelReader, PartReader, StoredTensor
from shoal.errors import CheckpointError
from shoal.ledger.book import Book
from shoal.model.parking.parked import parked_from
from shoal.model.start import Start
from shoal.observe.checkpoint_names import is_checkpoint
from shoal.spec import Job

Tensors = Mapping[str, torch.Tensor]


def read_start(job: Job) -> Start:
    """What `options` name: a checkpoint to resume, or one to take the weights of.

    Where the model is cut, tensors stay in their files until somebody asks for them: no worker needs all.
    """
    resumed, model_of = job.options.get("resume"), job.options.get("from")
    stays = job.conduct.is_never_whole
    if resumed:
        return start_of(_parked_snapshot(Path(resumed)) if stays else read_folder(_checked(Path(resumed))))
    if model_of:
        return Start(model=_parked_weights(Path(model_of)) if stays else load_weights(Path(model_of)))
    return Start()


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """A model's values: of a checkpoint's folder, or of a saved model's file."""
    return dict(read_folder(_checked(path), ["model"]).model) if path.is_dir() else load_tensors(path)


def start_of(snapshot: Snapshot) -> Start:
    """Where a run begins that goes on from this state."""
    book = snapshot.facts.get("book")
    optimizer, aside = split_aside(snapshot.optimizer)
    return Start(
        step=snapshot.step,
        model=snapshot.model,
        optimizer=optimizer,
        aside=aside,
        losses=snapshot.losses.tolist(),
        evaluations={int(step): results for step, results in snapshot.facts.get("evaluations", {}).items()},
        sizes=(Book.from_plain(book).cuts.at(snapshot.step) or ()) if book else (),
        facts=snapshot.facts,
    )


def _parked_snapshot(path: Path) -> Snapshot:
    manifest = read_manifest(_checked(path))
    return Snapshot(
        step=manifest.step,
        model=_parked(PartReader(path, "model", manifest).tensors()),
        optimizer=_parked(PartReader(path, "optimizer", manifest).tensors()),
        losses=read_folder(path, ["losses"]).losses,
        rng={},
        facts=manifest.facts,
    )


def _parked_weights(path: Path) -> Tensors:
    if not path.is_dir():
        return _parked(ModelReader(path).tensors())
    return _parked(PartReader(path, "model", read_manifest(_checked(path))).tensors())


def _parked(stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    return {name: parked_from(tensor) for name, tensor in stored.items()}


def _checked(path: Path) -> Path:
    if not is_checkpoint(path):
        raise CheckpointError(
            f"There is no whole checkpoint at {path}; `shoal checkpoint ls` lists those there are."
        )
    return path
