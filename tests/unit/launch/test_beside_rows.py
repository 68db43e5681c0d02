"""What `predict` shows while its rows go to standard output."""

from __future__ import annotations

import io

import pytest

from shoal.launch.saved import _beside_rows
from shoal.observe import PlainSink, ProgressSink


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("asked", "shown"), [(None, PlainSink), (False, PlainSink), (True, ProgressSink)], ids=str
)
def test_no_bar_is_drawn_over_rows_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, shown: type
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    assert type(_beside_rows(asked, None)) is shown
