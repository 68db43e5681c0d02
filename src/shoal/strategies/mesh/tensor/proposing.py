"""Ways to cut the layers of a block so that nothing has to be gathered between them. They are guesses: `Trial`
says which is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shoal.layout.tensor_plan import LayerCut, Region, Way
from shoal.strategies.mesh.tensor.shapes import GroupedShape, LayerShape, channels_of, fits

HEADS = (
    "heads",
    "num_heads",
    "n_head",
    "n_heads",
    "nhead",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
)
"""What modules call the number of their attention's heads."""
WIDTHS = (
    "embed_dim",
    "split_size",
    "all_head_size",
    "inner_dim",
    "hidden_size",
    "d_model",
    "n_embd",
    "width",
    "dim",
)
"""What they call the width of all heads together."""
MOST_FUSED = 4


@dataclass(frozen=True, kw_only=True)
class Called:
    """A layer of a block, as it was called."""

    name: str
    shape: LayerShape | None = None
    channels: int | None = None
    """Of a norm that treats its channels apart."""
    grouped: GroupedShape | None = None
    """Of a convolution that treats its groups apart."""


def regions_of(
    block: str, called: Sequence[Called], modules: Mapping[str, nn.Module], count: int, wanted: Mapping[str, Way]
) -> Iterator[tuple[Region, ...]]:
    """Proposals for a block whose layers were called in this order, the likeliest first. `modules`: the block and
    what is in it, by name. `wanted`: the ways that some layers must be cut; none: any."""
    for chains in _layerings(called, count):
        if any(wanted.get(cut.layer, cut.way) is not cut.way for cuts in chains for cut in cuts):
            continue
        for divided in _attributes(modules, count):
            yield tuple(Region(block=block, cuts=cuts, divided=divided) for cuts in chains)
        if len(chains) == 1 and block:
            width = next(each.shape.inputs for each in called if each.shape is not None)
            for divided in _attributes(modules, count)[:-1]:
                yield (Region(block=block, cuts=chains[0], divided=divided, narrowed=width),)


def _layerings(called: Sequence[Called], count: int) -> Iterator[list[tuple[LayerCut, ...]]]:
    """Each a list of chains that begin and end whole."""
    layers = [each for each in called if each.shape is not None]
    if len(layers) < 2:
        return

    def with_others(cuts: tuple[LayerCut, ...]) -> tuple[LayerCut, ...]:
        return (*cuts, *_between(called, cuts[0].layer, cuts[-1].layer, count))

    # Several layers side by side feed the last one: attention, gated perceptrons.
    for fused in (True, False):
        if cuts := _fan(layers[:-1], layers[-1], count, fused=fused):
            yield [with_others(cuts)]
    # One feeds the next: perceptrons, convolutions.
    for fused in (True, False):
        pairs = [with_others(pair) for pair in _pairs(layers, count, fused=fused)] if len(layers) > 2 else []
        if pairs:
            yield pairs
        if len(pairs) > 1:
            yield from ([pair] for pair in pairs)  # one that is wrong must not spoil the others


def _fan(columns: Sequence[Called], row: Called, count: int, *, fused: bool) -> tuple[LayerCut, ...]:
    """Every layer but the last by its outputs, the last by its inputs; nothing where sizes do not allow it."""
    assert row.shape is not None
    if not fits(row.shape.inputs, count):
        return ()
    cuts = [_column(each, row.shape.inputs, count, fused=fused) for each in columns]
    if any(cut is None for cut in cuts):
        return ()
    return (*(cut for cut in cuts if cut is not None), LayerCut(layer=row.name, way=Way.ROW))


def _pairs(layers: Sequence[Called], count: int, *, fused: bool) -> list[tuple[LayerCut, ...]]:
    pairs: list[tuple[LayerCut, ...]] = []
    number = 0
    while number + 1 < len(layers):
        first, second = layers[number : number + 2]
        assert first.shape is not None and second.shape is not None
        feeds = first.shape.outputs % second.shape.inputs == 0
        cuts = _fan([first], second, count, fused=fused) if feeds else ()
        if cuts:
            pairs.append(cuts)
        number += 2 if cuts else 1
    return pairs


def _column(layer: Called, following: int, count: int, *, fused: bool) -> LayerCut | None:
    """`fused`: outputs that are several times what follows are several things one after the other."""
    assert layer.shape is not None
    outputs = layer.shape.outputs
    blocks = _blocks(outputs, following) if fused and outputs > following else ()
    if (fused and outputs > following and not blocks) or not fits(outputs, count, blocks):
        return None
    return LayerCut(layer=layer.name, way=Way.COLUMN, blocks=blocks)


def _blocks(outputs: int, following: int) -> tuple[int, ...]:
    """Equal ones (query, key, value), or smaller ones after the first (grouped queries)."""
    times, rest = divmod(outputs, following)
    if not rest and times <= MOST_FUSED:
        return (following,) * times
    smaller, odd = divmod(outputs - following, 2)
    return () if odd or smaller >= following else (following, smaller, smaller)


def _between(called: Sequence[Called], first: str, last: str, count: int) -> list[LayerCut]:
    """Norms, and convolutions in groups, that get what the cut layers before them have computed."""
    names = [each.name for each in called]
    found: list[LayerCut] = []
    outputs: int | None = None
    for each in called[names.index(first) : names.index(last)]:
        if each.shape is not None:
            outputs = each.shape.outputs
        elif each.grouped is not None and each.grouped.inputs == outputs and fits(each.grouped.groups, count):
            found.append(LayerCut(layer=each.name, way=Way.GROUPS))
            outputs = each.grouped.outputs
        elif each.channels is not None and each.channels == outputs and fits(each.channels, count):
            found.append(LayerCut(layer=each.name, way=Way.CHANNELS))
    return found


def _attributes(modules: Mapping[str, nn.Module], count: int) -> list[tuple[tuple[str, str], ...]]:
    """Which attributes to divide: heads and widths, heads alone, or none."""

    def having(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
        return tuple(
            (name, attribute)
            for name, module in modules.items()
            if not _is_layer(module)
            for attribute in names
            if _is_divisible(vars(module).get(attribute), count)
        )

    return list(dict.fromkeys((having((*HEADS, *WIDTHS)), having(HEADS), ())))


def _is_divisible(value: object, count: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= count and value % count == 0


def _is_layer(module: nn.Module) -> bool:
    """Layers of torch's own keep their sizes under such names, too; what becomes of these is up to their parts."""
    return type(module).__module__.startswith("torch.nn") or channels_of(module) is not None
