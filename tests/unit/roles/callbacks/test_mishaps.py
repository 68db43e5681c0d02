"""Faults are read from a run's events, each once, from wherever a reader before has come to."""

from __future__ import annotations

from pathlib import Path

from shoal.observe import Event
from shoal.observe.happenings import Lost, Restarted, Warned
from shoal.roles.callbacks.mishaps import LOOK_EVERY_S, MishapReader
from shoal.spec.callback import Mishap
from shoal.spec.vocabulary import Role

LOST = Event(Lost(rank=1, reason="killed"), 1).to_json() + "\n"
SERVER = Event(Lost(rank=0, role=Role.SERVER, node=3, reason="gone")).to_json() + "\n"
AGAIN = Event(Restarted(reason="killed", step=8, samples=64, undone=2, seconds=0.5)).to_json() + "\n"
OTHER = Event(Warned(text="lost in thought")).to_json() + "\n"


def found(reader: MishapReader, offset: int) -> tuple[list[Mishap], int]:
    told = list(reader.after(offset))
    return [mishap for _, mishap in told if mishap is not None], told[-1][0]


def test_each_is_found_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = MishapReader(path)
    assert found(reader, 0) == ([], 0), "there is no file yet"
    path.write_text(OTHER + LOST + AGAIN + SERVER[:20])
    mishaps, offset = found(reader, 0)
    assert [(one.kind, one.who, one.reason) for one in mishaps] == [
        ("lost", "worker 1", "killed"),
        ("restarted", "all workers", "killed"),
    ]
    assert offset == len(OTHER + LOST + AGAIN), "half a line waits for its end"
    with path.open("a") as file:
        file.write(SERVER[20:])
    other = MishapReader(path)  # of a successor
    mishaps, offset = found(other, offset)
    assert [one.who for one in mishaps] == ["server 0"] and found(other, offset) == ([], offset)
    reader.close()
    other.close()


def test_it_looks_now_and_then() -> None:
    now = [0.0]
    reader = MishapReader(Path("nowhere"), clock=lambda: now[0])
    assert reader.is_due() and not reader.is_due()
    now[0] = LOOK_EVERY_S
    assert reader.is_due()
