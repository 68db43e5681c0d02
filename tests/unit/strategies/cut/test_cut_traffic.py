"""Messages between stages are found by what they are about, whatever comes first."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch

from shoal.comm.group import SocketGroup, together
from shoal.comm.memory_transport import MemoryNetwork
from shoal.errors import TaskError
from shoal.layout.schedules import make_schedule
from shoal.strategies.cut.traffic import Crossing, Traffic
from shoal.strategies.cut.wires import receive_told, send_told


def traffic_pair() -> list[Traffic]:
    """Stages 0 and 2 on worker 0, 1 and 3 on worker 1."""
    schedule = make_schedule("interleaved", workers=2, per_worker=2)
    return together(2, lambda group: Traffic(group, schedule))


def test_values_arrive_as_they_were_when_they_were_sent() -> None:
    network = MemoryNetwork(2)
    left, right = (SocketGroup(network.transport(rank), range(2)) for rank in range(2))
    changed = torch.arange(3.0, requires_grad=True) * 2
    send_told((changed, None, "text"), 1, left)
    changed.detach().zero_()
    found, *others = receive_told(0, right)
    assert (found.tolist(), found.requires_grad, others) == ([0.0, 2.0, 4.0], True, [None, "text"])


@pytest.mark.parametrize("shape", [None, "known"])
def test_messages_are_found_by_stage_and_micro_batch(shape: Hashable) -> None:
    left, right = traffic_pair()
    for number in range(2):
        for source in (0, 2):
            values = (torch.full((2,), 10.0 * number + source, requires_grad=True), 7)
            left.send(Crossing(source, 1, number, shape), values)
    for number in range(2):
        for source in (2, 0):
            tensor, seven = right.receive(Crossing(source, 1, number, shape), "cpu")
            assert (tensor.tolist(), tensor.requires_grad, seven) == ([10.0 * number + source] * 2, True, 7)
    right.send(Crossing(2, 1, 1, shape, back=True), [torch.ones(2)])
    (gradient,) = left.receive(Crossing(2, 1, 1, shape, back=True), "cpu")
    assert gradient.tolist() == [1.0, 1.0]


def test_a_gradient_that_nobody_found_stays_away_unless_the_form_is_known() -> None:
    left, right = traffic_pair()
    for shape in (None, "known"):
        left.send(Crossing(0, 1, 0, shape), (torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)))
        right.receive(Crossing(0, 1, 0, shape), "cpu")
        right.send(Crossing(0, 1, 0, shape, back=True), [None, torch.ones(1)])
    first, second = left.receive(Crossing(0, 1, 0, back=True), "cpu")
    assert first is None and second.tolist() == [1.0]
    zeros, _ = left.receive(Crossing(0, 1, 0, "known", back=True), "cpu")
    assert zeros.tolist() == [0.0, 0.0]


def test_what_was_told_once_must_stay_so_and_what_is_told_each_time_need_not() -> None:
    left, _ = traffic_pair()
    for size in (2, 3):
        left.send(Crossing(0, 1, 0), (torch.ones(size),))
    left.send(Crossing(0, 1, 0, "known"), (torch.ones(2),))
    with pytest.raises(
        TaskError, match=r"stage 0 of the pipeline has sent .* for models whose shapes depend on values"
    ):
        left.send(Crossing(0, 1, 1, "known"), (torch.ones(3),))
