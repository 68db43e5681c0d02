"""A training loop as users of Horovod write it, timed: under `shoal run --horovod`, with MODEL, STEPS and OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import horovod.torch as hvd

from benchmarks.measurement import summarise
from benchmarks.models import WORKLOADS
from benchmarks.peers import timed_steps

hvd.init()
workload, out = WORKLOADS[sys.argv[1]](), Path(sys.argv[3])
steps = int(sys.argv[2]) or workload.steps
model = workload.model()
optimizer = hvd.DistributedOptimizer(
    workload.optimizer(model.parameters()), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
times_s, loss, _ = timed_steps(workload, model, optimizer, rank=hvd.rank(), steps=steps)
if hvd.rank() == 0:
    measurement = summarise(
        variant="horovod",
        model=workload.name,
        processes=hvd.size(),
        batch_per_process=workload.batch_per_process,
        step_times_s=times_s,
        loss=loss,
    )
    out.write_text(measurement.to_json(), encoding="utf-8")
