"""The toy engine made faster, and wrong: `hkv diff` names the invariant it breaks and the operation that breaks it.

It looks prefixes up by key, keeps the free queue in a deque, and knows the number of cached blocks without counting.
One line is missing.

Example: hkv diff --engines examples/wrong_engine.py:WrongEngine,numpy --kinds full_attention --max-groups 1 --version 1
"""

from collections import deque

from toy_engine import ToyEngine

from hkv.dialects.vllm import CacheEvent


class WrongEngine(ToyEngine):
    """One full-attention group, with an index from keys to the blocks that have them, oldest first."""

    def __init__(self, header):
        super().__init__(header)
        self.free_queue = deque(self.free_queue)
        self.index = {}

    def find(self, key):
        """The block that was registered first under a key."""
        return next(iter(self.index.get(key, ())), None)

    def grow(self, request, tokens):
        """Takes blocks from the front of the queue. Their old keys ought to be dropped here."""
        new = [self.free_queue.popleft() for _ in range(-(-tokens // self.size) - len(request.blocks))]
        self.refs.update(dict.fromkeys(new, 1))
        request.blocks += new
        return new

    def register(self, request, tokens):
        """Full blocks enter the index too."""
        before = request.registered or 0
        super().register(request, tokens)
        for column in range(before, request.registered or 0):
            self.index.setdefault(request.chain.keys[column], {})[request.blocks[column]] = None

    def evict(self, blocks):
        """Blocks leave the index too."""
        for block in blocks:
            if known := self.keys.pop(block, None):
                self.index[known[0]].pop(block)
                self.log.append(CacheEvent(type="removed", group=0, num_blocks=1))

    def free(self, id):
        """The queue becomes a deque again."""
        super().free(id)
        self.free_queue = deque(self.free_queue)

    def reset(self):
        """The index is emptied with the cache."""
        done = super().reset()
        if done:
            self.index.clear()
        return done
