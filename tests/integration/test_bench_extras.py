"""What the benchmark measures besides speed: the Trainer's cost, memory, bandwidth, the start."""

import pytest

from benchmarks import compare, trainer_overhead
from benchmarks.bandwidth import open_model, pushes
from benchmarks.measurement import Measurement
from benchmarks.memory import PARAMETERS, Footprint, measure_memory
from benchmarks.receiver import BareSender, ShoalSender
from benchmarks.startup import measure_startup
from shoal.errors import PeerLost
from shoal.ps.node import encode_bundle

DIGITS_PARAMETERS = 19_210


def run_here(command: list[str]) -> Measurement:
    """What the command measures in a fresh process, in this one: here its speed does not matter."""
    *_, module, side, model, _, steps = command
    assert module == "benchmarks.trainer_overhead"
    return trainer_overhead.measure(side, model, int(steps))


def test_trainer_and_loop_train_the_same_model(monkeypatch):
    monkeypatch.setattr(compare, "run_command", run_here)
    rows, verdicts = trainer_overhead.compare_trainer("digits", rounds=1, steps=5)
    assert [row.variant for row in rows] == ["trainer", "loop"]
    assert rows[0].loss == pytest.approx(rows[1].loss, rel=1e-5)
    (finding,) = verdicts
    assert finding.value == pytest.approx((rows[0].step_s - rows[1].step_s) * 1e6)


def test_a_footprint_is_judged_by_what_must_be_there():
    six_copies = 6 * 4 * PARAMETERS
    assert Footprint(six_copies, 2 * six_copies).finding().met
    assert not Footprint(int(1.1 * six_copies), 2 * six_copies).finding().met
    assert Footprint(six_copies, 0).private_copies == 2 * six_copies


@pytest.mark.alone
@pytest.mark.long
def test_workers_share_parameters_and_momentum():
    found = measure_memory()
    assert found.finding().met
    assert found.arena < found.private_copies < 2 * found.expected_arena + 1


@pytest.mark.alone
@pytest.mark.long
def test_the_start_of_both_is_measured():
    told = []
    finding = measure_startup(2, 1, lambda name, seconds: told.append((name, seconds)))
    assert sorted(name for name, _ in told) == ["shoal, 2 workers", "torchrun, 2 workers"]
    seconds = dict(told)
    assert finding.value == seconds["shoal, 2 workers"] / seconds["torchrun, 2 workers"] > 0


def test_a_model_is_sent_both_ways_and_a_dead_receiver_is_noticed():
    framed = pushes(open_model("digits"), with_frames=True)
    assert sum(frame.numel() for push in framed for frame in push.frames) >= DIGITS_PARAMETERS
    with BareSender() as bare:
        bare.send([encode_bundle(1, [push]) for push in framed])
    with ShoalSender() as shoal:
        shoal.send(framed)
        shoal.kill_receiver()
        with pytest.raises(PeerLost):
            shoal.send(framed[:1])
