"""Whether this process is one of a run's own: those must not start runs themselves.

Workers import the file that started the run. Where that calls `shoal.train` at its top, each of them would start
a run whose workers do the same, without end.
"""

from __future__ import annotations

from shoal.errors import SpecError

_members: list[str] = []
"""What this process, or the one that it was forked from, is in its run; of a process it is told once."""


def become_member(name: str) -> None:
    """From now on this process is one of a run's own."""
    _members.append(name)


def refuse_inside(purpose: str) -> None:
    """Raise where this process is one of a run's own."""
    if _members:
        raise SpecError(
            f"shoal.{purpose} was called in {_members[-1]} of a run, which imports the file that started it, and "
            'would start runs without end; put the call under `if __name__ == "__main__":`.'
        )
