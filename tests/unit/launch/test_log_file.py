"""A log on a disk that refuses loses lines, and nothing else."""

import os
from pathlib import Path

from shoal.launch.log_file import open_log


def test_what_is_printed_on_a_full_disk_is_lost_and_ends_nobody():
    fd = os.open("/dev/full", os.O_WRONLY)
    log = open_log(fd)
    for _ in range(3):
        print("step", file=log)
    log.flush()
    os.close(fd)


def test_what_is_missing_is_told_once_there_is_room(tmp_path: Path):
    path = tmp_path / "rank-0.log"
    full, roomy = os.open("/dev/full", os.O_WRONLY), os.open(path, os.O_WRONLY | os.O_CREAT)
    fd = os.dup(roomy)
    log = open_log(fd)
    print("one", file=log)
    os.dup2(full, fd)
    print("two", file=log)
    os.dup2(roomy, fd)
    print("three", file=log)
    assert path.read_text() == "one\n[4 bytes could not be written here: No space left on device]\nthree\n"
    for each in (fd, full, roomy):
        os.close(each)
