"""Gives the prefixes of a trace's requests dense integer keys: equal keys, equal tokens from the first on."""

from __future__ import annotations

import numpy as np

from hkv.replay.traces.reader import TOKENS_PER_ID, TraceRequest


class PrefixKeys:
    """Interns prefixes. Keys are 0, 1, 2, ... in the order in which prefixes are met, so tables by key stay small.

    A prefix of t tokens that ends within the j-th id of a request is known by that id and t, since equal ids mean equal
    prefixes; any block size will do, whether or not it divides `tokens_per_id`. Token lists are known by their tokens.
    Tokens that the trace does not name (generated ones, mostly) make keys that no other request has.

    Args:
      hash_block_size: tokens between two keys of a request.
      tokens_per_id: tokens that one of the `hash_ids` stands for.

    Attributes:
      count: keys given out so far.
    """

    def __init__(self, hash_block_size: int, tokens_per_id: int = TOKENS_PER_ID) -> None:
        self.hash_block_size = hash_block_size
        self.tokens_per_id = tokens_per_id
        self.count = 0
        self._first_key_of_id: dict[int, int] = {}
        self._key_of_block: dict[tuple[int, bytes], int] = {}

    def of(self, request: TraceRequest) -> np.ndarray:
        """Keys of a request, int64 `[(input_length + output_length) // hash_block_size]`.

        Element i names the first `(i + 1) * hash_block_size` tokens of prompt and output together. To be called once
        for each request, in the order of the trace.
        """
        if request.hash_ids is not None:
            known = self._of_hash_ids(request.hash_ids, request.input_length)
        else:
            known = self._of_tokens([*(request.tokens or ()), *(request.output_tokens or ())])
        total = (request.input_length + request.output_length) // self.hash_block_size
        fresh = self._take(total - len(known)) + np.arange(total - len(known), dtype=np.int64)
        return np.concatenate([known, fresh])

    def _take(self, count: int) -> int:
        first = self.count
        self.count += count
        return first

    def _of_hash_ids(self, hash_ids: list[int], input_length: int) -> np.ndarray:
        per_id, step = self.tokens_per_id, self.hash_block_size
        firsts = np.empty(len(hash_ids), np.int64)
        for index, hash_id in enumerate(hash_ids):
            first = self._first_key_of_id.get(hash_id)
            if first is None:
                first = self._take((index + 1) * per_id // step - index * per_id // step)
                self._first_key_of_id[hash_id] = first
            firsts[index] = first
        blocks = np.arange(min(input_length, len(hash_ids) * per_id) // step, dtype=np.int64)
        index = ((blocks + 1) * step - 1) // per_id
        return firsts[index] + blocks - index * per_id // step

    def _of_tokens(self, tokens: list[int]) -> np.ndarray:
        size = self.hash_block_size
        data = np.asarray(tokens, np.uint32).tobytes()
        keys = np.empty(len(tokens) // size, np.int64)
        parent = -1
        for index in range(len(keys)):
            block = (parent, data[4 * index * size : 4 * (index + 1) * size])
            key = self._key_of_block.get(block)
            if key is None:
                key = self._key_of_block[block] = self._take(1)
            keys[index] = parent = key
        return keys
