"""What `fast` tries, and what it takes of it."""

from __future__ import annotations

from shoal.roles.fast.choice import (
    Openings,
    StepWay,
    Tried,
    agree,
    best_of,
    captured_ways,
    compiled_ways,
    pays_to_compile,
    plain_way,
    quick_ways,
)
from shoal.spec import StepForm

PLAIN = StepWay()
LAST = StepWay(form=StepForm(memory_format="channels_last"))
COMPILED = StepWay(form=StepForm(compile=True))


def tried(way: StepWay, step_s: float, first_s: float = 0.0, why_not: str = "") -> Tried:
    return Tried(way=way, step_s=step_s, first_s=first_s, why_not=why_not)


def test_what_is_tried_follows_from_the_model() -> None:
    assert quick_ways(Openings()) == []
    assert quick_ways(Openings(has_images=True)) == [LAST]
    found = quick_ways(Openings(precisions=("fp32", "bf16"), has_images=True, has_vocabulary=True))
    assert {str(way) for way in found} == {"channels_last", "plain, bf16", "channels_last, bf16", "loss in pieces"}
    assert plain_way(Openings(precisions=("bf16",))) == StepWay(precision="bf16")


def test_products_are_tried_in_float32() -> None:
    openings = Openings(precisions=("fp32", "bf16"), can_multiply=True)
    assert {str(way) for way in quick_ways(openings)} == {"onednn", "plain, bf16"}
    found = [tried(PLAIN, 1.0), tried(StepWay(form=StepForm(products="onednn")), 0.5)]
    assert [str(way) for way in compiled_ways(openings, found)] == ["compile + onednn", "compile, bf16"]
    assert quick_ways(Openings(precisions=("bf16",), can_multiply=True)) == []


def test_patches_are_tried_of_images_that_lie_pixel_by_pixel() -> None:
    openings = Openings(precisions=("fp32", "bf16"), has_images=True, can_use_patches=True)
    ways = quick_ways(openings)
    patched = [way for way in ways if way.form.convolutions == "patches"]
    assert {str(way) for way in patched} == {"channels_last + patches", "channels_last + patches, bf16"}
    found = [tried(PLAIN, 1.0), tried(patched[-1], 0.5)]
    assert [str(way) for way in compiled_ways(openings, found)] == [f"compile + {way}" for way in patched]


def test_precision_is_changed_only_where_it_may_be() -> None:
    ways = quick_ways(Openings(has_images=True)) + compiled_ways(Openings(), [tried(PLAIN, 1.0)])
    assert {way.precision for way in ways} == {"fp32"}


def test_compilation_keeps_what_has_helped() -> None:
    openings = Openings(precisions=("fp32", "bf16"), has_images=True)
    ways = compiled_ways(openings, [tried(PLAIN, 1.0), tried(LAST, 0.7), tried(StepWay(precision="bf16"), 2.0)])
    assert [str(way) for way in ways] == ["compile + channels_last", "compile + channels_last, bf16"]
    failed = compiled_ways(Openings(), [tried(PLAIN, 1.0), tried(LAST, 0.0, why_not="it failed")])
    assert [str(way) for way in failed] == ["compile"]


def test_a_loss_in_pieces_that_costs_nothing_is_compiled_with_and_without() -> None:
    pieces = StepWay(form=StepForm(loss_in_pieces=True))
    ways = compiled_ways(Openings(has_vocabulary=True), [tried(PLAIN, 1.0), tried(pieces, 1.02)])
    assert [str(way) for way in ways] == ["compile + loss in pieces", "compile"]


def test_the_fastest_of_each_kind_is_captured() -> None:
    ways = captured_ways(Openings(), [tried(PLAIN, 1.0), tried(COMPILED, 0.5), tried(LAST, 0.9)])
    assert [str(way) for way in ways] == ["graph + channels_last", "compile + graph"]


def test_short_jobs_are_not_compiled_for() -> None:
    assert not pays_to_compile(steps=100, step_s=0.1, number=1)
    assert pays_to_compile(steps=10_000, step_s=0.1, number=2)


def test_the_fastest_is_taken_where_it_is_faster() -> None:
    plain = tried(PLAIN, 1.0)
    assert best_of(plain, [tried(LAST, 0.98)], 100) is plain, "less than can be told from noise"
    assert best_of(plain, [tried(LAST, 0.0, why_not="its losses differ")], 100) is plain
    assert best_of(plain, [last := tried(LAST, 0.7), tried(COMPILED, 0.8)], 100) is last


def test_loading_what_was_compiled_counts() -> None:
    plain, compiled = tried(PLAIN, 1.0), tried(COMPILED, 0.9, first_s=100.0)
    assert best_of(plain, [compiled], 100) is plain
    assert best_of(plain, [compiled], 1000) is compiled


def test_losses_agree_up_to_rounding() -> None:
    assert agree([2.0001, 1.0], [2.0, 1.0], 1e-3)
    assert not agree([2.0, 1.1], [2.0, 1.0], 1e-3)
    assert not agree([float("nan")], [2.0], 1e-1)


def test_an_update_in_one_kernel_is_tried_where_it_can_be() -> None:
    flat = StepWay(form=StepForm(flat_update=True), precision="bf16")
    assert quick_ways(Openings(precisions=("bf16",), can_update_flat=True)) == [flat]
    assert flat in quick_ways(Openings(precisions=("fp32", "bf16"), can_update_flat=True))
    assert quick_ways(Openings(can_update_flat=True)) == []
    captured = captured_ways(Openings(can_update_flat=True), [tried(StepWay(precision="bf16"), 1.0)])
    assert [str(way) for way in captured] == ["graph, bf16", "graph + flat update, bf16"]
    compiled = compiled_ways(Openings(precisions=("fp32", "bf16")), [tried(PLAIN, 1.0), tried(flat, 0.5)])
    assert [str(way) for way in compiled] == ["compile", "compile + flat update, bf16"]
