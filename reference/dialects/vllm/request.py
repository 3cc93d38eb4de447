"""A request as the cache knows it: how long it is, how far it is computed, and what its prefixes are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from hkv.errors import OperationError
from hkv.keys.chained import PLAIN, GivenKeys, KeyChain, PrefixIdentity
from reference.keys.views import Chain


class Grant(NamedTuple):
    """Grant of blocks to a request in one scheduling step.

    Attributes:
      written: tokens up to which the request's blocks were written.
      joined: True if the step admitted it: the blocks up to there are a hit's, every other one is new.
    """

    written: int
    joined: bool


@dataclasses.dataclass
class Request:
    """One request. All counts are tokens.

    Attributes:
      id: its name.
      num_prompt: length of the prompt.
      num_tokens: prompt and output so far; draft tokens do not count.
      keys: chained keys of its hash blocks, as far as they exist.
      tokens: the tokens themselves; empty for a request of which only the keys are known.
      num_computed: tokens whose cache content is written or being written.
      num_in_flight: of those, tokens of steps that have not come back yet.
      num_granted: tokens, drafts included, that its rows have room for.
      shared_prefix: length at which others were seen to branch off, in tokens, or 0.
      running: whether it holds blocks; a request that does not is waiting.
      grant: the first grant of blocks to it in this step; None if there was none.
      identity: everything besides its tokens that identifies its prefix.
      session: the session that its events name, "" for none.
      lookahead: tokens after a hash block that its key covers.
      reports: whether its hits are published as events.
    """

    id: str
    num_prompt: int
    num_tokens: int
    keys: list[Chain]
    tokens: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    num_granted: int = 0
    shared_prefix: int = 0
    running: bool = False
    grant: Grant | None = None
    identity: PrefixIdentity = PLAIN
    session: str = ""
    lookahead: int = 0
    reports: bool = False

    @property
    def num_keys(self) -> int:
        """Keys that the request's prompt and output have, known or not yet."""
        return len(self.keys)

    @property
    def prefill_end(self) -> int:
        """Tokens to compute before it goes on: its prompt, or all but the last that it has, if it comes again."""
        return max(self.num_prompt, self.num_tokens - 1)

    def wait(self) -> None:
        """It holds no blocks any more, and nothing of it is computed."""
        self.running = False
        self.grant = None
        self.num_computed = self.num_in_flight = self.num_granted = 0


class TokenRequest(Request):
    """A request whose tokens are known, and hashed as they come."""

    def __init__(self, id: str, tokens: Sequence[int], chain: KeyChain | GivenKeys, keys: Sequence[str] = ()) -> None:
        super().__init__(id, len(tokens), 0, chain.keys)  # type: ignore[arg-type]
        self._chain = chain
        self.append(tokens, keys)

    def append(self, tokens: Sequence[int], keys: Sequence[str] = ()) -> None:
        """`tokens` were generated; `keys`, in hex, are given where they are not computed.

        Raises:
          OperationError: keys for a request whose keys are computed, or that are not hex.
        """
        if isinstance(self._chain, GivenKeys):
            self._chain.give(keys)
        elif keys:
            raise OperationError("keys", list(keys), "none: this request's are computed")
        self.tokens.extend(tokens)
        self.num_tokens = len(self.tokens)
        self._chain.extend(self.tokens)

    def resume(
        self,
        keep: int,
        tokens: Sequence[int],
        prompt: int,
        hash_block_size: int,
        identity: PrefixIdentity | None,
        keys: Sequence[str],
    ) -> None:
        """A streaming session goes on (vLLM 0.33 `Scheduler._update_request_as_session`).

        Args:
          keep: tokens that stay.
          tokens: those that follow.
          prompt: length of the prompt from now on.
          hash_block_size: tokens per key.
          identity: everything besides tokens that identifies the prefix from now on; None for what it was.
          keys: as of `append`.
        """
        self._chain.cut(keep, hash_block_size, identity)
        self.identity = self.identity if identity is None else identity
        del self.tokens[keep:]
        self.append(tokens, keys)
        self.num_prompt = prompt


class KeyedRequest(Request):
    """A request of which only the length is known, and what its prefixes are called.

    Args:
      id: its name.
      num_tokens: tokens of its prompt.
      given: key of each of its hash blocks, now and later; those beyond its length are not used yet.
      hash_block_size: tokens per hash block.
      lookahead: tokens after a hash block that must exist before its key does.
    """

    def __init__(self, id: str, num_tokens: int, given: Sequence[int], hash_block_size: int, lookahead: int) -> None:
        super().__init__(id, num_tokens, 0, [])
        self._given = given
        self._size = hash_block_size
        self._lookahead = lookahead
        self.extend(num_tokens)

    def extend(self, tokens: int) -> None:
        """`tokens` tokens were generated."""
        self.num_tokens += tokens
        complete = max(0, self.num_tokens - self._lookahead) // self._size
        self.keys.extend(self._given[len(self.keys) : complete])
