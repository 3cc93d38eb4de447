"""The formats that `hkv trace import` reads, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from hkv.replay.traces.imports import chats, kv_events, lengths
from hkv.replay.traces.imports.imported import Imported, ImportOptions, Remarks
from hkv.replay.traces.reader import TOKENS_PER_ID

BAILIAN_TOKENS = 16
"""Tokens of an id in Bailian's traces (their specification), and by default in vLLM's timed traces
(vLLM 0.33 `vllm.benchmarks.datasets.TimedTrace`, `timed_trace_chunk_hash_size`)."""

Reader = Callable[[str, ImportOptions, Remarks], Iterator[Imported]]

IDS = ("tokens_per_id",)
TEXTS = ("tokens_per_id", "tokenizer", "template")
UNTIMED = ("rate", "seed")
ANSWERED = ("ms_per_token",)
MADE_UP = ("synthetic", "prefixes", "prefix_tokens", "tokens_per_id", "seed")


@dataclasses.dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
      options: names of the options that mean something to it, besides those that all have.
      tokens_per_id: tokens that one of its ids stands for unless told otherwise; None where it has no ids.
    """

    read: Reader
    options: tuple[str, ...]
    tokens_per_id: int | None = None


FORMATS = {
    "mooncake": Format(lengths.mooncake, IDS, TOKENS_PER_ID),
    "bailian": Format(lengths.bailian, IDS, BAILIAN_TOKENS),
    "timed-trace": Format(lengths.timed_trace, IDS, BAILIAN_TOKENS),
    "dynamo": Format(lengths.dynamo, (*IDS, *UNTIMED, *ANSWERED), TOKENS_PER_ID),
    "azure": Format(lengths.azure, MADE_UP),
    "burstgpt": Format(lengths.burst_gpt, MADE_UP),
    "sharegpt": Format(chats.sharegpt, (*TEXTS, *UNTIMED, *ANSWERED, "pause")),
    "openai-chat": Format(chats.openai_log, (*TEXTS, *UNTIMED, "output_tokens")),
    "openai-batch": Format(chats.openai_batch, (*TEXTS, *UNTIMED, "output_tokens", "answers")),
    "prompts": Format(chats.prompt_lines, (*TEXTS, *UNTIMED, "output_tokens")),
    "text": Format(chats.plain_text, (*TEXTS, *UNTIMED, "output_tokens")),
    "kv-events": Format(
        kv_events.kv_events,
        ("tokens_per_id", "group", "endpoint", "replay_endpoint", "topic", "seconds"),
    ),
    "operation-log": Format(kv_events.operation_log, ("tokens_per_id", "step_ms")),
}
