"""The models of this folder, by file, and what becomes of each under each strategy.

A pair that is not named `verifies`: it trains, and `shoal verify` finds what one process computes. What is
`refused: …` does not train, and says so with these words. What is `explained: …` trains, and `shoal verify` says
with these words why parts of a batch are not the whole one, what could not be compared, or what else is odd in one
process, too; all else is as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

VERIFIES, REFUSED, EXPLAINED = "verifies", "refused", "explained"
STRATEGIES = {
    "data": ("data", 2),
    "ps": ("ps:servers=1", 2),
    "sharded": ("sharded", 2),
    "tensor": ("tensor", 2),
    "pipeline": ("pipeline", 2),
    "mesh": ("mesh:shard=2,tensor=2", 4),
}
"""By name: as it is written, and its workers."""
_IN_PARTS = "explained: what a sample adds to it depends on the others in its batch"
_FLOAT32 = "explained: cannot be computed in float64"
_UNUSED = "explained: unused in this model? 2.experts.1.weight"

ZOO: dict[str, dict[str, dict[str, str]]] = {
    "tables": {
        "linear_regression": {},
        "mixed_columns": {},
        "quantiles": {},
        "radial_basis": {},
        "two_heads": {},
        "rare_classes": {},
        "rare_classes_of_its_own": dict.fromkeys(STRATEGIES, _FLOAT32),
        "many_labels": {},
        "routed_experts": dict.fromkeys(STRATEGIES, _UNUSED),
    },
    "pictures": {
        "batch_norm": {},
        "group_norm": {},
        "depthwise": {},
        "augmented": {},
        "autoencoder": {},
        "variational": {},
        "segments": {},
    },
    "texts": {
        "lstm": {},
        "packed": {"pipeline": "refused: that of PackedTexts cannot be followed"},
        "ragged": {},
        "bag_of_words": {},
        "sparse_embedding": {},
        "tied": {},
        "seq2seq": {},
        "encoder": {},
        "decoder": {},
    },
    "pairs": {
        "siamese": {"pipeline": "refused: objective= calls the model twice"},
        "contrastive": dict.fromkeys(("data", "ps", "sharded", "pipeline", "mesh"), _IN_PARTS),
        "distilled": {},
        "adapted": {},
    },
    "libraries": {"bert": {}, "gpt2": {}, "llama": {}, "vit": {}, "compiled": {}},
    "courses": {
        "averaged": {},
        "arrays": {},
        "in_pieces": {},
        "from_loader": {},
        "stream": {},
        "two_rates": {},
    },
}

QUICK = {
    ("two_heads", "mesh"),
    ("rare_classes_of_its_own", "data"),
    ("routed_experts", "sharded"),
    ("many_labels", "tensor"),
    ("variational", "pipeline"),
    ("lstm", "sharded"),
    ("packed", "pipeline"),
    ("sparse_embedding", "tensor"),
    ("bag_of_words", "pipeline"),
    ("siamese", "pipeline"),
    ("contrastive", "data"),
    ("adapted", "tensor"),
    ("stream", "tensor"),
    ("compiled", "mesh"),
}
"""Pairs that no other test is like; the rest takes too long for every day."""


@dataclass(frozen=True)
class ZooPair:
    """A model, a strategy, and what becomes of it."""

    file: str
    model: str
    strategy: str
    outcome: str
    words: str
    """What is said with it."""

    @property
    def name(self) -> str:
        return f"{self.model}-{self.strategy}"

    @property
    def is_quick(self) -> bool:
        return (self.model, self.strategy) in QUICK


def pairs() -> Iterator[ZooPair]:
    """Every model under every strategy."""
    for file, models in ZOO.items():
        for model, known in models.items():
            for strategy in STRATEGIES:
                outcome, _, words = known.get(strategy, VERIFIES).partition(": ")
                yield ZooPair(file, model, strategy, outcome, words)
