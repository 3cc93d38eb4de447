"""Random cache configurations, by feature, that vLLM 0.33 accepts, and those that are kept for what they reach."""

from __future__ import annotations

import functools
import math
import pathlib
import zlib
from typing import Any

import msgspec

from hkv.contract.traffic import Choices, KeptTraffic, RandomChoices
from hkv.dialects.vllm import config as vllm
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig, manager_block
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import Header
from hkv.keys.chained import GIVEN
from hkv.spec import KINDS, LayerSpec, retained_sparsely, spec_from_log

FEATURES = (
    "core",
    "eagle",
    "context_parallel",
    "external",
    "retention",
    "partial",
    "lookahead_hash",
    "speculative_state",
)
"""Features of traffic; `docs/oplog.md` says which rules each exercises."""

SHARING, LONG_ROWS = REACHING = ("sharing", "long_rows")
"""Features of traffic that takes the same rules to states that the others seldom reach: many requests of few prompts,
whose cached blocks are taken out here and there; and rows of hundreds of blocks."""

SHARED = (*2 * ("partial", "speculative_state", "external"), *4 * ("eagle",), "retention")
"""Features whose configurations requests share, the more often named the more often."""

UNCACHED = ("core", "external")
"""Features whose configurations may be without prefix caching."""

DRAWS = 40
"""Configurations that are looked at for one in which holes show."""

LONG = ("core", "eagle", "retention", "partial", "speculative_state")
"""Features whose configurations have long rows."""

SIZES = ((2, 4, 8, 16), (2, 4, 8), (1, 2, 4), (3, 6, 12), (4, 8, 16))
"""Families of block sizes with small common multiples."""

MANAGER_BUGS = (
    "begun-state-under-later-key",
    "checkpoint-beyond-keys",
    "checkpoint-under-later-key",
    "copied-before-written",
    "external-state-not-counted",
    "finder-index-error",
    "hit-reported-by-columns",
    "negative-estimate",
    "offer-outlives-state",
    "plan-outlives-refusal",
    "tail-key-outlives-state",
    "window-one-never-hits",
)
"""Defects of vLLM 0.33's cache manager: with all of them named, a reference must agree with it exactly."""

OFFERS = "offer-outlives-state"
"""The defect of `MANAGER_BUGS` that traffic would run into where states are offered."""

LATER_KEY, BEGUN_KEY = LATER_KEYS = ("checkpoint-under-later-key", "begun-state-under-later-key")
"""Those that it would run into where chunks export states."""

Entry = dict[str, Any]


def draw_header(choices: Choices, feature: str, version: int = 1, kinds: frozenset[str] = frozenset()) -> Header:
    """A random configuration about one feature; of version 3, some that zero new blocks, or whose states are offered.

    Arguments as of `_drawn`.
    """
    header = _drawn(choices, feature, version, kinds)
    if version > 1:
        header = msgspec.structs.replace(header, bugs=with_later_keys(header, header.bugs))
    if version < 3:
        return header
    zeroing, offers = later_choices(header).chance(40), later_choices(header, "offloads")
    header = msgspec.structs.replace(header, zeroing=zeroing)
    if not (header.caching and any(spec_from_log(group).keeps_states for group in header.groups)):
        return header
    bugs = [OFFERS, *header.bugs] if offers.chance(40) and OFFERS not in header.bugs else header.bugs
    return msgspec.structs.replace(header, offloads=True, bugs=bugs) if offers.chance(60) else header


def later_choices(header: Header, about: str = "") -> RandomChoices:
    """Decisions about what version 3 gained later: of their own, so that other draws stay what they were.

    Those `about` one thing do not depend on the others either.
    """
    bugs = [name for name in header.bugs if name not in (OFFERS, *LATER_KEYS)]
    earlier = msgspec.structs.replace(header, offloads=False, bugs=bugs)
    return RandomChoices(zlib.crc32(msgspec.json.encode(earlier) + about.encode()))


def _drawn(choices: Choices, feature: str, version: int, kinds: frozenset[str]) -> Header:
    """A random configuration about one feature, without those in which vLLM 0.33 fails by itself.

    Args:
      choices: source of decisions.
      feature: one of `FEATURES` or `REACHING`.
      version: of the log format; 2 adds watermarks, MLA and opaque groups and shared-prefix checkpoints.
      kinds: those that are asked for by name; a kind that vLLM lacks is drawn only then.
    """
    if feature in REACHING:
        return _draw_reaching(choices, feature, version, kinds)
    header = _draw(choices, feature, version, kinds)
    while header.partial_hits != (feature == "partial") and feature != "speculative_state":
        header = _draw(choices, feature, version, kinds)
    return header


def derive_partial_hits(specs: list[LayerSpec], hash_block_size: int, context_parallel: int, caching: bool) -> bool:
    """True if sub-block hits are on (vLLM 0.33 `partial_hash_hits_enabled`, several groups, given the managers)."""
    return vllm.default_partial_hits(specs, hash_block_size, context_parallel, caching)


def copies_states(config: VllmConfig) -> bool:
    """True if blocks may ever be copied: a hit ends inside a block, or a state is kept where its owner goes on."""
    return config.partial_hits or any(
        spec.keeps_states and config.block_size(group) > config.hash_block_size
        for group, spec in enumerate(config.topology.specs if config.caching else ())
    )


def with_later_keys(header: Header, bugs: list[str]) -> list[str]:
    """The defects `bugs`, with those of `LATER_KEYS` that traffic of a configuration would run into."""
    met = ((LATER_KEY, looks_again(header)), (BEGUN_KEY, begins_inside(header)))
    return [*bugs, *(name for name, reached in met if reached and name not in bugs)]


def begins_inside(header: Header) -> bool:
    """True if a chunk that leaves a state behind may begin inside a block of states."""
    return header.caching and any(
        group.get("num_prefill_checkpoint_blocks") and group["block_size"] > header.hash_block_size
        for group in header.groups
    )


def looks_again(header: Header) -> bool:
    """True if keys may lag so far behind tokens that the column of a state inside a chunk is not looked at with it: by
    whole scheduler blocks, by tokens that keys look ahead, or by those that may be prefilled again."""
    lags = header.hash_lookahead > 1 or header.prefill_lookahead > 2
    exporting = [group for group in header.groups if group.get("num_prefill_checkpoint_blocks")]
    coarse = any(group["block_size"] < header.scheduler_block_size for group in exporting)
    return header.caching and len(exporting) > 0 and (lags or (coarse and not header.partial_hits))


def loads(header: Header) -> bool:
    """True if traffic may load tokens from elsewhere."""
    recurrent = any(KINDS[group["kind"]].snapshot for group in header.groups)
    known = not recurrent or "external-state-not-counted" in header.bugs
    return header.feature == "external" or (header.feature == SHARING and not header.partial_hits and known)


def _draw_reaching(choices: Choices, feature: str, version: int, kinds: frozenset[str]) -> Header:
    """A configuration of another feature: for requests that share, of three groups and more where drafts drop blocks;
    for long rows, with room for some of several hundred blocks."""
    base = choices.pick(SHARED if feature == SHARING else LONG)
    header = _drawn(choices, base, version, kinds)
    if feature == SHARING:
        if choices.chance(75):
            for _ in range(DRAWS):
                if _is_telling(header, base):
                    break
                header = _drawn(choices, base, version, kinds)
        if base == "external":  # few blocks, so that those of a hit are the next to be handed out
            sizes = [manager_block(spec_from_log(group), header.context_parallel) for group in header.groups]
            few = sum(-(-choices.integer(30, 70) // size) for size in sizes) + choices.integer(2, 6)
            header = msgspec.structs.replace(header, num_blocks=max(few, 3 * len(sizes)))
        return msgspec.structs.replace(header, feature=feature)
    sizes = [manager_block(spec_from_log(group), header.context_parallel) for group in header.groups]
    longest = choices.pick(sizes) * choices.integer(140, 240)
    longest = max(min(longest, 1500), 2 * header.scheduler_block_size)
    blocks = sum(-(-longest // size) for size in sizes)
    return msgspec.structs.replace(
        header, feature=feature, max_model_len=longest + 80, num_blocks=min(blocks * choices.integer(1, 3), 1200)
    )


def _is_telling(header: Header, base: str) -> bool:
    """True if holes in what is cached can show: of drafts, in a window of theirs next to two groups of other specs; of
    recurrent states, where chunks export them at lengths inside blocks; of loads, where a group
    but the first keeps all that it hit."""
    if base == "eagle":
        config = to_config(header)
        drafts = [config.topology.specs[group] for group in config.eagle_group_ids]
        return len(set(config.topology.specs)) > 2 and any(kinds.layer(spec).seeks_run for spec in drafts)
    if base == "speculative_state":
        exports = any(group.get("num_prefill_checkpoint_blocks") for group in header.groups)
        return exports and header.partial_hits and header.retention_interval is None
    return base != "external" or any(spec_from_log(group).reads_all for group in header.groups[1:])


def _draw(choices: Choices, feature: str, version: int, kinds: frozenset[str]) -> Header:
    ranks = choices.integer(2, 4) if feature == "context_parallel" else 1
    groups = _draw_groups(choices, feature, version, ranks, kinds)
    specs = [spec_from_log(group) for group in groups]
    cacheable = [manager_block(spec, ranks) for spec in specs if spec.prefix_cacheable]
    scheduler = math.lcm(*(manager_block(spec, ranks) for spec in specs))
    common = math.gcd(*cacheable)
    divisors = [size for size in range(1, common + 1) if common % size == 0 and size >= min(2, common)]
    hash_size = common if len(groups) == 1 or choices.chance(60) else choices.pick(divisors)
    caching = feature not in UNCACHED or not choices.chance(12)
    if version > 2 and feature in UNCACHED:
        groups, caching = _with_encoder(choices, groups, caching, kinds)
    if version > 1 and not caching and choices.chance(50):
        groups = [{**group, "cache_mode": "none"} if KINDS[group["kind"]].snapshot else group for group in groups]
    partial = derive_partial_hits(specs, hash_size, ranks, caching)
    shared_boundaries = version > 1 and partial and choices.chance(50)
    eagle = feature == "eagle" or (feature == "retention" and choices.chance(40)) or shared_boundaries
    sparse = any(retained_sparsely(spec) for spec in specs)
    longest = choices.pick((400, 400, 64, 40))
    bugs = _draw_bugs(choices, groups, feature) if version > 1 else []
    if version > 2 and partial and "copied-before-written" not in bugs:
        bugs.append("copied-before-written")  # a load may begin inside a block that another request fills
    return Header(
        oplog=version,
        dialect=vllm.NAME,
        feature=feature,
        num_blocks=_draw_pool(choices, len(groups)),
        groups=groups,
        hash=_draw_hash(choices, version),
        hash_block_size=hash_size,
        scheduler_block_size=scheduler,
        hash_lookahead=_draw_lookahead(choices, specs) if feature == "lookahead_hash" else 0,
        caching=caching,
        eagle=eagle,
        eagle_groups=[i for i in range(len(groups)) if choices.chance(40)] if eagle and choices.chance(50) else [],
        prefill_lookahead=_draw_prefill_lookahead(choices, specs, scheduler) if eagle and not shared_boundaries else 0,
        retention_interval=_draw_retention(choices, feature, scheduler, sparse),
        partial_hits=partial,
        max_model_len=max(longest, 2 * scheduler),
        max_in_flight_tokens=choices.pick((None, 8, 16, 40, 3)),
        context_parallel=ranks,
        watermark=choices.pick((0.0, 0.05, 0.1, 0.25)) if version > 1 else 0.0,
        shared_prefix_checkpoint=shared_boundaries,
        bugs=bugs,
    )


def _draw_hash(choices: Choices, version: int) -> str:
    if version > 2 and choices.chance(10):
        return GIVEN
    return "sha256" if version > 1 and choices.chance(10) else "sha256_cbor"


def _draw_bugs(choices: Choices, groups: list[Entry], feature: str) -> list[str]:
    """Defects to name: version 1 cannot, and its traffic keeps clear of them."""
    if choices.chance(30):
        return list(MANAGER_BUGS)
    # These two, traffic of such a configuration would run into all the time.
    bugs = []
    if feature == "external" and any(KINDS[group["kind"]].snapshot for group in groups):
        bugs.append("external-state-not-counted")
    if any(group.get("window") == 1 for group in groups):
        bugs.append("window-one-never-hits")
    return bugs


def _draw_pool(choices: Choices, groups: int) -> int:
    if choices.chance(20):
        return choices.pick((80, 160))
    return choices.integer(3 if groups < 3 else 3 * groups, 40)


def _draw_retention(choices: Choices, feature: str, scheduler: int, sparse: bool) -> int | None:
    if feature == "retention":
        return choices.pick((0, 0, scheduler, 2 * scheduler, 3 * scheduler)) if sparse else 0
    if feature in ("partial", "lookahead_hash", "speculative_state") and choices.chance(30):
        return 0
    return None


def _draw_prefill_lookahead(choices: Choices, specs: list[LayerSpec], scheduler: int) -> int:
    # Three tokens or more: vLLM fails over a state that it has given back (`tail-key-outlives-state`).
    recurrent = any(spec.snapshot for spec in specs)
    return min(scheduler, choices.integer(0, 2 if recurrent else 3))


def _draw_lookahead(choices: Choices, specs: list[LayerSpec]) -> int:
    # Two tokens or more without a full-attention group: vLLM's finders index past the hashes (`finder-index-error`).
    full = any(spec.reads_all for spec in specs)
    return choices.integer(1, 3) if full else 1


def _draw_groups(choices: Choices, feature: str, version: int, ranks: int, asked: frozenset[str]) -> list[Entry]:
    def draw(kind: str, size: int) -> Entry:
        return kinds.of_kind(kind).draw(choices, size, feature, ranks)

    sizes = choices.pick(SIZES)
    count = choices.integer(2 if feature == "partial" else 1, 5 if choices.chance(20) else 4)
    chunked = feature == "core" and choices.chance(40) and _wanted("aligned_blocks", asked)
    picked = _kinds(feature, version, asked, chunked)
    if any(kinds.of_kind(kind).aligned_blocks for kind in picked):
        sizes = (choices.pick(sizes),)  # its finder wants every block as long as the alignment of hits
    entries = [draw(choices.pick(picked), choices.pick(sizes)) for _ in range(count)]
    for entry in entries:
        if version == 1 and entry.get("window") == 1:
            entry["window"] = 2
        if (
            version > 2
            and "extra_retained_tokens" in kinds.of_kind(entry["kind"]).later_log_fields
            and choices.chance(30)
        ):
            entry["extra_retained_tokens"] = choices.integer(1, 4)
    if chunked:
        entries[choices.integer(0, count - 1)] = draw(_first("aligned_blocks"), sizes[0])
    stateful = any(KINDS[entry["kind"]].snapshot for entry in entries)
    if feature in ("partial", "speculative_state") and not stateful:
        entries[choices.integer(0, count - 1)] = draw(_first("snapshot"), sizes[-1])
    if version > 1 and choices.chance(25) and _wanted("one_block", asked):
        entries.insert(choices.integer(0, count), draw(_first("one_block"), choices.pick(sizes)))
    replayed = _first("replays")
    if version > 2 and (replayed in asked or (not asked and choices.chance(12))):
        entries.insert(choices.integer(0, len(entries)), draw(replayed, choices.pick(sizes)))
    if len(entries) > 1 and choices.chance(25):
        entries[-1] = dict(choices.pick([entry for entry in entries if KINDS[entry["kind"]].prefix_cacheable]))
    if not any(KINDS[entry["kind"]].prefix_cacheable for entry in entries):
        entries[0] = draw(picked[0], choices.pick(sizes))
    return entries


def _with_encoder(
    choices: Choices, groups: list[Entry], caching: bool, asked: frozenset[str]
) -> tuple[list[Entry], bool]:
    """The groups, perhaps with one of an encoder's output, beside which nothing is cached; whether caching is on."""
    kind = _first("reads_encoder")
    if kind not in asked and (caching or not choices.chance(50)):
        return groups, caching
    entry = kinds.of_kind(kind).draw(choices, choices.pick(groups)["block_size"], "core", 1)
    place = choices.integer(0, len(groups))
    return [entry] if asked == {kind} else [*groups[:place], entry, *groups[place:]], False


def _kinds(feature: str, version: int, asked: frozenset[str], chunked: bool) -> list[str]:
    """The kinds to pick from, each as often as it weighs: of those that are asked for, where some can be picked, and of
    those that vLLM lacks only such."""
    ordered = [kind for kind in _ordered() if kinds.of_kind(kind).log_version <= version]
    weighed = [kind for kind in ordered for _ in range(kinds.of_kind(kind).draw_weight(feature, version))]
    own = [kind for kind in ordered if kind in asked and kinds.of_kind(kind).vllm_name is None]
    of_asked = [kind for kind in weighed if kind in asked] + own + [_first("aligned_blocks")] * chunked
    return of_asked if asked and of_asked else weighed + [_first("aligned_blocks")] * chunked


def _wanted(flag: str, asked: frozenset[str]) -> bool:
    return not asked or _first(flag) in asked


def _ordered() -> tuple[str, ...]:
    """All kinds, in the order in which they came to be drawn."""
    return _ordered_of(tuple(KINDS))


def _first(flag: str) -> str:
    """VLLM's kind that has a flag."""
    return _first_of(tuple(KINDS), flag)


# Kept by the kinds there are, for a package may add one: asking each kind anew was a third of the work of a draw.


@functools.cache
def _ordered_of(known: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(known, key=lambda kind: (kinds.of_kind(kind).draw_place, kind)))


@functools.cache
def _first_of(known: tuple[str, ...], flag: str) -> str:
    return next(kind for kind in _ordered_of(known) if kinds.of_kind(kind).vllm_name and _has(kind, flag))


def _has(kind: str, flag: str) -> bool:
    """True if a kind's spec, or what the dialect says of it, has a flag."""
    of = kinds.of_kind(kind)
    return bool(getattr(of if hasattr(of, flag) else KINDS[kind], flag))


# Configurations under which seeds reached branches of the reference that others seldom do, as they are kept.

KEPT = pathlib.Path(__file__).with_name("kept.jsonl")
"""The file of them."""


class _Line(msgspec.Struct):
    seed: int
    header: Header


@functools.cache
def kept(version: int) -> tuple[KeptTraffic, ...]:
    """Kept configurations of a version of the log.

    Versions 3 and 4 have those of 2 and 1 too, the second half of them first: seeds of all versions in turn then go
    through everything that is kept.
    """
    lines = [msgspec.json.decode(line, type=_Line) for line in KEPT.read_bytes().splitlines()]
    known = version if version < 3 else 5 - version
    every = [KeptTraffic(_of_version(line.header, version), line.seed) for line in lines if line.header.oplog == known]
    half = len(every) // 2 if version > 2 else 0
    return (*every[half:], *every[:half])


def written(every: list[KeptTraffic]) -> bytes:
    """The file of these configurations."""
    return b"".join(msgspec.json.encode(_Line(seed, header)) + b"\n" for header, seed in every)


def _of_version(header: Header, version: int) -> Header:
    bugs = list(header.bugs)
    if version > 2 and header.partial_hits and "copied-before-written" not in bugs:
        bugs.append("copied-before-written")  # a load may begin inside a block that another request fills
    bugs = with_later_keys(header, bugs) if version > 1 else bugs
    return msgspec.structs.replace(header, oplog=version, bugs=bugs)
