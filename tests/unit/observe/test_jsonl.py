"""What is written to events.jsonl is read back, torn ends and full disks included."""

import errno
import json
import os

import pytest

from shoal.errors import DiskRefused, SpecError
from shoal.observe import Bus, Event, JsonlSink, read_events

VALUES = {
    "world": {"workers": 2},
    "steps": {"steps": [[1, 2.5]]},
    "evaluation": {"step": 1, "results": {"loss": 0.5}},
    "finished": {},
}


def told(kind):
    return Event.of(kind, values=VALUES[kind])


def test_events_are_read_back_as_written(tmp_path):
    events = [Event.of("world", values={"workers": 2}), Event.of("steps", 0, {"steps": [[1, 2.5]], "samples": 8})]
    sink = JsonlSink(tmp_path)
    for event in events:
        sink.handle(event)
    assert read_events(tmp_path) == events, "a line is there as soon as it is handled"
    sink.close()
    assert read_events(tmp_path) == events


def test_of_beats_only_the_peaks_are_kept(tmp_path):
    sink = JsonlSink(tmp_path)
    for rank, rss in ((0, 10), (1, 40), (0, 30), (0, 20)):
        sink.handle(Event.of("beat", rank, {"step": 1, "rss": rss}))
    assert read_events(tmp_path) == []
    sink.close()
    (event,) = read_events(tmp_path)
    assert (event.kind, event.values) == ("memory", {"peak_rss": [[0, 30], [1, 40]]})


def test_a_torn_last_line_is_left_out_and_the_next_run_goes_on_behind_it(tmp_path):
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(tmp_path)
    sink.handle(told("world"))
    sink.handle(told("finished"))
    sink.close()
    path.write_bytes(path.read_bytes()[:-9])
    assert [event.kind for event in read_events(tmp_path)] == ["world"]
    sink = JsonlSink(tmp_path)
    sink.handle(told("steps"))
    sink.close()
    assert [event.kind for event in read_events(tmp_path)] == ["world", "steps"]
    assert all(json.loads(line) for line in path.read_text().splitlines()), "others read it line by line, too"


def test_a_file_that_is_one_torn_line_is_begun_anew(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b"x" * 200_000)
    JsonlSink(tmp_path).handle(told("world"))
    assert [event.kind for event in read_events(tmp_path)] == ["world"]


def test_damage_before_the_end_is_left_out(tmp_path):
    good = told("world").to_json()
    (tmp_path / "events.jsonl").write_text(f"{good}\n{good[:10]}\n\0\0\n{good}\n")
    assert [event.kind for event in read_events(tmp_path)] == ["world", "world"]


def test_folder_without_events_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"no events\.jsonl"):
        read_events(tmp_path)


class Disk:
    """Takes so many bytes of what `os.write` is given, and then none."""

    def __init__(self, monkeypatch):
        self.room = 1 << 30
        self._write = os.write
        monkeypatch.setattr("os.write", self.write)

    def write(self, fd, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(fd, bytes(data)[: self.room])
        self.room -= written
        return written


def test_a_full_disk_ends_nothing_and_events_wait_until_there_is_room(tmp_path, monkeypatch):
    disk, warnings = Disk(monkeypatch), []
    events = [told("world"), told("steps"), told("evaluation")]
    sink = JsonlSink(tmp_path, warnings.append)
    disk.room = 30
    sink.handle(events[0])
    sink.handle(events[1])
    assert read_events(tmp_path) == [] and disk.room == 0
    assert warnings == [
        "events.jsonl: the disk is full (No space left on device); training goes on, and events wait in memory"
    ]
    disk.room = 1 << 30
    sink.handle(events[2])
    assert read_events(tmp_path) == events, "none is lost, and none is torn"
    sink.close()


def test_events_that_never_fit_are_told_at_the_end(tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    warnings = []
    bus = Bus([JsonlSink(tmp_path, warnings.append)])
    bus.emit(told("world"))
    bus.emit(told("steps"))
    assert len(warnings) == 1
    with pytest.raises(DiskRefused, match=r"events\.jsonl lacks the last events: the disk is full"):
        bus.close()


def test_what_waits_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.observe.jsonl.MOST_WAITING_BYTES", 400)
    disk = Disk(monkeypatch)
    sink = JsonlSink(tmp_path)
    disk.room = 0
    for _ in range(100):
        sink.handle(told("steps"))
    disk.room = 1 << 30
    with pytest.raises(DiskRefused, match="lacks the last events"):
        sink.close()
    assert 0 < len(read_events(tmp_path)) < 10


def test_a_file_that_was_removed_is_told_at_the_end(tmp_path):
    sink = JsonlSink(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    sink.handle(told("world"))
    with pytest.raises(DiskRefused, match=r"events\.jsonl was removed"):
        sink.close()
