"""A short way to run a script in a world."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.supervisor import Supervisor
from shoal.observe.events import Event
from shoal.spec import Cluster, Job


@dataclass
class ScriptRun:
    """One run of a script: what it said and where it wrote."""

    folder: Path
    zygote: ZygoteProcess
    events: list[Event] = field(default_factory=list)

    def __call__(
        self,
        code: str,
        *,
        argv: tuple[str, ...] = (),
        on_event: Callable[[Event], None] | None = None,
        hang_timeout_s: float = 30.0,
        **cluster: Any,
    ) -> dict[str, Any]:
        script = self.folder / "script.py"
        script.write_text(textwrap.dedent(code))
        job = Job(
            target=str(script),
            purpose="script",
            cluster=Cluster(**{"workers": 2, "threads": 1, **cluster}),
            run_dir=str(self.folder / "run"),
            options={"argv": list(argv)},
        )

        def listen(event: Event) -> None:
            self.events.append(event)
            if on_event is not None:
                on_event(event)

        return Supervisor(job, listen, LocalEngine(self.zygote), hang_timeout_s=hang_timeout_s).run()

    def log(self, name: str) -> str:
        return (self.folder / "run" / "logs" / f"{name}.log").read_text()

    def kinds(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


@pytest.fixture
def run_script(tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> ScriptRun:
    monkeypatch.chdir(tmp_path)
    return ScriptRun(tmp_path, zygote)
