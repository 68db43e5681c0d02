"""A trained model to take away: as a module, or in a form that others read."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.checkpoint.model_stream import save_tensors
from shoal.errors import SpecError
from shoal.feed.feed import Feed
from shoal.model.replica import Replica
from shoal.model.start import Start
from shoal.observe.disk import writing
from shoal.roles.inference.model_inputs import ModelInputs
from shoal.roles.inference.reading import for_use
from shoal.roles.loading.start import load_weights
from shoal.roles.loading.task import load_task
from shoal.spec import Job, Task

_NUM_EXAMPLES = 2
"""Samples that a model is shown: of a single one it could not be told which size is that of the batch."""


def load_module(job: Job, saved: Path) -> nn.Module:
    """The module that the job's task makes, with the weights that were saved there; in `eval` mode, on the CPU."""
    return _load(for_use(load_task(job)), saved)


def export(to: str, job: Job, saved: Path, out: Path) -> None:
    """Write a saved model in one of the forms for which there is a writer."""
    _WRITERS[to](job, saved, out)


def _load(task: Task, saved: Path) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers go on as if nothing had been made
        start = Start(model=load_weights(saved))
        return Replica(task, sample=lambda: _example(task), start=start).module.eval()


def _example(task: Task) -> Any:
    """A batch of the train set."""
    train = task.dataset("train")
    return Feed(task, train).batch(np.arange(min(_NUM_EXAMPLES, len(train))))


def _write_safetensors(job: Job, saved: Path, out: Path) -> None:
    save_tensors(out, load_weights(saved))


def _write_torch(job: Job, saved: Path, out: Path) -> None:
    weights, part = load_weights(saved), out.with_name(f".{out.name}.part")
    with writing(out.parent):
        torch.save(weights, part)
        part.replace(out)


def _write_huggingface(job: Job, saved: Path, out: Path) -> None:
    module = load_module(job, saved)
    save = getattr(module, "save_pretrained", None)
    if save is None:
        raise SpecError(
            f"export --to huggingface needs a model with save_pretrained, as those of transformers have, but this "
            f"task's is a {type(module).__name__}; use --to safetensors, or derive it from "
            "huggingface_hub.PyTorchModelHubMixin."
        )
    with writing(out.parent):
        save(out)


def _write_onnx(job: Job, saved: Path, out: Path) -> None:
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise SpecError(
            f"export --to onnx needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed; install what it takes: pip install shoal[onnx]"
        )
    task = for_use(load_task(job))
    module = _load(task, saved)
    inputs = ModelInputs(module).of(_example(task))
    if isinstance(inputs, dict):
        named = {name: _any_number_of_samples(value) for name, value in inputs.items()}
        torch.onnx.export(module, (), out, kwargs=inputs, dynamic_shapes=named, verbose=False)
    else:
        args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        shapes = tuple(map(_any_number_of_samples, args))
        torch.onnx.export(module, args, out, dynamic_shapes=shapes, verbose=False)


def _any_number_of_samples(value: Any) -> Any:
    """What torch is told of an argument's shape: its first size may be another."""
    return {0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) and value.dim() else None


_WRITERS: dict[str, Callable[[Job, Path, Path], None]] = {
    "huggingface": _write_huggingface,
    "onnx": _write_onnx,
    "safetensors": _write_safetensors,
    "torch": _write_torch,
}
