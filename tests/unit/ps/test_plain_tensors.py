"""Tensors of the plain parameter server: how they travel, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.compression import make_compression
from shoal.errors import LaunchError, ProtocolError, SpecError
from shoal.ps.plain.line import reply_address
from shoal.ps.plain.tensors import PIECE_BYTES, PlainBulk, TensorSpec, pack, pieces, require_fit, unpack

TENSORS = {
    "scalar": torch.tensor(2.5),
    "vector": torch.arange(7, dtype=torch.float64),
    "image": torch.randn(3, 5, 4, 4),
    "transposed": torch.randn(6, 4).t(),
    "empty": torch.zeros(0, 3),
    "half": torch.randn(9).to(torch.bfloat16),
    "counts": torch.arange(6).view(2, 3),
    "mask": torch.tensor([True, False]),
}
SPECS = {name: TensorSpec.of(tensor) for name, tensor in TENSORS.items()}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), [(1,)]),
        ((0, 3), [(0,)]),
        ((3, 2, 2), [(3, 4)]),
        ((3, PIECE_BYTES // 8), [(2, PIECE_BYTES // 8), (1, PIECE_BYTES // 8)]),
        ((2, PIECE_BYTES // 2), [(PIECE_BYTES // 4,)] * 4),
        ((PIECE_BYTES // 4 + 1,), [(PIECE_BYTES // 4,), (1,)]),
    ],
)
def test_pieces_are_rows_of_a_bounded_size(shape, expected):
    cut = pieces(torch.zeros(shape))
    assert [tuple(piece.shape) for piece in cut] == expected
    assert all(piece.nbytes <= PIECE_BYTES for piece in cut)


@pytest.mark.parametrize("text", ["none", "zstd"])
def test_all_tensors_arrive_bit_by_bit(text):
    compression = None if text == "none" else make_compression(text)
    arrived = unpack(pack(TENSORS, compression), TENSORS, SPECS, compression)
    assert list(arrived) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(arrived[name], tensor) and arrived[name].dtype == tensor.dtype
        assert arrived[name].data_ptr() != tensor.data_ptr() or not tensor.numel()


@pytest.mark.parametrize("text", ["bf16", "int8", "powersgd:4"])
def test_lossy_compression_spares_what_cannot_be_rounded(text):
    arrived = unpack(pack(TENSORS, make_compression(text)), TENSORS, SPECS, make_compression(text))
    for name in ("counts", "mask"):
        assert torch.equal(arrived[name], TENSORS[name])
    torch.testing.assert_close(arrived["vector"], TENSORS["vector"], rtol=0.01, atol=0.05)


GOOD = pack({"image": TENSORS["image"]})
RAW = GOOD.frames[0]


@pytest.mark.parametrize(
    "bulk",
    [
        PlainBulk(),
        PlainBulk(packing=[None]),
        PlainBulk(packing=[None], frames=[RAW, RAW]),
        PlainBulk(packing=[None, None], frames=[RAW, RAW]),
        PlainBulk(packing=[None], frames=[RAW.reshape(-1)]),
        PlainBulk(packing=[None], frames=[RAW.double()]),
        PlainBulk(packing=[None], frames=[b"bytes"]),
        PlainBulk(packing=[[1, {}]], frames=[RAW]),
        PlainBulk(packing=[[0, {}]], frames=[RAW]),
        PlainBulk(packing=[[1 << 60, {}]], frames=[RAW]),
        PlainBulk(packing=["plain"], frames=[RAW]),
    ],
)
def test_what_is_not_exactly_the_tensor_is_refused(bulk):
    assert torch.equal(unpack(GOOD, ["image"], SPECS)["image"], TENSORS["image"])
    with pytest.raises(ProtocolError):
        unpack(bulk, ["image"], SPECS)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"vectro": torch.zeros(7)}, "'vectro' is not known. Did you mean 'vector'?"),
        ({"vector": torch.zeros(7)}, "float32 \\[7\\], but the server has float64 \\[7\\]"),
        ({"vector": torch.zeros(8).double()}, "float64 \\[8\\], but the server has float64 \\[7\\]"),
        ({"vector": [0.0] * 7}, "found list"),
        ({"vector": torch.zeros(7).double().to_sparse()}, "to_dense"),
    ],
)
def test_what_does_not_fit_is_said(values, sentence):
    require_fit({"vector": TENSORS["vector"]}, SPECS)
    with pytest.raises(SpecError, match=sentence):
        require_fit(values, SPECS)


def test_specs_travel_as_plain_data():
    for spec in SPECS.values():
        assert TensorSpec.from_plain(spec.to_plain()) == spec
    for plain in (None, ["float32"], ["nn", [1]], ["float32", [-1]], ["float32", [True]], [1, []]):
        with pytest.raises(ProtocolError):
            TensorSpec.from_plain(plain)


def test_a_client_listens_where_its_server_is():
    assert reply_address("tcp://127.0.0.1:5000") == "tcp://127.0.0.1:*"
    assert reply_address("tcp://[::1]:5000") == "tcp://[::1]:*"
    assert reply_address("ipc://@somewhere").startswith("ipc://@shoal-")
    for address in ("127.0.0.1:5000", "tcp://127.0.0.1", "tcp://:5000", "tcp://127.0.0.1:*", "udp://1.2.3.4:5"):
        with pytest.raises(SpecError, match="copy what the server shows"):
            reply_address(address)
    with pytest.raises(LaunchError, match="no way"):
        reply_address("tcp://no.such.host.invalid:5000")
