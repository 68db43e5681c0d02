"""A small GPT that learns to write Python, byte by byte, from the standard library's own sources.

    shoal train examples/gpt.py --workers 2

Expected: a test loss of about 2.1 (natural logarithm, per byte; 5.5 at the start) after 600 steps, in one to
two minutes on two cores. The model has 0.84 M parameters.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal


class Attention(nn.Module):
    """Causal self-attention: each token looks at itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a two-layer perceptron; each adds to what it was given."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Scores for each next token. Input and output share one embedding."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, depth: int, dropout: float):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        return self.head(self.norm(self.blocks(x)))


def next_token_loss(scores: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy over all tokens of the batch."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def adamw(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW that decays matrices and embeddings, but neither biases nor norms."""
    params = list(params)
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A short rise to the full learning rate, then half a cosine down to a tenth of it."""
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.55 + 0.45 * math.cos(math.pi * done)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def task(
    width: int = 128,
    heads: int = 4,
    depth: int = 4,
    context: int = 128,
    steps: int = 600,
    lr: float = 3e-3,
    dropout: float = 0.1,
) -> shoal.Task:
    """What to train."""
    train, test = shoal.datasets.python_text(block_size=context)
    return shoal.Task(
        model=lambda: GPT(shoal.datasets.NUM_BYTES, context, width, heads, depth, dropout),
        loss=next_token_loss,
        optimizer=lambda params: adamw(params, lr),
        scheduler=lambda optimizer: cosine(optimizer, steps),
        clip_norm=1.0,
        train=train,
        test=test,
        batch_size=16,
        epochs=1 + steps * 16 // len(train),
        max_steps=steps,
        metrics={"accuracy": shoal.metrics.accuracy},
    )
