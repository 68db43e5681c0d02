"""Which line of whose code a process is at, by the stacks that it wrote. No I/O."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_SHOAL = f"{Path(__file__).resolve().parents[1]}/"
_LIBRARIES = tuple(
    f"{folder}/" for name, folder in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")
)


def find_frame(text: str) -> str | None:
    """`file:line in function` of the innermost frame of the main thread that is the user's own, if there is one.

    Where all frames are a library's the innermost that is not ours; None where there are no frames.
    """
    main_thread = text.split("\n\n")[-1]  # The oldest comes last.
    frames = list(_FRAME.finditer(main_thread))
    outside = [frame for frame in frames if not frame["file"].startswith(("<", _SHOAL))]
    own = [frame for frame in outside if not frame["file"].startswith(_LIBRARIES)]
    for frame in (*own, *outside, *frames):
        return f"{frame['file']}:{frame['line']} in {frame['function']}"
    return None
