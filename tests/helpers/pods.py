"""Pods of a manifest as network namespaces of this machine: what a kubelet would do, as far as manifests say it.

Each pod has an address of its own and the names of the headless service; it runs its container's command with its
environment, and probes run inside of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.namespaces import NamespaceHost
from helpers.namespaces import network_of

GUARD_S = 120.0
_INSIDE = 'mkdir -p /tmp/shoal && mount -t tmpfs none /tmp/shoal && exec "$@"'
"""What pods write to their own disk is their own; `ip netns exec` gives each a table of mounts to itself."""


class Pod:
    """One that runs."""

    def __init__(self, host: NamespaceHost, container: dict[str, Any], environment: dict[str, str], log: Path):
        self._container, self._environment, self.log = container, environment, log
        command = host.command(["sh", "-c", _INSIDE, "sh", *container["command"]])
        with log.open("w") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def probe(self, name: str) -> subprocess.CompletedProcess[str]:
        """Run a probe of its container inside of it."""
        command = self._container[name]["exec"]["command"]
        inside = ["nsenter", "-t", str(self.process.pid), "-m", "-n", *command]
        return subprocess.run(
            inside, env=self._environment, capture_output=True, text=True, timeout=GUARD_S, check=False
        )

    def end(self) -> None:
        """As a kubelet ends a pod."""
        self.process.terminate()
        try:
            self.process.wait(GUARD_S)
        finally:
            self.process.kill()
            self.process.wait()


@contextmanager
def running(
    containers: list[dict[str, Any]], names: list[str], secret: dict[str, str], folder: Path
) -> Iterator[list[Pod]]:
    """Pods of one job: one for each container, by the names that the headless service gives them."""
    with network_of(len(containers)) as network, ExitStack() as at_end:
        known = "".join(f"{host.address} {name}\n" for host, name in zip(network.hosts, names, strict=True))
        pods = []
        for index, (container, host) in enumerate(zip(containers, network.hosts, strict=True)):
            resolver = Path("/etc/netns") / host.name  # where `ip netns exec` looks
            resolver.mkdir(parents=True)
            at_end.callback(shutil.rmtree, resolver)
            (resolver / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
            environment = _environment(container, index, host.address, secret)
            pods.append(Pod(host, container, environment, folder / f"pod-{index}.log"))
            at_end.callback(pods[-1].end)
        yield pods


def _environment(container: dict[str, Any], index: int, address: str, secret: dict[str, str]) -> dict[str, str]:
    """That of the container, and what a kubelet knows; of this machine's only what programs need to run."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    kept["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept["JOB_COMPLETION_INDEX"] = str(index)
    for one in container["env"]:
        if "value" in one:
            kept[one["name"]] = one["value"]
        elif "fieldRef" in one["valueFrom"]:
            assert one["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
            kept[one["name"]] = address
        else:
            kept[one["name"]] = secret[one["valueFrom"]["secretKeyRef"]["key"]]
    return kept
