"""Small models of Hugging Face's library, built from configs, without dropout; and samples for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, LABELS, WIDTH = 20, 12, 4, 16


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=LABELS, **sizes, **quiet)
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 3, "n_head": 2}
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes, **quiet))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, max_position_embeddings=LENGTH, **sizes)
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=4, num_channels=3, num_labels=LABELS, **sizes, **quiet)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit}


def inputs(name: str, count: int, length: int = 8, seed: int = 3) -> dict[str, Tensor]:
    """What a model is called with, labels included."""
    draw = torch.Generator().manual_seed(seed)
    if name == "vit":
        pixels = torch.randn(count, 3, 8, 8, generator=draw)
        return {"pixel_values": pixels, "labels": torch.randint(0, LABELS, (count,), generator=draw)}
    tokens = torch.randint(1, VOCABULARY, (count, length), generator=draw)
    if name == "bert":
        mask = (torch.arange(length) < torch.randint(2, length + 1, (count, 1), generator=draw)).long()
        labels = torch.randint(0, LABELS, (count,), generator=draw)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return {"input_ids": tokens, "labels": tokens}


def samples(name: str, count: int) -> list[dict[str, Any]]:
    """The same, one by one."""
    columns = inputs(name, count)
    return [{key: column[row] for key, column in columns.items()} for row in range(count)]
