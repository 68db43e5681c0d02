"""What a server tells clients of how they are to train, when they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shoal.errors import SpecError
from shoal.spec.checks import require_count


@dataclass(frozen=True, kw_only=True)
class ClientCourse:
    """It is not in the ticket, of which clients keep copies: a server that goes on may be asked for more."""

    steps: int
    """That a client takes from one version on, before it brings how far it has come."""
    versions: int
    """After so many all is over."""

    def __post_init__(self) -> None:
        require_count("ClientCourse", "steps", self.steps)
        require_count("ClientCourse", "versions", self.versions)

    def notice(self) -> dict[str, int]:
        """What `of` reads."""
        return asdict(self)

    @classmethod
    def of(cls, notice: Mapping[str, int]) -> ClientCourse:
        """What a server has told."""
        try:
            return cls(**notice)
        except TypeError:
            raise SpecError(
                f"The server tells {sorted(notice)} in place of steps and versions, so it is none for clients "
                "from outside; let `shoal federated serve` of the same version of Shoal be the server."
            ) from None
