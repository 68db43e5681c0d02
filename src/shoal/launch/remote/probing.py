"""Signs of life of an agent, in a file that a probe reads: whether it lives, and whether it has joined a run."""

from __future__ import annotations

import json
import os
import time
from enum import StrEnum
from pathlib import Path

from shoal.errors import LaunchError

SIGN_VARIABLE = "SHOAL_SIGN"
"""The file in which an agent leaves its signs of life; none: it leaves none."""
_STALE_S = 20.0
"""An agent that has left no sign for so long is stuck: it leaves one every second, and starting a zygote takes a
few."""


class AgentState(StrEnum):
    """What an agent does."""

    CALLING = "calling"
    """It looks for its supervisor."""
    JOINED = "joined"
    """It takes part in a run."""


def leave_sign(state: AgentState, path: str | None = None) -> None:
    """Say that this agent lives, where somebody wants to know. What the disk does to it is no agent's end."""
    path = path or os.environ.get(SIGN_VARIABLE)
    if not path:
        return
    text = json.dumps({"state": state, "process": os.getpid(), "at": time.monotonic()})
    unfinished = Path(f"{path}.{os.getpid()}")
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="ascii")
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)


def probe(path: str, *, wants_joined: bool) -> str:
    """What the agent of this host does; LaunchError where it is not alive, or not in the state that is wanted."""
    try:
        sign = json.loads(Path(path).read_text(encoding="ascii"))
        state, process, at = AgentState(sign["state"]), int(sign["process"]), float(sign["at"])
    except FileNotFoundError:
        raise LaunchError(f"No agent has left a sign of life in {path} yet.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"The agent's sign of life in {path} cannot be read ({error}).") from None
    if not Path(f"/proc/{process}").exists():
        raise LaunchError(f"The agent of this host, process {process}, has ended.")
    if (silent_s := time.monotonic() - at) > _STALE_S:
        raise LaunchError(f"The agent of this host, process {process}, has been silent for {silent_s:.0f} s.")
    if wants_joined and state is not AgentState.JOINED:
        raise LaunchError(f"The agent of this host is {state}: it takes part in no run yet.")
    return state
