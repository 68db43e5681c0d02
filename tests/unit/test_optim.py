"""SAG: against its formula, against plain gradient descent, and slice by slice."""

import pytest
import torch
from torch import nn

from shoal.errors import SpecError
from shoal.optim import SAG, history_weights

STEPS = 12


def gradients(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def trained(start: torch.Tensor, grads: list[torch.Tensor], make_optimizer) -> tuple[torch.Tensor, dict]:
    """The parameter and its state after one step per gradient."""
    param = nn.Parameter(start.clone())
    optimizer = make_optimizer([param])
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach(), optimizer.state[param]


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_follows_the_weighted_average_of_the_last_gradients(decay, weight_decay):
    start, grads = torch.ones(5, 7), gradients((5, 7))
    expected = start.double()
    for step in range(STEPS):
        recent = [grad.double() for grad in grads[max(0, step - 3) : step + 1]]
        weights = [decay ** (len(recent) - 1 - place) for place in range(len(recent))]
        average = sum(w * g for w, g in zip(weights, recent, strict=True)) / sum(weights)
        expected -= 0.1 * (average + weight_decay * expected)
    got, _ = trained(start, grads, lambda p: SAG(p, lr=0.1, table=4, decay=decay, weight_decay=weight_decay))
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_a_table_of_one_is_gradient_descent_bit_for_bit(weight_decay):
    start, grads = torch.randn(33, 7), gradients((33, 7))
    ours, _ = trained(start, grads, lambda p: SAG(p, lr=0.1, table=1, weight_decay=weight_decay))
    plain, _ = trained(start, grads, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=weight_decay))
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("begin, end", [(0, 5), (1, 64), (3, 1000), (517, 1003), (1002, 1003)])
def test_the_update_of_a_slice_is_the_slice_of_the_update(begin, end):
    start, grads = torch.randn(1003), gradients((1003,))

    def optimizer(params):
        return SAG(params, lr=0.03, table=5, decay=0.7, weight_decay=0.1)

    whole, whole_state = trained(start, grads, optimizer)
    part, part_state = trained(start[begin:end], [grad[begin:end] for grad in grads], optimizer)
    assert torch.equal(whole[begin:end], part)
    for slot in range(5):
        assert torch.equal(whole_state[f"history_{slot}"][begin:end], part_state[f"history_{slot}"])


def test_all_state_exists_after_the_first_step():
    param, state = trained(torch.ones(2, 3), gradients((2, 3))[:1], lambda p: SAG(p, lr=0.1, table=3))
    assert set(state) == {"step", "history_0", "history_1", "history_2"}
    assert state["step"].shape == () and state["step"].item() == 1.0
    assert all(state[f"history_{slot}"].shape == param.shape for slot in range(3))


def test_a_saved_and_loaded_optimizer_goes_on_as_if_never_stopped():
    start, grads = torch.ones(9), gradients((9,))
    unbroken, _ = trained(start, grads, lambda p: SAG(p, lr=0.1, table=4))
    param = nn.Parameter(start.clone())
    optimizer = SAG([param], lr=0.1, table=4)
    for step, grad in enumerate(grads):
        if step == STEPS // 2:
            saved = optimizer.state_dict()
            optimizer = SAG([param], lr=0.1, table=4)
            optimizer.load_state_dict(saved)
        param.grad = grad.clone()
        optimizer.step()
    assert torch.equal(param.detach(), unbroken)


def test_parameters_without_a_gradient_stay_and_get_no_state():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = SAG([used, unused], lr=0.1, weight_decay=0.5)
    loss = optimizer.step(lambda: used.sum().backward())
    assert loss is None
    assert torch.equal(unused.detach(), torch.ones(2)) and unused not in optimizer.state
    assert not torch.equal(used.detach(), torch.ones(2))


def test_weights_sum_to_one_and_fall_with_age():
    assert history_weights(4, 1.0) == [0.25] * 4
    assert history_weights(2, 0.5) == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"table": 0}, "table must be a whole number"),
        ({"lr": -1.0}, "lr must not be negative"),
        ({"decay": 1.5}, "decay must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
    ],
)
def test_wrong_settings_are_refused(wrong, sentence):
    with pytest.raises(SpecError, match=sentence):
        SAG([nn.Parameter(torch.ones(1))], **{"lr": 0.1, **wrong})


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(SpecError, match="sparse=False"):
        SAG(embedding.parameters(), lr=0.1).step()
