"""A cache small enough to check by hand: no prefix caching, blocks are counted, every operation is written down."""

from __future__ import annotations

import math

from hkv.dialects.vllm.log.structs import Allocation, Hit


class CountingEngine:
    """Blocks of four tokens in one group, from a pool of so many; `hits` gives lookups' answers by request id."""

    BLOCK = 4

    def __init__(self, blocks, hits=None):
        self.free_blocks = blocks
        self.hits = hits or {}
        self.rows = {}
        self.computed = {}
        self.tokens = {}
        self.log = []

    def step(self):
        self.log.append(("step",))

    def request_keyed(self, id, num_tokens, keys):
        self.log.append(("request", id, num_tokens))
        self.tokens[id] = num_tokens
        self.rows[id] = 0
        self.computed[id] = 0

    def lookup(self, id):
        hit = self.hits.get(id, 0)
        self.log.append(("lookup", id, hit))
        return Hit(hit, [[1] * (hit // self.BLOCK)], 0)

    def allocate(self, operation):
        end = self.computed[operation.id] + operation.hit + operation.new
        whole = self.tokens[operation.id] if operation.must_fit else end
        fits = math.ceil(whole / self.BLOCK) - self.rows[operation.id] <= self.free_blocks
        self.log.append(("allocate", operation.id, operation.new, fits))
        if not fits:
            return Allocation(None)
        need = max(0, math.ceil((end + operation.lookahead) / self.BLOCK) - self.rows[operation.id])
        if need > self.free_blocks:
            return Allocation(None)
        self.free_blocks -= need
        self.rows[operation.id] += need
        return Allocation([[1] * need])

    def advance(self, id, tokens):
        self.log.append(("advance", id, tokens))
        self.computed[id] += tokens
        assert self.computed[id] <= self.tokens[id]

    def extend(self, id, tokens):
        self.log.append(("extend", id, tokens))
        self.tokens[id] += tokens

    def free(self, id):
        self.log.append(("free", id))
        self.free_blocks += self.rows[id]
        self.rows[id] = 0
        self.computed[id] = 0

    def drop(self, id):
        self.log.append(("drop", id))
        assert self.rows[id] == 0
        del self.rows[id], self.tokens[id], self.computed[id]

    def num_free(self):
        return self.free_blocks

    def operations(self):
        """Operations but lookups, in a line: `|` a step, `+0:8` 8 tokens for request 0, `-0:8` refused, `.0` freed."""
        words = []
        for name, *rest in self.log:
            if name == "step":
                words.append("|")
            elif name == "allocate":
                words.append(f"{'+' if rest[2] else '-'}{rest[0]}:{rest[1]}")
            elif name == "free":
                words.append(f".{rest[0]}")
        return " ".join(words)
