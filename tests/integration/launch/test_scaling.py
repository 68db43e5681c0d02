"""`shoal scale` on a running job: a second process asks, the coordinator answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_stage import COORDINATOR, WORKER, Stage

from helpers.warm_commands import Answer, WarmCommands
from shoal.launch.control import FILE_NAME
from shoal.observe.events import Event

AFTER_THE_ANSWER = f'await_note("asked"); {WORKER}'


class Client:
    """Scales the run as soon as its world is formed, and tells the actors when it has its answer."""

    def __init__(self, commands: WarmCommands) -> None:
        self.words: tuple[str, ...] = ()
        self._commands = commands
        self._folder = Path.cwd()
        self._answer: Answer | None = None
        self._thread = threading.Thread(target=self._ask)

    def on_event(self, event: Event) -> None:
        if event.kind == "world":
            assert (Path("runs/demo") / FILE_NAME).stat().st_mode & 0o777 == 0o600
            self._thread.start()

    def answer(self) -> tuple[int | None, str, str]:
        """Exit status, output and errors of the command."""
        self.join()
        assert self._answer is not None, "the run never asked"
        return self._answer.status, self._answer.out, self._answer.err

    def join(self) -> None:
        """Wait for the command, which ends with the run at the latest."""
        if self._thread.ident is not None:
            self._thread.join()

    def _ask(self) -> None:
        self._answer = self._commands(self._folder, "scale", "demo", *self.words)
        (self._folder / "asked").touch()


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    return Stage()


@pytest.fixture
def client(play: Stage, warm_commands: WarmCommands) -> Iterator[Client]:
    asking = Client(warm_commands)
    yield asking
    asking.join()


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
    assert status == 1 and "runs of ps can be scaled, and those of data and average in shared memory" in err
    assert len(play.host.processes) == 2
