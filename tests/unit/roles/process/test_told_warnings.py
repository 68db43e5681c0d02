"""Warnings of a worker reach the terminal, each once."""

from __future__ import annotations

import os
import warnings

import pytest

import shoal
from shoal.roles.process.told_warnings import warnings_told


def warn(text: str, filename: str = "/env/site-packages/torch/nn/odd.py") -> None:
    warnings.showwarning(UserWarning(text), UserWarning, filename, 7)


def test_each_is_told_once_on_one_line_and_all_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    told, logged = [], []
    monkeypatch.setattr(warnings, "showwarning", lambda *shown: logged.append(shown))
    before = warnings.showwarning
    with warnings_told(told.append):
        for text in ("slow\n  path (Triggered internally at /x.cpp:3.)", "slow path", "other", "w" * 1000):
            warn(text)
        warn("ours", f"{shoal.__path__[0]}/feed/feed.py")
    assert warnings.showwarning is before
    assert told[:2] == ["UserWarning: slow path (torch/nn/odd.py:7)", "UserWarning: other (torch/nn/odd.py:7)"]
    assert len(told) == 3 and len(told[2]) < 400
    assert len(logged) == 5


def test_who_is_forked_meanwhile_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no line of its own, as loaders have none."""
    told: list[str] = []
    with warnings_told(told.append):
        monkeypatch.setattr(os, "getpid", lambda: -1)
        warn("slow")
    assert told == []


def test_what_python_itself_shows_is_told() -> None:
    told: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with warnings_told(told.append):
            warnings.warn("from here", RuntimeWarning, stacklevel=1)
    (text,) = told
    assert text.startswith("RuntimeWarning: from here (") and __file__ in text
