"""What the doctor has a forked worker do: wake another process through shared memory, and time it.

Run as a script; it writes `{"wake_s": seconds, "accelerator": [kind, number]}` to the file that it is given.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from pathlib import Path

ROUNDS = 100


def measure_wake_s(rounds: int = ROUNDS) -> float:
    """The mean time for which a process waits for an answer from another, halved."""
    from shoal.arena import Counters

    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        counters = Counters(memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        pid = os.fork()
        if pid == 0:
            for number in range(1, rounds + 1):
                counters.wait(0, number)
                counters.publish(1, number)
            os._exit(0)
        begin = time.perf_counter()
        for number in range(1, rounds + 1):
            counters.publish(0, number)
            counters.wait(1, number)
        seconds = time.perf_counter() - begin
        os.waitpid(pid, 0)
        del counters
    return seconds / rounds / 2


def find_accelerator() -> tuple[str, int]:
    """What torch says that it can compute on besides processors, whoever has taught it to; `""`: nothing."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return ("", 0) if found is None else (found.type, torch.accelerator.device_count())


if __name__ == "__main__":
    found = {"wake_s": measure_wake_s(), "accelerator": find_accelerator()}
    Path(sys.argv[1]).write_text(json.dumps(found))
