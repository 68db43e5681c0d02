"""What a batch counts, derived from losses that are known: halves average to the whole by it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from shoal.model.replica import Replica
from shoal.roles.loading.weighing import derived_weight
from shoal.roles.training.mean_check import compare
from shoal.roles.training.training import Training
from shoal.spec import Conduct, Task, World
from shoal.strategies.data.single import SingleProcess

CHANCE = torch.Generator().manual_seed(5)
SCORES = torch.randn(10, 4, 3, generator=CHANCE)
CLASSES = torch.randint(0, 4, (10, 3), generator=CHANCE)
CLASSES[6:, 1:] = -100
WEIGHTS = torch.tensor([1.0, 5.0, 0.2, 2.0])


def replica_of(model: Any = lambda: nn.Linear(1, 1), sample: Any = None, **fields: Any) -> Replica:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    return Replica(Task(model=model, optimizer=optimizer, train=range(2), **fields), sample=sample)


KNOWN = {
    "class weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "class weights, smoothed": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
    "another class left out": nn.CrossEntropyLoss(ignore_index=2),
    "likelihood": nn.NLLLoss(weight=WEIGHTS, ignore_index=1),
    "function": partial(functional.cross_entropy, weight=WEIGHTS),
    "function that leaves out": partial(functional.nll_loss, ignore_index=0, reduction="mean"),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_halves_average_to_the_whole(kind: str) -> None:
    loss = KNOWN[kind]
    ignored = getattr(loss, "ignore_index", -100)
    if isinstance(loss, partial):
        ignored = loss.keywords.get("ignore_index", -100)
    target = torch.where(CLASSES == -100, ignored, CLASSES)
    found = derived_weight(replica_of(loss=loss))
    assert found is not None and found.text.startswith("weight= follows from the loss")
    halves = [(SCORES[:5], target[:5]), (SCORES[5:], target[5:])]
    weights = [found.weight((None, half)) for _, half in halves]
    assert weights[0] != weights[1]
    mean = sum(w * float(loss(*half)) for w, half in zip(weights, halves, strict=True)) / sum(weights)
    assert mean == pytest.approx(float(loss(SCORES, target)), rel=1e-5)


def test_the_loss_stays_in_the_numbers_of_the_model() -> None:
    task = Task(
        model=lambda: nn.Linear(4, 4),
        loss=nn.CrossEntropyLoss(weight=WEIGHTS),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(SCORES[:, :, 0], torch.arange(10) % 4),
    )
    training = Training(task, SingleProcess(), World(), Conduct(fills=(range(1),)), numerics="float64")
    loss = training.replica.task.loss
    assert training.weighing is not None and training.task.weight is not None
    assert isinstance(loss, nn.CrossEntropyLoss) and loss.weight is not None and loss.weight.dtype == torch.float64


def test_shares_of_classes_count_as_samples_do() -> None:
    found = derived_weight(replica_of(loss=nn.CrossEntropyLoss(weight=WEIGHTS)))
    assert found is not None and found.weight((None, SCORES.softmax(1))) == 30.0
    assert found.weight((None, SCORES[:, :, 0].softmax(1))) == 10.0


@pytest.mark.parametrize(
    "fields",
    [
        {"loss": functional.cross_entropy},
        {"loss": nn.CrossEntropyLoss()},
        {"loss": nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum")},
        {"loss": nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)},
        {"loss": partial(functional.cross_entropy, weight=WEIGHTS, reduction="sum")},
        {"loss": nn.CrossEntropyLoss(weight=WEIGHTS), "weight": lambda batch: 1.0},
        {"objective": lambda model, batch: model(batch).sum()},
    ],
)
def test_what_is_said_or_not_known_is_left_alone(fields: dict[str, Any]) -> None:
    assert derived_weight(replica_of(**fields)) is None


class PreTrainedModel(nn.Linear):
    """As those of Hugging Face look from outside."""

    def __init__(self, has_encoder: bool = False) -> None:
        super().__init__(1, 1)
        self.config = type("Config", (), {"is_encoder_decoder": has_encoder})()


LABELS = torch.tensor([[1, 2, 3, -100], [4, -100, -100, -100]])


@pytest.mark.parametrize(
    ("name", "has_encoder", "expected"),
    [
        ("LlamaForCausalLM", False, 2.0),
        ("GPT2LMHeadModel", False, 2.0),
        ("BertForMaskedLM", False, 4.0),
        ("BertForTokenClassification", False, 4.0),
        ("T5ForConditionalGeneration", True, 4.0),
        ("LlavaForConditionalGeneration", False, 2.0),
        ("BertForSequenceClassification", False, None),
        ("ViTForImageClassification", False, None),
    ],
)
def test_labels_of_models_that_compute_their_own_loss(
    name: str, has_encoder: bool, expected: float | None
) -> None:
    kind = type(name, (PreTrainedModel,), {})
    batch = {"labels": LABELS}
    fields = {"model": lambda: kind(has_encoder), "objective": lambda model, batch: model(**batch).loss}
    found = derived_weight(replica_of(sample=lambda: batch, **fields))
    assert (None if found is None else found.weight(batch)) == expected
    assert found is None or name in found.text
    for other in ({"labels": LABELS[:, 0]}, {"labels": LABELS.float()}, {"y": LABELS}, (LABELS, LABELS)):
        assert derived_weight(replica_of(sample=lambda other=other: other, **fields)) is None


def test_what_adapts_a_model_counts_as_it_does() -> None:
    class Adapted(nn.Linear):
        def get_base_model(self) -> nn.Module:
            return type("LlamaForCausalLM", (PreTrainedModel,), {})()

    fields = {"model": lambda: Adapted(1, 1), "objective": lambda model, batch: model(**batch).loss}
    found = derived_weight(replica_of(sample=lambda: {"labels": LABELS}, **fields))
    assert found is not None and found.weight({"labels": LABELS}) == 2.0


def language_model(kind: str) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, initializer_range=1.0, **sizes)
        )
    if kind == "bert":
        shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        return transformers.BertForMaskedLM(transformers.BertConfig(**shape, **sizes))
    shape = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, **sizes))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_models_of_hugging_face_count_as_derived(kind: str) -> None:
    tokens = torch.randint(3, 20, (6, 7), generator=CHANCE)
    labels = tokens.clone()
    for row in range(6):
        labels[row, 2 + row // 2 :] = -100
    batch = {"input_ids": tokens, "labels": labels}
    objective = lambda model, batch: model(**batch).loss  # noqa: E731
    replica = replica_of(lambda: language_model(kind), sample=lambda: batch, objective=objective)
    plain, found = compare(replica, batch, 6), derived_weight(replica)
    assert plain is not None and plain.differs and found is not None
    replica.task = replace(replica.task, weight=found.weight)
    counted = compare(replica, batch, 6)
    assert counted is not None and not counted.differs


def test_only_models_of_hugging_face_are_known_by_their_names() -> None:
    kind = type("OwnForCausalLM", (nn.Linear,), {})
    fields = {"model": lambda: kind(1, 1), "objective": lambda model, batch: model(**batch).loss}
    assert derived_weight(replica_of(sample=lambda: {"labels": LABELS}, **fields)) is None
