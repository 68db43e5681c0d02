"""Torch's own attention at workers that are threads, each with some heads, against the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.group import ThreadGroup, together
from shoal.layout.tensor_plan import LayerCut, Way
from shoal.strategies.mesh.tensor.building import Parts, build

BATCH, LENGTH, SOURCE, WIDTH, HEADS = 3, 5, 6, 16, 4
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(SOURCE).repeat(BATCH, 1) > torch.tensor([[5], [3], [2]])


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


Q, K, V = double(BATCH, LENGTH, WIDTH), double(BATCH, SOURCE, WIDTH), double(BATCH, SOURCE, WIDTH) + 1
NARROW_K, WIDE_V = double(BATCH, SOURCE, 7), double(BATCH, SOURCE, 20)
QUIETLY = {"need_weights": False}
CASES: dict[str, tuple[dict[str, Any], tuple[Tensor, ...], dict[str, Any]]] = {
    "self": ({}, (Q, Q, Q), QUIETLY),
    "self, averaged weights": ({"bias": False}, (Q, Q, Q), {}),
    "self, causal": ({}, (Q, Q, Q), {**QUIETLY, "attn_mask": CAUSAL, "is_causal": True}),
    "length first": ({"batch_first": False}, tuple(each.transpose(0, 1) for each in (Q, K, V)), {}),
    "key is value": ({}, (Q, K, K), {"key_padding_mask": PADDING, "average_attn_weights": False}),
    "all different": ({"bias": False}, (Q, K, V), {**QUIETLY, "key_padding_mask": PADDING}),
    "other widths": ({"kdim": 7, "vdim": 20}, (Q, NARROW_K, WIDE_V), {"average_attn_weights": False}),
    "no batch": ({}, (Q[0], K[1], V[1]), {"key_padding_mask": PADDING[1]}),
    "learned mask": ({}, (Q, K, V), {**QUIETLY, "attn_mask": double(LENGTH, SOURCE)}),
    "learned mask by head": ({}, (Q, K, V), {"attn_mask": double(BATCH * HEADS, LENGTH, SOURCE)}),
}


def run(module: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[list[Tensor], ...]:
    """Outputs, gradients of all that is learned around it, gradients of its parameters."""
    fresh = {id(each): each.detach().clone().requires_grad_() for each in inputs}
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().clone().requires_grad_()
        options = {**options, "attn_mask": mask}
        fresh[id(mask)] = mask
    outputs = [each for each in module(*(fresh[id(each)] for each in inputs), **options) if each is not None]
    score = sum((out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum() for out in outputs)
    assert isinstance(score, Tensor)
    around, params = list(fresh.values()), list(module.parameters())
    grads = torch.autograd.grad(score, [*around, *params])
    return [out.detach() for out in outputs], list(grads[: len(around)]), list(grads[len(around) :])


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_as_the_whole_computes_it(case: str, count: int) -> None:
    made, inputs, options = CASES[case]
    whole = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **made}).double()
    with torch.no_grad():
        for param in whole.parameters():
            param.add_(double(*param.shape), alpha=0.1)  # biases begin as zeros
    outputs, grads_around, grads = run(whole, inputs, options)

    def act(worker: ThreadGroup) -> tuple[Parts, list[str], tuple[list[Tensor], ...]]:
        parts = Parts(worker)
        part = build(whole, LayerCut(layer="it", way=Way.HEADS, alone=True), parts)
        return parts, [name for name, _ in part.named_parameters()], run(part, inputs, options)

    for index, (parts, names, (ours, ours_around, our_grads)) in enumerate(together(count, act)):
        torch.testing.assert_close(ours, outputs)
        torch.testing.assert_close(ours_around, grads_around)
        assert names == [name for name, _ in whole.named_parameters()]
        splits = {name: parts.splits().get(id(param)) for name, param in whole.named_parameters()}
        assert {name for name, split in splits.items() if split is None} <= {"out_proj.bias"}
        for name, our_grad, grad in zip(names, our_grads, grads, strict=True):
            split = splits[name]
            torch.testing.assert_close(our_grad, grad if split is None else split.cut(grad, index, count))


def test_dropout_is_for_training_alone() -> None:
    whole = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=True).double()

    def act(worker: ThreadGroup) -> list[Tensor]:
        part = build(whole, LayerCut(layer="it", way=Way.HEADS, alone=True), Parts(worker))
        return [
            part.train(mode)(Q, Q, Q, need_weights=weights)[0]
            for mode in (False, True)
            for weights in (False, True)
        ]

    wanted, _ = whole.eval()(Q, Q, Q)
    for quiet, quiet_too, noisy, noisy_too in together(2, act):
        torch.testing.assert_close(quiet, wanted)
        torch.testing.assert_close(quiet_too, wanted)
        assert not torch.allclose(noisy, wanted) and not torch.allclose(noisy_too, wanted)
