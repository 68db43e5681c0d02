"""Lets the supervisor see where a process is, even one that hangs."""

from __future__ import annotations

import faulthandler
import os
import signal

from shoal.comm.channel import Channel
from shoal.comm.words import StacksOffered

STACKS_SIGNAL = signal.SIGRTMIN + 9
"""Nobody's convention: users' code may have its own plans for SIGUSR1 and SIGUSR2."""


def offer_stacks(channel: Channel) -> None:
    """From now on the stacks of all threads are written to a file whenever a signal comes; tell where.

    The handler needs neither the main thread nor Python's lock. The file has no name in any file system: it is
    read through this process, and gone with it.
    """
    fd = os.memfd_create("shoal-stacks")
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)
    channel.send(StacksOffered(signal=int(STACKS_SIGNAL), pid=os.getpid(), fd=fd).as_message())
