"""Parts of layers, at workers that are threads, against the whole layer: outputs and all gradients."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.group import ThreadGroup, together
from shoal.layout.tensor_plan import LayerCut, Way
from shoal.strategies.mesh.splits import Split
from shoal.strategies.mesh.tensor.building import Parts, build
from shoal.strategies.mesh.tensor.collectives import copy_in, gather, scatter, sum_out
from shoal.strategies.mesh.tensor.narrowed import NarrowedInput


class Conv1D(nn.Module):
    """A linear layer with a transposed weight, as Hugging Face has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def run(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Output, gradient of the input, gradients of the parameters."""
    inputs = inputs.detach().clone().requires_grad_(inputs.is_floating_point())
    params = dict(layer.named_parameters())
    output = layer(inputs)
    score = (output * torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view(output.shape)).sum()
    # Workers share whole parameters: each must get its own gradients.
    grads = dict(zip(params, torch.autograd.grad(score, list(params.values()), retain_graph=True), strict=True))
    grad = torch.autograd.grad(score, [inputs])[0] if inputs.requires_grad else None
    return output.detach(), grad, grads


FEATURES = torch.randn(3, 5, 8, dtype=torch.float64)
IMAGES = torch.randn(2, 8, 6, 6, dtype=torch.float64)
NUMBERS = torch.tensor([[0, 11, 3], [7, 2, 2]])


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("layer", "inputs", "way"),
    [
        (nn.Linear(8, 12), FEATURES, Way.COLUMN),
        (nn.Linear(8, 12, bias=False), FEATURES, Way.ROW),
        (nn.Linear(8, 5), FEATURES, Way.ROW),
        (Conv1D(12, 8), FEATURES, Way.COLUMN),
        (Conv1D(12, 8), FEATURES, Way.ROW),
        (nn.Conv2d(8, 12, 3, stride=2, padding=1), IMAGES, Way.COLUMN),
        (nn.Conv2d(8, 5, 3, dilation=2), IMAGES, Way.ROW),
        (nn.Conv1d(8, 4, 3), IMAGES[:, :, 0], Way.ROW),
        (nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=4), IMAGES, Way.GROUPS),
        (nn.Conv1d(8, 16, 3, groups=8, bias=False), IMAGES[:, :, 0], Way.GROUPS),
        (nn.Embedding(12, 8, padding_idx=7), NUMBERS, Way.VOCABULARY),
        (nn.Embedding(13, 8, padding_idx=2), NUMBERS, Way.COLUMN),
    ],
    ids=lambda value: getattr(value, "value", None) or type(value).__name__,
)
def test_a_layer_that_is_cut_alone(layer: nn.Module, inputs: Tensor, way: Way, count: int) -> None:
    layer = layer.double()
    cut = LayerCut(layer="it", way=way, alone=True)
    output, grad, grads = run(layer, inputs)

    def act(worker: ThreadGroup) -> tuple[Parts, tuple[Tensor, Tensor | None, dict[str, Tensor]]]:
        parts = Parts(worker)
        return parts, run(build(layer, cut, parts), inputs)

    for index, (parts, (ours, our_grad, our_grads)) in enumerate(together(count, act)):
        torch.testing.assert_close(ours, output)
        torch.testing.assert_close(our_grad, grad)
        splits = {name: parts.splits().get(id(p)) for name, p in layer.named_parameters()}
        assert splits["weight"] is not None and our_grads.keys() == grads.keys()
        for name, split in splits.items():
            wanted = grads[name] if split is None else split.cut(grads[name], index, count)
            torch.testing.assert_close(our_grads[name], wanted)


def test_a_pair_with_a_norm_between_needs_no_whole_tensor() -> None:
    net = nn.Sequential(nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 4, 1)).double()
    with torch.no_grad():
        net[1].weight.copy_(torch.linspace(0.5, 2, 12))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    output, grad, _ = run(net, IMAGES)
    statistics = net[1].running_mean.clone()
    net.load_state_dict(before)

    def act(worker: ThreadGroup) -> tuple[Tensor, Tensor | None, Tensor, int]:
        parts = Parts(worker)
        ways = (Way.COLUMN, Way.CHANNELS, None, Way.ROW)
        layers = [
            layer if way is None else build(layer, LayerCut(layer="", way=way), parts)
            for layer, way in zip(net, ways, strict=True)
        ]
        found, found_grad, _ = run(nn.Sequential(*layers), IMAGES)
        return found, found_grad, layers[1].running_mean, layers[1].num_features

    for index, (ours, our_grad, mean, channels) in enumerate(together(3, act)):
        torch.testing.assert_close(ours, output)
        torch.testing.assert_close(our_grad, grad)
        assert channels == 4
        torch.testing.assert_close(mean, statistics.chunk(3)[index])


def test_a_shared_parameter_is_cut_once_and_one_way_only() -> None:
    weight = nn.Parameter(torch.randn(4, 6))

    def act(worker: ThreadGroup) -> None:
        parts = Parts(worker)
        assert parts.parameter(weight, Split(0)) is parts.parameter(weight, Split(0))
        with pytest.raises(ValueError, match="cannot be cut both"):
            parts.parameter(weight, Split(1))

    together(2, act)


def test_what_goes_in_and_out_comes_back() -> None:
    whole = torch.arange(12.0).view(2, 6)

    def act(worker: ThreadGroup) -> tuple[Tensor, Tensor, Tensor]:
        split = Split(-1, (4, 2))
        x = whole.clone().requires_grad_()
        out = gather(scatter(x, split, worker), split, worker)
        (out * whole).sum().backward()
        y = whole.clone().requires_grad_()
        total = sum_out(copy_in(y, worker) * (worker.index + 1), worker)
        total.sum().backward()
        assert x.grad is not None and y.grad is not None
        return out.detach(), x.grad, torch.stack([total.detach(), y.grad])

    for out, grad, summed in together(2, act):
        assert torch.equal(out, whole) and torch.equal(grad, whole)
        assert torch.equal(summed[0], 3 * whole) and torch.equal(summed[1], torch.full_like(whole, 3.0))


def test_a_narrowed_input_is_whole_but_for_its_shape() -> None:
    whole = torch.randn(2, 3, 8, requires_grad=True)
    seen = NarrowedInput.wrap(whole, 4)
    batch, length, width = seen.shape
    assert (batch, length, width, seen.size(-1)) == (2, 3, 2, 2)
    residual = seen + whole
    assert type(residual) is Tensor and torch.equal(residual, 2 * whole)
    residual.sum().backward()
    assert whole.grad is not None and torch.equal(whole.grad, torch.full_like(whole, 2.0))


def test_a_worker_that_raises_leaves_nobody_waiting() -> None:
    def act(worker: ThreadGroup) -> None:
        if worker.index == 1:
            raise RuntimeError("not me")
        worker.all_reduce_(torch.ones(2))

    with pytest.raises(RuntimeError, match="not me"):
        together(3, act)
    assert threading.active_count() < 50
