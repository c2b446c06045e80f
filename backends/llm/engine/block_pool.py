"""BlockPool: who holds which block of the KV cache, and which free ones still hold a prefix worth finding.

A block is in exactly one of three states. A published block is in the index, where its tokens find it:

           --allocate-->                               --free, if published-->
    empty                 referenced (in block tables)                          evictable (free, and in the index)
           <--free, if not published--                 <--touch: it was found--
                                                       <--allocate: its tokens are forgotten--

Free blocks stand in one queue, the next to be taken first: empty ones, then evictable ones, least recently used first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from backends.llm.engine.block_hash import BlockHash, PrefixKey
from backends.llm.engine.outputs import BlockId


class Block:
    """One block of the cache.

    Attributes:
        ref_cnt: requests whose block table has it.
        key: what it is found by, once it was published.
        parent: the published block before it, None for the first of a sequence.
    """

    __slots__ = ("block_id", "key", "next_free", "parent", "prev_free", "ref_cnt")

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.key: PrefixKey | None = None
        self.parent: Block | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, published={self.key is not None})"


class FreeQueue:
    """A doubly linked list through the blocks themselves: every operation is O(1), also taking one from the middle."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head, self._tail = Block(BlockId(-1)), Block(BlockId(-1))
        self._link(self._head, self._tail)
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def append(self, block: Block) -> None:
        """Puts a block where it is taken last."""
        assert self._tail.prev_free is not None
        self._insert(block, self._tail.prev_free, self._tail)

    def prepend(self, block: Block) -> None:
        """Puts a block where it is taken next."""
        assert self._head.next_free is not None
        self._insert(block, self._head, self._head.next_free)

    def popleft(self) -> Block:
        """Takes the next block; there must be one."""
        block = self._head.next_free
        assert block is not None and block is not self._tail, "the free queue is empty"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Takes a block out of the middle."""
        assert block.prev_free is not None and block.next_free is not None, f"{block} is not free"
        self._link(block.prev_free, block.next_free)
        block.prev_free = block.next_free = None
        self._length -= 1

    def _insert(self, block: Block, before: Block, after: Block) -> None:
        assert block.prev_free is None and block.next_free is None, f"{block} is free already"
        self._link(before, block)
        self._link(block, after)
        self._length += 1

    @staticmethod
    def _link(left: Block, right: Block) -> None:
        left.next_free, right.prev_free = right, left


class BlockPool:
    """All blocks of the cache.

    Since a request that references a block references its parents too, and frees its last block first, a parent always
    stands behind its children in the free queue: a block in the index has all its parents there (`check_invariants`).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, at least 1 is needed")
        self._blocks = tuple(Block(BlockId(i)) for i in range(num_blocks))
        self._free = FreeQueue(self._blocks)
        self._index: dict[BlockHash, Block] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the index, referenced or not."""
        return len(self._index)

    def allocate(self, count: int) -> list[Block]:
        """Takes blocks, each with one reference; what was cached in them is forgotten. There must be enough."""
        taken = []
        for _ in range(count):
            block = self._free.popleft()
            self._forget(block)
            block.ref_cnt = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Adds a reference to blocks that were found in the index."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free(self, table: Sequence[Block]) -> None:
        """Drops one reference of each block of a table, the last block first: children are evicted before parents."""
        for block in reversed(table):
            assert block.ref_cnt > 0, f"{block} is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.key is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)

    def find(self, key: PrefixKey, parent: Block | None) -> Block | None:
        """Returns the published block with these tokens after that parent; a hash alone is never believed.

        Equal tokens after the very same parent are an equal prefix, since the same holds for the parent.
        """
        block = self._index.get(key.block_hash)
        if block is None or block.parent is not parent or block.key is None or block.key.content != key.content:
            return None
        return block

    def publish(self, block: Block, key: PrefixKey, parent: Block | None) -> Block | None:
        """Makes a computed block findable.

        Returns:
            The block that stands for these tokens: this one, or another that was published before it with the same
            tokens. None where the hash is taken by other tokens; nothing may be published after it then.
        """
        assert block.ref_cnt > 0 and block.key is None, f"{block} cannot be published"
        assert parent is None or parent.key is not None, "the block before it is not published"
        if key.block_hash in self._index:
            return self.find(key, parent)
        block.key, block.parent = key, parent
        self._index[key.block_hash] = block
        return block

    def num_evictable(self, blocks: Iterable[Block]) -> int:
        """Returns how many of these found blocks are free now: touching them takes as many from the free blocks."""
        return sum(block.ref_cnt == 0 for block in blocks)

    def check_invariants(self, tables: Iterable[Sequence[Block]]) -> None:
        """Raises AssertionError unless every block is where it must be, given the block tables of all requests."""
        expected = [0] * len(self._blocks)
        for table in tables:
            for block in table:
                expected[block.block_id] += 1
        free = list(self._free)
        assert len(free) == len(self._free) == len({b.block_id for b in free}), "the free queue is broken"
        for block in self._blocks:
            assert block.ref_cnt == expected[block.block_id], f"{block} stands in {expected[block.block_id]} tables"
            assert (block.ref_cnt == 0) == (block.next_free is not None), f"{block} is both free and in use, or neither"
            if block.key is not None:
                assert self._index[block.key.block_hash] is block, f"{block} is not in the index"
                assert block.parent is None or block.parent.key is not None, f"{block} outlived its parent"
        assert len(self._index) == sum(block.key is not None for block in self._blocks), "the index has strangers"

    def _forget(self, block: Block) -> None:
        """Takes a block out of the index, where it is in it."""
        if block.key is not None:
            del self._index[block.key.block_hash]
            block.key = block.parent = None
