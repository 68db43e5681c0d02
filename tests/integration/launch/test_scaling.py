"""`shoal scale` on a running job: a second process asks, the coordinator answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_stage import COORDINATOR, WORKER, Stage

from helpers.commands import GUARD_S, command
from shoal.launch.control import FILE_NAME
from shoal.observe.events import Event

AFTER_THE_ANSWER = f'await_note("asked"); {WORKER}'


class Client:
    """Scales the run as soon as its world is formed, and tells the actors when it has its answer."""

    def __init__(self) -> None:
        self.words: tuple[str, ...] = ()
        self.process: subprocess.Popen[str] | None = None

    def on_event(self, event: Event) -> None:
        if event.kind == "world":
            assert (Path("runs/demo") / FILE_NAME).stat().st_mode & 0o777 == 0o600
            words = command("scale", "demo", *self.words)
            code = (
                "import subprocess, sys; code = subprocess.call(sys.argv[1:]); open('asked', 'w'); sys.exit(code)"
            )
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )

    def answer(self) -> tuple[int, str, str]:
        """Exit status, output and errors of the command."""
        assert self.process is not None, "the run never asked"
        out, err = self.process.communicate(timeout=GUARD_S)
        return self.process.returncode, out, err


@pytest.fixture
def client() -> Iterator[Client]:
    asking = Client()
    yield asking
    if asking.process is not None and asking.process.poll() is None:
        asking.process.kill()
        asking.process.communicate()


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    return Stage()


def test_the_coordinator_is_asked_and_its_answer_printed(play: Stage, client: Client) -> None:
    coordinator = f"""
asked = hear("scale")
note("wish", asked)
start("worker", 2)
say("answer", text="3 workers and 2 servers from now on.", workers=3)
{COORDINATOR}
"""
    client.words = ("--workers", "3", "--json")
    play(coordinator=coordinator, worker=AFTER_THE_ANSWER, run_dir="runs/demo", on_event=client.on_event)
    status, out, err = client.answer()
    assert status == 0, err
    assert json.loads(out)["text"] == "3 workers and 2 servers from now on." and json.loads(out)["workers"] == 3
    assert play.noted("wish") == {"kind": "scale", "workers": 3}
    added = play.host.worlds[-1]
    assert (added.node, added.role, added.global_rank, added.world_size) == (5, "worker", 2, 3)
    assert not play.told("replaced"), "it follows nobody"
    assert sorted(event.rank for event in play.events if event.kind == "done") == [0, 1, 2]
    assert not (Path("runs/demo") / FILE_NAME).exists()


@pytest.mark.parametrize(
    ("coordinator", "sentence"),
    [
        (
            'hear("scale"); say("answer", text="Two servers are the least.", is_refused=True); ',
            "Two servers are the least.",
        ),
        ('if once("died"): hear("scale"); die()\n', "The coordinator was lost before it answered; ask again."),
    ],
)
def test_a_refusal_is_one_sentence(play: Stage, client: Client, coordinator: str, sentence: str) -> None:
    client.words = ("--servers", "1")
    play(
        coordinator=coordinator + COORDINATOR,
        worker=AFTER_THE_ANSWER,
        run_dir="runs/demo",
        on_event=client.on_event,
    )
    assert client.answer() == (1, "", f"error: {sentence}\n")


def test_how_many_there_are(play: Stage, client: Client) -> None:
    play(worker=AFTER_THE_ANSWER, run_dir="runs/demo", on_event=client.on_event)
    assert client.answer()[:2] == (0, "2 workers and 2 servers.\n")


def test_a_run_over_sockets_cannot_be_scaled(play: Stage, client: Client) -> None:
    client.words = ("--workers", "1")
    play(worker=AFTER_THE_ANSWER, run_dir="runs/demo", on_event=client.on_event, strategy="data:via=ring")
    status, _, err = client.answer()
    assert status == 1 and "runs of ps can be scaled, and those of data in shared memory" in err
    assert len(play.host.processes) == 2
