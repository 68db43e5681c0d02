"""Faults done to a run on hosts with networks of their own, one after the other; each is seen to have happened."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from helpers.namespaces import NamespaceStarter
from shoal.coordinator.store import unpack_state
from shoal.observe import Event

GUARD_S = 180.0
_LOOK_EVERY_S = 0.1
_NAMES = {"worker": "shoal-worker-", "server": "shoal-server-", "coordinator": "shoal-coordina"}
"""As the kernel cuts them."""


class Havoc:
    """Strikes a run with servers whenever all that it needs is there: so each fault has to be outlived by itself.

    `faults`: `worker`, `server` and `coordinator` (killed), `link` (cut until its host is given up, and healed),
    `host` (lost with all that it has; one without anything comes in its place), `coordinator's host` (the same).
    """

    def __init__(
        self, folder: Path, faults: Sequence[str], *, shape: dict[str, int], every_s: float = 0.0
    ) -> None:
        """`shape`: how many workers and servers there are when all is well."""
        self.done: Counter[str] = Counter()
        """Faults that were outlived, by kind."""
        self.error: BaseException | None = None
        self.over = threading.Event()
        self._folder, self._faults, self._shape, self._every_s = folder, faults, shape, every_s
        self._told: Counter[str] = Counter()
        self._chance = random.Random(14)
        self._starter: NamespaceStarter | None = None
        self._thread = threading.Thread(target=self._run)

    def on_event(self, event: Event, starter: NamespaceStarter) -> None:
        """For `run_in_namespaces`."""
        self._told[event.kind] += 1
        if event.kind == "steps" and self._starter is None:
            self._starter = starter
            self._thread.start()

    def close(self) -> None:
        """The run is over; what went wrong here is raised."""
        self.over.set()
        if self._starter is not None:
            self._thread.join(GUARD_S)
            assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        begun = time.monotonic()
        try:
            for number, fault in enumerate(self._faults, 1):
                self._await_mended()
                self.over.wait(max(0.0, begun + number * self._every_s - time.monotonic()))
                assert not self.over.is_set(), f"the run was over before fault {number}, {fault}"
                self._strike(fault)
                self.done[fault] += 1
            self._await_mended()
        except BaseException as error:
            self.error = error
        finally:
            assert self._starter is not None
            for name in self._names if self.error is not None else ():
                self._starter.network.heal(self._starter.host(name))  # So that the run can end.
            (self._folder.parent / "hurry").touch()

    def _strike(self, fault: str) -> None:
        match fault:
            case "worker" | "server" | "coordinator":
                self._kill(fault)
            case "link":
                self._lose_host(self._chance.choice(self._names), for_good=False)
            case "host":
                self._lose_host(self._chance.choice(self._names), for_good=True)
            case "coordinator's host":
                ((_, name),) = self._living("coordinator")
                self._lose_host(name, for_good=True)

    def _kill(self, role: str) -> None:
        term, state = self._saved()
        before, lost = {row[0] for row in state["members"]}, self._told["lost"]
        victims = self._living(role)
        os.kill(victims[self._chance.randrange(len(victims))][0], signal.SIGKILL)
        self._await(lambda: self._told["lost"] > lost, f"the loss of a {role} was told")
        if role == "coordinator":
            self._await(lambda: self._saved()[0] > term, "another coordinates")
        else:
            self._await(lambda: bool(before - self._nodes()), f"a {role} was missed")

    def _lose_host(self, name: str, *, for_good: bool) -> None:
        assert self._starter is not None
        there = self._nodes_at(name)
        lost, added = self._told["host"], self._told["host_added"]
        if for_good:
            self._starter.kill(name)
        else:
            self._starter.network.cut(self._starter.host(name))
        self._await(lambda: self._told["host"] > lost, f"the loss of {name} was told")
        self._await(lambda: not there & self._nodes(), f"all that was on {name} was missed")
        if for_good:
            self._starter.revive(name)
        else:
            self._starter.network.heal(self._starter.host(name))
        self._await(lambda: self._told["host_added"] > added, f"{name} was there again")

    # What there is.

    @property
    def _names(self) -> Sequence[str]:
        assert self._starter is not None
        return self._starter.names

    def _living(self, role: str) -> list[tuple[int, str]]:
        """The processes of a role, with their hosts; waits until there are any."""
        found: list[tuple[int, str]] = []

        def look() -> bool:
            assert self._starter is not None
            found.clear()
            for name in self._names:
                for pid in self._starter.host(name).processes():
                    with suppress(psutil.NoSuchProcess):
                        if psutil.Process(pid).name().startswith(_NAMES[role]):
                            found.append((pid, name))
            return bool(found)

        self._await(look, f"there is a {role}")
        return sorted(found)

    def _saved(self) -> tuple[int, dict[str, Any]]:
        """What the coordinator has saved last, and under which term."""
        deadline = time.monotonic() + GUARD_S
        while True:
            database = sqlite3.connect(self._folder / "coordinator.sqlite", timeout=GUARD_S)
            try:
                term, packed = database.execute("SELECT term, state FROM coordinator").fetchone()
                return term, unpack_state(packed)
            except sqlite3.OperationalError:  # Who was killed in the middle of a transaction is being cleaned up.
                assert time.monotonic() < deadline
                time.sleep(_LOOK_EVERY_S)
            finally:
                database.close()

    def _nodes(self) -> set[int]:
        return {row[0] for row in self._saved()[1]["members"]}

    def _nodes_at(self, name: str) -> set[int]:
        assert self._starter is not None
        address = self._starter.host(name).address
        return {row[0] for row in self._saved()[1]["members"] if f"//{address}:" in row[3]}

    def _await_mended(self) -> None:
        """Until everybody is there, every shard has its copy on another host, and training goes on."""
        self._await(self._is_whole, "everybody was replaced, and every shard has a copy on another host")
        told = self._told["steps"]
        self._await(lambda: self._told["steps"] > told, "training went on")

    def _is_whole(self) -> bool:
        _, state = self._saved()
        members = {row[0]: row for row in state["members"]}
        roles = Counter(str(row[1]) for row in members.values())
        return roles == self._shape and all(
            filled and {primary, backup} <= members.keys() and members[primary][4] != members[backup][4]
            for _, primary, backup, filled, _ in state["shards"]
        )

    def _await(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + GUARD_S
        while not holds():
            assert not self.over.is_set(), f"the run ended before {what}"
            assert time.monotonic() < deadline, f"waited {GUARD_S:.0f} s in vain until {what}"
            time.sleep(_LOOK_EVERY_S)
