"""The benchmark: its workloads, its arithmetic, and how it treats runs that fail."""

import io
import sys

import pytest
import torch
from rich.console import Console

from benchmarks import peers
from benchmarks.bars import BARS, Bar, judge
from benchmarks.compare import SpeedRow, compare, run_command
from benchmarks.measurement import Measurement, summarise, summarise_timeline
from benchmarks.models import CYCLE, WORKLOADS
from benchmarks.table import rows_table, verdicts_table
from benchmarks.variants import VARIANTS
from shoal.errors import LaunchError, SpecError

PARAMETERS = {"mlp": 20_933_608, "small_mlp": 3_514_468, "gpt": 834_304, "conv": 1_004_932, "digits": 19_210}


def measured(variant: str, *speeds: float) -> SpeedRow:
    """A row with these speeds, one per round."""
    rounds = tuple(
        Measurement(
            variant=variant,
            model="mlp",
            processes=2,
            step_s=128 / speed,
            spread=0.07,
            samples_per_s=speed,
            loss=1.0,
        )
        for speed in speeds
    )
    return SpeedRow(variant=variant, model="mlp", rounds=rounds)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_the_same_in_every_process(name):
    workload = WORKLOADS[name]()
    model, again = workload.model(), workload.model()
    assert sum(param.numel() for param in model.parameters()) == PARAMETERS[name]
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    inputs, _ = workload.batch(0, 3)
    assert len(inputs) == workload.batch_per_process
    assert workload.batch(0, 3 + CYCLE)[0] is inputs
    assert not torch.equal(workload.batch(1, 3)[0], inputs)


@pytest.mark.parametrize("name", ["gpt", "conv", "digits"])
def test_a_fused_optimizer_takes_the_same_step(name):
    workload = WORKLOADS[name]()
    results = []
    for fused in (None, True):
        model = workload.model()
        optimizer = workload.optimizer(model.parameters(), fused=fused)
        inputs, target = workload.batch(0, 0)
        workload.loss(model(inputs), target).backward()
        optimizer.step()
        results.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    assert not torch.equal(results[0], torch.nn.utils.parameters_to_vector(workload.model().parameters()))


def test_a_measurement_is_the_median_step():
    result = summarise(
        variant="ddp",
        model="mlp",
        processes=2,
        batch_per_process=64,
        step_times_s=[0.1, 0.2, 0.2, 0.3, 9.0],
        loss=1.5,
    )
    assert result.step_s == 0.2 and result.samples_per_s == pytest.approx(640)
    assert result.spread == pytest.approx(0.5)
    assert Measurement.from_output(f"a warning\n{result.to_json()}\n") == result


TIMELINE = [(when, 100 * when) for when in range(10)] + [(20.0, 1000), (21.0, 1010), (90.0, 1400), (99.0, 1400)]
"""A hundred samples a second, a slow stretch, and an end that is slower still."""


@pytest.mark.parametrize(("window", "speed"), [(range(201, 900), 100), (range(300, 1020), 710 / 18)])
def test_without_lockstep_a_measurement_is_all_samples_over_the_time_of_the_window(window, speed):
    result = summarise_timeline(
        TIMELINE, variant="ps_asp", model="mlp", processes=2, batch=50, window=window, loss=1.5
    )
    assert result.samples_per_s == pytest.approx(speed) and result.step_s == pytest.approx(50 / speed)
    assert (result.spread > 0) is (speed < 100)


@pytest.mark.parametrize("window", [range(201, 299), range(201, 399), range(1400, 1500)])
def test_a_window_in_which_nothing_can_be_seen_is_an_error(window):
    with pytest.raises(LaunchError, match="too few to measure; take more steps"):
        summarise_timeline(TIMELINE, variant="ps_asp", model="mlp", processes=2, batch=50, window=window, loss=1.5)


@pytest.mark.parametrize("output", ["", "not json", '{"variant": "ddp"}'])
def test_output_that_is_no_measurement_is_refused(output):
    with pytest.raises(LaunchError, match="one line of JSON"):
        Measurement.from_output(output)


def test_rows_compare_round_by_round():
    ours, theirs = measured("data", 200, 100, 180), measured("ddp", 100, 50, 100)
    assert ours.samples_per_s == 180 and ours.spread == pytest.approx(100 / 180)
    assert ours.ratios_to(theirs) == [2.0, 2.0, 1.8]
    assert measured("data", 200).spread == 0.07


def test_bars_are_judged_by_the_median_and_only_where_measured():
    rows = [measured("data", 200, 100, 180), measured("ddp", 100, 50, 100), measured("ddp_tuned", 190, 95, 180)]
    verdicts = judge(rows)
    assert [(verdict.bar.peer, verdict.met) for verdict in verdicts] == [("ddp", True), ("ddp_tuned", False)]
    assert verdicts[0].ratio == 2.0
    assert judge(rows, [Bar("mlp", "absent", "ddp", 1.0), Bar("mlp", "data", "absent", 1.0)]) == []
    assert judge(rows, [Bar("mlp", "data", "ddp", 2.1)])[0].met is False


def test_each_bar_has_its_own_subject():
    rows = [measured("ps_asp", 210), measured("ps_asp_2", 160), measured("tensorflow_ps", 100)]
    rows.append(measured("tensorflow_ps_tuned", 200))
    assert [(verdict.bar.subject, verdict.bar.peer, verdict.met) for verdict in judge(rows)] == [
        ("ps_asp", "tensorflow_ps", True),
        ("ps_asp", "tensorflow_ps_tuned", True),
        ("ps_asp_2", "tensorflow_ps", False),
        ("ps_asp_2", "tensorflow_ps_tuned", True),
    ]
    assert all(bar.model in WORKLOADS and {bar.subject, bar.peer} <= set(VARIANTS) for bar in BARS)


def test_tables_show_ratios_and_verdicts():
    rows = [measured("data", 200, 100, 180), measured("ddp", 100, 50, 100)]
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(rows_table(rows), verdicts_table(judge(rows)))
    text = console.export_text()
    assert "1.80" in text and "2.00" in text and "met" in text


def test_a_ratio_without_a_promise_is_shown_and_not_judged():
    rows = [measured("ps_asp", 150), measured("tensorflow_ps_tuned", 100)]
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(verdicts_table(judge(rows)))
    text = console.export_text()
    assert "1.50" in text and "none" in text and "met" not in text


def test_an_unknown_variant_is_named():
    with pytest.raises(SpecError, match="Did you mean 'ddp'"):
        compare("digits", ["dpd"])


def test_a_failed_run_shows_what_it_said():
    with pytest.raises(LaunchError, match=r"status 3(.|\n)*the reason"):
        run_command([sys.executable, "-c", "import sys; print('the reason', file=sys.stderr); sys.exit(3)"])


def test_a_run_that_hangs_is_ended():
    with pytest.raises(LaunchError, match="did not end within"):
        run_command([sys.executable, "-c", "import signal; signal.pause()"], timeout_s=0.5)


def test_a_single_process_measures_itself(capsys):
    assert peers.main(["single", "digits", "--steps", "5"]) == 0
    result = Measurement.from_output(capsys.readouterr().out)
    assert (result.variant, result.model, result.processes) == ("single", "digits", 1)
    assert result.step_s > 0 and result.samples_per_s == pytest.approx(32 / result.step_s)
