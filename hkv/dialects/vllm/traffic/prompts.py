"""Random prompts that share prefixes with earlier ones, of lengths around every modulus of a configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from hkv.contract.traffic import Choices
from hkv.dialects.vllm.config import manager_block
from hkv.dialects.vllm.log.structs import ExtraKeys, Header
from hkv.dialects.vllm.traffic.headers import LONG_ROWS, REACHING
from hkv.spec import spec_from_log

VOCABULARY = 5
"""Token ids in use; few, so that equal blocks occur by themselves."""

FEW = 3
"""Number of prompts where many requests share few."""

MEMORY = 12
"""Number of earlier texts that a new prompt may continue."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokens, and everything else that identifies the prefix."""

    tokens: tuple[int, ...]
    extra: ExtraKeys | None


@dataclasses.dataclass(eq=False)
class DrawnRequest:
    """A request as the scheduler knows it.

    Attributes:
      id: its name.
      tokens: prompt and output.
      extra: everything besides its tokens that identifies its prefix.
      prompt: tokens of its prompt.
      computed: tokens computed.
      loading: whether tokens from elsewhere are on their way.
      retires: whether its next allocation has to retire what its last chunk left behind inside it.
    """

    id: str
    tokens: list[int]
    extra: ExtraKeys | None
    prompt: int
    computed: int = 0
    loading: bool = False
    retires: bool = False

    def text(self) -> Text:
        """Its prompt; of one that a session made longer, the part whose embeddings are known."""
        embeds = None if self.extra is None else self.extra.embeds
        known = self.prompt if embeds is None else min(self.prompt, len(embeds))
        return Text(tuple(self.tokens[:known]), self.extra)


class Prompts:
    """Makes prompts: A, then B, then A again, cut and continued at lengths that matter.

    Args:
      header: the configuration; its block sizes, windows and chunks are the moduli.
      choices: source of decisions.
    """

    def __init__(self, header: Header, choices: Choices) -> None:
        self._choices = choices
        self._named = header.oplog > 1 and header.hash == "sha256_cbor"
        self._texts: list[Text] = []
        specs = [spec_from_log(group) for group in header.groups]
        sizes = [manager_block(spec, header.context_parallel) for spec in specs]
        spans = [entry[name] for entry in header.groups for name in ("window", "chunk") if name in entry]
        self._moduli = sorted({header.hash_block_size, header.scheduler_block_size, *sizes, *spans})
        room = header.num_blocks * max(sizes) // max(1, len(sizes))
        self._longest = max(2, min(header.max_model_len - 2, 80, max(24, room)))
        self._shared: list[Text] | None = None
        if header.feature in REACHING:
            self._longest = header.max_model_len - 2 if header.feature == LONG_ROWS else self._longest
            self._shared = []

    def length(self) -> int:
        """A length of one to a few dozen tokens, often one next to a multiple of a modulus."""
        if self._choices.chance(30):
            return self._choices.integer(1, self._longest)
        modulus = self._choices.pick(self._moduli)
        near = modulus * self._choices.integer(1, max(1, self._longest // modulus)) + self._choices.integer(-1, 1)
        return max(1, min(near, self._longest))

    def tokens(self, count: int) -> list[int]:
        """Random tokens."""
        return [self._choices.integer(0, VOCABULARY - 1) for _ in range(count)]

    def draw(self) -> Text:
        """A new prompt, usually beginning as an earlier one did."""
        if self._shared is not None and not self._choices.chance(15):
            return self._draw_shared(self._shared)
        length = self.length()
        parent = self._choices.pick(self._texts) if self._texts and self._choices.chance(75) else Text((), None)
        whole = self._choices.chance(50)
        shared = len(parent.tokens) if whole else self._choices.integer(0, len(parent.tokens))
        start = parent.tokens[: min(shared, length)]
        tokens = start + tuple(self.tokens(length - len(start)))
        text = Text(tokens, self._draw_extra(parent, len(start), length) if self._named else None)
        self.remember(text)
        return text

    def _draw_shared(self, shared: list[Text]) -> Text:
        """One of few prompts: as it was, with some tokens more, cut where a modulus ends, or under another identity."""
        choices = self._choices
        if len(shared) < FEW and choices.chance(40 if shared else 100):
            length = choices.integer(self._longest // 2, self._longest)
            tokens = tuple(self.tokens(length))
            shared.append(Text(tokens, self._draw_extra(Text((), None), 0, length) if self._named else None))
        text = choices.pick(shared)
        if choices.chance(35):
            return text
        if self._named and choices.chance(25):
            return Text(text.tokens, self._other_identity(text.extra))
        room = self._longest - len(text.tokens)
        most = min(2 * self._moduli[0], self._longest)
        if room > 0 and choices.chance(50):
            return self._changed(text, len(text.tokens), choices.integer(1, min(room, most)))
        modulus = choices.pick(self._moduli)
        end = modulus * choices.integer(1, max(1, len(text.tokens) // modulus)) + choices.integer(-1, 1)
        more = choices.integer(1, most)
        return self._changed(text, max(0, min(end, len(text.tokens), self._longest - more)), more)

    def _changed(self, text: Text, kept: int, more: int) -> Text:
        """The first tokens of a text, and others after them."""
        tokens = text.tokens[:kept] + tuple(self.tokens(more))
        extra = None if text.extra is None else self._continue_extra(text.extra, kept, len(tokens))
        return Text(tokens, extra)

    def _other_identity(self, extra: ExtraKeys | None) -> ExtraKeys:
        """Identity of a prefix with another adapter, another path of it, or another salt."""
        extra = ExtraKeys() if extra is None else extra
        change: tuple[dict[str, Any], ...] = ({"lora": ["a", "/a"]}, {"lora": ["a", "/b"]}, {"lora": None})
        return msgspec.structs.replace(extra, **self._choices.pick((*change, {"salt": "s"}, {"salt": None})))

    def remember(self, text: Text) -> None:
        """Later prompts may begin as this text does."""
        self._texts.append(text)
        if len(self._texts) > MEMORY:
            del self._texts[self._choices.integer(0, MEMORY - 1)]

    def _draw_extra(self, parent: Text, shared: int, length: int) -> ExtraKeys | None:
        choices = self._choices
        if parent.tokens and choices.chance(75):
            return None if parent.extra is None else self._continue_extra(parent.extra, shared, length)
        if not choices.chance(50):
            return None
        return ExtraKeys(
            lora=choices.pick((["a", "/a"], ["a", "/b"], ["b", "/b"])) if choices.chance(40) else None,
            multimodal=self._draw_items(0, length) if choices.chance(50) else [],
            salt=choices.pick(("s", "t", "")) if choices.chance(40) else None,
            embeds=self._draw_embeds(length) if choices.chance(25) else None,
        )

    def _continue_extra(self, extra: ExtraKeys, shared: int, length: int) -> ExtraKeys:
        kept = [item for item in extra.multimodal if item[1] + item[2] <= shared]
        embeds = None
        if extra.embeds is not None:
            start = extra.embeds[:shared]
            embeds = start + self._draw_embeds(length - len(start))
        return msgspec.structs.replace(extra, multimodal=kept + self._draw_items(shared, length), embeds=embeds)

    def _draw_items(self, start: int, end: int) -> list[tuple[str, int, int]]:
        items = []
        while start < end and self._choices.chance(60):
            offset = self._choices.integer(start, end - 1)
            size = self._choices.integer(1, min(end - offset, 12))
            items.append((self._choices.pick(("image-1", "image-2", "sound")), offset, size))
            start = offset + size
        return items

    def _draw_embeds(self, count: int) -> list[str]:
        return [self._choices.pick(("00ff", "8001", "3f80")) for _ in range(count)]
