"""A shard that outlives its servers: what they note on the way, and how a successor goes on with it.

Where a shard's values lie in memory that outlives the process, a journal lies beside them: the shard's books of
some moment, and every entry of its log since then, noted before it is applied. As the same log makes the same
shard, whoever takes in these entries again has the shard as the dead server had it, or as it was about to be;
the values know how much of the newest entry they have, and take the rest. So nothing that was answered is lost,
and nothing is in twice: what was not answered is sent again, and is known by then or new.

A primary keeps its journal as long as no other server has everything: a filled backup takes over without one.
"""

from __future__ import annotations

from shoal.comm.codec import Message
from shoal.errors import LaunchError
from shoal.ps.between_servers import Settle
from shoal.ps.contract import ShardValues
from shoal.ps.messages import Control, Push
from shoal.ps.packing import pack, unpack
from shoal.ps.rules import ShardRules
from shoal.ps.shard import Shard


def note_books(shard: Shard) -> None:
    """A primary begins its journal, or a new page of it."""
    if (journal := shard.values.journal) is not None:
        frames, books = shard.books()
        if not journal.begin(Message("books", books, frames)):
            journal.give_up()


def note_entry(shard: Shard, entry: Push | Control | Settle) -> None:
    """A primary is about to apply an entry."""
    if (journal := shard.values.journal) is None or journal.is_void:
        return
    packed = pack(entry)
    if journal.append(packed):
        return
    note_books(shard)
    if not journal.is_void and not journal.append(packed):
        journal.give_up()


def inherit(number: int, rules: ShardRules, values: ShardValues) -> Shard:
    """The shard that lies there, as its last primary left it; as the model begins where there was none."""
    journal = values.journal
    if journal is not None and journal.is_void:
        raise LaunchError(
            f"Nobody has all of shard {number} any more: both its servers are lost, or what is noted of it has "
            "become too large for its journal; start the run again, or resume it."
        )
    left = None if journal is None else journal.books()
    if journal is None or left is None:
        values.initialise()
        return Shard(rules, values)
    values.resume(left.fields["facts"])
    shard = Shard.from_books(rules, values, left.frames, left.fields)
    for packed in journal.entries():
        entry = unpack(packed)
        assert isinstance(entry, Push | Control | Settle)
        shard.accept(entry)
    return shard
