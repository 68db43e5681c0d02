"""The command line: one file per verb.

What takes longest is started first: a zygote imports torch in a process of its own while this one still
imports what it needs to read the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from shoal.launch.engines.found import guess_local_rank
from shoal.launch.owner import ZYGOTE_VARIABLE, start_zygote

VERBS_WITH_WORKERS = ("train", "evaluate", "predict", "run", "verify", "bench")


def main() -> None:
    """The `shoal` command."""
    # Modules beside the user's files may be named as targets; last, so that they hide none of ours.
    sys.path.append(os.getcwd())
    zygote = start_zygote() if needs_zygote(sys.argv[1:]) else None
    try:
        from shoal.cli.app import run

        status = run(sys.argv[1:], zygote)
    finally:
        if zygote is not None:
            zygote.close()
    sys.exit(status)


def needs_zygote(words: Sequence[str]) -> bool:
    """Whether this command line will want workers that no running zygote provides."""
    if not words or words[0] not in VERBS_WITH_WORKERS or os.environ.get(ZYGOTE_VARIABLE):
        return False
    # Behind a script's name, --help is the script's.
    ours = words[1:2] if words[0] == "run" else words[1:]
    if {"--help", "-h"} & set(ours):
        return False
    # Of processes that a launcher has started, the first of each host has workers; the others wait.
    return words[0] != "train" or guess_local_rank(os.environ) == 0


__all__ = ["VERBS_WITH_WORKERS", "main", "needs_zygote"]
