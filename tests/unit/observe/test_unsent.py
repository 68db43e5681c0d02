"""What was logged and not sent is found by who comes next, and once."""

from __future__ import annotations

from pathlib import Path

import msgpack

from shoal.observe.happenings import ImageLogged, ScalarsLogged, TextLogged
from shoal.observe.unsent import Unsent

TOLD = [
    ScalarsLogged(scalars=[[3, "norm", 0.5], [3, "odd", float("inf")]]),
    TextLogged(name="note", text="two\nlines", step=3),
    ImageLogged(name="digit", path="images/digit-3.png", step=3),
]


def test_who_comes_next_finds_what_was_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "unsent"
    dead = Unsent(path)
    dead.keep(TextLogged(name="note", text="sent", step=1))
    dead.clear()
    for told in TOLD:
        dead.keep(told)
    with path.open("ab") as file:
        file.write(msgpack.packb(TOLD[1].as_message())[:7])  # it was killed in the middle
    after = Unsent(path)
    assert after.take() == TOLD and after.take() == []
    after.remove()
    assert not path.exists()


def test_a_disk_that_refuses_stops_nobody(tmp_path: Path) -> None:
    nowhere = Unsent(tmp_path / "gone" / "unsent")
    nowhere.keep(TOLD[0])
    assert nowhere.take() == []
    nowhere.clear()
    nowhere.remove()
