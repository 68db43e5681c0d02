"""`python -m shoal.horovod.run -np 4 python train.py`: what `horovodrun` takes, on this host or several.

Flags that tune what is not there (fusion, cycles, caches, MPI) are taken and have no effect; flags that ask for
what cannot be are refused.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import MISUSED, ShoalError, SpecError, WorkerFailed
from shoal.horovod.elastic.driver import ElasticLimits, run_elastic
from shoal.launch.engines.ssh import SSH, SSH_VARIABLE
from shoal.launch.owner import ZygoteProcess
from shoal.launch.scripts import run_script
from shoal.observe import Event
from shoal.observe.happenings import HostGone, LineSaid, Warned, WorldFormed
from shoal.observe.wording import line
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
    "--fusion-threshold-mb",
    "--cycle-time-ms",
    "--cache-capacity",
    "--log-level",
    "--elastic-timeout",
    "--blacklist-cooldown-range",
    "--slots-per-host",
    "--mpi-threads-disable",
    "--binding-args",
)


def start_elastic(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    limits: ElasticLimits,
    threads: int | None = None,
    zygote: ZygoteProcess | None = None,
) -> None:
    """Run an elastic script that imports `horovod.torch`, in a world that changes within limits."""
    options: dict[str, object] = {"before": BEFORE, "elastic": True}
    run_elastic(script, arguments, limits=limits, options=options, threads=threads, zygote=zygote)


def carried_variables() -> dict[str, str]:
    """What processes of other hosts have to know, as Horovod's own launcher tells them."""
    return {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}


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
    found = parser_of_horovodrun().parse_args(words)
    if found.check_build:
        print("Available Frameworks:\n    [X] PyTorch\n\nAvailable Controllers:\n    [X] Shoal (shared memory)")
        return
    hosts = slots_of_hosts(found)
    workers = found.num_proc or found.min_num_proc or (sum(hosts.values()) if hosts else 1)
    if hosts and workers > sum(hosts.values()):
        raise SpecError(
            f"-np {workers} asks for more than the {sum(hosts.values())} slots of {', '.join(hosts)}; ask "
            "for fewer, or name more."
        )
    hosts = _filled(hosts, workers)
    script, arguments = _script_of(found.command)
    _set_environment(found)
    is_elastic = any((found.min_num_proc, found.max_num_proc, found.host_discovery_script))
    if not hosts.keys() <= {*_HERE}:
        if is_elastic:
            raise SpecError(
                f"Elastic scripts run on one host, as localhost:4, found {', '.join(hosts)}; name one."
            )
        _run_on(hosts, found, script, arguments, workers)
    elif is_elastic:
        limits = ElasticLimits(
            workers=workers,
            least=found.min_num_proc or 1,
            most=found.max_num_proc,
            resets=found.reset_limit,
            discovery_script=found.host_discovery_script,
        )
        start_elastic(script, arguments, limits=limits)
    else:
        run_script(script, arguments, cluster=Cluster(workers=workers), before=BEFORE)


def _run_on(
    hosts: dict[str, int], found: argparse.Namespace, script: str, arguments: Sequence[str], workers: int
) -> None:
    """On hosts that ssh reaches, each with so many processes."""
    if found.ssh_port is not None or found.ssh_identity_file is not None:
        words = [*(["-p", found.ssh_port] if found.ssh_port else [])]
        words += ["-i", found.ssh_identity_file] if found.ssh_identity_file else []
        os.environ[SSH_VARIABLE] = shlex.join([*shlex.split(SSH), *words])
    with tempfile.NamedTemporaryFile("w", prefix="shoal-hosts-") as listed:
        listed.write("".join(f"{name} workers={count}\n" for name, count in hosts.items()))
        listed.flush()
        interface = (found.network_interface or "").partition(",")[0]
        cluster = Cluster(workers=workers, on=f"hosts:{listed.name}", interface=interface)
        run_script(
            script,
            arguments,
            cluster=cluster,
            before=BEFORE,
            variables=carried_variables(),
            on_event=_show,
        )


def _show(event: Event) -> None:
    if isinstance(event.what, WorldFormed | Warned | LineSaid | HostGone) and (text := line(event)) is not None:
        print(text, file=sys.stderr)


def parser_of_horovodrun() -> argparse.ArgumentParser:
    """The flags that it has."""
    parser = argparse.ArgumentParser(prog="shoal.horovod.run", description=__doc__, allow_abbrev=False)
    parser.add_argument("-np", "--num-proc", type=int, help="processes")
    parser.add_argument("-H", "--hosts", help="hosts that ssh reaches, and their slots: a:4,b:4")
    parser.add_argument("-hostfile", "--hostfile", help="a file of hosts, as lines `a slots=4`")
    parser.add_argument("-p", "--ssh-port", help="at which port of all hosts ssh is answered")
    parser.add_argument("-i", "--ssh-identity-file", help="with which key ssh proves who you are")
    parser.add_argument("--network-interface", "--network-interfaces", "--nics", help="how hosts reach this one")
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


def slots_of_hosts(found: argparse.Namespace) -> dict[str, int]:
    """How many processes each host may have that `-H` or a hostfile names."""
    entries = [] if found.hosts is None else found.hosts.split(",")
    if found.hostfile is not None:
        entries += _lines_of(Path(found.hostfile))
    hosts: dict[str, int] = {}
    for entry in entries:
        name, _, slots = entry.partition(":")
        if not name or not (slots or "1").isdecimal() or slots == "0":
            raise SpecError(f"Hosts are written name:SLOTS, as in a:4,b:4, found {entry!r}; write it so.")
        hosts[name] = hosts.get(name, 0) + int(slots or 1)
    return hosts


def _lines_of(hostfile: Path) -> list[str]:
    """Hosts that a file names, one in a line, as in `a slots=4`."""
    try:
        lines = hostfile.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"--hostfile {hostfile} cannot be read ({error}); name a file with lines like a slots=4."
        ) from None
    plain = [line.partition("#")[0].strip() for line in lines]
    return [re.sub(r"\s+slots\s*=\s*", ":", line).split()[0] for line in plain if line]


def _filled(hosts: dict[str, int], workers: int) -> dict[str, int]:
    """How many processes each host gets: as many as it has slots, in the order in which hosts are named."""
    filled, left = {}, workers
    for name, slots in hosts.items():
        if count := min(slots, left):
            filled[name], left = count, left - count
    return filled


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
