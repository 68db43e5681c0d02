"""Requests and answers of a key-value store as messages of the codec."""

from __future__ import annotations

from torch import Tensor

from shoal.comm.codec import Frame, Message
from shoal.errors import ProtocolError
from shoal.kv.desk import KvAnswer, KvRequest

CLIENT_ID_BYTES = 16
_ANSWER = "kv answer"


def write_kv_request(request: KvRequest, reply_to: str) -> Message:
    """The request, with the address at which its answer is awaited."""
    fields = {
        "client": request.client,
        "sequence": request.sequence,
        "reply_to": reply_to,
        "worker": request.worker,
        "key": request.key,
        "span": [request.start, request.count],
        "is_last": request.is_last,
        "look": list(request.look),
        "rule": None if request.rule is None else list(request.rule),
        "has_rows": request.rows is not None,
    }
    frames: list[Frame] = [one for one in (request.rows, request.values) if one is not None]
    return Message(request.ask, fields, frames)


def read_kv_request(message: Message) -> tuple[KvRequest, str]:
    """The request in a message, and where its answer is awaited; `ProtocolError` for anything else."""
    frames = list(message.frames)
    match message.fields:
        case {
            "client": bytes(client),
            "sequence": int(sequence),
            "reply_to": str(reply_to),
            "worker": int(worker),
            "key": str(key),
            "span": [int(start), int(count)],
            "is_last": bool(is_last),
            "look": list(look),
            "rule": (None | [str(), dict()]) as rule,
            "has_rows": bool(has_rows),
        } if len(client) == CLIENT_ID_BYTES and all(isinstance(frame, Tensor) for frame in frames):
            rows = frames.pop(0) if has_rows and frames else None
        case _:
            raise ProtocolError(f"The fields of message {message.kind!r} are not those of a key-value request.")
    request = KvRequest(
        ask=message.kind,
        client=client,
        sequence=sequence,
        worker=worker,
        key=key,
        start=start,
        count=count,
        is_last=is_last,
        look=tuple(look),
        rule=None if rule is None else (rule[0], rule[1]),
        rows=rows if isinstance(rows, Tensor) else None,
        values=frames[0] if frames and isinstance(frames[0], Tensor) else None,
    )
    return request, reply_to


def write_kv_answer(answer: KvAnswer) -> Message:
    """The answer."""
    frames: list[Frame] = [] if answer.values is None else [answer.values]
    return Message(_ANSWER, {"sequence": answer.sequence, "reason": answer.reason}, frames)


def read_kv_answer(message: Message) -> KvAnswer:
    """The answer in a message; `ProtocolError` for anything else."""
    match message.fields:
        case {"sequence": int(sequence), "reason": str(reason)} if message.kind == _ANSWER:
            values = message.frames[0] if message.frames else None
            return KvAnswer(
                sequence=sequence, reason=reason, values=values if isinstance(values, Tensor) else None
            )
    raise ProtocolError("A message is no answer of a key-value server.")
