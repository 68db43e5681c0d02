"""Who holds a shard: its primary, which answers, and its backup, which has every change before it is answered.

A change of holders is one of a register that all servers see and nobody can change twice from one state (see
`register.py`); each is a new generation. What a server wishes is a pure function of what it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import ProtocolError


@dataclass(frozen=True)
class Seat:
    """A server, in one of its lives: it has another after each start."""

    server: int
    life: str


@dataclass(frozen=True, kw_only=True)
class Holders:
    """Of one shard."""

    generation: int
    primary: Seat
    backup: Seat | None = None
    filled: bool = False
    """Whether the backup has everything, and may take over."""

    def to_plain(self) -> list[Any]:
        """As plain data."""
        backup = None if self.backup is None else [self.backup.server, self.backup.life]
        return [self.generation, [self.primary.server, self.primary.life], backup, self.filled]

    @classmethod
    def from_plain(cls, plain: object) -> Holders:
        """What `to_plain` gave."""
        match plain:
            case [int(generation), [int(server), str(life)], None, False]:
                return cls(generation=generation, primary=Seat(server, life))
            case [int(generation), [int(server), str(life)], [int(second), str(other)], bool(filled)]:
                backup = Seat(second, other)
                return cls(generation=generation, primary=Seat(server, life), backup=backup, filled=filled)
        raise ProtocolError("Who holds a shard is not written as [generation, primary, backup, filled].")

    @property
    def order(self) -> tuple[int, bool]:
        """What is higher is newer."""
        return self.generation, self.filled

    def led_by(self, primary: Seat) -> Holders:
        """The next generation, without a backup."""
        return Holders(generation=self.generation + 1, primary=primary)


def wish(
    shard: int,
    holders: Holders | None,
    me: Seat,
    living: Mapping[int, str],
    *,
    remembers: int,
    has_synced: bool,
) -> Holders | None:
    """What this server would have the holders be; None where they are well.

    `living`: the servers that were heard of lately, and their lives. `remembers`: the generation of which this
    server's memory has all, 0 for none. `has_synced`: whether its backup has everything by now.
    """
    if holders is None:
        return Holders(generation=1, primary=me) if shard == me.server else None
    backup, knows_all = holders.backup, remembers == holders.generation
    if holders.primary == me:
        if backup is None:
            others = [server for server in living if server != me.server]
            if not others:
                return None
            after = min(others, key=lambda server: (server - me.server) % (1 + max(living)))
            return replace(holders.led_by(me), backup=Seat(after, living[after]))
        if living.get(backup.server) != backup.life:
            return holders.led_by(me)
        return replace(holders, filled=True) if has_synced and not holders.filled else None
    primary_lives = living.get(holders.primary.server) == holders.primary.life
    if backup is not None and backup.server == me.server:
        return holders.led_by(me) if knows_all and holders.filled and not primary_lives else None
    # Its primary in an earlier life, whose memory has outlived it. A backup that lives goes before.
    backup_lives = backup is not None and holders.filled and living.get(backup.server) == backup.life
    if holders.primary.server == me.server and knows_all and not backup_lives:
        return holders.led_by(me)
    return None
