"""What is written to events.jsonl is read back, torn ends and full disks included."""

import pytest

from shoal.errors import LaunchError, SpecError
from shoal.observe import Bus, Event, JsonlSink, read_events


def test_events_are_read_back_as_written(tmp_path):
    events = [Event("world", values={"workers": 2}), Event("steps", 0, {"steps": [[1, 2.5]], "samples": 8})]
    sink = JsonlSink(tmp_path)
    for event in events:
        sink.handle(event)
    assert read_events(tmp_path) == events, "a line is there as soon as it is handled"
    sink.close()
    assert read_events(tmp_path) == events


def test_of_beats_only_the_peaks_are_kept(tmp_path):
    sink = JsonlSink(tmp_path)
    for rank, rss in ((0, 10), (1, 40), (0, 30), (0, 20)):
        sink.handle(Event("beat", rank, {"step": 1, "rss": rss}))
    assert read_events(tmp_path) == []
    sink.close()
    (event,) = read_events(tmp_path)
    assert (event.kind, event.values) == ("memory", {"peak_rss": [[0, 30], [1, 40]]})


def test_torn_last_line_is_left_out(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.handle(Event("world"))
    sink.handle(Event("finished"))
    sink.close()
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert [event.kind for event in read_events(tmp_path)] == ["world"]


def test_damage_before_the_end_is_named(tmp_path):
    good = Event("world").to_json()
    (tmp_path / "events.jsonl").write_text(f"{good}\n{good[:10]}\n{good}\n")
    with pytest.raises(SpecError, match="line 2"):
        read_events(tmp_path)


def test_folder_without_events_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"no events\.jsonl"):
        read_events(tmp_path)


def test_full_disk_stops_the_run_with_a_sentence(tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    bus = Bus([JsonlSink(tmp_path)])
    with pytest.raises(LaunchError, match=f"Run folder {tmp_path}: the disk is full .*free some space"):
        bus.emit(Event("world"))
    bus.close()
