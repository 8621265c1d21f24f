"""Block bookkeeping: numbers only."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mint.engine.sampler.cache import NULL_BLOCK, BlockCache


def filled(cache: BlockCache, policy: int, tokens: list[int]) -> list[int]:
    """Blocks for the tokens, taken and published."""
    blocks = cache.take(cache.blocks_for(len(tokens)))
    assert blocks is not None
    digest = b""
    for i in range(len(tokens) // cache.block_size):
        piece = tokens[i * cache.block_size : (i + 1) * cache.block_size]
        digest = cache.publish(policy, digest, piece, blocks[i])
    return blocks


def test_taken_blocks_are_distinct_and_never_the_null_block() -> None:
    cache = BlockCache(4, 8, 8)
    taken = cache.take(8)
    assert taken is not None and len(set(taken)) == 8 and NULL_BLOCK not in taken
    assert cache.take(1) is None
    cache.release(taken)
    assert cache.used == 0 and cache.available == 8


def test_a_prefix_is_found_after_its_holder_let_go_up_to_the_limit() -> None:
    cache = BlockCache(4, 8, 8)
    tokens = list(range(11))
    blocks = filled(cache, 1, tokens)
    cache.release(blocks)
    found, _ = cache.lookup(1, tokens, 11)
    assert found == blocks[:2]  # the third block is not full
    assert cache.lookup(1, tokens, 7)[0] == blocks[:1]
    assert cache.used == 2  # what was looked up is held


def test_prefixes_of_other_policies_and_other_tokens_are_not_found() -> None:
    cache = BlockCache(4, 8, 8)
    filled(cache, 1, list(range(8)))
    assert cache.lookup(2, list(range(8)), 8)[0] == []
    assert cache.lookup(1, [9, *range(1, 8)], 8)[0] == []
    # The second block's tokens behind another first block are another prefix.
    assert cache.lookup(1, [4, 5, 6, 7, 4, 5, 6, 7], 8)[0] == []


def test_the_least_recently_used_prefix_is_evicted_and_its_end_before_its_beginning() -> None:
    cache = BlockCache(2, 6, 6)
    old, new = [1, 2, 3, 4], [5, 6, 7, 8]
    cache.release(filled(cache, 0, old))
    cache.release(filled(cache, 0, new))
    cache.release(cache.lookup(0, old, 4)[0])  # now `new` is the older one
    assert cache.take(3) is not None  # two free blocks and one evicted
    assert len(cache.lookup(0, new, 4)[0]) == 1
    assert len(cache.lookup(0, old, 4)[0]) == 2


def test_held_blocks_are_never_evicted() -> None:
    cache = BlockCache(2, 4, 4)
    held = filled(cache, 0, [1, 2, 3, 4])
    assert cache.take(3) is None
    rest = cache.take(2)
    assert rest is not None and not set(rest) & set(held)


def test_the_pool_grows_only_when_live_sequences_need_it() -> None:
    cache = BlockCache(2, 2, 8)
    cache.release(filled(cache, 0, [1, 2, 3, 4]))
    first = cache.take(2)
    assert cache.total == 2 and cache.lookup(0, [1, 2], 2)[0] == []  # remembered prefixes went first
    second = cache.take(1)
    assert cache.total == 4
    assert first is not None and second is not None and len({*first, *second}) == 3
    assert cache.take(6) is None and cache.take(5) is not None and cache.total == 8


def test_a_shared_block_is_free_when_its_last_holder_let_go() -> None:
    cache = BlockCache(2, 4, 4)
    blocks = cache.take(1)
    assert blocks is not None
    cache.share(blocks)
    assert cache.is_shared(blocks[0])
    cache.release(blocks)
    assert not cache.is_shared(blocks[0]) and cache.used == 1
    cache.release(blocks)
    assert cache.used == 0


def test_publishing_the_same_content_twice_keeps_the_first_block() -> None:
    cache = BlockCache(2, 4, 4)
    first, second = filled(cache, 0, [1, 2]), filled(cache, 0, [1, 2])
    assert cache.lookup(0, [1, 2], 2)[0] == first
    cache.release(second)
    assert cache.available == 3  # and the second is simply free


def test_a_forgotten_policy_leaves_the_others_alone() -> None:
    cache = BlockCache(2, 8, 8)
    cache.release(filled(cache, 1, [1, 2]))
    running = filled(cache, 1, [3, 4])
    cache.release(filled(cache, 2, [1, 2]))
    cache.forget(1)
    assert cache.lookup(1, [1, 2], 2)[0] == [] and cache.lookup(1, [3, 4], 2)[0] == []
    assert len(cache.lookup(2, [1, 2], 2)[0]) == 1
    cache.release(running)
    assert cache.used == 1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=9)), max_size=30))
def test_no_block_is_lost_or_doubled_whatever_is_done(actions: list[tuple[int, list[int]]]) -> None:
    cache = BlockCache(2, 1, 10)
    live: list[list[int]] = []
    for action, tokens in actions:
        if action == 0 and cache.blocks_for(len(tokens)) <= cache.available:
            live.append(filled(cache, 0, tokens))
        elif action == 1:
            live.append(cache.lookup(0, tokens, len(tokens))[0])
        elif live:
            cache.release(live.pop(len(tokens) % len(live)))
        held = {block for blocks in live for block in blocks}
        assert cache.used == len(held) and NULL_BLOCK not in held
    for blocks in live:
        cache.release(blocks)
    everything = cache.take(10)
    assert everything is not None and len(set(everything)) == 10
