"""`python -m shoal.horovod.run -np 4 python train.py`: what `horovodrun` takes, on this host.

Flags that tune what is not there (fusion, cycles, caches, MPI) are taken and have no effect; flags that ask for
what cannot be are refused.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import MISUSED, ShoalError, SpecError, WorkerFailed
from shoal.horovod.elastic.driver import ElasticLimits, run_elastic
from shoal.launch.owner import ZygoteProcess
from shoal.launch.scripts import run_script
from shoal.spec import Cluster

BEFORE = "shoal.horovod.names"
"""What makes `horovod` known in a script."""
_HERE = ("localhost", "127.0.0.1", os.uname().nodename)
_WITHOUT_EFFECT_FLAGS = (
    "--gloo",
    "--mpi",
    "--jsrun",
    "--use-gloo",
    "--use-mpi",
    "--verbose",
    "--disable-cache",
    "--autotune",
    "--timeline-mark-cycles",
    "--hierarchical-allreduce",
    "--hierarchical-allgather",
    "--tcp",
    "--prefix-output-with-timestamp",
)
_WITHOUT_EFFECT_VALUES = (
    "--start-timeout",
    "--network-interface",
    "--nics",
    "--fusion-threshold-mb",
    "--cycle-time-ms",
    "--cache-capacity",
    "--log-level",
    "--ssh-port",
    "--elastic-timeout",
    "--blacklist-cooldown-range",
    "--slots-per-host",
    "--mpi-threads-disable",
    "--binding-args",
)


def start(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    limits: ElasticLimits | None = None,
    workers: int = 1,
    threads: int | None = None,
    zygote: ZygoteProcess | None = None,
) -> None:
    """Run a script that imports `horovod.torch`: in a world of so many, or in one that changes within limits."""
    if limits is not None:
        options: dict[str, object] = {"before": BEFORE, "elastic": True}
        run_elastic(script, arguments, limits=limits, options=options, threads=threads, zygote=zygote)
        return
    run_script(script, arguments, cluster=Cluster(workers=workers, threads=threads), before=BEFORE, zygote=zygote)


def main(words: Sequence[str] | None = None) -> int:
    """As a shell calls it."""
    try:
        _run(list(sys.argv[1:] if words is None else words))
    except WorkerFailed as failure:
        print(f"shoal.horovod.run: {failure}", file=sys.stderr)
        return failure.exit_code
    except SpecError as error:
        print(f"shoal.horovod.run: {error}", file=sys.stderr)
        return MISUSED
    except ShoalError as error:
        print(f"shoal.horovod.run: {error}", file=sys.stderr)
        return 1
    return 0


def _run(words: list[str]) -> None:
    found = _parser().parse_args(words)
    if found.check_build:
        print("Available Frameworks:\n    [X] PyTorch\n\nAvailable Controllers:\n    [X] Shoal (shared memory)")
        return
    hosts = _hosts(found)
    workers = found.num_proc or found.min_num_proc or (sum(hosts.values()) if hosts else 1)
    if hosts and workers > sum(hosts.values()):
        raise SpecError(f"-np {workers} asks for more than the {sum(hosts.values())} slots of {found.hosts}.")
    script, arguments = _script_of(found.command)
    _set_environment(found)
    is_elastic = any((found.min_num_proc, found.max_num_proc, found.host_discovery_script))
    limits = None
    if is_elastic:
        limits = ElasticLimits(
            workers=workers,
            least=found.min_num_proc or 1,
            most=found.max_num_proc,
            resets=found.reset_limit,
            discovery_script=found.host_discovery_script,
        )
    start(script, arguments, limits=limits, workers=workers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal.horovod.run", description=__doc__, allow_abbrev=False)
    parser.add_argument("-np", "--num-proc", type=int, help="processes")
    parser.add_argument("-H", "--hosts", help="hosts and their slots; this host only: localhost:4")
    parser.add_argument("-hostfile", "--hostfile", help="a file of hosts; this host only")
    parser.add_argument("--min-np", "--min-num-proc", dest="min_num_proc", type=int, help="elastic: at least")
    parser.add_argument("--max-np", "--max-num-proc", dest="max_num_proc", type=int, help="elastic: at most")
    parser.add_argument("--host-discovery-script", help="elastic: prints localhost:SLOTS")
    parser.add_argument("--reset-limit", type=int, help="elastic: how often the world may change")
    parser.add_argument("--timeline-filename", help="where the timeline is written")
    parser.add_argument("--no-stall-check", action="store_true", help="warn nobody of ranks that do not come")
    parser.add_argument("--stall-check-warning-time-seconds", type=int, help="when to warn")
    parser.add_argument("--stall-check-shutdown-time-seconds", type=int, help="when to give up")
    parser.add_argument("-cb", "--check-build", action="store_true", help="show what there is")
    parser.add_argument("-v", "--version", action="version", version="Horovod's interface, by Shoal")
    for flag in _WITHOUT_EFFECT_FLAGS:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    for flag in _WITHOUT_EFFECT_VALUES:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="python script.py …")
    return parser


def _hosts(found: argparse.Namespace) -> dict[str, int]:
    entries = [] if found.hosts is None else found.hosts.split(",")
    if found.hostfile is not None:
        lines = Path(found.hostfile).read_text(encoding="utf-8").splitlines()
        entries += [line.replace(" slots=", ":").split()[0] for line in lines if line.strip()]
    hosts: dict[str, int] = {}
    for entry in entries:
        name, _, slots = entry.partition(":")
        if name not in _HERE or not (slots or "1").isdecimal():
            raise SpecError(
                f"Scripts run on one host, as localhost:4, found {entry!r}; to train on several hosts, make the "
                "model a task and use `shoal train --on`."
            )
        hosts[name] = hosts.get(name, 0) + int(slots or 1)
    return hosts


def _script_of(command: list[str]) -> tuple[str, list[str]]:
    words = command[1:] if command[:1] == ["--"] else list(command)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
        while words and words[0] in ("-u", "-B"):  # output is never held back here
            words = words[1:]
    if not words or words[0].startswith("-"):
        raise SpecError(f"Say what to run, as in `python train.py`, found {' '.join(command)!r}.")
    return words[0], words[1:]


def _set_environment(found: argparse.Namespace) -> None:
    """What workers read, as with Horovod's own launcher."""
    settings = {
        "HOROVOD_TIMELINE": found.timeline_filename,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": 0 if found.no_stall_check else found.stall_check_warning_time_seconds,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": found.stall_check_shutdown_time_seconds,
    }
    os.environ.update({name: str(value) for name, value in settings.items() if value is not None})


if __name__ == "__main__":
    sys.exit(main())
