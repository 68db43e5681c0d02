"""Whose code a run folder makes this user run.

A job names its code. Whoever could write the run's folder, its `job.json` or that code decides what is executed
here, so all three must belong to this user, or to one whose code this user runs anyway: root, and the owner of
this installation of Shoal.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from shoal.errors import SpecError
from shoal.observe.run_folder import RunFolder
from shoal.spec import Job


def trusted_job(folder: RunFolder, *, trust: bool) -> Job:
    """The job of a run whose code is about to be run; `SpecError` where others could have written it."""
    job = folder.read_job()
    code = Path(job.target.partition(":")[0])
    for path in () if trust else (folder.path, folder.job, *([code] if code.suffix == ".py" else [])):
        if doubt := _doubt(path):
            raise SpecError(
                f"This would run the code that {folder.job} names, but {path} {doubt}; look at both, then say "
                "--trust (in Python trust=True) if you trust them."
            )
    return job


def _doubt(path: Path) -> str:
    """Why others could have written this; nothing where they could not."""
    try:
        status = path.stat()
    except OSError:
        return ""  # What is not there is not run; whoever looks for it says so.
    if status.st_uid not in (os.geteuid(), 0, Path(__file__).stat().st_uid):
        return f"belongs to user {_name(status.st_uid)}"
    by_group = status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)
    if status.st_mode & stat.S_IWOTH or by_group:
        return f"can be changed by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""


def _is_private(gid: int) -> bool:
    """Whether a group is this user's own, as many systems make one for each and let it write all files."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)
