"""Folders on a host, in the one that is its own, for what a job needs besides what is installed."""

from __future__ import annotations

CODE, RUN, FROM = "code", "run", "from"
