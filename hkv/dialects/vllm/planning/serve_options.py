"""Options of `vllm serve` on HKV's command line, under vLLM 0.33's names, and what their texts mean."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import click

from hkv.byte_size import parse_bytes
from hkv.contract.plan_command import length_option
from hkv.dialects.vllm.planning.engine_options import (
    ALL2ALL_BACKENDS,
    DEFAULT_DEVICE,
    DEVICES,
    GDN_BACKENDS,
    KDA_BACKENDS,
    PERFORMANCE_MODES,
    USAGE_CONTEXTS,
)
from hkv.dialects.vllm.planning.speculation import Speculation, parse_speculation
from hkv.errors import ConfigError, FileError
from hkv.limits import MAX_BLOCKS, MAX_MEMORY, MAX_RANKS, MAX_TOKENS

INDEX_SUFFIX = ".json"
"""Files that list a checkpoint's shards and say how large all of its tensors are."""


def memory_options() -> Sequence[click.Option]:
    """Options from which the memory for the cache is computed, where it is not given itself."""
    return (
        click.Option(
            ["device", "--gpu", "--device"],
            metavar="NAME",
            default=DEFAULT_DEVICE,
            show_default=True,
            help=f"GPU: its memory, and vLLM's defaults on it: {', '.join(DEVICES)}.",
        ),
        click.Option(
            ["--gpu-memory"], metavar="SIZE", help="Memory that each GPU reports; left out, what those of --gpu do."
        ),
        click.Option(
            ["--gpu-memory-utilization"],
            type=click.FloatRange(0, 1, min_open=True),
            callback=_no_nan,
            default=0.92,
            show_default=True,
            help="Share of --gpu-memory that vLLM takes.",
        ),
        click.Option(
            ["--weights"],
            metavar="SIZE|INDEX",
            help="Weights on each GPU, or model.safetensors.index.json, dealt out evenly; left out, vLLM's classes'.",
        ),
        click.Option(
            ["--activations"],
            metavar="SIZE",
            help="What profiling finds beside the weights: activations, CUDA graphs, the rest; left out, an estimate.",
        ),
        click.Option(
            ["--num-gpu-blocks-override"], type=click.IntRange(1, MAX_BLOCKS), help="Blocks, whatever the memory."
        ),
    )


def batch_options() -> Sequence[click.Option]:
    """Options of a step and of the number of steps that run at once."""
    return (
        length_option(),
        click.Option(
            ["--max-num-batched-tokens"],
            type=click.IntRange(1, MAX_TOKENS),
            help="Tokens of one step; left out, vLLM's default for --device and --usage-context.",
        ),
        click.Option(["--max-num-seqs"], type=click.IntRange(1, MAX_TOKENS), help="Requests of one step."),
        click.Option(
            ["--async-scheduling/--no-async-scheduling"],
            default=None,
            help="Schedule a step while one runs, so that windows and chunks keep the tokens of two; vLLM's default.",
        ),
        click.Option(
            ["--enable-chunked-prefill/--no-enable-chunked-prefill"],
            default=None,
            help="Compute prompts in several steps; vLLM's default.",
        ),
        click.Option(
            ["--performance-mode"], type=click.Choice(PERFORMANCE_MODES), default="balanced", show_default=True
        ),
        click.Option(
            ["--usage-context"],
            type=click.Choice(USAGE_CONTEXTS, case_sensitive=False),
            default=USAGE_CONTEXTS[0],
            show_default=True,
            help="Who makes the engine: `vllm serve`, `LLM(...)` or `vllm run-batch`.",
        ),
        click.Option(
            ["--max-in-flight"],
            type=click.IntRange(1, MAX_TOKENS),
            help="Tokens scheduled and not settled; left out, those of all steps that run at once.",
        ),
        click.Option(
            ["--speculative-config"],
            metavar="JSON",
            help='How tokens are drafted, such as \'{"method": "mtp", "num_speculative_tokens": 1}\'.',
        ),
    )


def cache_options() -> Sequence[click.Option]:
    """Options of the cache's manager."""
    return (
        click.Option(
            ["--layout"], metavar="ORDER", help="LBHNC, LBNHC, LHBNC, BLHNC, BLNHC or BHLNC; left out, the first fit."
        ),
        click.Option(
            [
                "--enable-prefix-caching/--no-enable-prefix-caching",
                " /--disable-prefix-caching",
                " /--no-prefix-caching",
            ],
            default=None,
            help="Keep recurrent states at boundaries, or one a request; vLLM's default: where the model can.",
        ),
        click.Option(
            [
                "disable_hybrid_kv_cache_manager",
                "--no-hybrid/--no-disable-hybrid-kv-cache-manager",
                "--disable-hybrid-kv-cache-manager/--enable-hybrid-kv-cache-manager",
            ],
            default=None,
            help="Cache every layer like full attention; vLLM's default with chunked attention.",
        ),
        click.Option(
            ["--gdn-prefill-backend"],
            type=click.Choice(GDN_BACKENDS),
            help="Kernel for prompts of gated delta nets; FlashInfer's, if the GPU has it, keeps a state in a chunk.",
        ),
        click.Option(
            ["--kda-prefill-backend"],
            type=click.Choice(KDA_BACKENDS),
            default=KDA_BACKENDS[0],
            show_default=True,
            help="Kernel for prompts of Kimi K3's layers; FlashKDA keeps a state in a chunk.",
        ),
        click.Option(
            ["--prefix-match-unit"], type=click.IntRange(1, MAX_TOKENS), help="Tokens between two hashes of a prefix."
        ),
    )


def parallel_options() -> Sequence[click.Option]:
    """Options of engines beside this one, and of experts dealt out to ranks."""
    return (
        click.Option(
            ["data_parallel_size", "--dp", "--data-parallel-size", "-dp"],
            type=click.IntRange(1, MAX_RANKS),
            default=1,
            show_default=True,
            help="Engines with a cache each; the plan is for one.",
        ),
        click.Option(
            ["enable_expert_parallel", "--ep/--no-ep", "--enable-expert-parallel", "-ep"],
            default=False,
            help="Deal experts out to ranks; with --dp it may lower the tokens of a step.",
        ),
        click.Option(
            ["--all2all-backend"], type=click.Choice(ALL2ALL_BACKENDS), default=ALL2ALL_BACKENDS[0], show_default=True
        ),
    )


def _no_nan(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """The value, NaN apart, which `click.FloatRange` takes for a number in any range."""
    if math.isnan(value):
        raise click.BadParameter(f"{value!r} is not a number.", ctx, param)
    return value


def size_of_weights(text: str | None, ranks: int) -> int | None:
    """Bytes of weights on each GPU: a size, or an index file whose `metadata.total_size` is dealt out evenly."""
    if text is None:
        return None
    if not text.endswith(INDEX_SUFFIX):
        return parse_bytes(text, "--weights")
    try:
        total = json.loads(pathlib.Path(text).read_text(encoding="utf-8"))["metadata"]["total_size"]
    except OSError as error:
        raise FileError(text, None, "", error.strerror, "a file that can be read, as --weights names it") from None
    except (ValueError, KeyError, TypeError):
        total = None
    if not isinstance(total, int | float) or not 1 <= total <= MAX_MEMORY * ranks:
        raise FileError(
            text, None, "metadata.total_size", total, "bytes of all tensors, as an index of safetensors has"
        )
    return -(-int(total) // ranks)


def speculation_of_options(options: dict[str, Any]) -> Speculation | None:
    """Speculation that `--speculative-config`, or `--draft` and `--speculative-tokens` in its place, ask for."""
    text, draft, tokens = options["speculative_config"], options["draft_path"], options["speculative_tokens"]
    if text is not None:
        for name, value in (("--draft", draft), ("--speculative-tokens", tokens or None)):
            if value is not None:
                raise ConfigError(name, value, "none beside --speculative-config, which says it")
        return parse_speculation(text)
    if draft is not None:
        return Speculation(method="eagle", num_speculative_tokens=tokens or 1, model=draft)
    return Speculation(method="ngram", num_speculative_tokens=tokens) if tokens else None
