"""How the command line tells that something went wrong: one sentence, and an exit status."""

from __future__ import annotations

from shoal.errors import FAILED, INTERRUPTED, MISUSED, Interrupted, ShoalError, SpecError


def show_failure(error: ShoalError) -> int:
    """Tell on standard error what went wrong; returns the exit status."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    if isinstance(error, Interrupted):
        console.print(Text(str(error), style="yellow"), soft_wrap=not console.is_terminal)
        return status_of(error)
    # Whole lines for whoever reads this with a program; a person's terminal breaks them between words.
    console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=not console.is_terminal)
    if details := getattr(error, "details", ""):
        console.print(Text(f"\n{details.rstrip()}", style="dim"), soft_wrap=True)
    return status_of(error)


def status_of(error: ShoalError) -> int:
    """The exit status that tells of it."""
    if isinstance(error, Interrupted):
        return INTERRUPTED
    return MISUSED if isinstance(error, SpecError) else getattr(error, "exit_code", FAILED)
