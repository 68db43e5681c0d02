"""A parameter server and two worker processes in a page, without anything else of Shoal.

    python examples/parameter_server_objects.py

Expected: a test accuracy of 0.93 to 0.96 after 400 updates, in seconds. Nobody waits for anybody: each worker
gets the parameters as they are, computes gradients on its own half of the digits, and lets the server apply them.
"""

import multiprocessing
import tempfile
from pathlib import Path

import torch
from torch import nn

import shoal

WORKERS, STEPS, BATCH = 2, 200, 64


def work(address: str, key_file: Path, worker: int) -> None:
    """Train on every second sample; runs in a process of its own."""
    torch.set_num_threads(1)
    samples, _ = shoal.datasets.digits()
    inputs, targets = (tensor[worker::WORKERS] for tensor in samples.tensors)
    model = nn.Linear(64, 10)
    with shoal.ps.Client(address, key=key_file) as client:
        for _ in range(STEPS):
            model.load_state_dict(client.get())
            batch = torch.randint(len(inputs), (BATCH,))
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
            version = client.update({name: param.grad for name, param in model.named_parameters()})
        print(f"worker {worker}: {STEPS} updates sent, the last was number {version} of all")


def main() -> None:
    """Serve until all workers are done, then test what they trained."""
    model, processes = nn.Linear(64, 10), multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        shoal.ps.Server(model, optimizer=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5)) as server,
    ):
        server.key.save(key_file := Path(folder, "ps.key"))
        workers = [
            processes.Process(target=work, args=(server.address, key_file, each)) for each in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        model.load_state_dict(server.parameters)
        inputs, targets = shoal.datasets.digits()[1].tensors
        accuracy = shoal.metrics.accuracy(model(inputs), targets)
        print(f"server: {server.version} updates applied, test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
