"""Who holds which block of the key/value cache: free list, reference counts, and the prefixes blocks can be found by.

Integers and digests only; the tensors the numbers point into belong to `paged.py`. A full block is known by a digest of
its policy, its own tokens and all before them, and stays findable after its last holder let go, until its room is
needed. Full blocks are never written again; a block still being filled may be shared too, and is then copied by
whoever writes to it (see the scheduler).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

# Belongs to nobody and is never written: what tables are filled up with.
NULL_BLOCK = 0


class BlockCache:
    def __init__(self, block_size: int, blocks: int, max_blocks: int) -> None:
        """`blocks` to begin with, the null block not counted; doubled when the live sequences need more, up to
        `max_blocks`."""
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.total = 0
        self._free: list[int] = []
        self._holders: list[int] = [1]
        self._keys: dict[int, tuple[int, bytes]] = {}  # block -> (policy, digest)
        self._found: dict[bytes, int] = {}  # digest -> block
        # Blocks nobody holds but whose content is known, the least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._grow(min(blocks, max_blocks))

    @property
    def used(self) -> int:
        """Blocks somebody holds."""
        return self.total - len(self._free) - len(self._idle)

    @property
    def available(self) -> int:
        """Blocks `take` could give."""
        return self.max_blocks - self.used

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """`count` empty blocks, or None. Remembered prefixes go before the pool grows: memory follows live demand."""
        if count > self.available:
            return None
        while len(self._free) < count and self._idle:
            self._forget(next(iter(self._idle)))
        if len(self._free) < count:
            self._grow(min(self.max_blocks, max(2 * self.total, self.total + count - len(self._free))))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
            self._holders[block] += 1

    def is_shared(self, block: int) -> bool:
        return self._holders[block] > 1

    def release(self, blocks: Sequence[int]) -> None:
        """Last block first: a prefix is found from its beginning, so its end should be forgotten first."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def publish(self, policy: int, parent: bytes, tokens: Sequence[int], block: int) -> bytes:
        """Makes a full block findable behind the prefix `parent` (empty: at the start); its digest."""
        digest = _digest(policy, parent, tokens)
        if digest not in self._found:  # otherwise somebody computed the same at the same time; theirs is as good
            self._found[digest] = block
            self._keys[block] = (policy, digest)
        return digest

    def lookup(self, policy: int, tokens: Sequence[int], limit: int) -> tuple[list[int], bytes]:
        """The known blocks at the start of `tokens`, at most `limit` tokens of them, now held by the caller, and the
        digest of the last."""
        blocks: list[int] = []
        digest = b""
        for start in range(0, limit - self.block_size + 1, self.block_size):
            key = _digest(policy, digest, tokens[start : start + self.block_size])
            if key not in self._found:
                break
            digest = key
            blocks.append(self._found[key])
        self.share(blocks)
        return blocks, digest

    def forget(self, policy: int) -> None:
        """Frees what is remembered of a policy that will not be asked again."""
        for block in [block for block, (owner, _) in self._keys.items() if owner == policy]:
            self._forget(block)

    def forget_all(self) -> None:
        for block in list(self._keys):
            self._forget(block)

    def _forget(self, block: int) -> None:
        _, digest = self._keys.pop(block)
        del self._found[digest]
        if self._holders[block] == 0:
            del self._idle[block]
            self._free.append(block)

    def _grow(self, total: int) -> None:
        self._free.extend(range(total, self.total, -1))  # blocks are numbered from 1
        self._holders.extend([0] * (total - self.total))
        self.total = total


def _digest(policy: int, parent: bytes, tokens: Sequence[int]) -> bytes:
    # Cryptographic, because a collision would show one tenant's text to another.
    return blake2b(parent + array("q", [policy, *tokens]).tobytes(), digest_size=16).digest()
