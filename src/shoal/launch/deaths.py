"""Why a process ended, as far as the system knows."""

from __future__ import annotations

import signal

from shoal.launch.messages import Ended

_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def explain_death(name: str, end: Ended) -> str:
    """One sentence about a process that ended without a word of its own."""
    who, code = name.capitalize(), end.exit_code
    where = f" Its output is in {end.log_name}." if end.log_name else ""
    if end.lost_host:
        return f"{who} was on host {end.lost_host}, which was lost."
    if code >= 0:
        return f"{who} ended with exit code {code} before its work was done.{where}"
    if end.ran_out_of_memory:
        return (
            f"{who} was killed because memory ran out ({signal_name(-code)}); use a smaller batch_size, "
            f"accumulate=2 or more, or fewer workers.{where}"
        )
    if -code in _CRASHES:
        return f"{who} crashed in native code ({signal_name(-code)}).{where}"
    return f"{who} was killed from outside ({signal_name(-code)}).{where}"


def signal_name(signum: int) -> str:
    """`SIGKILL` for 9, and so on."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
