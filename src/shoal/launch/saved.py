"""What can be done with a saved model: evaluate it, let it predict. Spread over workers, nothing is kept."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from shoal.comm.desk_words import STREAM
from shoal.launch.engines import engine_for
from shoal.launch.inside import refuse_inside
from shoal.launch.owner import ZygoteProcess
from shoal.launch.prediction.attempts import Prediction
from shoal.launch.prediction.inflow import Source, lines_from, values_from
from shoal.launch.prediction.output import Output, StreamOutput, open_output
from shoal.launch.prediction.reading import rows_as_they_come
from shoal.launch.runs import screen
from shoal.launch.supervisor import Supervisor
from shoal.launch.taking import find_model
from shoal.observe import Bus, Event, Sink
from shoal.observe.happenings import LineSaid
from shoal.observe.trust import trusted_job
from shoal.spec import Cluster, Job, StrategySpec, parse_strategy
from shoal.spec.vocabulary import Purpose


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on a data set."""

    results: Mapping[str, float]
    """`loss`, and the task's metrics."""
    samples: int


def evaluate(
    run: str | Path,
    *,
    data: str = "test",
    workers: int | None = None,
    strategy: str | StrategySpec | None = None,
    cluster: Cluster | Mapping[str, Any] | None = None,
    progress: bool | None = None,
    output: TextIO | None = None,
    trust: bool = False,
    zygote: ZygoteProcess | None = None,
) -> Evaluation:
    """Loss and metrics of a run's model over its task's `test` or `train` set; the same for any `workers`.

    `run` is a run's folder or name, or one of its checkpoints: `demo@200`, or the checkpoint's folder. It names
    the code that is run; what others could have written is refused unless you `trust` it.

    `strategy` is the run's own where none is given; of those in which each worker has the whole model it does not
    matter which. Where the model is cut, since perhaps no worker can hold it, there are as many `workers` as the
    run had, each with as much memory; else one. Of a `cluster`, single fields can be given.
    """
    said = _said(workers, cluster)
    job = _saved_job(Purpose.EVALUATE, run, strategy, said, {"data": data}, trust=trust)
    found = _execute(job, progress, output, zygote)
    return Evaluation(found["results"], found["samples"])


def predict(
    run: str | Path,
    out: str | Path = "-",
    *,
    data: str = "test",
    input: str | Path | Iterable[Any] | None = None,
    workers: int | None = None,
    strategy: str | StrategySpec | None = None,
    cluster: Cluster | Mapping[str, Any] | None = None,
    progress: bool | None = None,
    output: TextIO | None = None,
    trust: bool = False,
    zygote: ZygoteProcess | None = None,
) -> Path:
    """Write the outputs of a run's model over a data set, one row per sample, in order, as they are done.

    The ending of `out` says how: `.jsonl`, `.csv` or `.npy`; `-` is standard output. `input` is new data in place
    of the task's own: a file `.npy`, `.csv` or `.jsonl`, a folder of files, `-` for the lines of standard input,
    or what an iterable of yours yields, with or without an end. A worker that dies costs time, and no row. All
    else is as in `evaluate`.
    """
    to_stdout = str(out) == "-"
    path = Path(out) if to_stdout else Path(out).absolute()
    target: Output = StreamOutput(sys.stdout) if to_stdout else open_output(path)
    shown = _beside_rows(progress, output) if to_stdout else screen(progress, output)
    said = _said(workers, cluster)
    prediction = _prediction(run, data, input, strategy, said, Bus([shown]), trust=trust, zygote=zygote)
    try:
        prediction.run(target.append)
    except BrokenPipeError:
        return path  # Whoever reads the rows has had enough.
    target.close()
    return path


def _beside_rows(progress: bool | None, output: TextIO | None) -> Sink:
    """What is shown while rows go to standard output. No bar unless one is asked for: where the rows, or what a
    pipe makes of them, come out on the same screen, it would be drawn over them."""
    return screen(bool(progress), sys.stderr if output is None else output)


def predictions(
    run: str | Path,
    input: str | Path | Iterable[Any] | None = None,
    *,
    data: str = "test",
    workers: int | None = None,
    strategy: str | StrategySpec | None = None,
    cluster: Cluster | Mapping[str, Any] | None = None,
    trust: bool = False,
    zygote: ZygoteProcess | None = None,
) -> Generator[Any, None, None]:
    """The rows that `predict` would write, one after the other, as numpy arrays: dicts of them where the model has
    several outputs. An iterable `input` is read in another thread, a little ahead. Nothing is shown."""
    said = _said(workers, cluster)
    return rows_as_they_come(_prediction(run, data, input, strategy, said, Bus(), trust=trust, zygote=zygote))


def _prediction(
    run: str | Path,
    data: str,
    given: str | Path | Iterable[Any] | None,
    strategy: str | StrategySpec | None,
    said: Cluster | Mapping[str, Any],
    bus: Bus,
    *,
    trust: bool,
    zygote: ZygoteProcess | None,
) -> Prediction:
    options: dict[str, Any] = {"data": data}
    source: Source | None = None
    if isinstance(given, (str, Path)):
        is_stream = str(given) == STREAM
        options["input"] = STREAM if is_stream else str(Path(given).absolute())
        source = lines_from(sys.stdin.fileno()) if is_stream else None
    elif given is not None:
        options["input"], source = STREAM, values_from(given)
    return Prediction(_saved_job(Purpose.PREDICT, run, strategy, said, options, trust=trust), source, bus, zygote)


def _said(workers: int | None, cluster: Cluster | Mapping[str, Any] | None) -> Cluster | Mapping[str, Any]:
    """What is given of the cluster."""
    return cluster if cluster is not None else {} if workers is None else {"workers": workers}


def _saved_job(
    purpose: Purpose,
    run: str | Path,
    strategy: str | StrategySpec | None,
    said: Cluster | Mapping[str, Any],
    options: dict[str, Any],
    *,
    trust: bool,
) -> Job:
    refuse_inside(purpose)
    folder, model = find_model(str(run))
    trained = trusted_job(folder, trust=trust)
    spec = parse_strategy(trained.strategy if strategy is None else strategy).for_inference()
    return Job(
        purpose=purpose,
        target=trained.target,
        args=trained.args,
        strategy=str(spec),
        cluster=said if isinstance(said, Cluster) else _cluster_for(spec, trained, said),
        overrides=trained.overrides,
        options={"from": str(model), **options},
    )


def _cluster_for(spec: StrategySpec, trained: Job, said: Mapping[str, Any]) -> Cluster:
    """What is said, and where it says nothing of workers: those that held the model together, with the memory that
    each had; or one, where each holds all of it."""
    if "workers" in said or not spec.conduct(trained.cluster).is_cut:
        return Cluster(**said)
    on_same = said.get("device", "cpu") == trained.cluster.device
    memory = trained.cluster.memory if on_same else ""
    return Cluster(**{"workers": trained.cluster.places, "memory": memory, **said})


def _execute(
    job: Job, progress: bool | None, output: TextIO | None, zygote: ZygoteProcess | None
) -> dict[str, Any]:
    bus = Bus([screen(progress, output)])
    try:
        engine = engine_for(job.cluster, zygote, tell=lambda text: bus.emit(Event(LineSaid(text=text))))
        return Supervisor(job, bus.emit, engine).run()
    finally:
        bus.close()
