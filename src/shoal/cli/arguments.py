"""What several verbs read from the command line in the same way."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.errors import SpecError

CLUSTER, TASK, RECORD, SCREEN = "Where it runs", "Changes to the task", "What is kept", "What is shown"

Workers = Annotated[int, typer.Option("--workers", "-w", help="Processes.", rich_help_panel=CLUSTER)]
WorkersOrLimits = Annotated[
    Any,
    typer.Option(
        "--workers",
        "-w",
        help="Processes; 1:4 for 1 to 4, as the load of the machine allows. Default 1.",
        metavar="N|LEAST:MOST",
        parser=lambda text: int(text) if str(text).isdecimal() else text,
        rich_help_panel=CLUSTER,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads of each process; default OMP_NUM_THREADS, or its share of the cores.",
        rich_help_panel=CLUSTER,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu; cuda, a GPU for each worker; or cuda+cpu, both.", metavar="WHERE", rich_help_panel=CLUSTER
    ),
]
DeviceOrSaved = Annotated[
    str | None,
    typer.Option(
        help="cpu (default); cuda, a GPU for each worker; or cuda+cpu, both.",
        metavar="WHERE",
        rich_help_panel=CLUSTER,
    ),
]
Port = Annotated[
    int | None,
    typer.Option(help="A fixed loopback port, where sockets are used; default any.", rich_help_panel=CLUSTER),
]
On = Annotated[
    str | None,
    typer.Option(
        help="local, ssh:a,b, hosts:FILE, join:2 (hosts on which somebody runs shoal host), mpi:a,b (that mpirun "
        "reaches), slurm (those of an allocation), k8s (in pods, see shoal k8s), or local:2 (here, as if on 2 "
        "hosts). Default auto: as the launcher of this process says, or local.",
        metavar="ENGINE",
        rich_help_panel=CLUSTER,
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        help="With --on: how many hosts at least and at most, as 2:8. The run begins when the least are there, "
        "takes in others that come, and goes on without those that leave.",
        metavar="LEAST:MOST",
        rich_help_panel=CLUSTER,
    ),
]
Interface = Annotated[
    str | None,
    typer.Option(
        help="With several hosts: the network, or address, on which they reach this one; default by route.",
        rich_help_panel=CLUSTER,
    ),
]
Ports = Annotated[
    str | None,
    typer.Option(
        help="With several hosts: where processes may listen; default any free port.",
        metavar="FIRST-LAST",
        rich_help_panel=CLUSTER,
    ),
]
Grace = Annotated[
    float | None,
    typer.Option(
        help="With several hosts: how long they go on when their supervisor has ended, until another takes its "
        "place (--resume); default 60.",
        metavar="SECONDS",
        rich_help_panel=CLUSTER,
    ),
]
TrustedNetwork = Annotated[
    bool | None,
    typer.Option(
        "--trusted-network",
        help="With several hosts: do not encrypt what passes between them.",
        rich_help_panel=CLUSTER,
        show_default=False,
    ),
]
LinkOption = Annotated[
    str | None,
    typer.Option(
        "--link",
        help="With several hosts: let the network between them seem to be another, as "
        "bandwidth=100mbit or latency=20ms,loss=0.1%.",
        metavar="KEYS",
        rich_help_panel=CLUSTER,
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        help="With ps: where the coordinator's decisions outlive its host, as etcd://host:2379/prefix; etcds:// "
        "for TLS, with ?ca=FILE&cert=FILE&key=FILE, and &login=FILE. Default the run folder.",
        metavar="URL",
        rich_help_panel=CLUSTER,
    ),
]
CLASSIC = "Where it runs, as in classic TensorFlow"
PsHosts = Annotated[
    str,
    typer.Option("--ps_hosts", help="The servers, as a:2222,b:2222.", rich_help_panel=CLASSIC, show_default=False),
]
WorkerHosts = Annotated[
    str, typer.Option("--worker_hosts", help="The workers.", rich_help_panel=CLASSIC, show_default=False)
]
JobName = Annotated[
    str,
    typer.Option(
        "--job_name",
        help="What this process is: each of them runs the same command.",
        metavar="ps|worker",
        rich_help_panel=CLASSIC,
        show_default=False,
    ),
]
TaskIndex = Annotated[
    int, typer.Option("--task_index", help="Which of them.", rich_help_panel=CLASSIC, show_default=False)
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the results as one JSON object and nothing else.", rich_help_panel=SCREEN),
]
Progress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--plain",
        help="A live bar, or plain lines; default what fits the output.",
        rich_help_panel=SCREEN,
        show_default=False,
    ),
]
SavedRun = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", show_default=False)
]
SavedModel = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's folder, its name under runs/, or a checkpoint: RUN@STEP.", show_default=False
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run the code that the run folder names, though others could have written it.",
        show_default=False,
    ),
]
ReadingWorkers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-w",
        help="Processes; default 1, or those of the run where each has a part of the model.",
        rich_help_panel=CLUSTER,
    ),
]
ReadingStrategy = Annotated[
    str | None,
    typer.Option(
        "--strategy", "-s", help="How: name:key=value,…; default the run's own.", rich_help_panel=CLUSTER
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        help="The most that each worker may use for its work, as 1.5GiB; default no limit.",
        metavar="SIZE",
        rich_help_panel=CLUSTER,
    ),
]
FactoryArguments = Annotated[
    list[str] | None,
    typer.Option("--arg", help="An argument of the factory, name=value; repeatable.", rich_help_panel=TASK),
]
BatchSize = Annotated[int | None, typer.Option(help="Samples of one step of all workers.", rich_help_panel=TASK)]
Seed = Annotated[int | None, typer.Option(help="Decides every random number.", rich_help_panel=TASK)]
Runs = Annotated[Path, typer.Option(help="Where runs are kept.", rich_help_panel=RECORD)]
DataPart = Annotated[str, typer.Option(help="Which of the task's sets: test or train.", metavar="test|train")]


PrivacyAsked = Annotated[
    str | None,
    typer.Option(
        "--privacy",
        help="What the model may tell of its data: epsilon=8 and delta=1e-5 find the noise, noise=1.1 names it; "
        "clip=1 besides; with commas between.",
        metavar="KEYS",
        rich_help_panel=TASK,
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Compile forward and backward passes, once for each shape of a batch.",
        rich_help_panel=TASK,
        show_default=False,
    ),
]
Graph = Annotated[
    bool | None,
    typer.Option(
        "--graph/--no-graph",
        help="Capture the whole step on the GPU, and replay it.",
        rich_help_panel=TASK,
        show_default=False,
    ),
]
MemoryFormat = Annotated[
    str | None,
    typer.Option(
        help="How images lie in memory: contiguous, or channels_last, with which convolutions may be faster.",
        metavar="FORMAT",
        rich_help_panel=TASK,
    ),
]
Products = Annotated[
    str | None,
    typer.Option(
        help="Who multiplies in float32 on a CPU: torch, or onednn, which may be twice as fast on processors that "
        "are not Intel's.",
        metavar="NAME",
        rich_help_panel=TASK,
    ),
]
Convolutions = Annotated[
    str | None,
    typer.Option(
        help="How gradients of convolutions' weights are made on a CPU: as torch makes them, or from patches, "
        "which may be faster where images are small.",
        metavar="NAME",
        rich_help_panel=TASK,
    ),
]
LossInPieces = Annotated[
    bool | None,
    typer.Option(
        "--loss-in-pieces/--no-loss-in-pieces",
        help="Make the scores of a large vocabulary piece by piece, so that they never exist as a whole.",
        rich_help_panel=TASK,
        show_default=False,
    ),
]
FlatUpdate = Annotated[
    bool | None,
    typer.Option(
        "--flat-update/--no-flat-update",
        help="Update linear layers on a GPU in one kernel, from gradients in bf16.",
        rich_help_panel=TASK,
        show_default=False,
    ),
]
Offload = Annotated[
    str | None,
    typer.Option(
        help="What of a GPU's lies in the host's memory: none, or optimizer, all that it keeps.",
        metavar="WHAT",
        rich_help_panel=TASK,
    ),
]


def given(**values: Any) -> dict[str, Any]:
    """What was said on the command line."""
    return {name: value for name, value in values.items() if value is not None}


def parse_arguments(items: Iterable[str]) -> dict[str, Any]:
    """The factory's arguments, each written `name=value`."""
    arguments = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise SpecError(f"--arg must be written name=value, for instance --arg width=256; found {item!r}.")
        arguments[name] = parse_value(value)
    return arguments


def parse_value(text: str) -> Any:
    """A number or a boolean where it is written as one, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
