"""In which pieces a shard's gradient travels, and that every bit of it arrives where it belongs."""

import pytest
import torch

from benchmarks.bandwidth import open_model
from shoal.comm.compression import make_compression
from shoal.errors import ProtocolError
from shoal.strategies.ps.parcelling import blocks, parcels, unwrap, wrap

NONE, BF16 = make_compression("none"), make_compression("bf16")
MOST_BYTES = 4 << 20


@pytest.fixture(scope="module")
def memory():
    memory = open_model("mlp").memory
    for number, view in enumerate(memory.views("gradients/0")):
        view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(number)))
    return memory


def test_neighbouring_blocks_travel_as_one_where_cuts_do_not_matter(memory):
    for shard in range(len(memory.blocks)):
        whole, cut = parcels(memory, shard, "gradients/0", NONE), blocks(memory, shard, "gradients/0")
        assert len(whole) < len(cut)
        assert max(parcel.nbytes for parcel in whole) <= MOST_BYTES
        assert torch.equal(torch.cat(whole), torch.cat(cut))


def test_blocks_travel_apart_where_cuts_matter(memory):
    apart, cut = parcels(memory, 0, "gradients/0", BF16), blocks(memory, 0, "gradients/0")
    assert [parcel.data_ptr() for parcel in apart] == [block.data_ptr() for block in cut]


def test_what_travels_is_unwrapped_into_the_blocks(memory):
    frames = wrap(NONE, "push", parcels(memory, 1, "gradients/0", NONE))
    unwrap(NONE, frames, parcels(memory, 1, "gradients/1", NONE))
    pairs = zip(blocks(memory, 1, "gradients/1"), blocks(memory, 1, "gradients/0"), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_frames_cut_in_another_way_are_refused(memory):
    frames = wrap(NONE, "push", blocks(memory, 1, "gradients/0"))
    with pytest.raises(ProtocolError, match="does not hold the tensors"):
        unwrap(NONE, frames, parcels(memory, 1, "gradients/1", NONE))
