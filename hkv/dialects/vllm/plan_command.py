"""`hkv plan` under vLLM 0.33's rules."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hkv.contract.options import Number, option
from hkv.contract.plan_command import Capacity, ModelPlan, PlanCommand, plan_table, print_facts
from hkv.dialects.vllm.offload.capacity import planned_tier
from hkv.dialects.vllm.planning.cache_plan import CachePlan, ServedPlan, waste
from hkv.dialects.vllm.planning.engine_options import EngineOptions, reported_memory
from hkv.dialects.vllm.planning.engine_plan import plan_config
from hkv.dialects.vllm.planning.plan import PlannedGroup
from hkv.dialects.vllm.planning.speculation import Speculation, parse_speculation
from hkv.errors import ConfigError, FileError
from hkv.files import decode_json, read_whole
from hkv.limits import MAX_MEMORY, parse_bytes, parse_length, show_bytes
from hkv.model.released import find

INDEX_SUFFIX = ".json"
"""Files that list a checkpoint's shards and say how large all of its tensors are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VllmPlanOptions(EngineOptions):
    """Options of `vllm serve`, and one that changes nothing on the GPU."""

    kv_offloading_size: float | None = option(
        type=Number(0, MAX_MEMORY >> 30, min_open=True),
        metavar="GIB",
        help="Host memory behind the cache, of all GPUs of an engine: what it holds, and what it would not find.",
    )


class VllmPlanCommand(PlanCommand):
    """One pool of blocks, what fits, and what vLLM says at start-up. Options are `vllm serve`'s, and its defaults."""

    declared = VllmPlanOptions
    replays_workloads = True
    of_one_plan = ("kv_offloading_size",)

    def plan(self, memory: int | None, options: dict[str, Any]) -> ModelPlan:
        planned, size = _planned(memory, options), options["kv_offloading_size"]
        report = planned.report() | ({} if size is None else {"offloading": _offloading(planned, size)})
        return ModelPlan(report, lambda console: print_served(console, report, planned.served))

    def serve_line(self, options: dict[str, Any], engines: int) -> str:
        released = find(options["config"])
        words = ["vllm serve", options["config"] if released is None else released.ids[0]]
        flags = {
            "--tensor-parallel-size": options["tp"] if options["tp"] > 1 else None,
            "--pipeline-parallel-size": options["pp"] if options["pp"] > 1 else None,
            "--data-parallel-size": engines if engines > 1 else None,
            "--max-model-len": options["max_model_len"],
            "--kv-cache-dtype": None if options["kv_dtype"] == "auto" else options["kv_dtype"],
        }
        return " ".join([*words, *(f"{name} {value}" for name, value in flags.items() if value is not None)])

    def capacity(self, memory: int | None, options: dict[str, Any]) -> Capacity:
        return capacity_of(_planned(memory, options))


def _offloading(planned: CachePlan, gib: float) -> dict[str, Any]:
    """The second tier of a plan, and prompts that it would not find again."""
    from hkv.dialects.vllm.offload.found_again import warnings

    tier = planned_tier(planned, gib)
    return {**tier.record(), "warnings": warnings(tier.config, tier.longest)}


def _planned(memory: int | None, options: dict[str, Any]) -> CachePlan:
    return plan_config(options["config"], engine_options(memory, options), bugs=options["bugs"])


def engine_options(memory: int | None, options: dict[str, Any]) -> EngineOptions:
    """The engine's options that those of `hkv plan` mean: alike in name, or in another form."""
    gpu_memory = _size(options, "gpu_memory")
    if gpu_memory is None and "device" in options["given"]:
        gpu_memory = reported_memory(options["device"])
    length = 0 if options["max_model_len"] == "-1" else parse_length(options["max_model_len"])
    alike = {field.name for field in dataclasses.fields(EngineOptions)} & options.keys()
    in_another_form = {
        "gpu_memory": gpu_memory,
        "gpu_memory_reported": options["gpu_memory"] is None,
        "activations": _size(options, "activations"),
        "weights": size_of_weights(options["weights"], options["tp"] * options["pp"]),
        "kv_cache_memory_bytes": memory,
        "tensor_parallel_size": options["tp"],
        "pipeline_parallel_size": options["pp"],
        "decode_context_parallel_size": options["dcp"],
        "max_model_len": -1 if length == 0 else length,
        "max_in_flight_tokens": options["max_in_flight"],
        "kv_cache_layout": options["layout"],
        "kv_cache_dtype": options["kv_dtype"],
        "speculation": speculation_of_options(options),
    }
    return EngineOptions(**{**{name: options[name] for name in alike}, **in_another_form})


def _size(options: dict[str, Any], name: str) -> int | None:
    text = options[name]
    return None if text is None else parse_bytes(text, f"--{name.replace('_', '-')}")


def size_of_weights(text: str | None, ranks: int) -> int | None:
    """Bytes of weights on each GPU: a size, or an index file whose `metadata.total_size` is dealt out evenly."""
    if text is None:
        return None
    if not text.endswith(INDEX_SUFFIX):
        return parse_bytes(text, "--weights")
    index = decode_json(read_whole(text), text, None, "an index of safetensors, as --weights names it")
    metadata = index.get("metadata") if isinstance(index, dict) else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
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


# Tables in which a plan is shown on a terminal, 80 columns and up.


def print_served(console: Console, report: dict[str, Any], served: ServedPlan) -> None:
    """Prints groups, what fits, and every tensor."""
    fits, unit = report["fits"], report["hash_block_size"]
    hits = f"at multiples of {report['scheduler_block_size']:,} tokens; a hash every {unit:,}"
    facts = [
        *_memory_facts(report),
        ("a block", f"{show_bytes(report['bytes_per_block'])} over all layers, layout {report['layout']}"),
        ("blocks", f"{report['num_blocks']:,}, one of them the null block"),
        ("hits", hits),
        *_startup_facts(report),
        (
            "fits",
            f"{_between(fits['requests'], fits['most_requests'])} request{'s' * (fits['most_requests'] != 1)} of "
            f"{report['max_model_len']:,} tokens at "
            f"once, {_between(fits['tokens'], fits['most_requests'] * report['max_model_len'])} tokens, by simulation",
        ),
        ("limited by", fits["limited_by"]),
        *_tier_facts(report),
    ]
    if difference := report["startup"]["why_simulation_differs"]:
        facts.insert(facts.index(("limited by", fits["limited_by"])), ("", difference))
    if (replicas := max(report["tp_replicas"])) > 1:
        facts.append(("replicas", f"{replicas} tensor-parallel ranks in a row hold the same bytes"))
    print_facts(console, report, facts)
    console.print(_groups(report, served))
    for stage, tensors in enumerate(report["tensors"]):
        console.print(_tensors(f"stage {stage}" if len(report["tensors"]) > 1 else "tensors", tensors))


def _tier_facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The second tier in chunks, what a prompt takes of them, and what would go wrong with it."""
    tier = report.get("offloading")
    if tier is None:
        return []
    parts = zip(tier["chunks_of_longest_prompt"], tier["tokens_per_chunk"], strict=True)
    taken = ", ".join(f"{chunks:,} of g{group} ({size:,} tokens each)" for group, (chunks, size) in enumerate(parts))
    return [
        (
            "host memory",
            f"{tier['num_chunks']:,} chunks of {show_bytes(tier['chunk_bytes'])}, a block of any group each",
        ),
        (
            "",
            f"a prompt of {report['max_model_len']:,} tokens takes {taken}: room for {tier['tokens']:,} tokens of such",
        ),
        ("vLLM says", f"cpu_kv_cache_size_tokens {tier['cpu_kv_cache_size_tokens']:,}"),
        *(("warning", text) for text in tier["warnings"]),
    ]


def _memory_facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    """A GPU's memory and what is left of it for the cache, each with where its number is from."""
    memory = report["memory"]
    cache = memory["cache"]
    if "weights" not in memory:
        return [("memory", f"{_stages(cache['stages'])} for the cache on each GPU (given)")]
    [gpu], [rest], weights = memory["gpu"], memory["activations"], memory["weights"]
    known = "what such a GPU reports" if gpu["origin"] == "estimated" else gpu["origin"]
    sizes = f"{show_bytes(gpu['most'])} ({known}), of which vLLM takes {show_bytes(memory['taken'])}"
    least = "" if cache["stages"] == cache["most"] else "; all below is for the least"
    return [
        ("a GPU", sizes),
        ("weights", f"{_stages([part['most'] for part in weights])} ({weights[0]['origin']}{_unpacked(memory)})"),
        *(("rotary tables", f"{show_bytes(part['most'])} ({part['origin']})") for part in memory.get("tables", ())),
        ("beside them", f"{_sizes(rest['least'], rest['most'])} of activations and CUDA graphs ({rest['origin']})"),
        ("cache", f"{_sizes(min(cache['stages']), min(cache['most']))} ({cache['origin']}){least}"),
    ]


def _unpacked(memory: dict[str, Any]) -> str:
    """The element type of weights whose packing HKV's part of the config may lack."""
    dtype = memory["unpacked"]
    return f", all in {dtype}: the shipped config is not the whole file, and names no packing" if dtype else ""


def _stages(sizes: Sequence[int]) -> str:
    """A size, or those of pipeline stages."""
    return ", ".join(show_bytes(size) for size in (sizes if len(set(sizes)) > 1 else sizes[:1]))


def _sizes(least: int, most: int) -> str:
    return show_bytes(least) if least == most else f"{show_bytes(least)} to {show_bytes(most)}"


def _between(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _startup_facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The line that vLLM itself prints, and the options that it is for."""
    settings = report["settings"]["settings"]
    asked = " ".join(each["option"] for each in settings if not each["origin"])
    chosen = "; ".join(f"{each['option']} ({each['origin']})" for each in settings if each["origin"])
    facts = [("vLLM says", report["startup"]["line"] or "nothing: the model caches nothing")]
    if report["startup"]["not_started"]:
        facts.append(("but vLLM", report["startup"]["not_started"]))
    if chosen:
        facts.append(("with", f"{asked}; by default {chosen}" if asked else f"by default {chosen}"))
    elif asked:
        facts.append(("with", asked))
    return facts


def kind_text(group: PlannedGroup) -> str:
    """A group's kind as `hkv replay --groups` names it, with its window or chunk; `+` if it holds several kinds."""
    spec = group.spec
    numbers = "".join(f" {getattr(spec, name)}" for name in spec.written.parameters)
    return f"{spec.written.short_name}{numbers}{' +' * group.mixed}"


def _groups(report: dict[str, Any], served: ServedPlan) -> Table:
    table = plan_table("groups")
    table.add_column("group", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("layers")
    for name in ("tokens\na block", "KiB\na block", "unused", "blocks a\nrequest", "at peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, (group, planned) in enumerate(zip(report["groups"], served.plan.groups, strict=True)):
        table.add_row(
            f"g{index}" + (" draft" if group["eagle"] else ""),
            kind_text(planned),
            runs(group["layers"]),
            f"{group['block_size']:,}",
            f"{group['bytes_per_block'] / 1024:,.1f}",
            f"{waste(planned, report['bytes_per_block']):.1%}",
            f"{group['full_length_blocks']:,}",
            f"{group['peak_blocks']:,}",
        )
    return table


def _tensors(title: str, tensors: list[dict[str, Any]]) -> Table:
    """Two lines a tensor: extents of the axes, and below them their strides in bytes."""
    sizes = " and ".join(dict.fromkeys(show_bytes(tensor["size"]) for tensor in tensors))
    table = plan_table(f"{title} in a buffer of {sizes}: extent of each axis, its stride in bytes below")
    table.add_column("layers")
    for name in ("offset", "L", "B", "H", "N", "C"):
        table.add_column(name, justify="right", no_wrap=True)
    for tensor in tensors:
        cells = (f"{n}\n{stride}" for n, stride in zip(tensor["shape"], tensor["strides"], strict=True))
        table.add_row(runs(tensor["layers"]), str(tensor["offset"]), *cells)
    return table


def runs(names: tuple[str, ...] | list[str]) -> str:
    """Names of layers, shortened: `0,4..44 (12)` for evenly spaced numbers, `3.state and 19 more` for anything else."""
    short = [name.removeprefix("layers.") for name in names]
    if len(names) < 3:
        return ",".join(short)
    numbers = [name.partition(".")[0] for name in short]
    suffixes = [name.partition(".")[2] for name in short]
    if len(set(suffixes)) > 1 or not all(number.isdigit() for number in numbers):
        return f"{short[0]} and {len(names) - 1} more"
    steps = {int(after) - int(before) for before, after in itertools.pairwise(numbers)}
    middle = ".." if steps == {1} else f",{numbers[1]}.." if len(steps) == 1 else f",{numbers[1]},..,"
    suffix = f" {suffixes[0]}" if suffixes[0] else ""
    return f"{numbers[0]}{middle}{numbers[-1]}{suffix} ({len(names)})"


def capacity_of(plan: CachePlan) -> Capacity:
    """The row of a plan in a capacity table. Tokens and concurrency are those that vLLM logs at start-up."""
    held = plan.served.residency.full_length_blocks
    widest = max(range(len(held)), key=lambda index: held[index], default=None)
    return Capacity(
        max_model_len=plan.max_model_len,
        token_bytes=plan.token_bytes,
        sequence_bytes=plan.sequence_bytes,
        num_blocks=plan.num_blocks,
        tokens=plan.tokens,
        concurrency=plan.concurrency if plan.request_blocks else None,
        requests=plan.requests,
        limiting="" if widest is None else kind_text(plan.served.plan.groups[widest]),
        limiting_share=0.0 if widest is None else held[widest] / sum(held),
        limited_by=plan.limited_by,
        waste=plan.waste,
        weights=max((part.most for part in plan.settings.memory.parts.get("weights", ())), default=None),
        memory=min(plan.settings.memory.stages),
        not_started=plan.not_started or None,
    )
