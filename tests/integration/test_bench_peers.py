"""The benchmark's distributed peer, with real processes."""

from shoal.bench import compare


def test_ddp_trains_in_two_processes_and_reports_once():
    reported = []
    (row,) = compare("digits", ["ddp"], rounds=1, processes=2, steps=5, on_measured=reported.append)
    assert reported == list(row.rounds)
    assert (row.variant, row.processes, len(row.rounds)) == ("ddp", 2, 1)
    assert row.step_s > 0 and 0 < row.loss < 3
