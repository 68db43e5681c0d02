"""A real sshd of this machine, at a port of loopback, for keys of its own alone."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

from helpers.launchers import free_port

START_S = 20.0
_SETTINGS = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
"""


def why_not() -> str:
    """Why there can be none here; empty where there can."""
    missing = [name for name in ("sshd", "ssh", "ssh-keygen") if shutil.which(name) is None]
    return f"{', '.join(missing)} is not installed" if missing else ""


class SshServer:
    """Lets in whoever has `command`'s key, as this user."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._port = free_port()
        for name in ("host_key", "user_key", "other_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        settings = folder / "sshd_config"
        settings.write_text(_SETTINGS.format(port=self._port, folder=folder))
        Path("/run/sshd").mkdir(exist_ok=True)  # Where it locks itself up, as root.
        self._log = open(folder / "log", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(shutil.which("sshd")), "-D", "-e", "-f", str(settings)],
            stderr=self._log,
            stdin=subprocess.DEVNULL,
        )
        self._wait()

    def command(self, key: str = "user_key") -> str:
        """What reaches it, with one of its keys: `other_key` is refused."""
        options = {"UserKnownHostsFile": "/dev/null", "StrictHostKeyChecking": "no", "BatchMode": "yes"}
        options |= {"LogLevel": "ERROR", "IdentitiesOnly": "yes", "IdentityFile": str(self.folder / key)}
        return " ".join(["ssh", "-F", "none", "-p", str(self._port), *(f"-o {k}={v}" for k, v in options.items())])

    def __enter__(self) -> SshServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1.0).close()
                return
            except OSError:
                said = (self.folder / "log").read_text()
                assert self._process.poll() is None and time.monotonic() < deadline, said
                time.sleep(0.1)
