"""Models of sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from zoo_data import CLASSES, LENGTH, VOCABULARY, adamw, classes_of, drawn, lengths, per_token, task, tokens

import shoal

WIDTH = 8


class LastState(nn.Module):
    """Reads to the end and decides then."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(3, 12, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.memory(x)
        return self.head(states[:, -1])


def lstm() -> shoal.Task:
    """Of measurements over time."""
    inputs = drawn(LENGTH, 3)
    return task(LastState, inputs, classes_of(inputs), optimizer=adamw)


class PackedTexts(nn.Module):
    """Padding is not read at all."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.memory = nn.GRU(WIDTH, 12, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, text: Tensor, length: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(text), length, batch_first=True, enforce_sorted=False)
        _, last = self.memory(packed)
        return self.head(torch.cat([last[0], last[1]], 1))


def padded() -> tuple[Tensor, Tensor]:
    """Texts that end with zeros, and how long they are."""
    text, length = tokens(), lengths()
    return text * (torch.arange(LENGTH) < length[:, None]), length


def packed() -> shoal.Task:
    text, length = padded()
    rows = [((text[row], length[row]), text[row, 0] % CLASSES) for row in range(len(text))]
    return task(PackedTexts, train=rows)


class MaskedMean(nn.Module):
    """The mean of the words that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, text: Tensor, mask: Tensor) -> Tensor:
        mask = mask.unsqueeze(-1)
        return self.mix((self.words(text) * mask).sum(1) / mask.sum(1))


def ragged() -> shoal.Task:
    """Rows of different lengths, which a collate of the task's own pads."""
    text, length = tokens(), lengths()
    rows = [(row[:end], row[0] % CLASSES) for row, end in zip(text, length.tolist(), strict=True)]

    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
        texts = pad_sequence([row for row, _ in samples], batch_first=True)
        return {"text": texts, "mask": (texts > 0).float()}, torch.stack([target for _, target in samples])

    return task(MaskedMean, train=rows, collate=collate)


def bag_of_words() -> shoal.Task:
    """Its gradients are sparse."""
    text = tokens()
    return task(
        lambda: nn.Sequential(nn.EmbeddingBag(VOCABULARY, WIDTH, sparse=True), nn.Linear(WIDTH, CLASSES)),
        text,
        text[:, 0] % CLASSES,
    )


class LinearBigram(nn.Module):
    """So are those of the words alone here."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.words(text))


def sparse_embedding() -> shoal.Task:
    text = tokens(LENGTH + 1)
    return task(LinearBigram, text[:, :-1], text[:, 1:], loss=per_token)


class SelfAttention(nn.Module):
    """Causal, with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.mix = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        heads = [
            layer(inner).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.mix(seen.transpose(1, 2).flatten(2))


class TiedWriter(nn.Module):
    """Scores words with the very table that it reads them with."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.Sequential(SelfAttention(), SelfAttention())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(text) + self.positions))


def tied() -> shoal.Task:
    text = tokens(LENGTH + 1)
    return task(TiedWriter, text[:, :-1], text[:, 1:], loss=per_token, optimizer=adamw)


class Translator(nn.Module):
    """Writes a text from the last state of another; while it learns, each word follows the right one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.reader = nn.GRU(WIDTH, 12, batch_first=True)
        self.writer = nn.GRU(WIDTH, 12, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        _, state = self.reader(self.words(source))
        written, _ = self.writer(self.words(before), state)
        return self.head(written)


def seq2seq() -> shoal.Task:
    source, target = tokens(), tokens(LENGTH + 1, seed=5)
    rows = [((text, wanted[:-1]), wanted[1:]) for text, wanted in zip(source, target, strict=True)]
    return task(Translator, train=rows, loss=per_token, optimizer=adamw)


class Encoder(nn.Module):
    """Torch's own layers, which are told what is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.layers(self.words(text), src_key_padding_mask=text == 0)[:, 0])


def encoder() -> shoal.Task:
    text, _ = padded()
    return task(Encoder, text, text[:, 1] % CLASSES, optimizer=adamw)


class Decoder(nn.Module):
    """Reads one text and writes another, with attention to both."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        sizes: dict[str, Any] = {"nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.layers = nn.Transformer(WIDTH, num_encoder_layers=1, num_decoder_layers=1, **sizes)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return self.head(self.layers(self.words(source), self.words(before), tgt_mask=hidden))


def decoder() -> shoal.Task:
    source, target = tokens(), tokens(LENGTH + 1, seed=5)
    rows = [((text, wanted[:-1]), wanted[1:]) for text, wanted in zip(source, target, strict=True)]
    return task(Decoder, train=rows, loss=per_token, optimizer=adamw)
