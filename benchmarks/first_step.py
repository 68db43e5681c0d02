"""A script for torchrun: the benchmark's digits model under DDP, one step, and the time when it was done.

Nothing but torch is imported, as in a script that one writes by hand.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
inputs, target = torch.randn(32, 64), torch.randint(0, 10, (32,))
optimizer.zero_grad()
nn.functional.cross_entropy(model(inputs), target).backward()
optimizer.step()
if distributed.get_rank() == 0:
    Path(sys.argv[1]).write_text(str(time.time()))
distributed.barrier()
# Without the interpreter's farewell: a gloo thread that still drops a tensor would abort the process.
os._exit(0)
