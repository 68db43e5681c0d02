"""Models whose width is cut: a Hugging Face GPT-2, the GPT of the examples, torch's own encoder, a weight used
past its layer."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

import shoal

VOCABULARY, LENGTH, CLASSES = 60, 12, 12
EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"


def _task(model: Callable[[], nn.Module], optimizer: str, steps: int) -> shoal.Task:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (50, LENGTH + 1), generator=generator)  # the last batch is a small one
    train = TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def optimize(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        if optimizer == "momentum":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(params, lr=1e-3)

    return shoal.Task(
        model=model,
        loss=lambda scores, target: F.cross_entropy(scores.flatten(0, 1), target.flatten()),
        optimizer=optimize,
        train=train,
        test=train,
        metrics={"accuracy": shoal.metrics.accuracy},
        batch_size=16,
        epochs=10,
        max_steps=steps,
        evaluate_every=steps,
        clip_norm=0.5,
    )


class Scores(nn.Module):
    """A Hugging Face model as one that returns its scores."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(input_ids=tokens).logits


def hugging_face(optimizer: str = "momentum", steps: int = 5, attention: str = "sdpa") -> shoal.Task:
    """GPT-2 as its library builds it from a small config."""

    def model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
        config = GPT2Config(**sizes, **quiet, bos_token_id=0, eos_token_id=0, attn_implementation=attention)
        return Scores(GPT2LMHeadModel(config))

    return _task(model, optimizer, steps)


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpt(
    optimizer: str = "adamw",
    steps: int = 5,
    width: int = 32,
    vocabulary: int = VOCABULARY,
    dropout: float = 0.0,
    length: int = LENGTH,
) -> shoal.Task:
    """The GPT of the examples. `dropout` is that of its blocks, outside of attention."""

    def model() -> nn.Module:
        net = _example().GPT(vocabulary, LENGTH, width, 4, 2, dropout)
        for block in net.blocks:
            block.attention.dropout = 0.0
        return net

    task = _task(model, optimizer, steps)
    data = TensorDataset(*(each[:, :length] for each in task.train.tensors))
    return replace(task, train=data, test=data)


class Encoder(nn.Module):
    """Sorts sequences into classes with torch's own layers; tokens of number 0 are padding."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        self.classes = nn.Linear(32, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.tokens(tokens), src_key_padding_mask=tokens == 0)
        seen = (tokens != 0).unsqueeze(-1).to(hidden.dtype)
        return self.classes((hidden * seen).sum(1) / seen.sum(1))


def encoder(optimizer: str = "adamw", steps: int = 5, norm_first: bool = False) -> shoal.Task:
    task = _task(lambda: Encoder(norm_first), optimizer, steps)
    (tokens, _) = task.train.tensors
    tokens = tokens.clone()
    for row in range(len(tokens)):
        tokens[row, 3 + row % LENGTH :] = 0
    data = TensorDataset(tokens, tokens[:, 0] % CLASSES)
    return replace(task, loss=F.cross_entropy, train=data, test=data)


def grouped(optimizer: str = "momentum", steps: int = 5) -> shoal.Task:
    """Convolutions each channel by itself, between two others, and in groups between whole neighbours."""

    def model() -> nn.Module:
        inverted = nn.Sequential(
            nn.Conv2d(4, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 8, 1)
        )
        return nn.Sequential(inverted, nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(), nn.Linear(128, CLASSES))

    generator = torch.Generator().manual_seed(4)
    images = torch.randn(50, 4, 6, 6, generator=generator)
    data = TensorDataset(images, torch.randint(0, CLASSES, (50,), generator=generator))
    return replace(_task(model, optimizer, steps), loss=F.cross_entropy, train=data, test=data)


class PastItsLayer(nn.Module):
    """Scores tokens with the weight of its embedding, which it takes out of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return F.linear(x + self.down(torch.tanh(self.up(x))), self.tokens.weight)


def past_its_layer(optimizer: str = "momentum", steps: int = 5) -> shoal.Task:
    return _task(PastItsLayer, optimizer, steps)


def measured(folder: str) -> shoal.Task:
    """As `gpt`, large enough to be measured: every process notes what it holds before its last update."""
    task = gpt(steps=3, width=256, vocabulary=2048)
    make = task.model

    def model() -> nn.Module:
        register_optimizer_step_pre_hook(lambda optimizer, *_: _note_held(optimizer, Path(folder)))
        return make()

    return replace(task, model=model, test=None, metrics={})


class Weighed(nn.Module):
    """Notes with each pass what it keeps for the way back, and what its process has sent until then."""

    def __init__(self, inner: nn.Module, folder: Path) -> None:
        super().__init__()
        self.inner, self.folder, self.notes, self.sent = inner, folder, [], [0.0]
        for name, halves in {"all_reduce": 2, "all_gather": 1, "all_to_all_single": 1}.items():
            setattr(dist, name, self._counting(getattr(dist, name), halves))

    def _counting(self, collective: Callable[..., object], halves: int) -> Callable[..., object]:
        def call(first: Tensor | list[Tensor], *args: object, **kwargs: object) -> object:
            workers = dist.get_world_size(kwargs.get("group"))
            whole = first if isinstance(first, list) else [first]
            num_bytes = sum(tensor.nbytes for tensor in whole)
            self.sent[0] += halves * (workers - 1) / workers * num_bytes
            return collective(first, *args, **kwargs)

        return call

    def forward(self, tokens: Tensor) -> Tensor:
        kept: dict[int, int] = {}
        known = {param.untyped_storage().data_ptr() for param in self.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = getattr(tensor, "local", tensor).untyped_storage()  # of a part of a sequence: its own
            kept.update({} if storage.data_ptr() in known else {storage.data_ptr(): storage.nbytes()})
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            scores = self.inner(tokens)
        if self.training:
            self.notes.append((sum(kept.values()), self.sent[0]))
            (self.folder / f"{os.getpid()}.json").write_text(json.dumps(self.notes))
        return scores


def weighed(folder: str, width: int = 64, length: int = 64, depth: int = 2, dropout: float = 0.1) -> shoal.Task:
    """The GPT of the examples, weighed in three steps."""
    task = _task(
        lambda: Weighed(_example().GPT(VOCABULARY, length, width, 4, depth, dropout), Path(folder)), "adamw", 3
    )
    tokens = torch.randint(0, VOCABULARY, (48, length + 1), generator=torch.Generator().manual_seed(3))
    return replace(task, train=TensorDataset(tokens[:, :-1], tokens[:, 1:]), test=None, metrics={})


def _note_held(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Bytes of all tensors that are alive in this process: parameters, gradients, optimizer state and all else."""
    if sum(p.numel() for group in optimizer.param_groups for p in group["params"]) < 1000:
        return  # not the model's: what an optimizer keeps is found out on a few numbers
    found = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    found += [each.grad for each in found if each.is_leaf and each.grad is not None]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(sum(storages.values())))
