"""What tests of units have in common."""

from __future__ import annotations

import pytest

from shoal.model import gathering


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom `gather` asks is a matter of the process, and a run has its own; tests share one."""
    monkeypatch.setattr(gathering, "_asked", None)
