"""KVCacheManager: the block table of each request. The only place that takes and frees blocks.

A request of 38 tokens, of which 37 are computed, with 16 tokens in a block:

    token_ids     0 ....... 15   16 ...... 31   32 ... 37
    block table   block 7        block 2        block 9
                  published      published      not full: no other request may find it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from backends.llm.engine.block_hash import HashFunction, PrefixKey, prefix_key, sha256
from backends.llm.engine.block_pool import Block, BlockPool
from backends.llm.engine.outputs import BlockId, RequestId
from backends.llm.engine.request import Request


@dataclass(slots=True)
class _Table:
    """One request's blocks.

    Attributes:
        block_ids: of `blocks`, in the form that the model runner takes.
        num_published: blocks from the start that are in the index. None once one could not be published.
    """

    blocks: list[Block] = field(default_factory=list)
    block_ids: list[BlockId] = field(default_factory=list)
    num_published: int | None = 0


class KVCacheManager:
    """Block tables over one pool.

    Args:
        num_blocks: of the cache.
        block_size: tokens in one block.
        enable_prefix_cache: find and publish prefixes.
        hash_function: another than SHA-256 only in tests.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_cache: bool = True,
        hash_function: HashFunction = sha256,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, at least 1 is needed")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._caching = enable_prefix_cache
        self._hash_function = hash_function
        self._tables: dict[RequestId, _Table] = {}

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all blocks together hold."""
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def num_blocks_of(self, request_id: RequestId) -> int:
        """Returns the length of a request's block table; 0 for one that has none."""
        table = self._tables.get(request_id)
        return len(table.blocks) if table else 0

    def num_missing_blocks(self, request: Request) -> int:
        """Returns how many blocks a running request still needs for the tokens that it has."""
        return max(0, self.num_blocks_for(request.num_tokens) - self.num_blocks_of(request.request_id))

    def block_ids(self, request_id: RequestId, num_tokens: int) -> list[BlockId]:
        """Returns the blocks that hold the first `num_tokens` tokens of a request."""
        return self._tables[request_id].block_ids[: self.num_blocks_for(num_tokens)]

    def find_prefix(self, request: Request) -> list[Block]:
        """Returns the cached blocks that a request begins with.

        The last token is never among them, since its logits are needed. Nothing is taken: they are
        good until other blocks are allocated.
        """
        if not self._caching or request.wants_prompt_logits:
            return []
        found: list[Block] = []
        for index in range((request.num_tokens - 1) // self.block_size):
            block = self.pool.find(self._key(request, index), found[-1] if found else None)
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, request: Request, prefix: Sequence[Block], num_new_tokens: int, num_reserved: int = 0) -> bool:
        """Starts a request's table with a cached prefix and blocks for the tokens after it.

        Args:
            prefix: as `find_prefix` returned it.
            num_new_tokens: tokens after the prefix that need room now.
            num_reserved: free blocks that must be left over.

        Returns:
            False where there are not enough blocks; nothing has changed then.
        """
        assert request.request_id not in self._tables, f"{request.request_id} has a table already"
        num_new = self.num_blocks_for(len(prefix) * self.block_size + num_new_tokens) - len(prefix)
        if num_new + num_reserved > self.pool.num_free_blocks - self.pool.num_evictable(prefix):
            return False
        self.pool.touch(prefix)
        blocks = [*prefix, *self.pool.allocate(num_new)]
        self._tables[request.request_id] = _Table(blocks, [b.block_id for b in blocks], len(prefix))
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Makes a request's table long enough for `num_tokens` tokens.

        Returns:
            False where there are not enough blocks; nothing has changed then.
        """
        table = self._tables[request.request_id]
        missing = self.num_blocks_for(num_tokens) - len(table.blocks)
        if missing <= 0:
            return True
        if missing > self.pool.num_free_blocks:
            return False
        new = self.pool.allocate(missing)
        table.blocks += new
        table.block_ids += [block.block_id for block in new]
        return True

    def publish(self, request: Request) -> None:
        """Makes the full blocks of a request findable; its tokens up to `num_computed_tokens` must be computed.

        Where another request published the same tokens meanwhile, its block takes the place of this one's, which is
        freed: each prefix is held once, and a block's parent is always the one in the index.
        """
        table = self._tables[request.request_id]
        # An answer that ended within its accepted drafts has fewer tokens than were computed.
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if not self._caching or table.num_published is None or table.num_published >= num_full:
            return
        for index in range(table.num_published, num_full):
            mine = table.blocks[index]
            shared = self.pool.publish(mine, self._key(request, index), table.blocks[index - 1] if index else None)
            if shared is None:  # the hash is taken, and a block's parents must be in the index: no more of this table
                table.num_published = None
                return
            if shared is not mine:
                self.pool.touch([shared])
                self.pool.free([mine])
                table.blocks[index], table.block_ids[index] = shared, shared.block_id
            table.num_published = index + 1

    def free(self, request: Request) -> None:
        """Gives a request's blocks back; those that were published can still be found."""
        self.pool.free(self._tables.pop(request.request_id).blocks)

    def check_invariants(self) -> None:
        """Raises AssertionError where blocks were lost, shared by mistake or counted wrong."""
        self.pool.check_invariants([table.blocks for table in self._tables.values()])

    def _key(self, request: Request, index: int) -> PrefixKey:
        """Returns the name of one full block; kept with the request, since its tokens never change."""
        keys = request.prefix_keys
        while len(keys) <= index:
            tokens = request.token_ids[len(keys) * self.block_size : (len(keys) + 1) * self.block_size]
            assert len(tokens) == self.block_size, "only full blocks have names"
            keys.append(prefix_key(tokens, keys[-1] if keys else None, request.cache_salt, self._hash_function))
        return keys[index]
