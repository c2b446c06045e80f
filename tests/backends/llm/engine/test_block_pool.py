"""The block pool: references, the order of eviction, and prefixes found only where they are right."""

from __future__ import annotations

import pytest

from backends.llm.engine.block_hash import PrefixKey, prefix_key, sha256
from backends.llm.engine.block_pool import BlockPool


def key(*tokens: int, parent: PrefixKey | None = None, salt: bytes = b"") -> PrefixKey:
    return prefix_key(tokens, parent, salt, sha256)


def ids(blocks):  # type: ignore[no-untyped-def]
    return [block.block_id for block in blocks]


def test_blocks_are_taken_in_the_order_of_their_ids_and_come_back_last_first():
    pool = BlockPool(4)
    table = pool.allocate(3)
    assert ids(table) == [0, 1, 2] and pool.num_free_blocks == 1
    pool.free(table)
    # Empty blocks go to the front: freed 2, 1, 0, so 0 stands first.
    assert ids(pool.allocate(4)) == [0, 1, 2, 3]


def test_a_block_with_two_references_is_free_after_the_second():
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.touch(table)
    pool.free(table)
    assert pool.num_free_blocks == 1
    pool.free(table)
    assert pool.num_free_blocks == 2
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(table)


def test_evictable_blocks_go_least_recently_used_first_and_children_before_parents():
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    key_a, key_c = key(1, 2), key(9, 9)
    key_b = key(3, 4, parent=key_a)
    assert pool.publish(a, key_a, None) is a
    assert pool.publish(b, key_b, a) is b
    assert pool.publish(c, key_c, None) is c
    pool.free([a, b])
    pool.free([c])
    # Block 3 was never used. Then b, which is the child of a; then a; then c.
    assert ids(pool.allocate(2)) == [3, 1]
    assert pool.find(key_b, a) is None and pool.find(key_a, None) is a
    pool.touch([a])
    pool.free([a])  # used again, so c is older now
    assert ids(pool.allocate(1)) == [2]
    pool.check_invariants([[b], [c], [pool._blocks[3]]])


def test_publishing_the_same_tokens_again_returns_the_block_that_is_there():
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    assert pool.publish(a, key(1, 2), None) is a
    assert pool.publish(b, key(1, 2), None) is a
    assert b.key is None and pool.num_cached_blocks == 1
    assert pool.publish(c, key(1, 2, salt=b"other"), None) is c


def test_g10_a_hash_that_collides_is_neither_found_nor_published():
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    same = key(1, 2).block_hash
    assert pool.publish(a, PrefixKey(same, b"one"), None) is a
    assert pool.publish(b, PrefixKey(same, b"two"), None) is None
    assert pool.find(PrefixKey(same, b"two"), None) is None
    assert pool.find(PrefixKey(same, b"one"), c) is None  # equal tokens after another parent
    assert pool.find(PrefixKey(same, b"one"), None) is a


def test_g12_a_block_is_named_by_all_that_stands_before_it():
    a, c = key(1, 2), key(5, 6)
    assert key(3, 4, parent=a).block_hash != key(3, 4, parent=c).block_hash
    assert key(3, 4, parent=a) == key(3, 4, parent=key(1, 2))
    assert key(1, 2).block_hash != key(1, 2, salt=b"s").block_hash
    # A salt cannot be mistaken for tokens.
    assert key(1, salt=b"").content != key(salt=(1).to_bytes(8, "little")).content


@pytest.mark.parametrize("damage", ["lost", "shared", "both"])
def test_the_check_of_invariants_sees_what_is_wrong(damage):
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.check_invariants([table])
    if damage == "lost":
        tables = []
    elif damage == "shared":
        tables = [table, table[:1]]
    else:
        pool._free.append(table[0])
        tables = [table]
    with pytest.raises(AssertionError):
        pool.check_invariants(tables)


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)
