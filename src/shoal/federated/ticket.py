"""What a client needs to take part: where the server is, and the key that lets it in."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.comm.security import RunKey
from shoal.errors import SpecError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MOST_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class ClientTicket:
    """A ticket's content."""

    address: str
    key: str = field(repr=False)

    def save(self, path: Path) -> None:
        """In a file that nobody else could read at any moment."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SpecError(
                f"The ticket cannot be written to {path} ({error.strerror}); name a file in a folder "
                "that is there."
            ) from None
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            json.dump(asdict(self), file)

    @classmethod
    def load(cls, path: Path) -> ClientTicket:
        """What `save` wrote; refused where others could have read or written it."""
        try:
            with path.open("rb") as file:
                status, raw = os.fstat(file.fileno()), file.read(_MOST_BYTES)
        except OSError as error:
            raise SpecError(f"The ticket cannot be read from {path} ({error.strerror}).") from None
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
            raise SpecError(
                f"The ticket {path} must be yours alone (mode 0600), found mode "
                f"{stat.S_IMODE(status.st_mode):04o} and user {status.st_uid}; others may have seen its key, so "
                "have a new one made."
            )
        try:
            found = cls(**json.loads(raw))
            RunKey.from_text(found.key)
        except (ValueError, TypeError, AttributeError):
            raise SpecError(
                f"The file {path} is no ticket; copy the one that `shoal federated serve` wrote."
            ) from None
        return found
