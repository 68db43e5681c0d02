"""Horovod's interface on Shoal: `python -m benchmarks.horovod_variant MODEL` prints a `Measurement`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.models import WORKLOADS
from shoal.launch.scripts import run_script
from shoal.spec import Cluster


def main(argv: Sequence[str]) -> None:
    """Measure it in fresh processes and print one line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.horovod_variant", description=__doc__)
    parser.add_argument("model", choices=WORKLOADS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="measured steps; default the model's own number")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "measurement")
        run_script(
            Path(__file__).with_name("horovod_script.py"),
            [given.model, str(given.steps), str(out)],
            cluster=Cluster(workers=given.processes, threads=1),
            before="shoal.horovod.names",
            stream=sys.stderr.buffer,
        )
        print(out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1:])
