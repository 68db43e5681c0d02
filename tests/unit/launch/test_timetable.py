"""When faults are due: by step, at a moment within it, or at random times that a seed decides."""

from shoal.launch.chaos import Timetable
from shoal.spec.chaos import parse_chaos

SIZES = {"worker": 2, "server": 2, "coordinator": 1}


def timetable(text: str) -> Timetable:
    return Timetable(parse_chaos(text), SIZES)


def test_a_fault_is_due_when_its_worker_reaches_its_step():
    table = timetable("raise worker:1 at step 50")
    table.note(0, 80, 1.0)
    table.note(1, 48, 1.0)
    assert table.ready(2.0) == [] and table.next_time(2.0) is None
    table.note(1, 49, 3.0)
    assert [str(fault) for fault in table.ready(3.0)] == ["raise worker:1 at step 50"]


def test_a_step_that_was_not_heard_of_is_made_up_for():
    table = timetable("slow worker:0 x4 at step 50")
    table.note(0, 63, 1.0)
    assert [fault.step for fault in table.ready(1.0)] == [64]


def test_other_roles_go_by_the_steps_of_the_run():
    table = timetable("kill server:1 at step 5; kill coordinator at step 6")
    table.note(1, 4, 1.0)
    assert [fault.target for fault in table.ready(1.0)] == ["server:1"]
    table.note(0, 5, 2.0)
    assert [fault.target for fault in table.ready(9.0)] == ["server:1", "coordinator"]


def test_kills_fall_anywhere_within_a_step():
    moments = set()
    table = timetable("; ".join(f"kill worker:0 at step {step}" for step in range(11, 31)))
    table.note(0, 0, 0.0)
    for step in range(10, 30):
        now = float(step)  # a step takes a second
        table.note(0, step, now)
        assert table.ready(now) == []
        at = table.next_time(now)
        assert at is not None and now < at < now + 1
        moments.add(round(at - now, 3))
        (fault,) = table.ready(at)
        table.strike(fault, now)
    assert len(moments) > 15 and min(moments) < 0.3 and max(moments) > 0.7
    assert table.open == []


def test_a_fault_is_due_until_it_struck():
    table = timetable("raise worker:0 at step 1; raise worker:0 at step 1; raise worker:1 at step 9")
    table.note(0, 0, 1.0)
    first, second = table.ready(1.0)
    table.strike(first, 1.0)
    assert table.ready(5.0) == [second]
    assert table.next_time(5.0) is None  # it waits for its target, not for a time
    assert [fault.target for fault in table.open] == ["worker:0", "worker:1"]


def drawn(text: str, until: float, pause: float) -> list[tuple[str, str]]:
    """What a random table gives when it is looked at every `pause` seconds."""
    table = timetable(text)
    assert table.ready(100.0) == [], "nothing may happen before training has begun"
    table.note(0, 0, 1000.0)
    found, now = [], 1000.0
    while now < until:
        for fault in table.ready(now):
            table.strike(fault, now)
            found.append((fault.kind, fault.target))
        now += pause
    return found


def test_a_seed_decides_the_kinds_and_targets_and_their_order():
    text = "random:mtbf=10s,kinds=kill+hang+slow+raise,targets=worker+server+coordinator,seed="
    list_of_seed_3 = drawn(text + "3", 3000.0, 0.5)
    assert drawn(text + "3", 3000.0, 7.0)[:100] == list_of_seed_3[:100]
    assert drawn(text + "4", 3000.0, 0.5) != list_of_seed_3
    assert 150 < len(list_of_seed_3) < 250, "the mean time between faults is not the one asked for"
    assert {kind for kind, _ in list_of_seed_3} == {"kill", "hang", "slow", "raise"}
    assert {target for _, target in list_of_seed_3} == {
        "worker:0",
        "worker:1",
        "server:0",
        "server:1",
        "coordinator",
    }
    assert {kind for kind, target in list_of_seed_3 if not target.startswith("worker")} == {"kill", "hang"}


def test_a_fixed_interval_is_kept():
    table = timetable("random:every=10s")
    table.note(0, 0, 5.0)
    assert table.ready(5.0) == []
    assert table.next_time(5.0) == 15.0
    (late,) = table.ready(100.0)
    assert table.ready(200.0) == [late], "they must not pile up while the target is away"
    table.strike(late, 200.0)
    assert table.next_time(200.0) == 210.0


def test_when_all_begin_again_only_what_has_not_struck_is_left():
    table = timetable(
        "raise worker:0 at step 3; raise worker:0 at step 5; raise worker:1 at step 9; kill server:0 at step 1"
    )
    table.note(0, 4, 1.0)
    first, second, third = table.ready(1.0)
    assert (first.step, second.step, third.target) == (5, 5, "server:0")
    table.strike(first, 1.0)
    table.begin_again()
    assert table.ready(9.0) == [] and table.next_time(2.0) is None, "nobody has come so far again"
    table.note(0, 4, 10.0)
    assert [fault.target for fault in table.ready(10.0)] == ["worker:0", "server:0"]
    told = []
    table.tell_open(lambda warned: told.append(warned.text))
    assert told[0].startswith("3 of 4 faults never fired: ")


def test_random_faults_go_on_where_they_were():
    once, again = timetable("random:every=5s,seed=3"), timetable("random:every=5s,seed=3")
    drawn = []
    for table in (once, again):
        now = 0.0
        for number in range(6):
            table.note(0, number, now)
            now += 5.0
            (fault,) = table.ready(now)
            drawn.append((fault.kind, fault.role, fault.rank))
            table.strike(fault, now)
            if table is again:
                table.begin_again()
    assert drawn[:6] == drawn[6:]
