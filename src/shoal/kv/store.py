"""A store of tensors by key that all workers push to and pull from."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from shoal.comm.compression import Compression, make_compression
from shoal.errors import SpecError, unknown
from shoal.kv.arguments import (
    Keys,
    as_rows,
    as_tensor,
    columns,
    names,
    pairs,
    pieces,
    rooms,
    row_numbers,
    rows_of_piece,
    total,
)
from shoal.kv.lines import KvLine
from shoal.kv.pushes import PushQueue
from shoal.kv.requests import KvRequest, carried
from shoal.kv.rules import read_optimizer, settings_of
from shoal.kv.servers import KvServers
from shoal.ps.plain.tensors import packed
from shoal.roles.process.joining import Fellows
from shoal.spec import World

_CUT_BYTES = 1 << 20
"""Keys from here on are cut by rows over all servers."""


class KVStore:
    """Of one worker. Pushes go on in the background; what is pulled has this worker's own pushes in it."""

    def __init__(
        self, kind: str, lines: Sequence[KvLine], world: World, *, opens: str | None = None, drops: bool = False
    ) -> None:
        """`opens`: the kind that the servers know it by. `drops`: they hold nothing once it is closed."""
        self.type = kind
        self.rank, self.num_workers = world.global_rank, world.world_size
        self._lines, self._drops = list(lines), drops
        self._locks = [threading.Lock() for _ in self._lines]
        self._queue = PushQueue()
        self._each = ThreadPoolExecutor(len(self._lines), thread_name_prefix="shoal-kv-line")
        self._looks: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._pushed: dict[str, Future[None]] = {}
        self._open: dict[int, Future[None]] = {}
        self._timestamp = 0
        self._compression: Compression | None = None
        self.servers: KvServers | None = None
        """The processes that hold the store, where this worker has started them."""
        self.fellows: Fellows | None = None
        """Those whom the first worker has told where they are."""
        for number in range(len(self._lines)):
            self._ask(number, KvRequest(ask="open", look=(opens or kind, self.num_workers)))

    def init(self, key: Keys, value: Tensor | Sequence[Tensor]) -> None:
        """Add keys, at any time. All workers may, with values of one shape; those of the first to come count."""
        for name, tensor in pairs(key, value):
            rows = as_rows(as_tensor(tensor).detach().cpu().contiguous())
            self._learn(name, tensor)
            look = str(tensor.dtype).removeprefix("torch.")
            for number, (start, stop) in self._homes(name, len(rows)).items():
                part = rows[start:stop]
                for piece, at, _ in pieces(part):
                    shape = (len(part), part.shape[1], look)
                    self._ask(number, KvRequest(ask="init", key=name, start=at, look=shape, **carried(piece)))

    def push(self, key: Keys, value: Any, priority: int = 0) -> int:
        """Send values, or gradients where there is an optimizer; sparse tensors send their rows alone. A list of
        values for one key is added up. Returns at once: `wait` for what it returns, or pull. Of pushes that wait
        to be sent, those of a higher `priority` go first; a key's own keep their order."""
        for name, given in pairs(key, value):
            tensor = total(given)
            self._check(name, tensor)
            if tensor.is_sparse:
                if tensor.sparse_dim() != 1:
                    raise SpecError(
                        f"kv: of the key {name!r} whole rows are sent; make it sparse by to_sparse(1)."
                    )
                found = tensor.detach().coalesce()
                self._begin(name, found.indices()[0].clone(), found.values().clone(), priority)
            else:
                whole = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                self._begin(name, None, whole, priority)
        return self._timestamp

    def row_sparse_push(
        self, key: str | int, row_ids: Tensor | Sequence[int], values: Tensor, priority: int = 0
    ) -> int:
        """Send some rows; a row that is named twice counts with the sum."""
        name, rows = str(key), row_numbers(str(key), row_ids, self._look(str(key))[0])
        unique, back = rows.unique(return_inverse=True)
        shape, _ = self._look(name)
        given = as_tensor(values).detach().cpu()
        if given.numel() != len(rows) * columns(shape):
            raise SpecError(
                f"kv: {len(rows)} rows of the key {name!r} have the shape {[len(rows), *shape[1:]]}, "
                f"found {list(given.shape)}; give one row for each."
            )
        given = given.reshape(len(rows), columns(shape))
        summed = given.new_zeros(len(unique), given.shape[1])
        self._begin(name, unique, summed.scatter_add_(0, back[:, None].expand_as(given), given), priority)
        return self._timestamp

    def pull(self, key: Keys, out: Any = None, priority: int = 0) -> Any:
        """The values of keys, in `out` where it is given: a tensor for each key, or several. They are waited for,
        one after the other: `priority` is taken as other stores take it, and changes nothing."""
        named = names(key)
        wanted = rooms(out, key, len(named))
        found = [self._pull(name) for name in named]
        for tensor, own in zip(found, wanted, strict=True):
            for room in own:
                room.detach().copy_(tensor)
        return found[0] if isinstance(key, str | int) else found

    def row_sparse_pull(
        self, key: str | int, row_ids: Tensor | Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        """Some rows, in the order of `row_ids`."""
        name, rows = str(key), row_numbers(str(key), row_ids, self._look(str(key))[0])
        self._settle(name)
        shape, dtype = self._look(name)
        found = torch.empty(len(rows), columns(shape), dtype=dtype)

        def fetch(number: int, at: Tensor, own: Tensor, _: bool) -> None:
            answer = self._ask(number, self._request("pull", name, **carried(rows=own)))
            assert answer is not None
            if len(at) == len(found):
                found.copy_(answer)
            else:
                found[at] = answer

        self._over(name, rows, fetch)
        values = found.view(len(rows), *shape[1:])
        return values if out is None else out.copy_(values)

    def pushpull(self, key: Keys, value: Any, out: Any = None, priority: int = 0) -> Any:
        """Push, and pull what comes of it."""
        self.push(key, value, priority)
        return self.pull(key, out, priority)

    def set_optimizer(self, optimizer: str | torch.optim.Optimizer, **settings: float) -> None:
        """How servers use what is pushed: `sgd`, `adagrad`, `adam` with settings, or an optimizer of torch's whose
        class and settings are taken. All workers call this."""
        if isinstance(optimizer, str):
            name, found = optimizer, settings_of(optimizer, settings)
        else:
            name, found = read_optimizer(optimizer)
        if self.rank == 0:
            for number in range(len(self._lines)):
                self._ask(number, KvRequest(ask="optimizer", rule=(name, dict(found))))
        self.barrier()

    def set_gradient_compression(self, how: str | Mapping[str, Any]) -> None:
        """Send what is pushed smaller: `bf16`, `fp16`, `int8`, `sign`, `topk:0.01` and so on; `none`: as it is.
        What is rounded off one push of a whole tensor is part of the next. Rows that are pushed alone are other
        ones each time: they are sent as `bf16`, `fp16`, `int8` or `zstd`, and with the others as they are."""
        text = how if isinstance(how, str) else str(how.get("type"))
        if not isinstance(how, str) and (more := sorted(set(how) - {"type"})) and text not in ("1bit", "2bit"):
            raise SpecError(
                f"kv: what {text} is to do is all in its type, found {more[0]!r} beside it; leave it out."
            )
        if text in ("1bit", "2bit"):
            raise SpecError(f"kv: {text} is none of the compressions here; `sign` is nearest to it, or `int8`.")
        self._compression = None if text == "none" else make_compression(text)

    def wait(self, timestamp: int | None = None) -> None:
        """Until the push that returned this is acknowledged, and all before it; None: all."""
        for number in [one for one in sorted(self._open) if timestamp is None or one <= timestamp]:
            self._open.pop(number).result()

    def barrier(self) -> None:
        """Until all workers have come here, and what they have pushed is acknowledged."""
        self.wait()
        for ask in ("arrive", "gather"):
            self._ask(0, KvRequest(ask=ask, worker=self.rank))

    def close(self) -> None:
        """Leave, once all have come here; what the workers have started ends with that."""
        try:
            self.barrier()
            if self._drops:
                for number in range(len(self._lines)):
                    self._ask(number, KvRequest(ask="leave"))
            if self.fellows is not None:
                self.fellows.hear_first()  # who has started the servers goes last
        finally:
            self._queue.close()
            self._each.shutdown()
            for line in self._lines:
                line.close()
            if self.fellows is not None:
                self.fellows.close()
            if self.servers is not None:
                self.servers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, name: str, rows: Tensor | None, values: Tensor, priority: int) -> None:
        self._timestamp += 1
        for number in [one for one, future in self._open.items() if future.done()]:
            self._open.pop(number).result()  # raises what went wrong meanwhile
        future = self._queue.add(name, priority, partial(self._push, name, rows, values))
        self._open[self._timestamp] = self._pushed[name] = future

    def _push(self, name: str, rows: Tensor | None, values: Tensor) -> None:
        if rows is None:
            whole = as_rows(values)
            for number, (start, stop) in self._homes(name, len(whole)).items():
                for piece, at, is_last in pieces(whole[start:stop]):
                    what = self._sent(piece, None, (name, number, at))
                    self._ask(number, self._request("push", name, start=at, is_last=is_last, **what))
            return
        wide = values.reshape(len(rows), -1)

        def send(number: int, at: Tensor, own: Tensor, is_last: bool) -> None:
            part = wide if len(at) == len(wide) else wide[at]
            self._ask(number, self._request("push", name, is_last=is_last, **self._sent(part, own, None)))

        # Also to servers of which no row is pushed: rounds and clocks count there, too.
        self._over(name, rows, send)

    def _sent(self, values: Tensor, rows: Tensor | None, key: Hashable) -> dict[str, Any]:
        """How values travel; `key` names what is pushed whole each time."""
        compression = self._compression
        if compression is not None and key is None:
            # Other rows each time: what is rounded off has nowhere to go.
            text = compression.text
            compression = make_compression(text, error_feedback=False) if compression.keeps_all_elements else None
        if compression is None or not len(values):
            return carried(values, rows)
        piece = packed(values, compression, key)
        return {**carried(piece, rows), "compress": compression.text, "count": len(values)}

    def _pull(self, name: str) -> Tensor:
        self._settle(name)
        shape, dtype = self._look(name)
        found = torch.empty(shape, dtype=dtype)
        whole = as_rows(found)
        for number, (start, stop) in self._homes(name, len(whole)).items():
            for piece, at, _ in pieces(whole[start:stop]):
                answer = self._ask(number, self._request("pull", name, start=at, count=len(piece)))
                assert answer is not None
                piece.copy_(answer)
        return found

    def _settle(self, name: str) -> None:
        if (pushed := self._pushed.pop(name, None)) is not None:
            pushed.result()

    def _request(self, ask: str, key: str, **more: Any) -> KvRequest:
        return KvRequest(ask=ask, worker=self.rank, key=key, **more)

    def _ask(self, number: int, request: KvRequest) -> Tensor | None:
        with self._locks[number]:
            return self._lines[number].ask(request).values

    def _over(self, name: str, rows: Tensor, act: Callable[[int, Tensor, Tensor, bool], None]) -> None:
        """Do something with each server's part of some rows, side by side, and with as many as fit a message."""
        shape, dtype = self._look(name)
        size, parts = rows_of_piece(columns(shape), dtype), self._rows_by_home(name, rows, shape[0])

        def act_on(number: int) -> None:
            at, own = (one.split(size) for one in parts[number])
            for index, piece in enumerate(zip(at, own, strict=True)):
                act(number, *piece, index == len(at) - 1)

        if len(parts) == 1:
            act_on(*parts)
            return
        for future in [self._each.submit(act_on, number) for number in parts]:
            future.result()

    def _homes(self, name: str, rows: int) -> dict[int, tuple[int, int]]:
        """Which servers have which rows of a key."""
        shape, dtype = self._look(name)
        count = len(self._lines)
        if rows < count or rows * columns(shape) * dtype.itemsize < _CUT_BYTES:
            return {zlib.crc32(name.encode()) % count: (0, rows)}
        bounds = [rows * number // count for number in range(count + 1)]
        return dict(enumerate(pairwise(bounds)))

    def _rows_by_home(self, name: str, rows: Tensor, total: int) -> dict[int, tuple[Tensor, Tensor]]:
        """By server: where in the request its rows are, and which of its own rows they are."""
        homes = self._homes(name, total)
        if len(homes) == 1:
            return dict.fromkeys(homes, (torch.arange(len(rows)), rows))
        found = {}
        for number, (start, stop) in homes.items():
            at = ((rows >= start) & (rows < stop)).nonzero()[:, 0]
            found[number] = at, rows[at] - start
        return found

    def _learn(self, name: str, tensor: Tensor) -> None:
        """What a key looks like, of which nobody may think otherwise later."""
        look = tuple(tensor.shape), tensor.dtype
        if self._looks.setdefault(name, look) != look:
            (shape, dtype), found = self._looks[name], list(tensor.shape)
            raise SpecError(
                f"kv: the key {name!r} is {list(shape)} of {dtype} here, found {found} of {tensor.dtype}; "
                "use another key for it."
            )

    def _look(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        if name not in self._looks:
            raise unknown("kv: the key", name, self._looks)
        return self._looks[name]

    def _check(self, name: str, value: Tensor) -> None:
        shape, _ = self._look(name)
        if tuple(value.shape) != shape:
            raise SpecError(
                f"kv: the key {name!r} has the shape {list(shape)}, found {list(value.shape)}; send one like it."
            )
