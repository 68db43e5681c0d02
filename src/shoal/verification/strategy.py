"""Does a strategy compute what one process computes, or, where timing decides, does it train as well?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from shoal.errors import SpecError
from shoal.launch.targets import target_of
from shoal.observe.wording import plural
from shoal.spec import Claim, Cluster, Job, StrategySpec, Task, parse_strategy
from shoal.spec.checks import require_count
from shoal.spec.privacy import Privacy
from shoal.spec.step_form import StepForm
from shoal.verification.by_bits import NUM_TRIALS, compare_bits
from shoal.verification.by_result import compare_results, num_trials
from shoal.verification.jobs import with_overrides
from shoal.verification.report import Row, Verdict, VerifyReport
from shoal.verification.result_report import ResultReport
from shoal.verification.trials import Progress, open_laboratory

if TYPE_CHECKING:
    from shoal.launch.owner import ZygoteProcess

DEFAULT_STEPS = 20
DEFAULT_SEEDS = 5


def verify(
    target: str | Callable[..., Any] | Task,
    *,
    workers: int = 2,
    strategy: str | StrategySpec = "data",
    slots: int | None = None,
    steps: int | None = None,
    args: Mapping[str, Any] | None = None,
    seed: int | None = None,
    seeds: int = DEFAULT_SEEDS,
    precision: str = "fp32",
    privacy: str | Privacy = "none",
    form: StepForm | None = None,
    zygote: ZygoteProcess | None = None,
    progress: Progress | None = None,
) -> VerifyReport | ResultReport:
    """Train a task with a strategy and without, and compare what comes out.

    Synchronous strategies are trained for a few `steps` and compared with one process, number by number. Where
    timing decides, no two runs are alike: such a strategy trains the whole task (or `steps` of it) with several
    `seeds`, and its results are compared with those of synchronous training on the same samples.
    `precision` is what the model computes in, but for the comparison in float64; `form` is how its steps run.
    `privacy` is as `train` takes it; all runs have the same noise.
    `progress(number, total, label)` is called before each of the runs.
    """
    form = form or StepForm()
    require_count("verify", "seeds", seeds)
    if steps is not None:
        require_count("verify", "steps", steps)
    spec = parse_strategy(strategy)
    run = spec.for_trial(steps or DEFAULT_STEPS)
    job = Job(
        target=target if isinstance(target, str) else target_of(target),
        args=dict(args or {}),
        strategy=str(run),
        cluster=Cluster(workers=workers),
        slots=slots,
        overrides={} if seed is None else {"seed": seed},
        precision=precision,
        privacy=str(privacy),
        **asdict(form),
    )
    if job.protection is not None and job.conduct.clients is not None:
        raise SpecError(
            f"verify: privacy adds noise to sums over clients with strategy={spec}, and nothing alike to "
            "those over samples that it would be compared with; leave privacy out."
        )
    expected = num_trials(seeds) if spec.claim(workers) is Claim.RESULT else NUM_TRIALS
    with open_laboratory(expected, zygote, progress) as laboratory:
        facts, initial = laboratory.inspect(job)
        claim = spec.claim(workers, facts.optimizer)
        if claim is Claim.RESULT:
            limit = {} if steps is None else {"max_steps": steps}
            return compare_results(laboratory, with_overrides(job, limit), facts, seeds)
        job = with_overrides(job, {"max_steps": steps or DEFAULT_STEPS})
        report = compare_bits(laboratory, job, facts, initial, claim)
    return replace(report, strategy=str(spec), rows=(*report.rows, *_shortened(spec, run)))


def _shortened(spec: StrategySpec, run: StrategySpec) -> list[Row]:
    """What to say where phases were made shorter."""
    asked, taken = (getattr(one, "every", 0) for one in (spec, run))
    if asked == taken:
        return []
    note = f"shorter than asked for (every={asked}), so that each group of layers has one"
    return [Row(comparison="phases", what=f"of {plural(taken, 'step')}", verdict=Verdict.NOT_JUDGED, note=note)]
