"""Read tensors by name, and know them by one digest; nothing is unpickled."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from shoal.arena.tensors import as_bytes
from shoal.errors import CheckpointError


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """One name for all of these: equal digests mean equal names, shapes, dtypes and bits."""
    total = xxhash.xxh3_128()
    for name in sorted(tensors):
        add_to_digest(total, name, tensors[name].detach().cpu().contiguous())
    return str(total.hexdigest())


def add_to_digest(total: xxhash.xxh3_128, name: str, tensor: torch.Tensor) -> None:
    """Take the next tensor, which lies side by side in the host's memory; names come sorted."""
    total.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
    if tensor.numel():
        total.update(as_bytes(tensor).numpy().data)


def _as_os_error(error: SafetensorError, path: Path) -> Exception:
    """safetensors hides the system's error in its text: `... (os error 28) ...`."""
    _, found, rest = str(error).partition("os error ")
    number = rest.split(")")[0].strip()
    return OSError(int(number), os.strerror(int(number)), str(path)) if found and number.isdigit() else error


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file that `save_tensors` wrote, and check that it still is what was written."""
    if not path.is_file():
        raise CheckpointError(f"There is no saved model at {path}; train first, or name another run.")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            expected = (file.metadata() or {}).get("digest")
    except (SafetensorError, OSError) as error:
        cause = _as_os_error(error, path) if isinstance(error, SafetensorError) else error
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
            raise cause from None  # nothing is wrong with the file
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}); train or copy it again."
        ) from None
    if expected is not None and digest(tensors) != expected:
        raise CheckpointError(f"{path} was changed since it was written: its digest is not {expected}.")
    return tensors
