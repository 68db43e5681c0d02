"""What all agree on, from how far each has come: clipped, added up, and taken as an outer optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from shoal.spec import Average
from shoal.spec.averaging import Clip
from shoal.strategies.groups.vectors import Vectors

_ADAM_SECOND, _ADAM_LEAST = 0.99, 1e-3
"""As federated Adam has them: differences are few, and larger than gradients."""


Norm = Callable[[Vectors], float]
"""Of vectors, or of all of which these are a part."""


def norm_of(values: Vectors) -> float:
    """Of vectors that are all there is."""
    return float(torch.stack([vector.double().norm() for vector in values.values()]).norm())


@torch.no_grad()
def clip_(values: Vectors, clip: Clip | None, norm: Norm = norm_of) -> None:
    """Cut off, in place, what is too much."""
    if clip is None:
        return
    if clip.kind == "value":
        for vector in values.values():
            vector.clamp_(-clip.most, clip.most)
        return
    if (length := norm(values)) > clip.most:
        for vector in values.values():
            vector.mul_(clip.most / length)


@torch.no_grad()
def difference_(
    found: Vectors,
    agreed: Mapping[torch.dtype, torch.Tensor],
    params_of: Callable[[Vectors], Vectors],
    clip: Clip | None,
    norm: Norm = norm_of,
) -> Vectors:
    """Make of what a worker has, in place, how far it has come. `params_of`: what of it is clipped."""
    if clip is not None and not clip.is_of_difference:
        clip_(params_of(found), clip, norm)
    for kind, vector in found.items():
        vector.sub_(agreed[kind])
    if clip is not None and clip.is_of_difference:
        clip_(params_of(found), clip, norm)
    return found


class OuterStep:
    """Moves what all agreed on last by the mean of how far they have come. All do the same, with the same bits."""

    def __init__(self, spec: Average, agreed: Vectors) -> None:
        self._agreed = agreed
        self.optimizer = _optimizer(spec, agreed)
        """None where what all have in the mean is what they agree on."""

    @torch.no_grad()
    def take(self, mean: Mapping[torch.dtype, torch.Tensor]) -> None:
        """`mean`: of all differences, which this may write into."""
        if self.optimizer is None:
            for kind, vector in self._agreed.items():
                vector.add_(mean[kind])
            return
        for kind, vector in self._agreed.items():
            vector.grad = mean[kind].neg_()
        self.optimizer.step()
        for vector in self._agreed.values():
            vector.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """What the outer optimizer keeps, by kind of number and its own name for it."""
        if self.optimizer is None:
            return {}
        return {
            f"{kind_name(kind)}/{key}": value
            for kind, vector in self._agreed.items()
            for key, value in self.optimizer.state.get(vector, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `state` gave."""
        if self.optimizer is None:
            return
        for kind, vector in self._agreed.items():
            prefix = f"{kind_name(kind)}/"
            keys = {path.removeprefix(prefix): one for path, one in state.items() if path.startswith(prefix)}
            if keys:
                self.optimizer.state[vector] = {
                    key: value.to(vector.device if value.dim() else "cpu", copy=True)
                    for key, value in keys.items()
                }


class YogiStep(torch.optim.Optimizer):
    """Adam whose second moment goes towards the squared gradient by steps that do not grow with its distance."""

    def __init__(
        self, params: Iterable[torch.Tensor], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float64)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["step"] += 1
                squared, taken = param.grad * param.grad, float(state["step"])
                state["exp_avg"].lerp_(param.grad, 1 - first)
                sign = torch.sign(state["exp_avg_sq"] - squared)
                state["exp_avg_sq"].addcmul_(sign, squared, value=second - 1)
                root = (state["exp_avg_sq"] / (1 - second**taken)).sqrt_().add_(group["eps"])
                param.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - first**taken))


def _optimizer(spec: Average, agreed: Vectors) -> torch.optim.Optimizer | None:
    vectors = list(agreed.values())
    if not vectors:  # nothing of the model's parameters is here
        return None
    match spec.outer:
        case "momentum" | "nesterov":
            is_nesterov = spec.outer == "nesterov" and spec.momentum > 0
            return torch.optim.SGD(vectors, lr=spec.outer_rate, momentum=spec.momentum, nesterov=is_nesterov)
        case "yogi":
            return YogiStep(vectors, lr=spec.outer_rate, betas=(spec.momentum, _ADAM_SECOND), eps=_ADAM_LEAST)
        case "adam":
            betas = (spec.momentum, _ADAM_SECOND)
            return torch.optim.Adam(vectors, lr=spec.outer_rate, betas=betas, eps=_ADAM_LEAST)
    return None


def kind_name(kind: torch.dtype) -> str:
    """As a path has it."""
    return str(kind).removeprefix("torch.")
