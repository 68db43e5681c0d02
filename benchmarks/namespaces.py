"""Network namespaces of this machine as hosts: each has a cable to one switch, with a network of its own.

What runs in one reaches the others, and this machine, over the switch alone, and nothing else. Cables can be cut,
healed and made slow, and what passes over the switch can be captured. Only root can do that, with `ip` and `tc`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.fresh import surroundings
from shoal.errors import LaunchError
from shoal.launch.engines.ssh import SSH_VARIABLE
from shoal.launch.owner import ZYGOTE_VARIABLE

CABLE = "eth0"
"""What a host's only network is called inside it."""
_NAMES = itertools.count()
_OURS = re.compile(r"shoal-(\d+)-.*")
_END_S = 10.0


def why_not() -> str | None:
    """Why this process cannot make namespaces; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [program for program in ("ip", "tc", "tcpdump") if shutil.which(program) is None]:
        return f"network namespaces need {' and '.join(missing)} (Debian: iproute2, tcpdump)"
    try:
        with Network(1):
            return None
    except LaunchError as error:
        return f"network namespaces cannot be made here: {error}"


@dataclass(frozen=True, kw_only=True)
class NamespaceHost:
    """A namespace, and the cable to it."""

    name: str
    address: str
    cable: str
    """The switch's end."""

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs a command there. The zygote of this machine's own network would fork processes into that."""
        return ["ip", "netns", "exec", self.name, "env", "-u", ZYGOTE_VARIABLE, *words]

    def processes(self) -> list[int]:
        """Of whatever runs there."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name).split()]


class Network:
    """A switch, and so many hosts at it; this machine itself has an address there, too."""

    def __init__(self, count: int, *, ipv6: bool = False) -> None:
        """`ipv6`: they have no other addresses."""
        _remove_those_of_the_dead()
        number = next(_NAMES)
        self._prefix = f"shoal-{os.getpid()}-{number}"
        self._short = f"s{os.getpid()}n{number}"  # names of networks have at most 15 letters
        self._switch = f"{self._short}b"
        self.address, *addresses = _addresses(count + 1, ipv6=ipv6)
        self._bits = "64" if ipv6 else "24"
        self.hosts = [
            NamespaceHost(name=f"{self._prefix}-{at}", address=address, cable=f"{self._short}h{at}")
            for at, address in enumerate(addresses)
        ]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self, host: NamespaceHost) -> None:
        """Pull a cable at the switch: nobody is told, packets go nowhere."""
        _run("ip", "link", "set", host.cable, "nomaster")

    def heal(self, host: NamespaceHost) -> None:
        """Put it back."""
        _run("ip", "link", "set", host.cable, "master", self._switch)

    def limit(self, rate: str, burst: str = "256kb") -> None:
        """Let no more than this, as `1gbit`, through any cable, each way; `burst`: at once, after a rest."""
        shaping = ["tbf", "rate", rate, "burst", burst, "latency", "50ms"]
        for host in self.hosts:
            _run("tc", "qdisc", "replace", "dev", host.cable, "root", *shaping)
            _run("ip", "netns", "exec", host.name, "tc", "qdisc", "replace", "dev", CABLE, "root", *shaping)

    def control_congestion(self, way: str) -> None:
        """Have tcp in all hosts adapt to the network in this way, as `reno`, which every kernel has and allows."""
        for host in self.hosts:
            _run("ip", "netns", "exec", host.name, "sysctl", "-w", f"net.ipv4.tcp_congestion_control={way}")

    @contextmanager
    def long_cable(self, delay_s: float, bytes_per_s: float = math.inf, loss: float = 0.0) -> Iterator[None]:
        """In this block all hosts but the first are at another switch, behind a cable that every packet needs so
        long for, that carries so much, and loses a share of what it carries."""
        far, ends = f"{self._short}f", [f"{self._short}t{end}" for end in "ab"]
        command = [sys.executable, "-m", "benchmarks.long_cable", *ends, *map(str, (delay_s, bytes_per_s, loss))]
        environment = surroundings()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as carrier:
            try:
                if carrier.stdout is None or not carrier.stdout.readline():
                    raise LaunchError("benchmarks.long_cable did not begin; it needs /dev/net/tun.")
                _run("ip", "link", "add", far, "type", "bridge", "mcast_snooping", "0")
                _run("ip", "link", "set", far, "up")
                for end, switch in zip(ends, (self._switch, far), strict=True):
                    _run("ip", "link", "set", end, "txqueuelen", "20000", "master", switch, "up")
                for host in self.hosts[1:]:
                    _run("ip", "link", "set", host.cable, "master", far)
                yield
            finally:
                carrier.kill()
                with suppress(LaunchError):
                    _run("ip", "link", "delete", far)
        for host in self.hosts[1:]:
            self.heal(host)

    def carried_bytes(self) -> int:
        """What has come out of all hosts so far."""
        return sum(
            int(Path(f"/sys/class/net/{host.cable}/statistics/rx_bytes").read_text()) for host in self.hosts
        )

    @contextmanager
    def capture(self, path: Path) -> Iterator[None]:
        """Write all that passes over the switch to a file. LaunchError at the end where some of it was missed."""
        command = ["tcpdump", "-i", self._switch, "-w", str(path), "-s", "0", "-B", "65536", "-Z", "root", "-n"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                first = process.stderr.readline()
                if "listening on" not in first:
                    raise LaunchError(f"tcpdump does not capture: {first.strip() or process.stderr.read()}")
                yield
                _await_quiet(path)
            finally:
                process.send_signal(signal.SIGINT)
                told = process.stderr.read() if process.stderr else ""
            if (found := re.search(r"^(\d+) packets? dropped by kernel", told, re.MULTILINE)) and found[1] != "0":
                raise LaunchError(f"tcpdump missed {found[1]} packets; capture less.")

    def reached_by_command(self, folder: Path) -> tuple[str, dict[str, str]]:
        """For `--on`: a list of the hosts; and the environment in which `shoal train` finds its way to them."""
        script, listed = folder / "enter-namespace", folder / "hosts"
        script.write_text(f'#!/bin/sh\nexec ip netns exec "$1" env -u {ZYGOTE_VARIABLE} sh -c "exec $2"\n')
        script.chmod(0o755)
        listed.write_text("".join(f"{host.name} address={host.address}\n" for host in self.hosts))
        return f"hosts:{listed}", {SSH_VARIABLE: str(script)}

    def close(self) -> None:
        """Take all down, with whatever still runs there."""
        for host in self.hosts:
            with suppress(LaunchError):
                end_processes(host)
                _run("ip", "netns", "delete", host.name)
            with suppress(LaunchError):  # The cable goes with the namespace, though not at once.
                _run("ip", "link", "delete", host.cable)
        with suppress(LaunchError):
            _run("ip", "link", "delete", self._switch)

    def _make(self) -> None:
        _run("ip", "link", "add", self._switch, "type", "bridge", "mcast_snooping", "0")
        _run("ip", "address", "add", f"{self.address}/{self._bits}", "dev", self._switch, *self._at_once)
        _run("ip", "link", "set", self._switch, "up")
        for host in self.hosts:
            inside = ["ip", "-n", host.name]
            _run("ip", "netns", "add", host.name)
            _run("ip", "link", "add", host.cable, "type", "veth", "peer", "name", CABLE, "netns", host.name)
            _run("ip", "link", "set", host.cable, "master", self._switch, "up")
            _run(*inside, "address", "add", f"{host.address}/{self._bits}", "dev", CABLE, *self._at_once)
            _run(*inside, "link", "set", CABLE, "up")
            _run(*inside, "link", "set", "lo", "up")

    @property
    def _at_once(self) -> list[str]:
        """IPv6 would first ask for a second whether somebody else has the address."""
        return ["nodad"] if ":" in self.address else []


def _addresses(count: int, *, ipv6: bool) -> list[str]:
    """Of one network that this machine has not yet."""
    taken = {one.address for found in psutil.net_if_addrs().values() for one in found}
    for number in itertools.count(os.getpid()):
        start = f"fd5a:{number % 0xFFFF:x}::" if ipv6 else f"10.{64 + number // 256 % 128}.{number % 256}."
        if not any(address.startswith(start) for address in taken):
            break
    return [f"{start}{at}" for at in range(1, count + 1)]


def _remove_those_of_the_dead() -> None:
    """What processes have left behind that were killed."""
    found: list[dict[str, Any]] = json.loads(_run("ip", "-json", "netns", "list") or "[]")
    for name in [one["name"] for one in found]:
        if (ours := _OURS.fullmatch(name)) and not psutil.pid_exists(int(ours[1])):
            with suppress(LaunchError):
                _run("ip", "netns", "delete", name)
    for name in psutil.net_if_addrs():
        if (ours := re.fullmatch(r"s(\d+)n\d+b", name)) and not psutil.pid_exists(int(ours[1])):
            with suppress(LaunchError):
                _run("ip", "link", "delete", name)


def end_processes(host: NamespaceHost) -> None:
    """Kill all that runs there."""
    deadline = time.monotonic() + _END_S
    while (left := host.processes()) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _await_quiet(path: Path) -> None:
    """Until what has passed is in the file: packets are written a moment later."""
    size = -1
    while size != (size := path.stat().st_size):
        time.sleep(0.2)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise LaunchError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}.")
    return done.stdout
