"""An elastic script that kills its own processes: KILLS of them, and notes in FOLDER whom it has killed.

Counts, in what it commits, how often each sample was trained on, and prints whether that was once per epoch.
"""

import os
import signal
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

SAMPLES, EPOCHS, BATCH = 360, 2, 6  # what is left is always a multiple of 2 and 3 batches

kills, folder = int(sys.argv[1]), Path(sys.argv[2])
join_at = int(sys.argv[3]) if len(sys.argv) > 3 else -1
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), named_parameters=model.named_parameters()
)
sampler = hvd.elastic.ElasticSampler(range(SAMPLES), seed=3)
state = hvd.elastic.TorchState(
    model, optimizer, sampler=sampler, epoch=0, seen=torch.zeros(EPOCHS, SAMPLES), sizes=[]
)


def die_where_it_is_time(done: int) -> None:
    """After so many samples, one rank after the other, in the middle of a step that others finish or not."""
    dead = len(list(folder.glob("killed-*")))
    if dead < kills and hvd.rank() == dead % hvd.size() and done >= (dead + 1) * SAMPLES * EPOCHS // (kills + 2):
        (folder / f"killed-{dead}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        order = list(sampler)
        for number in range(-(-len(order) // BATCH)):
            indices = torch.tensor(order[number * BATCH : (number + 1) * BATCH])
            optimizer.zero_grad()
            model(indices[:, None] / 100).square().mean().backward()
            optimizer.step()
            die_where_it_is_time(int(state.seen.sum()))
            once = torch.zeros(SAMPLES)
            once[indices] = 1
            state.seen[state.epoch] += hvd.allreduce(once, op=hvd.Sum, name="seen")
            sampler.record_batch(number, BATCH)
            state.sizes = [*state.sizes, hvd.size()]
            if 0 <= join_at <= int(state.seen.sum()):
                (folder / "room").touch()
                while hvd.size() < 3 and not (folder / "came").exists():
                    state.check_host_updates()
            state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()


train(state)
print("once" if bool((state.seen == 1).all()) else "not once", "sizes", *sorted(set(state.sizes)), flush=True)
