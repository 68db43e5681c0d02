"""The text of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import SpecError
from shoal.spec.checks import require_count

if TYPE_CHECKING:
    from torch import Tensor

NUM_BYTES = 256
"""Tokens that `python_text` can hold: one per value of a byte."""


def python_text(block_size: int = 128, *, max_bytes: int = 1_500_000) -> tuple[TextBlocks, TextBlocks]:
    """The source text of this Python's standard library as (train, test), one token per byte.

    Files are taken whole, in order of their names, until `max_bytes` are reached; the last tenth of each
    is for testing. The text differs a little between Python versions.
    """
    import torch

    require_count("python_text", "block_size", block_size)
    require_count("python_text", "max_bytes", max_bytes)
    train, test = bytearray(), bytearray()
    for text in _library_sources(max_bytes):
        cut = len(text) * 9 // 10
        train += text[:cut]
        test += text[cut:]
    if len(test) <= block_size:
        raise SpecError(
            f"python_text: block_size={block_size} is longer than the test text of {len(test)} bytes; "
            "use shorter blocks or a larger max_bytes."
        )
    train_tokens, test_tokens = (torch.frombuffer(part, dtype=torch.uint8) for part in (train, test))
    return TextBlocks(train_tokens, block_size), TextBlocks(test_tokens, block_size)


class TextBlocks:
    """A text cut into blocks that do not overlap; a sample is (block, the block shifted by one token)."""

    def __init__(self, tokens: Tensor, block_size: int) -> None:
        self.tokens = tokens
        self.block_size = block_size

    def __len__(self) -> int:
        # One token more than whole blocks is needed, the last block's last target.
        return max(0, len(self.tokens) - 1) // self.block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Many samples at once, which torch's loaders ask for: one gather instead of one per sample."""
        import torch

        blocks = torch.as_tensor(indices, dtype=torch.int64)
        if len(blocks) and not (-len(self) <= int(blocks.min()) and int(blocks.max()) < len(self)):
            raise IndexError(f"a block's index must lie within {len(self)} blocks, found {list(indices)}.")
        starts = blocks % len(self) * self.block_size
        rows = self.tokens[starts.unsqueeze(1) + torch.arange(self.block_size + 1)].to(torch.int64)
        return [(row[:-1], row[1:]) for row in rows]


def _library_sources(max_bytes: int) -> Iterator[bytes]:
    """Whole source files of the standard library's top level, by name, up to `max_bytes` together."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py"))
    if not paths:
        raise SpecError(
            f"python_text: {folder} holds no .py files; use a Python that ships the sources of its library."
        )
    for path in paths:
        text = path.read_bytes()
        max_bytes -= len(text)
        if max_bytes < 0:
            return
        yield text
