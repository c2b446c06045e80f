"""The names of full blocks: a chain of SHA-256 over the tokens, so that equal names mean equal prefixes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, NewType

BlockHash = NewType("BlockHash", bytes)
HashFunction = Callable[[bytes], bytes]


class PrefixKey(NamedTuple):
    """What names a full block: the hash of all tokens up to its end, and its own tokens to compare on a hit."""

    block_hash: BlockHash
    content: bytes


def sha256(data: bytes) -> bytes:
    """Returns the digest: strong, so that nobody can make a prompt that is taken for another."""
    return hashlib.sha256(data).digest()


def prefix_key(
    block_tokens: Sequence[int], parent: PrefixKey | None, salt: bytes, hash_function: HashFunction
) -> PrefixKey:
    """Returns the name of a full block that stands after `parent`.

    The salt is part of the first block's content and not only of its hash, since a hit compares contents.
    """
    content = array("q", block_tokens).tobytes()
    if parent is None:
        content = len(salt).to_bytes(8, "little") + salt + content
    return PrefixKey(BlockHash(hash_function((parent.block_hash if parent else b"") + content)), content)
