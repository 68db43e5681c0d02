"""Handwritten digits by a script that was written for Horovod. Nothing in it is Shoal's but the data.

    shoal run --horovod -n 2 examples/horovod_digits.py

Expected: a test accuracy of about 0.95 after 5 epochs, the same whatever the number of processes says.
"""

import argparse

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

from shoal.datasets import digits


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Digits with Horovod")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    return parser.parse_args()


def train(epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    """One epoch on this rank's part of the data."""
    model.train()
    loader.sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        print(f"Train Epoch: {epoch}\tLoss: {loss.item():.6f}")


def metric_average(value: float, name: str) -> float:
    """The mean over ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


def test(model: nn.Module, loader: DataLoader) -> None:
    """Loss and accuracy over all ranks."""
    model.eval()
    loss = accuracy = 0.0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            loss += functional.cross_entropy(output, target, reduction="sum").item()
            accuracy += (output.argmax(1) == target).float().sum().item()
    count = len(loader.sampler)
    loss, accuracy = metric_average(loss / count, "avg_loss"), metric_average(accuracy / count, "avg_accuracy")
    if hvd.rank() == 0:
        print(f"Test set: Average loss: {loss:.4f}, Accuracy: {accuracy:.4f}")


def main() -> None:
    """Train and test."""
    given = arguments()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    train_set, test_set = digits()
    samplers = [DistributedSampler(one, num_replicas=hvd.size(), rank=hvd.rank()) for one in (train_set, test_set)]
    train_loader, test_loader = (
        DataLoader(one, batch_size=given.batch_size, sampler=sampler)
        for one, sampler in zip((train_set, test_set), samplers, strict=True)
    )
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    lr_scaler = hvd.size() if not given.use_adasum else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=given.lr * lr_scaler, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if given.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if given.use_adasum else hvd.Average,
        gradient_predivide_factor=given.gradient_predivide_factor,
    )
    for epoch in range(1, given.epochs + 1):
        train(epoch, model, optimizer, train_loader)
        test(model, test_loader)


if __name__ == "__main__":
    main()
