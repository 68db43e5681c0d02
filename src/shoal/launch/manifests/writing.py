"""Manifests as YAML: to a stream, or a file for each object in a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from shoal.errors import LaunchError, SpecError
from shoal.launch.manifests.order import PodOrder


def documents_of(order: PodOrder) -> list[dict[str, Any]]:
    """The objects of a run; SpecError where what they are made of is not installed."""
    try:
        from shoal.launch.manifests.kinds import documents
    except ImportError as error:
        raise SpecError(
            f"Manifests are made of typed models, and {error.name} is missing; pip install shoal[kubernetes]."
        ) from None
    return documents(order)


def write_stream(documents: Sequence[dict[str, Any]], stream: TextIO) -> None:
    """All of them, one behind the other, as `kubectl apply -f -` reads them."""
    import yaml

    yaml.safe_dump_all(documents, stream, sort_keys=False, explicit_start=True)


def write_folder(documents: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """A file for each, in the order to apply them; nobody else can read them, for one holds the run's key."""
    import yaml

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, document in enumerate(documents):
            path = folder / f"{number}-{document['kind'].lower()}.yaml"
            path.unlink(missing_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                yaml.safe_dump(document, file, sort_keys=False)
            written.append(path)
    except OSError as error:
        raise LaunchError(
            f"Manifests cannot be written to {folder} ({error.strerror}); name another folder."
        ) from None
    return written
