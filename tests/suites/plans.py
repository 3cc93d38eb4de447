"""Plans: groups, pages, blocks and tensors of any set of layers, checked by counting."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from hkv.contract.traffic import Choices
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.planning.pages import align_states, unify_pages
from hkv.dialects.vllm.planning.plan import Plan
from hkv.dialects.vllm.planning.residency import longest_request, request_blocks, simulate
from hkv.dialects.vllm.planning.vllm import plan_vllm
from hkv.dialects.vllm.vectors import LayerSet, draw_layer_set
from hkv.errors import HKVError
from hkv.layout.block_layout import Layout
from hkv.spec import (
    AttentionSpec,
    ChunkedLocal,
    HiddenState,
    LayerSpec,
    Mamba,
    MLAAttention,
    OpaqueState,
    RequestLimits,
    SlidingWindow,
)
from tests.suites.suite import CaseSuite, case_check


@dataclasses.dataclass(frozen=True)
class Planned:
    """Layers, and the plan that was made of them; None when they are refused."""

    layers: LayerSet
    plan: Plan | None

    @property
    def all_layers(self) -> dict[str, LayerSpec]:
        """Every layer of the model."""
        return {name: spec for worker in self.layers.workers for name, spec in worker.items()}

    def __str__(self) -> str:
        kinds = [f"{name}: {type(spec).__name__} of {spec.block_size}" for name, spec in self.all_layers.items()]
        return f"{len(self.layers.workers)} workers, {', '.join(kinds)}"


def draw_planned(choices: Choices) -> Planned:
    """A random set of layers and its plan."""
    layers = draw_layer_set(choices.integer(0, 100_000))
    try:
        return Planned(layers, plan_vllm(layers.workers, layers.memory, layers.options))
    except HKVError:
        return Planned(layers, None)


@case_check("partition", "B-I22")
def partition(case: Planned) -> Iterator[str]:
    """Each layer is in exactly one group; every worker has the same groups, with tensors of its own layers only."""
    plan = case.plan
    if plan is None:
        return
    names = [name for group in plan.groups for name in group.names]
    if sorted(names) != sorted(case.all_layers):
        yield f"the groups hold {sorted(names)} of {sorted(case.all_layers)}"
    for index, (worker, owned) in enumerate(zip(plan.workers, case.layers.workers, strict=True)):
        shares = [tuple(name for name in group.names if name in owned) for group in plan.groups]
        if [group.names for group in worker.groups] != shares:
            yield f"worker {index} has the groups {[group.names for group in worker.groups]}, not {shares}"
        placed = sorted(name for tensor in worker.tensors for name in tensor.layers)
        if placed != sorted(owned):
            yield f"worker {index} places {placed}, and owns {sorted(owned)}"
        if worker.num_blocks != plan.num_blocks:
            yield f"worker {index} has {worker.num_blocks} blocks of {plan.num_blocks}"


@case_check("one kind a group", "B-I22")
def one_kind(case: Planned) -> Iterator[str]:
    """Layers of one group retire alike: what a later query reads is the same for all; drafts' groups are marked."""
    plan, layers = case.plan, case.all_layers
    if plan is None:
        return
    for index, group in enumerate(plan.groups):
        reads = {_reads(spec) for spec in group.specs}
        if len(reads) > 1:
            yield f"group {index} holds layers that read {sorted(map(str, reads))}"
        drafts = any(layers[name].is_draft for name in group.names)
        if group.eagle != (drafts and case.layers.options.eagle):
            yield f"group {index} is {'marked' if group.eagle else 'not marked'} as a draft's, {drafts=}"


def _reads(spec: LayerSpec) -> tuple[object, ...]:
    return (type(spec).snapshot, *(spec.readable(n) for n in (3, 40, 700)))


@case_check("even groups", "B-I22")
def even_groups(case: Planned) -> Iterator[str]:
    """Groups of one spec differ by one layer at most, each stage has its share of each, and none is padded beyond that.

    A bucket's layers are dealt out in turn: every stretch of as many neighbours as there are groups meets all of them.
    """
    plan, layers = case.plan, case.all_layers
    if plan is None:
        return
    by_spec: dict[LayerSpec, list[tuple[str, ...]]] = {}
    for group in plan.groups:
        if not group.mixed:
            by_spec.setdefault(group.spec, []).append(group.names)
    order = list(layers)
    sizes = []
    for groups in by_spec.values():
        counts = [len(names) for names in groups]
        sizes.append(sum(counts))
        if max(counts) - min(counts) > 1:
            yield f"groups of one spec have {counts} layers"
        first = sorted(order.index(names[0]) for names in groups if names)
        whole = sorted(order.index(name) for names in groups for name in names)
        if len({layers[name] for names in groups for name in names}) == 1 and first != whole[: len(groups)]:
            yield f"the first layers {whole[: len(groups)]} of one spec are not in as many groups"
    if len(by_spec) > 1 and len(by_spec) == len({id(g) for g in by_spec}) and not any(g.mixed for g in plan.groups):
        most = max(len(group.names) for group in plan.groups if not _apart(group.spec))
        kinds = [total for spec, total in zip(by_spec, sizes, strict=True) if not _apart(spec)]
        if kinds and 2 * max(kinds) >= 3 * min(kinds) and most > min(kinds):
            yield f"a group of {most} layers beside a kind that has {min(kinds)}"


def _apart(spec: LayerSpec) -> bool:
    return isinstance(spec, HiddenState)


@case_check("pages", "B-I21")
def pages(case: Planned) -> Iterator[str]:
    """Payload fits its page; a longer block carries its tokens in proportion; states keep their bytes and their grid.

    Exception: where no token's hidden state fits the page, all blocks and grids become longer, by as little as will do.
    """
    plan, layers = case.plan, case.all_layers
    if plan is None:
        return
    hidden = max(
        (kinds.layer(spec).bytes_per_token for spec in layers.values() if isinstance(spec, HiddenState)), default=0
    )
    ratios: set[int] = set()
    for group in plan.groups:
        for name, spec in zip(group.names, group.specs, strict=True):
            old = layers[name]
            if spec.page_size_bytes < spec.unpadded_page_size_bytes:
                yield f"{name}: a payload of {spec.unpadded_page_size_bytes} in a page of {spec.page_size_bytes} bytes"
            payload = old.unpadded_page_size_bytes
            if isinstance(spec, AttentionSpec | OpaqueState):
                payload = old.unpadded_page_size_bytes * spec.block_size // old.block_size
            if spec.unpadded_page_size_bytes != payload:
                yield f"{name}: {spec.block_size} tokens take {spec.unpadded_page_size_bytes} bytes, not {payload}"
            if isinstance(spec, Mamba):
                ratio, page = spec.block_size // old.block_size, spec.page_size_bytes
                ratios.add(ratio)
                needed = ratio == 1 or (page - page // ratio < hidden <= page and page % ratio == 0)
                if spec.block_size != old.block_size * ratio or not needed:
                    yield f"{name}: states every {spec.block_size} tokens instead of {old.block_size}"
    if len(ratios) > 1:
        yield f"some states' grids are {min(ratios)} times as long as they were, some {max(ratios)} times"


@case_check("unified pages", "B-I21")
def unified(case: Planned) -> Iterator[str]:
    """Pages become equal by longer blocks where one divides the other, by padding only where none does."""
    layers = {name: spec for name, spec in case.all_layers.items() if spec.kind}
    try:
        made = unify_pages(layers, frozenset())
    except HKVError:
        return
    sizes = {spec.page_size_bytes for spec in made.values()}
    if len(sizes) != 1 or made.keys() != layers.keys():
        yield f"pages of {sorted(sizes)} bytes"
        return
    page = sizes.pop()
    for name, spec in made.items():
        old = layers[name]
        if isinstance(spec, Mamba):
            if spec.block_size != old.block_size or spec.unpadded_page_size_bytes != old.unpadded_page_size_bytes:
                yield f"{name}: the state's page was scaled"
            continue
        ratio = spec.block_size / old.block_size
        wanted = page // old.page_size_bytes if page % old.page_size_bytes == 0 else 1
        if ratio != wanted:
            yield f"{name}: blocks {ratio} times as long, and a page of {old.page_size_bytes} becomes {page} bytes"
    if unify_pages(made, frozenset()) != made:
        yield "pages that are equal are changed again"


@case_check("budget", "B-I23")
def budget(case: Planned) -> Iterator[str]:
    """The buffer fits the memory of every worker, no further block would fit the one that limits it, null included."""
    plan, options = case.plan, case.layers.options
    if plan is None or options.num_blocks is not None or not plan.groups:
        return
    slack = []
    for index, (worker, memory) in enumerate(zip(plan.workers, case.layers.memory, strict=True)):
        if worker.size > memory:
            yield f"worker {index} takes {worker.size} of {memory} bytes"
        if worker.bytes_per_block:
            slack.append(memory - worker.size - worker.bytes_per_block)
    if slack and min(slack) >= 0:
        yield f"one block more would fit on every worker: {slack} bytes are left over after it"
    if plan.workers[plan.limited_by].fitting_blocks != plan.num_blocks:
        yield f"worker {plan.limited_by} is said to limit {plan.num_blocks} blocks, and fits others"


@case_check("one request fits", "B-I23", "B-I24")
def fits(case: Planned) -> Iterator[str]:
    """A plan holds the longest request besides the null block, by its own count and by letting the request run."""
    plan = case.plan
    if plan is None or not plan.groups:
        return
    limits = case.layers.options.limits.with_max_model_len(plan.max_model_len)
    if plan.request_blocks > plan.usable_blocks:
        yield f"a request takes {plan.request_blocks} of {plan.usable_blocks} blocks"
    found = simulate(plan.groups, min(plan.usable_blocks, 2 * plan.request_blocks), limits)
    if plan.request_blocks < sum(found.full_length_blocks) or found.requests < 1:
        yield f"{plan.request_blocks} blocks are reserved, {found.full_length_blocks} are held at the end"
    more = longest_request(plan.groups, limits.with_max_model_len(4 * plan.max_model_len), plan.usable_blocks)
    if request_blocks(plan.groups, limits.with_max_model_len(max(1, more))) > plan.usable_blocks:
        yield f"requests of {more} tokens are said to fit, and do not"
    if case.layers.options.auto_fit and plan.max_model_len < case.layers.options.limits.max_model_len:
        longer = limits.with_max_model_len(plan.max_model_len + 1)
        if all(request_blocks(w.groups, longer) <= w.fitting_blocks - 1 for w in plan.workers if w.bytes_per_block):
            yield f"{plan.max_model_len} tokens are the longest that fit, and one more fits"


@case_check("start-up", "B-I4", "B-I23")
def start_up(case: Planned) -> Iterator[str]:
    """Memory for the longest request alone is refused, as the null block takes a block; one block more is accepted.

    Exception: a number of blocks that is given, or a length that may be lowered.
    """
    plan, layers = case.plan, case.layers
    if plan is None or not plan.groups or layers.options.auto_fit or layers.options.num_blocks is not None:
        return
    needed = [request_blocks(worker.groups, layers.options.limits) for worker in plan.workers]
    for spare in (0, 1):
        memory = [(count + spare) * worker.bytes_per_block for count, worker in zip(needed, plan.workers, strict=True)]
        try:
            plan_vllm(layers.workers, memory, layers.options)
        except HKVError:
            accepted = False
        else:
            accepted = True
        if accepted != bool(spare):
            yield f"{memory} bytes were {'accepted' if accepted else 'refused'} for {needed} blocks and the null block"


@case_check("some length fits", "B-I23")
def some_length(case: Planned) -> Iterator[str]:
    """A plan is made if the length may be lowered and a request of one token fits."""
    options = case.layers.options
    if case.plan is not None or not options.auto_fit:
        return
    shortest = dataclasses.replace(options, limits=options.limits.with_max_model_len(1), auto_fit=False)
    try:
        plan_vllm(case.layers.workers, case.layers.memory, shortest)
    except HKVError:
        return
    yield "a request of one token fits, and no length was found"


@case_check("reservation", "B-I23", "B-I24")
def reservation(case: Planned) -> Iterator[str]:
    """Blocks that a layer reserves for the longest request cover all it ever holds, token by token, and not much more.

    Exception: chunks that do not start at blocks, which reserve a block too few.
    """
    limits = RequestLimits(max_model_len=97, max_in_flight_tokens=10)
    for name, spec in case.all_layers.items():
        if spec.encoder_tokens:
            yield from _encodings_reserved(name, spec)
            continue
        if isinstance(spec, Mamba | OpaqueState) or (isinstance(spec, ChunkedLocal) and spec.chunk % spec.block_size):
            continue
        size = spec.block_size
        extra = spec.extra_retained_tokens if isinstance(spec, SlidingWindow) else 0
        most = 0
        for start in range(0, 97):
            end = min(start + 10, 97)
            first = max(0, spec.readable(start).start - extra) if isinstance(spec, SlidingWindow | ChunkedLocal) else 0
            held = len({token // size for token in range(first, end)} | set(range(first // size, -(-end // size))))
            if (said := kinds.layer(spec).held_blocks(start, end, limits)) != held:
                yield f"{name} holds {held} blocks for {start} to {end}, not {said}"
            most = max(most, held)
        if not most <= kinds.layer(spec).max_request_blocks(limits) <= most + 1:
            yield f"{name} reserves {kinds.layer(spec).max_request_blocks(limits)} blocks and holds {most}"
        width = kinds.layer(spec).table_width(limits)
        if width * size < 97 or width * size >= 97 + math.lcm(128, size):
            yield f"{name}: a table of {width} columns of {size} for 97 tokens"


def _encodings_reserved(name: str, spec: LayerSpec) -> Iterator[str]:
    """An encoder's output is held from beginning to end, and never more of it than is reserved."""
    for step in (1, 10, 200):
        limits = RequestLimits(max_model_len=97, max_in_flight_tokens=step, max_num_encoder_input_tokens=step)
        held = {kinds.layer(spec).held_blocks(start, start + 1, limits) for start in range(97)}
        blocks = {token // spec.block_size for token in range(min(step, spec.encoder_tokens))}
        if held != {len(blocks)}:
            yield f"{name} holds {held} blocks of an encoder's output in {len(blocks)}"
        if kinds.layer(spec).max_request_blocks(limits) != len({token // spec.block_size for token in range(step)}):
            yield f"{name} reserves {kinds.layer(spec).max_request_blocks(limits)} blocks for {step} tokens"


@case_check("states reserved", "B-I12", "B-I16", "B-I24")
def states_reserved(case: Planned) -> Iterator[str]:
    """Recurrent groups reserve, and have columns for, the running state, the last one, scratch and a checkpoint."""
    for name, spec in case.all_layers.items():
        if not isinstance(spec, Mamba):
            continue
        scratch, limits = spec.num_speculative_blocks, RequestLimits(max_model_len=97)
        if kinds.layer(spec).max_request_blocks(limits) < 2 + scratch + spec.num_prefill_checkpoint_blocks:
            yield f"{name} reserves {kinds.layer(spec).max_request_blocks(limits)} states"
        if kinds.layer(spec).table_width(limits) < -(-97 // spec.block_size) + scratch:
            yield f"{name} has a table of {kinds.layer(spec).table_width(limits)} columns, {scratch} of them scratch"


@case_check("tensors", "B-I18", "B-I21")
def tensors(case: Planned) -> Iterator[str]:
    """Tensors of one group lie inside the buffer and share no byte; distances between blocks are aligned."""
    plan = case.plan
    if plan is None:
        return
    for index, worker in enumerate(plan.workers):
        of_name = {name: number for number, group in enumerate(worker.groups) for name in group.names}
        spans: dict[int, list[tuple[int, int]]] = {}
        for tensor in worker.tensors:
            try:
                layout = Layout.of_spec(
                    tensor.spec,
                    plan.layout,
                    num_blocks=plan.num_blocks,
                    num_layers=len(tensor.layers),
                    layer_stride=tensor.layer_stride,
                    block_stride=tensor.block_stride,
                    offset=tensor.offset,
                )
            except HKVError as error:
                yield f"worker {index}: {tensor.layers} cannot be laid out as planned: {error}"
                return
            if layout.end > worker.size:
                yield f"worker {index}: {tensor.layers} end at {layout.end} of {worker.size} bytes"
            if tensor.block_stride % tensor.spec.stride_alignment_bytes:
                yield f"worker {index}: blocks of {tensor.layers} are {tensor.block_stride} bytes apart"
            if not layout.order.block_compact:
                continue
            for layer, name in enumerate(tensor.layers):
                for block in {0, 1, plan.num_blocks - 1} & set(range(plan.num_blocks)):
                    start = layout.address(layer, block, 0, 0)
                    spans.setdefault(of_name[name], []).append((start, start + tensor.spec.page_size_bytes))
        for group, ranges in spans.items():
            for first, second in zip(sorted(ranges), sorted(ranges)[1:], strict=False):
                if second[0] < first[1]:
                    yield f"worker {index}, group {group}: pages at {first} and {second} overlap"


@case_check("units of the scheduler", "B-I16", "B-I22")
def units(case: Planned) -> Iterator[str]:
    """Hits are aligned to every group's block; prefixes are hashed at a divisor of every block that can be cached."""
    plan, options = case.plan, case.layers.options
    if plan is None or not plan.groups:
        return
    ranks = options.limits.context_parallel
    sizes = [
        group.spec.block_size * (ranks if isinstance(group.spec, AttentionSpec) and group.spec.cp_sharded else 1)
        for group in plan.groups
    ]
    cached = [size for size, group in zip(sizes, plan.groups, strict=True) if group.prefix_cacheable] or sizes
    if any(plan.scheduler_block_size % size for size in sizes) or plan.scheduler_block_size != math.lcm(*sizes):
        yield f"hits are aligned to {plan.scheduler_block_size}, the blocks have {sizes}"
    if options.caching and plan.hash_block_size != plan.scheduler_block_size:
        largest = math.gcd(*cached)
        if any(size % plan.hash_block_size for size in cached) or (
            options.prefix_match_unit is None and plan.hash_block_size != largest
        ):
            yield f"prefixes are hashed every {plan.hash_block_size} tokens, blocks have {cached}"
    elif options.caching and options.prefix_match_unit is None and len(sizes) > 1:
        fine = math.gcd(*cached)
        recurrent = any(isinstance(spec, Mamba) for group in plan.groups for spec in group.specs)
        if fine != plan.scheduler_block_size and not (recurrent and options.limits.mamba_mode != "align"):
            yield f"prefixes are hashed every {plan.hash_block_size} tokens, where {fine} is possible"


@case_check("replicas and zeroing", "B-I26", "B-I17")
def replicas(case: Planned) -> Iterator[str]:
    """Ranks with the same bytes divide the ranks; blocks are zeroed where somebody could read them as another type."""
    plan, options = case.plan, case.layers.options
    if plan is None:
        return
    for worker in plan.workers:
        if options.tensor_parallel % worker.tp_replicas:
            yield f"{worker.tp_replicas} replicas of {options.tensor_parallel} ranks"
        for group in worker.groups:
            for spec in group.specs:
                shards = spec.max_tp_shards if isinstance(spec, AttentionSpec) else None
                most = max(1, options.tensor_parallel // shards) if shards else 1
                if most % worker.tp_replicas:
                    yield f"{worker.tp_replicas} ranks are said to hold the same, {shards} shards make {most}"
    specs = [spec for group in plan.groups for spec in group.specs]
    types = {spec.dtype for spec in specs if isinstance(spec, AttentionSpec)}
    if (len(types) > 1 or any(isinstance(spec, Mamba) for spec in specs)) and not plan.needs_zeroing:
        yield f"element types {sorted(types)} share blocks that nobody zeroes"


@case_check("states beside attention", "B-I21", "B-I37")
def aligned_states(case: Planned) -> Iterator[str]:
    """Attention blocks grow, by whole kernel blocks, until a state fits their page, and no further; states fill it."""
    layers = case.all_layers
    tokens = [spec for spec in layers.values() if isinstance(spec, AttentionSpec) and not spec.is_draft]
    states = [spec for spec in layers.values() if isinstance(spec, Mamba)]
    if not tokens or not states or any(s.page_size_padded or s.tokens_per_state != 1 for s in tokens):
        return
    made = align_states(layers, kernel_block_size=16, mamba_mode="align", max_model_len=500)
    blocks = {spec.block_size for spec in made.values() if isinstance(spec, AttentionSpec)}
    if len(blocks) != 1:
        yield f"attention blocks of {sorted(blocks)} tokens"
        return
    block = blocks.pop()
    smallest = min(spec.with_block_size(block).page_size_bytes for spec in tokens)
    largest = max(spec.unpadded_page_size_bytes for spec in states)
    if smallest < largest:
        yield f"a state of {largest} bytes in a page of {smallest}"
    latent = any(isinstance(spec, MLAAttention) for spec in tokens)
    unit = max(128 if latent else 16, *(spec.block_size for spec in tokens))
    if block > unit and min(spec.with_block_size(block - unit).page_size_bytes for spec in tokens) >= largest:
        yield f"blocks of {block} tokens, where {block - unit} hold a state of {largest} bytes"
    for spec in made.values():
        if isinstance(spec, Mamba) and spec.block_size != block:
            yield f"states every {spec.block_size} tokens beside blocks of {block}"


SUITE = CaseSuite(
    "plans",
    "plans of random layers, memories and options",
    draw_planned,
    (
        partition,
        one_kind,
        even_groups,
        pages,
        unified,
        budget,
        fits,
        start_up,
        some_length,
        reservation,
        states_reserved,
        tensors,
        units,
        replicas,
        aligned_states,
    ),
    pace=2,
)
