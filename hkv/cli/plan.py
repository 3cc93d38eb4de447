"""`hkv plan`: groups, pages, block counts and tensors of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from hkv.cli.capacity_table import (
    CapacityRow,
    capacity_rows,
    combinations,
    drawn,
    lengths_between,
    table_csv,
    table_lines,
)
from hkv.cli.options import (
    bugs_option,
    command_of,
    commands,
    is_given,
    names_of,
    own_options,
    refuse_given,
    refuse_others,
)
from hkv.cli.output_option import OutputPath, Reported, console, plot_field, talks, write_json, write_output
from hkv.contract import registry
from hkv.contract.bugs import bugs_of_part
from hkv.contract.options import (
    COUNT,
    RANKS,
    TOKENS,
    Number,
    OneOrMore,
    Several,
    argument,
    check_plot_path,
    option,
    percentage,
)
from hkv.contract.plan_command import Capacity, PlanCommand
from hkv.errors import ConfigError, HKVError, PlanError
from hkv.limits import MAX_SPECULATIVE_TOKENS, MAX_TOKENS, counted, parse_bytes, show_bytes
from hkv.model.huggingface import KV_DTYPES, check_layer_list, load_config
from hkv.spec import KINDS, retained_sparsely

if TYPE_CHECKING:
    from hkv.cli.workload import Drawn, Served

PLANNERS = {dialect.planned_as: dialect for dialect in registry.dialects() if dialect.planned_as}
"""Dialects that plan memory, by the names that `--dialect` has for them."""

PLANNED = tuple(PLANNERS)
COMMANDS = commands(lambda dialect: dialect.plan_command())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PlanOptions(Reported):
    configs: tuple[str, ...] = argument(metavar="CONFIG...", nargs=-1, type=click.Path())
    layers: tuple[str, ...] = option(
        (),
        metavar="FILE",
        type=click.Path(),
        help="Layers listed by hand, in JSON (docs/planning.md), in place of a CONFIG or beside some; repeatable.",
    )
    memory: str | None = option(
        *(None, "--memory", "--kv-cache-memory-bytes"),
        metavar="SIZE",
        help="Memory for the cache on each GPU, such as 80GiB.",
    )
    tp: Several = option(
        *(1, "--tp", "--tensor-parallel-size", "-tp"), type=OneOrMore(RANKS), help="Tensor-parallel ranks."
    )
    pp: Several = option(
        *(1, "--pp", "--pipeline-parallel-size", "-pp"), type=OneOrMore(RANKS), help="Pipeline stages."
    )
    dcp: Several = option(
        *(1, "--dcp", "--decode-context-parallel-size", "-dcp"),
        type=OneOrMore(RANKS),
        help="Context-parallel ranks; where a rank holds whole blocks, of a prefill server.",
    )
    block_size: int | None = option(type=TOKENS, help="Tokens per block; left out, what the model's kernels want.")
    kernel_block_size: int = option(
        0,
        type=click.IntRange(0, MAX_TOKENS),
        show_default=False,
        help="Tokens per kernel block; left out, the whole block.",
    )
    dtype: str | None = option(metavar="TYPE", help="The model's element type; left out, its config's.")
    kv_dtype: Several = option(
        *("auto", "--kv-dtype", "--kv-cache-dtype"),
        type=OneOrMore(click.STRING),
        help=f"One of {', '.join(KV_DTYPES)}.",
    )
    state_dtype: str | None = option(metavar="TYPE", help="Element type of recurrent states; left out, the model's.")
    draft_path: str | None = option(None, "--draft", metavar="CONFIG", help="Config of a draft (EAGLE or MTP) module.")
    speculative_tokens: int = option(
        0, type=click.IntRange(0, MAX_SPECULATIVE_TOKENS), help="Draft tokens verified in one step."
    )
    ignore_fields: tuple[str, ...] = option(
        (),
        "--ignore-field",
        metavar="NAME,...",
        help="Fields of CONFIG that HKV does not know, to be read over; noted in the plan. Repeatable.",
    )
    strict: bool = option(False, help="Refuse every field that HKV does not know, whether it matters or not.")
    own: dict[str, Any] = own_options(COMMANDS)
    dialects: tuple[Several, ...] = option(
        PLANNED[:1],
        "--dialect",
        type=OneOrMore(click.Choice(PLANNED)),
        metavar=f"[{'|'.join(PLANNED)}],...",
        multiple=True,
        help="Whose memory plan; repeatable.",
    )
    requests: int | None = option(
        type=COUNT,
        help="Find the fewest GPUs that hold so many requests of --max-model-len at once, --tp and --pp as given or "
        "tried.",
    )
    trace_path: str | None = option(
        None, "--trace", metavar="FILE", help="Say how much of this trace's prompts is hit (hkv replay)."
    )
    prompt: int | None = option(type=TOKENS, help="Likewise of drawn requests: tokens of a prompt.")
    answer: int | None = option(type=TOKENS, help="Tokens of an answer.  [default: 256]")
    shared: str | None = option(
        metavar="P%", help="Share of a prompt that is one of 8 common prefixes.  [default: 50%]"
    )
    requests_per_second: float | None = option(
        type=Number(1e-6, 1e9), help="Requests that arrive a second.  [default: 1]"
    )
    target_hit_rate: str | None = option(metavar="P%", help="Find the cheapest change with which so much is hit.")
    bugs: tuple[str, ...] = bugs_option()
    csv_path: str | None = option(
        None, "--csv", metavar="F", type=OutputPath(), help="Write the table as CSV to the file F."
    )
    plot_path: str | None = plot_field("Draw what fits against length to F, .png or .svg.", "F")


ELSEWHERE = ("configs", "layers", "dialects", "memory", "requests", "trace_path", "prompt", "answer", "shared")
ELSEWHERE += ("requests_per_second", "target_hit_rate", "json_path", "csv_path", "plot_path")
"""Options that say nothing about one plan."""


@command_of("plan", _PlanOptions)
def command(given: _PlanOptions) -> None:
    """Say what a model's cache looks like: which layers share blocks, how many blocks fit, and where every layer lies.

    CONFIG is a model's config.json, the folder it is in, or a released model by name (gpt-oss-20b). Sizes are those of
    one tensor-parallel rank. How many of the longest requests fit at once is found by letting them run in the pool.

    Of several models, or several values of --tp, --pp, --dcp, --kv-cache-dtype, --max-model-len or --dialect with
    commas between them, it makes one table: a row for each combination.

    Example: hkv plan llama-3.1-8b --gpu h100 --tp 1,2,8 --max-model-len 32k

    Example: hkv plan llama-3.1-70b --gpu h100 --max-model-len 32k --requests 100

    Example: hkv plan gemma-3-4b --gpu l4 --prompt 8000 --answer 400 --shared 60% --requests-per-second 3

    Example: hkv plan Qwen3-Next-80B/config.json --memory 80GiB --tp 2 --max-model-len 131072

    Example: hkv plan --layers layers.json --memory 80GiB

    Example: hkv plan Qwen3-Next-80B-A3B --memory 80GiB --dialect vllm-0.33,rtp-llm

    Example: hkv plan gpt-oss-20b gemma-3-27b --memory 80GiB --tp 1,2 --kv-cache-dtype auto,fp8 --csv capacity.csv
    """
    for path in given.layers:
        check_layer_list(path, load_config(path))
    configs = given.configs + given.layers
    if not configs:
        raise click.UsageError("Missing argument 'CONFIG...', or --layers FILE in its place.")
    chosen = Several(dict.fromkeys(dialect for some in given.dialects for dialect in some))
    planners = {dialect: PLANNERS[dialect].plan_command() for dialect in chosen}
    for dialect, planner in planners.items():
        refuse_others(planner, COMMANDS, dialect)
        known = PLANNERS[dialect].bugs
        if not known:
            refuse_given(["bugs"], f"nothing with --dialect {dialect}, of which no upstream defect is known")
        bugs_of_part(names_of(given.bugs), "planning", PLANNERS[dialect].title, known)
    memory = None if given.memory is None else parse_bytes(given.memory)
    options = _options(given, chosen)
    if given.plot_path is not None:
        check_plot_path(given.plot_path)
    first, wanted = planners[chosen[0]], combinations(configs, options)
    single = len(wanted) == 1 and given.csv_path is None and given.plot_path is None
    if not single or given.requests is not None or given.trace_path is not None or given.prompt is not None:
        refuse_given(first.of_one_plan, "one plan, without a table, requests or a workload")
    if given.requests is not None:
        _fewest(first, configs, given.requests, memory, options, given.json_path)
        return
    if given.trace_path is not None or given.prompt is not None:
        if not first.replays_workloads:
            expected = f"nothing with --dialect {chosen[0]}, whose plan does not say how steps are made"
            refuse_given(["trace_path", "prompt"], expected)
        _workload(first, configs, memory, options, given)
        return
    refuse_given(["answer", "shared", "requests_per_second", "target_hit_rate"], "--prompt or --trace beside it")
    if single:
        config, choice = wanted[0]
        plan = first.plan(memory, {**options, **choice, "config": config})
        if talks(given.json_path):
            plan.show(console(wide=False, soft_wrap=False))
        write_json(given.json_path, plan.report)
        return
    for config in configs:
        load_config(config)  # an unknown name is a typing error, not a refused combination

    def capacity(config: str, choice: dict[str, Any]) -> Capacity:
        planner = planners[choice.get("dialect", chosen[0])]
        return planner.capacity(memory, {**options, **choice, "config": config})

    _table(capacity_rows(wanted, capacity), capacity, given)


def _options(given: _PlanOptions, dialects: Several) -> dict[str, Any]:
    """The options of plans, as a dialect takes them."""
    params = click.get_current_context().params
    options = {name: value for name, value in params.items() if name not in ELSEWHERE}
    options["ignore_fields"] = tuple(name for names in given.ignore_fields for name in names.split(",") if name)
    options["bugs"] = frozenset(names_of(given.bugs))
    options["given"] = {name for name in params if is_given(name)}
    return {"dialect": dialects, **options} if len(dialects) > 1 else options


def _table(rows: list[CapacityRow], capacity: Callable[[str, dict[str, Any]], Capacity], given: _PlanOptions) -> None:
    """Shows and writes the table of several plans."""
    if talks(given.json_path, given.csv_path, given.plot_path):
        click.echo("\n".join(table_lines(rows, console(wide=False).width)))
    write_json(given.json_path, {"rows": [row.record() for row in rows]})
    if given.csv_path is not None:
        write_output(given.csv_path, table_csv(rows))
    if given.plot_path is not None:
        between = capacity_rows(lengths_between(rows), capacity)
        write_output(given.plot_path, drawn(rows, given.plot_path, between))


def _single(name: str, configs: Sequence[str], options: dict[str, Any], but: Sequence[str] = ()) -> dict[str, Any]:
    """The options with one value each, of one model, for an option that answers a single question."""
    lists = {key: value for key, value in options.items() if isinstance(value, Several) and key not in but}
    if len(configs) > 1 or any(len(values) > 1 for values in lists.values()):
        expected = "one model and one value of each option" + (" but --tp and --pp" if but else "")
        raise ConfigError(name, list(configs), expected)
    return {**options, **{key: values[0] for key, values in lists.items()}, "config": configs[0]}


def _asked_workload(given: _PlanOptions) -> Drawn | str:
    """The workload that the options say: a trace's path, or numbers; ConfigError where they say both."""
    from hkv.cli.workload import Drawn  # NumPy and JAX: a plan does without

    share = percentage("--shared", "50%" if given.shared is None else given.shared)
    if given.trace_path is not None:
        refuse_given(["prompt", "answer", "shared", "requests_per_second"], "none beside --trace, which says all of it")
        return given.trace_path
    return Drawn(given.prompt or 1, given.answer or 256, share, given.requests_per_second or 1.0)


def _workload(
    planner: PlanCommand, configs: Sequence[str], memory: int | None, options: dict[str, Any], given: _PlanOptions
) -> None:
    """Answers `--trace` and `--prompt`: hit rates on the planned GPUs, and what reaches a target."""
    from hkv.cli.workload import Served, answered, workload_lines

    workload = _asked_workload(given)
    wished = given.target_hit_rate
    target = None if wished is None else percentage("--target-hit-rate", wished)
    asked = _single("--trace" if isinstance(workload, str) else "--prompt", configs, options)

    def served(tp: int, kv_dtype: str) -> Served:
        report = planner.plan(memory, {**asked, "tp": tp, "kv_dtype": kv_dtype}).report
        settings = report["settings"]
        return Served(
            config=asked["config"],
            memory=settings["memory"],
            tp=tp,
            gpus=tp * asked["pp"],
            kv_dtype=kv_dtype,
            max_model_len=report["max_model_len"],
            step_tokens=settings["max_num_batched_tokens"],
            max_running=settings["max_num_seqs"],
            retains=any(retained_sparsely(KINDS[group["kind"]]) for group in report["groups"]),
        )

    def other(tp: int, kv_dtype: str) -> Served | None:
        try:
            return served(tp, kv_dtype)
        except HKVError:
            return None

    engine = served(asked["tp"], asked["kv_dtype"])
    report, picture = answered(engine, workload, target, other, given.plot_path)
    reached = report["target"] and report["target"]["reached"]
    chosen = {"tp": reached["tp"], "kv_dtype": reached["kv_dtype"]} if reached else {}
    serve = planner.serve_line({**asked, **chosen}, 1)
    if reached and "retention" in reached["change"]:
        serve += " --prefix-cache-retention-interval None"
    if talks(given.json_path):
        click.echo("\n".join(workload_lines(report, engine, workload, serve)))
    write_json(given.json_path, {**report, "serve": serve})
    if given.plot_path is not None:
        write_output(given.plot_path, picture)


# The fewest GPUs that hold so many longest requests at once: each number of ranks and stages is planned as one engine,
# and as many engines as are needed serve next to each other.

TRIED_RANKS = (1, 2, 4, 8)
"""Tensor-parallel ranks that are tried where none are given: those of one machine."""

TRIED_STAGES = (1, 2, 4)
"""Pipeline stages that are tried where none are given: more than one where ranks of one machine do not hold it."""


@dataclasses.dataclass(frozen=True)
class Deployment:
    """So many engines next to each other that hold the requests, each of so many ranks and stages."""

    tp: int
    pp: int
    engines: int
    capacity: Capacity

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp * self.pp * self.engines

    def record(self) -> dict[str, Any]:
        """The deployment as plain values."""
        fits = {"requests": self.capacity.requests, "weights": self.capacity.weights, "memory": self.capacity.memory}
        return {"gpus": self.gpus, "engines": self.engines, "tp": self.tp, "pp": self.pp, **fits}


def _fewest(
    planner: PlanCommand,
    configs: Sequence[str],
    requests: int,
    memory: int | None,
    options: dict[str, Any],
    json_path: str | None,
) -> None:
    """Answers `--requests`: ways to hold them, the fewest GPUs first."""
    asked = _single("--requests", configs, options, but=("tp", "pp"))
    ranks, stages = (options[name] if name in options["given"] else () for name in ("tp", "pp"))
    found = deployments(requests, ranks, stages, lambda tp, pp: planner.capacity(memory, {**asked, "tp": tp, "pp": pp}))
    best = found[0]
    serve = planner.serve_line({**asked, "tp": best.tp, "pp": best.pp}, best.engines)
    if talks(json_path):
        click.echo("\n".join(_deployment_lines(found, requests, serve)))
    rows = [each.record() for each in found]
    write_json(json_path, {"requests": requests, "deployments": rows, "fewest": rows[0], "serve": serve or None})


def deployments(
    requests: int, ranks: Sequence[int], stages: Sequence[int], capacity: Callable[[int, int], Capacity]
) -> list[Deployment]:
    """Ways to hold so many requests at once, the fewest GPUs first, and then the fewest engines.

    Numbers of ranks and stages that are not given are tried: `TRIED_RANKS`, and the first of `TRIED_STAGES` that holds
    a request. Where none does, the last refusal is raised.
    """
    refused: HKVError | None = None
    found: list[Deployment] = []
    for pp in stages or TRIED_STAGES:
        for tp in ranks or TRIED_RANKS:
            try:
                fits = capacity(tp, pp)
            except HKVError as error:
                refused = error
                continue
            if fits.requests:
                found.append(Deployment(tp, pp, -(-requests // fits.requests), fits))
        if found and not stages:
            break
    if not found:
        raise refused or PlanError("--requests", requests, "a request of that length that fits; none does")
    return sorted(found, key=lambda each: (each.gpus, each.engines, each.pp))


def _deployment_lines(found: Sequence[Deployment], requests: int, serve: str) -> Iterator[str]:
    """A table of the deployments, and what the first of them means."""
    yield "GPUs engines tp pp    weights      cache  requests"
    yield "                      a GPU      a GPU an engine"
    for each in found:
        fits = each.capacity
        weights, cache = (show_bytes(size) if size else "-" for size in (fits.weights, fits.memory))
        yield f"{each.gpus:4} {each.engines:7} {each.tp:2} {each.pp:2} {weights:>10} {cache:>10} {fits.requests:9,}"
    best = found[0]
    length = best.capacity.max_model_len
    held = best.engines * best.capacity.requests
    fewest = f"{counted(best.gpus, 'GPU')} hold{'s' * (best.gpus == 1)} {counted(held, 'request')}"
    yield f"fewest: {fewest} of {length:,} tokens at once; {requests:,} were asked for"
    if serve:
        yield serve
    if best.capacity.not_started:
        yield f"which {best.capacity.not_started}"
