"""What a failing process says: one sentence, and the traceback only where the fault is not yet clear."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path
from types import TracebackType

from shoal.errors import CommTimeout, Diverged, PeerLost, ShoalError, SpecError
from shoal.observe.happenings import Failed
from shoal.spec import World

_SHOAL = f"{Path(__file__).resolve().parents[2]}/"
_PYTHON_LOADERS = ("<frozen importlib", "<frozen runpy", "<frozen zipimport")
_NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "out of memory")


def describe_failure(error: Exception, world: World) -> Failed:
    """What to tell of this error."""
    who = f"{world.role.capitalize()} {world.global_rank}"
    message, details = f"{who} failed: {_one_line(error)}", ""
    clear = True
    if isinstance(error, ShoalError):
        message = str(error)
    elif is_memory_error(error):
        message = (
            f"{who} ran out of memory ({_one_line(error)}); use a smaller batch_size, accumulate=2 or more, "
            "or fewer workers."
        )
    else:
        details, clear = format_user_traceback(error), False
    return Failed(
        message=message,
        traceback=details,
        clear=clear,
        consequence=isinstance(error, (PeerLost, CommTimeout)),
        # A run that diverges was not asked for the impossible.
        misuse=isinstance(error, SpecError) and not isinstance(error, Diverged),
    )


def format_user_traceback(error: Exception) -> str:
    """The traceback from the user's first frame on: the frames that led there are ours and say nothing."""
    inner = error.__traceback__
    while inner is not None and _is_ours(inner):
        inner = inner.tb_next
    if inner is None and not isinstance(error, SyntaxError):
        inner = error.__traceback__  # No user frame at all: the fault is in here, so show it.
    return "".join(traceback.format_exception(type(error), error, inner))


def _is_ours(frame: TracebackType) -> bool:
    filename = frame.tb_frame.f_code.co_filename
    return filename.startswith(_PYTHON_LOADERS) or filename.startswith(_SHOAL)


def is_memory_error(error: BaseException) -> bool:
    """Whether the system has refused more memory."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)


def _one_line(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
