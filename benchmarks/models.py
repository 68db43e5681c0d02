"""What the benchmark trains: models from one bound by memory to one bound by overhead.

Data is made up once and cycled, so that reading it costs nothing and only the step is measured.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
CYCLE = 8
"""Batches made per process; step `CYCLE` sees the first one again."""
MODEL_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and how to train it."""

    name: str
    make_model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    make_optimizer: Callable[[list[nn.Parameter], bool | None], optim.Optimizer]
    make_batch: Callable[[torch.Generator], Batch]
    batch_per_process: int
    steps: int
    """Measured steps of one run: enough for a steady median, few enough for many rounds."""

    def model(self) -> nn.Module:
        """The model with the same initial parameters in every process and variant."""
        torch.manual_seed(MODEL_SEED)
        return self.make_model()

    def optimizer(self, params: Iterable[nn.Parameter], fused: bool | None = None) -> optim.Optimizer:
        """The optimizer; `fused=None` is torch's own choice."""
        return self.make_optimizer(list(params), fused)

    def batch(self, rank: int, step: int) -> Batch:
        """What process `rank` trains on in `step`."""
        return _cycle(self.make_batch, rank)[step % CYCLE]


@functools.cache
def _cycle(make_batch: Callable[[torch.Generator], Batch], rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1000 + rank)
    return [make_batch(generator) for _ in range(CYCLE)]


def _classified(shape: tuple[int, ...], classes: int, generator: torch.Generator) -> Batch:
    inputs = torch.randn(shape, generator=generator)
    return inputs, torch.randint(0, classes, shape[:1], generator=generator)


def _momentum(params: list[nn.Parameter], fused: bool | None) -> optim.Optimizer:
    return optim.SGD(params, lr=0.01, momentum=0.9, fused=fused)


def mlp() -> Workload:
    """A wide perceptron, 20.9 M parameters: its gradients are many bytes for little computing."""
    return _perceptron("mlp", [1024, *[2048] * 5, 1000], steps=40)


def small_mlp() -> Workload:
    """The same in small, 3.3 M parameters: its steps are short, for comparisons that consist of waiting."""
    return _perceptron("small_mlp", [256, *[1024] * 4, 100], steps=48)


def _perceptron(name: str, widths: list[int], steps: int) -> Workload:
    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for width_in, width_out in itertools.pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return Workload(
        name=name,
        make_model=model,
        loss=F.cross_entropy,
        make_optimizer=_momentum,
        make_batch=functools.partial(_classified, (64, widths[0]), widths[-1]),
        batch_per_process=64,
        steps=steps,
    )


def digits() -> Workload:
    """The digits example's perceptron: a step is almost nothing but overhead."""
    return Workload(
        name="digits",
        make_model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
        loss=F.cross_entropy,
        make_optimizer=_momentum,
        make_batch=functools.partial(_classified, (32, 64), 10),
        batch_per_process=32,
        steps=2000,
    )


def conv() -> Workload:
    """A convolutional network with batch normalisation on 32 x 32 images, 1.0 M parameters."""
    channels = [3, 32, 64, 128, 256, 256]
    strides = [1, 2, 2, 2, 1]

    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for before, after, stride in zip(channels[:-1], channels[1:], strides, strict=True):
            layers += [nn.Conv2d(before, after, 3, stride, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 100))

    return Workload(
        name="conv",
        make_model=model,
        loss=F.cross_entropy,
        make_optimizer=_momentum,
        make_batch=functools.partial(_classified, (32, 3, 32, 32), 100),
        batch_per_process=32,
        steps=60,
    )


def gpt() -> Workload:
    """A small GPT with AdamW, 0.8 M parameters, of the size and batch that nanoGPT recommends for CPUs."""
    context, vocabulary = 64, 256

    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(0, vocabulary, (12, context + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return Workload(
        name="gpt",
        make_model=lambda: GPT(vocabulary, context, width=128, heads=4, depth=4),
        loss=lambda scores, target: F.cross_entropy(scores.flatten(0, 1), target.flatten()),
        make_optimizer=_adamw,
        make_batch=batch,
        batch_per_process=12,
        steps=40,
    )


class GPT(nn.Module):
    """Torch's own transformer layers under a causal mask; input and output share one embedding."""

    def __init__(self, vocabulary: int, context: int, *, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        # Made here and not kept as a buffer: DDP would send it to every process at every step.
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


def _adamw(params: list[nn.Parameter], fused: bool | None) -> optim.Optimizer:
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    return optim.AdamW(groups, lr=3e-4, fused=fused)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": mlp,
    "small_mlp": small_mlp,
    "gpt": gpt,
    "conv": conv,
    "digits": digits,
}


def warm_up_steps(steps: int) -> int:
    """Steps to take before measuring so many."""
    return max(3, steps // 10)
