"""Small tasks that hold every awkward thing a model can have."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import shoal


class Recalling(torch.optim.Optimizer):
    """A user's own: keeps a list of tensors and a whole number, and looks at whole parameters."""

    def __init__(self, params: list[nn.Parameter], lr: float, *, depth: int) -> None:
        super().__init__(params, {"lr": lr})
        self.depth = depth

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    kept = self.state[param]
                    newest = param.grad / (1.0 + param.grad.norm())
                    kept["past"] = [*kept.get("past", []), newest][-self.depth :]
                    kept["steps"] = kept.get("steps", 0) + 1
                    param.add_(torch.stack(kept["past"]).mean(0), alpha=-group["lr"] / kept["steps"] ** 0.1)


OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "muon_like": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "recalling": lambda params: Recalling(params, lr=0.1, depth=3),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4),
    **{
        name: (lambda cls: lambda params: cls(params, lr=1e-3))(getattr(torch.optim, name))
        for name in ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adam", "SGD")
    },
    "SAG": lambda params: shoal.optim.SAG(params, lr=1e-2, table=3),
}


def _classified(count: int, shape: tuple[int, ...], classes: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, *shape, generator=generator), torch.randint(0, classes, (count,), generator=generator)
    )


def mlp(
    optimizer: str = "momentum", steps: int = 20, width: int = 300, clip: float = 0.0, **_: object
) -> shoal.Task:
    return shoal.Task(
        model=lambda: nn.Sequential(
            nn.Linear(32, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.Dropout(0.2),
            nn.ReLU(),
            nn.Linear(width, 10),
        ),
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        train=_classified(201, (32,), 10),  # the last batch of an epoch is a small one
        test=_classified(50, (32,), 10),
        metrics={"accuracy": shoal.metrics.accuracy},
        batch_size=24,
        epochs=100,
        max_steps=steps,
        clip_norm=clip or None,
        scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 7, 0.5),
    )


def plain(optimizer: str = "momentum", steps: int = 20) -> shoal.Task:
    """Nothing awkward, and little of it."""
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 10)),
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        train=_classified(204, (32,), 10),
        test=_classified(50, (32,), 10),
        batch_size=24,
        epochs=100,
        max_steps=steps,
    )


def conv(optimizer: str = "momentum", steps: int = 20, channels_last: bool = False) -> shoal.Task:
    def model() -> nn.Module:
        net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 24, 3, stride=2, padding=1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(24, 10),
        )
        return net.to(memory_format=torch.channels_last) if channels_last else net

    return shoal.Task(
        model=model,
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        train=_classified(160, (3, 12, 12), 10),
        batch_size=32,
        epochs=100,
        max_steps=steps,
    )


class Gpt(nn.Module):
    """Tied embeddings, dropout, causal attention."""

    def __init__(self, vocabulary: int = 64, context: int = 16, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0
        )
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(self.feed(x), self.dropout, self.training)
        return self.head(x)


def gpt(optimizer: str = "adamw", steps: int = 20) -> shoal.Task:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 64, (100, 17), generator=generator)

    def decay_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        if optimizer == "momentum":
            return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(groups, lr=1e-3)

    return shoal.Task(
        model=Gpt,
        loss=lambda scores, target: F.cross_entropy(scores.flatten(0, 1), target.flatten()),
        optimizer=decay_groups,
        train=TensorDataset(tokens[:, :-1], tokens[:, 1:]),
        batch_size=20,
        epochs=100,
        max_steps=steps,
        clip_norm=1.0,
    )


class Awkward(nn.Module):
    """A frozen layer, a layer used only for some batches, one never used, several dtypes, a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.sometimes = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.twice = nn.Linear(16, 16)
        self.narrow = nn.Linear(16, 16).to(torch.bfloat16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.frozen(torch.relu(self.first(x))))
        h = self.twice(torch.relu(self.twice(h)))
        h = h + self.narrow(h.to(self.narrow.weight.dtype)).to(h.dtype)
        if float(x[0, 0]) > 0:  # depends on the slot's own samples
            h = h + self.sometimes(h)
        return self.last(h)


def awkward(optimizer: str = "momentum", steps: int = 20) -> shoal.Task:
    return shoal.Task(
        model=Awkward,
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        train=_classified(64, (8,), 4),
        batch_size=16,
        epochs=100,
        max_steps=steps,
    )


class Checkpointed(nn.Module):
    """A layer that is used twice, and run again for each backward pass: its gradients come in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 200)
        self.twice = nn.Linear(200, 200)
        self.last = nn.Linear(200, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(2):
            h = torch.relu(checkpoint(self.twice, h, use_reentrant=True))
        return self.last(h)


def checkpointed(steps: int = 20) -> shoal.Task:
    return replace(awkward(steps=steps), model=Checkpointed)


def padded(steps: int = 20) -> shoal.Task:
    """Sentences of different lengths: the mean is over tokens, so a slot counts by its tokens."""
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, 50, (60, 12), generator=generator)
    target = tokens.clone()
    for row, length in enumerate(torch.randint(1, 12, (60,), generator=generator).tolist()):
        target[row, length:] = -100

    return shoal.Task(
        model=lambda: nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)),
        loss=lambda scores, wanted: F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=-100),
        weight=lambda batch: float((batch[1] != -100).sum()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        train=TensorDataset(tokens, target),
        batch_size=20,
        epochs=100,
        max_steps=steps,
    )


def _without_dropout(task: shoal.Task) -> shoal.Task:
    make = task.model

    def model() -> nn.Module:
        net = make()
        for layer in net.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
            if isinstance(layer, Gpt):
                layer.dropout = 0.0
        return net

    return replace(task, model=model)


def mlp_quiet(**args: object) -> shoal.Task:
    return _without_dropout(mlp(**args))


def gpt_quiet(**args: object) -> shoal.Task:
    return _without_dropout(gpt(**args))


def branching(steps: int = 20) -> shoal.Task:
    """As `awkward`, but one branch is taken by whole batches alone: every second one."""
    inputs, target = _classified(64, (8,), 4).tensors
    inputs = inputs.clone()
    inputs[:, 0] = inputs[:, 0].abs() * torch.tensor([1.0, -1.0]).repeat_interleave(16).repeat(2)
    return replace(awkward(steps=steps), train=TensorDataset(inputs, target), shuffle=False)


def weightless() -> shoal.Task:
    return replace(padded(), weight=lambda batch: 0.0)


class Remembering(nn.Module):
    """Keeps a large buffer that changes with every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("history", torch.zeros(5000))

    def forward(self, x: Tensor) -> Tensor:
        self.history.add_(1)
        return self.layer(x)


def remembering() -> shoal.Task:
    return replace(awkward(), model=Remembering)


def even(**args: object) -> shoal.Task:
    """Full batches alone, and nothing that depends on their size but the mean: no dropout, no schedule."""
    return replace(mlp_quiet(**args), train=_classified(160, (32,), 10), batch_size=32, scheduler=None)


def _contrast(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Each sample's two views are to be nearer to each other than to those of any other sample of the batch."""
    left, right = (F.normalize(model(view), dim=1) for view in batch)
    lefts, own = shoal.gather(left, with_own=True)
    rights = shoal.gather(right)
    wanted = torch.arange(own.start, own.stop)
    scores = (left @ rights.T, right @ lefts.T)
    return sum(F.cross_entropy(score / 0.2, wanted) for score in scores) / 2


def contrastive(optimizer: str = "momentum", steps: int = 20, dropout: float = 0.2, **_: object) -> shoal.Task:
    """Parts of a batch are of unequal size, and every slot has its own running means."""
    left, _labels = _classified(130, (32,), 10).tensors
    right = left + 0.3 * torch.randn(left.shape, generator=torch.Generator().manual_seed(6))
    return shoal.Task(
        model=lambda: nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 16)
        ),
        objective=_contrast,
        optimizer=OPTIMIZERS[optimizer],
        train=TensorDataset(left, right),
        batch_size=26,
        epochs=100,
        max_steps=steps,
    )


def contrastive_plain(**args: object) -> shoal.Task:
    """Nothing that depends on how a batch is cut, if gathering works."""
    make = lambda: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))  # noqa: E731
    return replace(contrastive(**args), model=make)


def gathered_loss(**args: object) -> shoal.Task:
    """Every part computes the loss of all of them."""

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(shoal.gather(scores), shoal.gather(target))

    return replace(even(**args), loss=loss)


def uneven_gathers(**args: object) -> shoal.Task:
    """One slot has no need of the others, now and then."""

    def objective(model: nn.Module, batch: list[Tensor]) -> Tensor:
        if float(batch[0][0, 0]) > 0:
            return model(batch[0]).square().mean()
        return _contrast(model, batch)

    return replace(contrastive_plain(**args), objective=objective)


def killed_in_gather(marker: str, of_slot: int = 0, **args: object) -> shoal.Task:
    """The process that computes a slot is killed once, when it has brought something to others and owes more."""
    calls = 0

    def objective(model: nn.Module, batch: list[Tensor]) -> Tensor:
        nonlocal calls
        seen, own = shoal.gather(batch[0], with_own=True)
        calls += 1
        if calls > 5 and round(4 * own.start / len(seen)) == of_slot and len(seen) > len(batch[0]):
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return _contrast(model, batch)

    return replace(contrastive(**args), objective=objective)


def soon_enough(**args: object) -> shoal.Task:
    """Stops at its second evaluation."""
    return replace(mlp(**args), stop=shoal.Plateau(patience=1, min_delta=1e9), evaluate_every=2)
