"""Which replica a robot or an episode belongs to: rendezvous hashing, one definition for every kind of replicas.

Every pair of key and member has a weight, and the member with the largest one owns the key. So all that know the same
members agree without a word to each other, each owns about the same share, and a member that leaves or joins moves
only the keys that it owned or owns now.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def owner(key: str, members: Iterable[str]) -> str | None:
    """The member that owns the key, None without members."""
    return max(members, key=lambda member: _weight(key, member), default=None)


def preference(key: str, members: Iterable[str]) -> list[str]:
    """All members, the owner first: each is the owner if those before it leave."""
    return sorted(members, key=lambda member: _weight(key, member), reverse=True)


def _weight(key: str, member: str) -> tuple[bytes, str]:
    """The name decides between equal hashes, so that the order of the members never does."""
    pair = f"{len(member)}:{member}{key}".encode("utf-8", "surrogatepass")  # the length: no two pairs are one text
    return blake2b(pair, digest_size=8).digest(), member
