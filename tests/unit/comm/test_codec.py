"""The codec: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.codec import MAX_FRAME_BYTES, MAX_FRAMES, MAX_HEADER_BYTES, Message, checksum, decode, encode
from shoal.comm.envelope import Envelope, PacketKind
from shoal.errors import ProtocolError

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.complex64),
]
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
shapes = st.lists(st.integers(0, 5), max_size=4)
tensors = st.builds(
    lambda dtype, shape: torch.arange(torch.Size(shape).numel()).view(shape).to(dtype),
    st.sampled_from(DTYPES),
    shapes,
)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sealed(header: bytes) -> bytes:
    return checksum(header).to_bytes(8, "little") + header


def with_entry(entry: object, payload: bytes) -> list[bytes]:
    return [sealed(msgpack.packb(["k", {}, [entry]])), payload]


@settings(deadline=None, max_examples=60)
@given(
    kind=st.text(max_size=10),
    fields=st.dictionaries(st.text(), plain_values, max_size=4),
    frames=st.lists(tensors | st.binary(max_size=64), max_size=4),
)
def test_round_trip(kind, fields, frames):
    message = decode([bytes(buffer) for buffer in encode(Message(kind, fields, frames))])
    assert (message.kind, message.fields) == (kind, fields)
    assert len(message.frames) == len(frames)
    for sent, got in zip(frames, message.frames, strict=True):
        if isinstance(sent, torch.Tensor):
            assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
            assert raw(got) == raw(sent)
        else:
            assert bytes(got) == sent


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_flipped_bit_is_refused(data):
    message = Message("gradient", {"step": 3}, [torch.arange(5.0), b"tail"])
    buffers = [bytearray(buffer) for buffer in encode(message)]
    victim = data.draw(st.sampled_from(buffers))
    victim[data.draw(st.integers(0, len(victim) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ProtocolError):
        decode(buffers)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_truncation_is_refused(data):
    buffers = [bytes(buffer) for buffer in encode(Message("k", {"a": 1}, [torch.ones(3), b"abc"]))]
    index = data.draw(st.integers(0, len(buffers) - 1))
    buffers[index] = buffers[index][: data.draw(st.integers(0, len(buffers[index]) - 1))]
    with pytest.raises(ProtocolError):
        decode(buffers)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(max_size=40), max_size=3))
def test_garbage_is_refused_even_with_a_right_checksum(garbage):
    with pytest.raises(ProtocolError):
        decode([sealed(part) for part in garbage])


def test_missing_and_surplus_frames_are_refused():
    buffers = encode(Message("k", {}, [b"one", b"two"]))
    for wrong in (buffers[:-1], [*buffers, b"three"], [buffers[0], buffers[2], buffers[1]], []):
        with pytest.raises(ProtocolError):
            decode(wrong)


@pytest.mark.parametrize(
    "entry",
    [
        ["float32", [3], checksum(b"12345678")],  # 12 bytes announced, 8 came
        ["float32", [-2], checksum(b"12345678")],
        ["float32", [True, 2], checksum(b"12345678")],
        ["float32", [2**40, 2**40, 0], checksum(b"12345678")],
        ["float32", [1] * 17, checksum(b"12345678")],
        ["qint8", [8], checksum(b"12345678")],
        ["no such type", [8], checksum(b"12345678")],
        ["", [2, 4], checksum(b"12345678")],
        ["float32", [2]],
        ["float32", 2, checksum(b"12345678")],
        "float32",
    ],
)
def test_frames_that_are_not_what_they_say_are_refused(entry):
    with pytest.raises(ProtocolError):
        decode(with_entry(entry, b"12345678"))


def test_bounds_hold_on_both_sides():
    with pytest.raises(ProtocolError, match="header"):
        encode(Message("k", {"big": "x" * (MAX_HEADER_BYTES + 1)}))
    with pytest.raises(ProtocolError, match="header"):
        decode([bytes(MAX_HEADER_BYTES + 9)])
    with pytest.raises(ProtocolError, match="frames"):
        encode(Message("k", {}, [b""] * (MAX_FRAMES + 1)))
    with pytest.raises(ProtocolError, match="cut it into several"):
        encode(Message("k", {}, [b"", torch.empty(MAX_FRAME_BYTES + 1, dtype=torch.uint8)]))
    with pytest.raises(ProtocolError, match="parts"):
        decode([b""] * (MAX_FRAMES + 2))
    with pytest.raises(ProtocolError, match="announces more"):
        decode(with_entry(["uint8", [MAX_FRAME_BYTES + 1], 0], b""))


def test_what_cannot_be_sent_says_so():
    with pytest.raises(ProtocolError, match="plain data"):
        encode(Message("k", {"tensor": torch.ones(1)}))
    with pytest.raises(ProtocolError, match="dense CPU"):
        encode(Message("k", {}, [torch.ones(2, 2).to_sparse()]))
    with pytest.raises(ProtocolError, match="dense CPU"):
        encode(Message("k", {}, [torch.ones(2, device="meta")]))


def test_sending_does_not_copy_and_strides_do_not_matter():
    tensor = torch.zeros(4)
    frame = encode(Message("k", {}, [tensor]))[1]
    tensor.fill_(1.0)
    assert bytes(frame) == raw(torch.ones(4))
    transposed = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(decode(encode(Message("k", {}, [transposed]))).frames[0], transposed)


def test_frames_at_odd_addresses_are_usable():
    buffers = encode(Message("k", {}, [torch.arange(4.0)]))
    memory = bytearray(b"?" + bytes(buffers[1]))
    frame = decode([buffers[0], memoryview(memory)[1:]]).frames[0]
    assert frame.data_ptr() % 4 == 0 and torch.equal(frame, torch.arange(4.0))


def test_envelopes_round_trip_and_refuse_damage():
    envelope = Envelope(PacketKind.REPEAT, 3, 7, 2**40, 12)
    packed = envelope.pack()
    assert Envelope.unpack(packed) == envelope
    for bit in range(len(packed) * 8):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            Envelope.unpack(damaged)
    for wrong in (b"", packed[:-1], packed + b"x"):
        with pytest.raises(ProtocolError):
            Envelope.unpack(wrong)
