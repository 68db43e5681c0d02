"""Small tasks for models that are cut: as deep and as wide as eight workers need, without dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

STEPS = 6
OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def _task(model: object, inputs: Tensor, target: Tensor, optimizer: str, **fields: object) -> shoal.Task:
    return shoal.Task(
        model=model,
        loss=lambda scores, wanted: F.cross_entropy(scores.flatten(0, -2), wanted.flatten()),
        optimizer=OPTIMIZERS[optimizer],
        train=TensorDataset(inputs, target),
        test=TensorDataset(inputs[:20], target[:20]),
        metrics={"accuracy": shoal.metrics.accuracy},
        batch_size=32,
        epochs=100,
        max_steps=STEPS,
        evaluate_every=STEPS,
        **fields,
    )


def _drawn(*shape: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(*shape, generator=generator)
    return inputs, torch.randint(0, classes, shape[:1], generator=generator)


def mlp(optimizer: str = "momentum") -> shoal.Task:
    """Deep enough for eight stages; the last batch of an epoch is a small one, and gradients are clipped."""

    def model() -> nn.Module:
        hidden = [layer for _ in range(4) for layer in (nn.Linear(24, 24), nn.ReLU())]
        return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), *hidden, nn.Linear(24, 8))

    return _task(model, *_drawn(84, 12, classes=8), optimizer, clip_norm=0.5)


class FrozenNorm(nn.BatchNorm2d):
    """Normalises by its running statistics, which stay as they are; its weights are trained."""

    def train(self, mode: bool = True) -> FrozenNorm:
        return super().train(False)


class Block(nn.Module):
    """A convolution beside a shortcut."""

    def __init__(self, channels: int, norm: type[nn.BatchNorm2d]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


def conv(optimizer: str = "momentum", frozen: bool = False) -> shoal.Task:
    """Whole batches alone: every worker must have a part of each for synchronised layers."""
    norm = FrozenNorm if frozen else nn.BatchNorm2d

    def model() -> nn.Module:
        first = [nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8), nn.ReLU()]
        blocks = [Block(8, norm) for _ in range(4)]
        return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8))

    return _task(model, *_drawn(96, 3, 6, 6, classes=8), optimizer)


class Attention(nn.Module):
    """Causal, with four heads and one layer for query, key and value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, -1, 4).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mix(seen.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """Widens, and narrows again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    """Four blocks; the scores are made by the transposed embeddings."""

    def __init__(self, vocabulary: int = 32, context: int = 8, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(nn.Sequential(Attention(width), FeedForward(width)) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(optimizer: str = "momentum") -> shoal.Task:
    tokens = torch.randint(0, 32, (84, 9), generator=torch.Generator().manual_seed(3))
    return _task(Gpt, tokens[:, :-1], tokens[:, 1:], optimizer, clip_norm=1.0)
