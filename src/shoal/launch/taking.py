"""Taking a run's model away: as a module of this process, or as a file for others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import CheckpointError, SpecError, unknown
from shoal.launch.inside import refuse_inside
from shoal.observe import RunFolder
from shoal.observe.checkpoint_names import find_checkpoint, names_checkpoint
from shoal.observe.run_folder import AVERAGE_MODEL, BEST_MODEL, PARTIAL_MODEL
from shoal.observe.trust import trusted_job

if TYPE_CHECKING:
    from torch import nn

ENDINGS = {"huggingface": "", "onnx": ".onnx", "safetensors": ".safetensors", "torch": ".pt"}
"""By format: how the names of its files end; that of transformers is a folder."""
_WEIGHTS_ALONE = ("safetensors", "torch")
"""Formats for which none of the task's code is run."""
_BESIDES = (AVERAGE_MODEL, BEST_MODEL, PARTIAL_MODEL)
"""Models of a run that are not what it ended with: whoever names one knows what it is."""


def load_module(run: str | Path, *, trust: bool = False) -> nn.Module:
    """The module that a run's task makes, with the weights of that run, or of the checkpoint that `run` names."""
    from shoal.roles.inference import module

    folder, saved = find_model(str(run))
    return module.load_module(trusted_job(folder, trust=trust), saved)


def export(run: str | Path, to: str, out: str | Path | None = None, *, trust: bool = False) -> Path:
    """Write a run's model for other programs to read; where it is.

    `to` is `safetensors` or `torch` (the weights by name), `onnx` (the computation, too), or `huggingface` (what
    `save_pretrained` of the task's model writes). By default it is called after the run, in the working folder.
    """
    refuse_inside("export")
    if to not in ENDINGS:
        raise unknown("export: the format", to, ENDINGS)
    folder, saved = find_model(str(run))
    path = Path(f"{folder.name}{ENDINGS[to]}" if out is None else out).absolute()
    if not path.parent.is_dir():
        raise SpecError(f"export: {str(path)!r} should be written, but there is no folder {path.parent}.")
    job = trusted_job(folder, trust=trust or to in _WEIGHTS_ALONE)
    from shoal.roles.inference import module

    module.export(to, job, saved, path)
    return path


def find_model(run: str) -> tuple[RunFolder, Path]:
    """A run and its final model, or that of the checkpoint which `run` names."""
    if names_checkpoint(run):
        model = find_checkpoint(run)
        return RunFolder.open(model.parent.parent), model
    if (named := Path(run).absolute()).name in _BESIDES and named.is_file():
        return RunFolder.open(named.parent), named
    folder = RunFolder.open(run)
    if not folder.model.is_file():
        raise CheckpointError(folder.explain_no_model())
    return folder, folder.model
