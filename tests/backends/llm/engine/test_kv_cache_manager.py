"""Block tables: which blocks a request gets, when it gets none, and which it shares; block ids by hand."""

from __future__ import annotations

import pytest

from backends.llm.engine.kv_cache_manager import KVCacheManager
from backends.llm.engine.outputs import RequestId
from backends.llm.engine.request import Request


def request(name, tokens, **fields):
    return Request(RequestId(name), tuple(tokens), 8, **fields)


def admit(kv, each, num_reserved=0):
    """Admits the whole of a request, and computes it where that went well."""
    prefix = kv.find_prefix(each)
    num_new = each.num_tokens - len(prefix) * kv.block_size
    if not kv.admit(each, prefix, num_new, num_reserved):
        return None
    each.num_computed_tokens = each.num_tokens
    kv.publish(each)
    kv.check_invariants()
    return kv.block_ids(each.request_id, each.num_tokens)


def test_a_table_grows_by_whole_blocks_and_only_when_it_must():
    kv = KVCacheManager(num_blocks=4, block_size=4)
    a = request("a", range(5))
    assert admit(kv, a) == [0, 1]
    assert kv.grow(a, 8) and kv.num_blocks_of(a.request_id) == 2
    assert kv.grow(a, 9) and kv.block_ids(a.request_id, 9) == [0, 1, 2]
    assert kv.block_ids(a.request_id, 4) == [0]  # the blocks of the first four tokens alone
    kv.free(a)
    assert kv.num_blocks_of(a.request_id) == 0 and kv.pool.num_free_blocks == 4


def test_nothing_changes_where_blocks_are_missing():
    kv = KVCacheManager(num_blocks=4, block_size=4)
    a = request("a", range(5))
    assert admit(kv, a, num_reserved=3) is None and kv.pool.num_free_blocks == 4
    assert admit(kv, a, num_reserved=2) == [0, 1]
    assert not kv.grow(a, 17) and kv.num_blocks_of(a.request_id) == 2
    assert kv.grow(a, 16) and kv.pool.num_free_blocks == 0


def test_a_prefix_is_found_in_whole_blocks_and_never_to_the_last_token():
    kv = KVCacheManager(num_blocks=8, block_size=4)
    assert admit(kv, request("a", range(8))) == [0, 1]
    found = [len(kv.find_prefix(request("b", range(n)))) for n in (4, 5, 8, 9)]
    assert found == [0, 1, 1, 2]
    assert kv.find_prefix(request("b", range(9), cache_salt=b"other")) == []
    assert kv.find_prefix(request("b", range(9), wants_prompt_logits=True)) == []
    assert admit(kv, request("b", range(9))) == [0, 1, 2]


def test_a_free_prefix_is_not_counted_twice_as_a_hit_and_as_free_blocks():
    kv = KVCacheManager(num_blocks=3, block_size=4)
    first = request("first", range(8))
    assert admit(kv, first) == [0, 1]
    kv.free(first)
    # All three blocks are free, two of them are the prefix: one is left for what comes after it, and eight need two.
    assert admit(kv, request("too long", range(16))) is None and kv.pool.num_free_blocks == 3
    assert admit(kv, request("fits", range(12))) == [0, 1, 2]


def test_of_two_equal_blocks_computed_side_by_side_one_is_kept():
    kv = KVCacheManager(num_blocks=4, block_size=4)
    a, b = request("a", range(4)), request("b", range(4))
    for each in (a, b):
        assert kv.admit(each, [], 4)
        each.num_computed_tokens = 4
    kv.publish(a)
    assert kv.block_ids(b.request_id, 4) == [1]
    kv.publish(b)
    assert kv.block_ids(b.request_id, 4) == [0] and kv.pool.num_free_blocks == 3
    kv.check_invariants()


def test_after_a_block_that_cannot_be_published_no_other_of_its_table_is():
    kv = KVCacheManager(
        num_blocks=8, block_size=4, hash_function=lambda data: data[-1:]
    )  # of its last token's top byte
    a, b = request("a", range(8)), request("b", range(20, 32))
    assert admit(kv, a) == [0, 1] and kv.pool.num_cached_blocks == 1
    assert admit(kv, b) == [2, 3, 4] and kv.pool.num_cached_blocks == 1
    assert len(kv.find_prefix(request("again", range(9)))) == 1
    assert kv.find_prefix(request("again", range(20, 32))) == []


def test_what_was_drafted_beyond_the_end_of_an_answer_is_not_published():
    kv = KVCacheManager(num_blocks=4, block_size=4)
    a = request("a", range(7))
    assert kv.admit(a, [], 7) and kv.grow(a, 9)
    a.num_computed_tokens = 9  # two drafts were accepted, the answer had ended before them
    kv.publish(a)
    assert kv.pool.num_cached_blocks == 1
    kv.check_invariants()


def test_nothing_is_found_or_published_without_the_cache():
    kv = KVCacheManager(num_blocks=8, block_size=4, enable_prefix_cache=False)
    assert admit(kv, request("a", range(8))) == [0, 1]
    assert kv.pool.num_cached_blocks == 0 and kv.find_prefix(request("b", range(9))) == []


def test_a_block_size_of_nothing_is_refused():
    with pytest.raises(ValueError, match="block_size is 0, at least 1 is needed"):
        KVCacheManager(4, 0)
