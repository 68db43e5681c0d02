"""A secure sum of clients that are processes, some of which are killed in the middle of a round."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from shoal.comm.secure_sum import SecureClient, SecureServer

CLIENTS, THRESHOLD, LENGTH, CONTEXT = 10, 6, 1000, b"round 1"
KILLED = (1, 4, 8)


def vector_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 2**64, LENGTH, dtype=np.uint64)


def be_client(number: int, line: Connection) -> None:
    """Answers one phase after the other; its vector is made here, and known to nobody else."""
    client = SecureClient(number, THRESHOLD, CONTEXT)
    line.send(client.advertise())
    line.send(client.share(line.recv()))
    line.send(client.mask(vector_of(number), line.recv()))
    line.send(client.unmask(line.recv()))


def answers(lines: dict[int, Connection]) -> dict[int, Any]:
    """What comes from each that lives."""
    found = {}
    for number, line in lines.items():
        try:
            found[number] = line.recv()
        except EOFError:
            continue
    return found


def test_three_of_ten_are_killed_in_mid_round_and_the_sum_of_the_rest_is_exact() -> None:
    context = multiprocessing.get_context("fork")
    lines, processes = dict[int, Connection](), []
    for number in range(CLIENTS):
        lines[number], theirs = context.Pipe()
        processes.append(context.Process(target=be_client, args=(number, theirs)))
        processes[-1].start()
        theirs.close()
    try:
        server = SecureServer(THRESHOLD, LENGTH, CONTEXT)
        for told in answers(lines).values():
            server.on_keys(told)
        roster = server.close_keys()
        for line in lines.values():
            line.send(roster)
        for told in answers(lines).values():
            server.on_shares(told)
        boxes = server.close_shares()
        for number in KILLED:  # they have shared their secrets, and others have masks with them
            os.kill(processes[number].pid or 0, signal.SIGKILL)
            processes[number].join()
        here = {number: line for number, line in lines.items() if number not in KILLED}
        for number, line in here.items():
            line.send(boxes[number])
        for told in answers(lines).values():
            server.on_input(told)
        stayed = server.close_inputs()
        assert stayed == here.keys()
        for line in here.values():
            line.send(stayed)
        for told in answers(here).values():
            server.on_unmasking(told)
        expected = np.sum([vector_of(number) for number in sorted(stayed)], axis=0, dtype=np.uint64)
        assert np.array_equal(server.close_unmasking(), expected)
    finally:
        for process in processes:
            if process.is_alive() and process.exitcode is None:
                process.join(10)
            process.kill()
            process.join()
        for line in lines.values():
            line.close()
