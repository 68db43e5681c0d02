"""What Flower's clients and server do: FedAvg on the digits, with the same samples in the same steps as ours.

For an interpreter that has flwr, torch and numpy, without Shoal. Ray's processes import it by its name: what is
loaded once stays loaded in each.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from benchmarks.flower_peer import DATA_VARIABLE


@dataclass(frozen=True)
class Course:
    """What is trained on, and by whom in which round."""

    arrays: dict[str, np.ndarray]
    settings: dict[str, Any]

    def tensors(self, *names: str) -> list[torch.Tensor]:
        return [torch.from_numpy(self.arrays[name]) for name in names]

    def model(self) -> nn.Module:
        """As `examples/digits.py` has it."""
        width = self.settings["width"]
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


@functools.cache
def course() -> Course:
    """Read once by each process."""
    torch.set_num_threads(1)
    with np.load(os.environ[DATA_VARIABLE]) as file:
        arrays = dict(file)
    return Course(arrays, json.loads(str(arrays.pop("settings"))))


client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """A client's part of a round: plain steps on its own batches."""
    found, asked = course(), message.content["config"]
    inputs, targets = found.tensors("inputs", "targets")
    model = found.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=found.settings["lr"], momentum=0.9)
    batches = torch.from_numpy(found.arrays["samples"][asked["round"] - 1, asked["place"]])
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
    told = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": batches.numel()}),
    }
    return Message(content=RecordDict(told), reply_to=message)


class ByPlace(FedAvg):
    """Tells each client of a round which one it is. Who drops out is not asked, and costs Flower nothing."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for place, message in enumerate(messages):
            own = ConfigRecord({"round": server_round, "place": place})
            message.content = RecordDict({"arrays": arrays, "config": own})
        return messages


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """All rounds, with an evaluation on the test set after each; prints when each was over, and its accuracy."""
    found, ends, accuracies = course(), list[float](), list[float]()
    settings, model = found.settings, found.model()
    inputs, targets = found.tensors("test_inputs", "test_targets")

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            output = model(inputs)
        accuracy = float((output.argmax(1) == targets).double().mean())
        ends.append(time.time())
        accuracies.append(accuracy)
        return MetricRecord({"accuracy": accuracy, "loss": float(nn.functional.cross_entropy(output, targets))})

    names = list(model.state_dict())
    first = dict(zip(names, found.tensors(*(f"initial {name}" for name in names)), strict=True))
    strategy = ByPlace(
        fraction_train=settings["per_round"] / settings["clients"],
        min_train_nodes=settings["per_round"],
        fraction_evaluate=0.0,
        min_available_nodes=settings["clients"],
    )
    result = strategy.start(grid, ArrayRecord(first), num_rounds=settings["rounds"], evaluate_fn=evaluate)
    last = {name: one.tolist() for name, one in result.arrays.to_torch_state_dict().items()}
    print(json.dumps({"ends": ends[1:], "accuracies": accuracies[1:], "model": last}), flush=True)
