"""Steps on one GPU beside loops written by hand: `python -m benchmarks.gpu_steps [gpt|mlp …]`.

GPT of the size of GPT-2 with 124 M parameters, 32 x 1024 tokens in bf16, and a small perceptron whose step is
nothing but launches. Every variant is in a process of its own, which prints one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.spec import StepForm, Task

WORDS, WIDTH, HEADS, DEPTH, CONTEXT, BATCH = 50304, 768, 12, 12, 1024, 32
FORMS = {
    "plain": StepForm(),
    "compile": StepForm(compile=True),
    "graph": StepForm(graph=True),
    "compile+graph": StepForm(compile=True, graph=True),
    "pieces": StepForm(loss_in_pieces=True),
    "compile+pieces": StepForm(compile=True, loss_in_pieces=True),
    "flat": StepForm(flat_update=True),
    "compile+flat": StepForm(compile=True, flat_update=True),
    "graph+flat": StepForm(graph=True, flat_update=True),
    "compile+graph+flat": StepForm(compile=True, graph=True, flat_update=True),
    "compile+offload": StepForm(compile=True, offload="optimizer"),
}
VARIANTS = {
    "gpt": (
        "loop",
        "loop compiled",
        "trainer plain",
        "trainer compile",
        "shoal plain",
        "shoal compile",
        "shoal compile+pieces",
        "shoal pieces",
        "shoal compile+flat",
        "shoal compile+offload",
    ),
    "mlp": (
        "loop",
        "loop compiled",
        "trainer plain",
        "shoal plain",
        "fp16 plain",
        "shoal graph",
        "shoal graph+flat",
        "shoal compile+graph",
        "shoal compile+graph+flat",
    ),
}


class Block(nn.Module):
    """Attention and a perceptron, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (
            part.view(rows, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Scores for every next word; input and output share one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_task() -> Task:
    """A few batches of made-up words."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (4 * BATCH, CONTEXT + 1), generator=generator)
    return Task(
        model=GPT,
        loss=lambda scores, target: F.cross_entropy(scores.flatten(0, 1), target.flatten()),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
        train=torch.utils.data.TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous()),
        batch_size=BATCH,
        epochs=1000,
    )


def mlp_task() -> Task:
    """Eight narrow layers."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(1024, 256, generator=generator)
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return Task(
        model=lambda: nn.Sequential(*layers[:-1]),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
        train=torch.utils.data.TensorDataset(inputs, torch.randint(0, 256, (1024,), generator=generator)),
        batch_size=128,
        epochs=1000,
    )


TASKS = {"gpt": gpt_task, "mlp": mlp_task}


def steps_by_hand(task: Task, *, compiled: bool) -> Callable[[int], Any]:
    """What people write, data already on the GPU."""
    torch.manual_seed(0)
    model = task.model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tensors = [tensor.cuda() for tensor in task.train.tensors]
    called = torch.compile(model) if compiled else model
    size = task.batch_size

    def step(number: int) -> Any:
        rows = slice(number % 4 * size, number % 4 * size + size)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = task.loss(called(tensors[0][rows]), tensors[1][rows])  # type: ignore[misc]
        loss.backward()
        optimizer.step()
        return loss

    return step


def shoal_steps(task: Task, form: StepForm, precision: str = "bf16") -> Callable[[int], Any]:
    """The same through the strategy of one worker, as the training loop takes them: a few are open."""
    from shoal.model.start import Start
    from shoal.roles.fast.choice import StepWay
    from shoal.roles.fast.trial import FormTrial

    trial = FormTrial(task, StepWay(form=form, precision=precision), "cuda:0", Start())
    opened: list[Any] = []

    def step(number: int) -> Any:
        opened.append(trial.take())
        return opened.pop(0).result() if len(opened) > 2 else None

    return step


def trainer_steps(task: Task, form: StepForm) -> Callable[[int], Any]:
    """`trainer.step` on batches of the host, in a loop of one's own."""
    from shoal.roles.trainer.trainer import Trainer

    trainer = Trainer(task, device="cuda", precision="bf16", form=form)
    tensors, size = task.train.tensors, task.batch_size

    def step(number: int) -> Any:
        rows = slice(number % 4 * size, number % 4 * size + size)
        return trainer.step(tuple(tensor[rows] for tensor in tensors))

    return step


def steps_of(task: Task, variant: str) -> Callable[[int], Any]:
    """How a variant takes a step."""
    who, _, form = variant.partition(" ")
    if who == "loop":
        return steps_by_hand(task, compiled=form == "compiled")
    if who == "trainer":
        return trainer_steps(task, FORMS[form])
    return shoal_steps(task, FORMS[form], "fp16" if who == "fp16" else "bf16")


def measure(model: str, variant: str) -> dict[str, Any]:
    """One variant in this process."""
    torch.set_float32_matmul_precision("high")
    task = TASKS[model]()
    begun = time.perf_counter()
    step = steps_of(task, variant)
    for number in range(8):
        step(number)
    torch.cuda.synchronize()
    ready_s, block = time.perf_counter() - begun, 10 if model == "gpt" else 200
    marks = [time.perf_counter()]
    for _ in range(5):
        for number in range(block):
            step(number)
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
    step_s = median(after - before for before, after in pairwise(marks)) / block
    return {
        "model": model,
        "variant": variant,
        "ms": round(step_s * 1e3, 4),
        "k_tokens_per_s": round(BATCH * CONTEXT / step_s / 1e3, 1) if model == "gpt" else None,
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "ready_s": round(ready_s, 1),
    }


def main(argv: Sequence[str]) -> None:
    """Measure a variant here, or all of some models in processes of their own."""
    if argv[:1] == ["--one"]:
        print(json.dumps(measure(argv[1], argv[2])), flush=True)
        return
    for model in argv or list(VARIANTS):
        for variant in VARIANTS[model]:
            subprocess.run([sys.executable, "-m", "benchmarks.gpu_steps", "--one", model, variant], check=False)


if __name__ == "__main__":
    main(sys.argv[1:])
