"""A folder at a URL: of any kind of store that fsspec knows, which only this file imports."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoal.errors import SpecError


def is_url(text: str) -> bool:
    """Whether this names a store, and no path or run of this machine."""
    return "://" in text


class UrlFolder:
    """What lies under a URL, by paths relative to it. What goes wrong is an `OSError`, with the store's words."""

    def __init__(self, url: str) -> None:
        """SpecError, in a sentence, where no such store can be used here."""
        if not is_url(url):
            raise SpecError(f"archive={url!r} is no URL; write one as s3://bucket/runs or file:///folder.")
        if urlsplit(url).password:
            raise SpecError(
                "archive: the URL has a password in it, which would be written into job.json; leave it to the "
                "settings of the store's own library."
            )
        if find_spec("fsspec") is None:
            raise SpecError("archive= needs fsspec, which is not installed here; pip install shoal[fsspec].")
        import fsspec

        try:
            self._store, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise SpecError(f"archive={url} cannot be used: {error}") from None
        self.url = url.rstrip("/")
        self.heard_at = time.monotonic()
        """When the store has last taken or given something."""

    def put(self, name: str, file: Path) -> None:
        """Have this file there, in place of what was."""
        path = self._path(name)
        self._do(lambda: self._store.makedirs(path.rpartition("/")[0], exist_ok=True))
        self._do(lambda: self._store.put_file(str(file), path, callback=_pulse(self)))

    def get(self, name: str, file: Path) -> None:
        """Have what lies there in this file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._do(lambda: self._store.get_file(self._path(name), str(file), callback=_pulse(self)))

    def read(self, name: str) -> bytes | None:
        """What lies there; None where nothing does."""
        try:
            found: bytes = self._do(lambda: self._store.cat_file(self._path(name)))
        except FileNotFoundError:
            return None
        return found

    def remove(self, name: str) -> None:
        """Have nothing there."""
        try:
            self._do(lambda: self._store.rm(self._path(name), recursive=True))
        except FileNotFoundError:
            pass

    def names(self) -> list[str]:
        """Of all files there."""
        self._store.invalidate_cache()
        root = self._root.strip("/")
        found = self._do(lambda: self._store.find(self._root))
        return sorted(path.strip("/").removeprefix(root).strip("/") for path in found)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _do(self, what: Callable[[], Any]) -> Any:
        try:
            done = what()
        except OSError:
            raise
        except Exception as error:  # Each store has errors of its own.
            raise OSError(f"{type(error).__name__}: {error}") from error
        self.heard_at = time.monotonic()
        return done


def _pulse(folder: UrlFolder) -> Any:
    """What fsspec tells how far a file is."""
    from fsspec.callbacks import Callback

    class Pulse(Callback):
        def call(self, *_: object, **__: object) -> None:
            folder.heard_at = time.monotonic()

    return Pulse()
