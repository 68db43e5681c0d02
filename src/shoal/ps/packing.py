"""Messages of the parameter server as the codec carries them, every field checked when they arrive."""

from __future__ import annotations

from shoal.comm.codec import Message, MessageForm
from shoal.errors import ProtocolError
from shoal.ps import between_servers  # noqa: F401  its messages are carried, too
from shoal.ps.messages import KINDS, PsMessage

_FORMS = {kind: MessageForm(cls, but=("frames",)) for kind, cls in KINDS.items()}


def pack(message: PsMessage) -> Message:
    """The message as the codec carries it."""
    return Message(message.kind, _FORMS[message.kind].plain(message), message.frames)


def unpack(message: Message) -> PsMessage:
    """The message that `pack` made, every field checked; `ProtocolError` for anything else."""
    cls = KINDS.get(message.kind)
    if cls is None:
        raise ProtocolError(f"There is no message {message.kind!r} in the parameter server's protocol.")
    found = _FORMS[message.kind].read(message.kind, message.fields)
    return cls(**found, frames=tuple(message.frames))
