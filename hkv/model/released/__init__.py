"""The released models that HKV ships configs of, and the one whose config has the values of each repository.

A name is a released model's, or that of a variant (`variants.toml`), with or without the organisation; or either of
these with a mark of quantized weights, by the model's own organisation or by one that publishes copies. Weights in
fewer bits leave the cache as it is. Checkpoints of organisations that pack the cache as well are not taken for others.
`index.toml` says where each config has its values from.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

FOLDER = importlib.resources.files("hkv.model.released")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Released:
    """A released model.

    Attributes:
      ids: repositories on Hugging Face whose config has these values.
      form: `copy` of a whole config.json; `excerpt` of one, the decoder's fields; or single `values` put together.
      source: address of what was read.
      other_sources: addresses of single values that are not from there, by field.
      compared: addresses of other sources that have the same values.
      note: anything else one has to know.
      name: HKV's name of it.
    """

    ids: tuple[str, ...]
    form: Literal["copy", "excerpt", "values"]
    source: str
    other_sources: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    compared: tuple[str, ...] = ()
    note: str = ""
    name: str = ""

    def config(self) -> dict[str, Any]:
        """The content of its config.json."""
        return json.loads((FOLDER / "configs" / f"{self.name}.json").read_text(encoding="utf-8"))

    @property
    def names(self) -> frozenset[str]:
        """Names that it is found by, in lower case: its own, and each repository with and without the organisation."""
        repositories = {repository.lower() for repository in self.ids}
        return frozenset({self.name, *repositories, *(name.partition("/")[2] for name in repositories)})


@functools.cache
def released_models() -> tuple[Released, ...]:
    """Every released model that HKV ships a config of, by name."""
    text = (FOLDER / "index.toml").read_text(encoding="utf-8")
    entries = sorted(tomllib.loads(text).items())
    return tuple(
        Released(name=name, **{key: _frozen(value) for key, value in fields.items()}) for name, fields in entries
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def find(name: str) -> Released | None:
    """The model of a name, in upper or lower case, or None."""
    return next((model for model in released_models() if name.lower() in model.names), None)


# Names of repositories, and quantized copies.

MARKS = re.compile(
    r"""[-_.](?:
    fp8|fp8[-_]dynamic|fp8[-_]block|dynamic|w8a8|w4a16|w8a16|quantized|int[48]|bf16|fp16|
    awq|awq[-_]int4|awq[-_]4bit|gptq|gptq[-_]int[348]|gptq[-_][348]bit|autoround|auto[-_]round|
    q[2-8]_(?:[01]|k|k_[sml])|bnb|bnb[-_][48]bit|unsloth|nf4|[2348]bit|[2348]-bit|hqq|gguf|mxfp4|nvfp4|qat|exl[23]
    )$""",
    re.VERBOSE,
)
"""Ends of names of quantized weights, after the model's; there may be several."""

COPIES = frozenset(
    re.findall(
        r"\S+",
        """
        bartowski casperhansen cognitivecomputations cpatonn cyankiwi gaunernst hugging-quants ibnzterrell intel
        ista-daslab jart25 kaitchup kosbu lmstudio-community mlx-community modelcloud neuralmagic nm-testing
        nousresearch quanttrio redhatai solidrust stelterlab techxgenus thebloke unsloth
        """,
    )
)
"""Organisations, in lower case, that publish models under the names that these have elsewhere."""

PACKING = frozenset(["nvidia", "amd"])
"""Organisations whose quantized checkpoints ask for a cache in float8, mostly in a file next to the config."""

SIZE = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])")


@dataclasses.dataclass(frozen=True)
class Variants:
    """Repositories with a released model's values, and its nicknames; longest requests of those that differ in them."""

    same: str = ""
    nicknames: str = ""
    longest: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The config for a name, and a line for the plan where the name is not the released model's own.

    `unweighed` are marks of quantized weights that do not say how many bytes.
    """

    model: Released
    config: dict[str, Any]
    note: str = ""
    unweighed: str = ""


@functools.cache
def variants() -> dict[str, tuple[Released, int | None]]:
    """Released model and, if it differs, longest request of each variant, by its names in lower case."""
    text = (FOLDER / "variants.toml").read_text(encoding="utf-8")
    known = {model.name: model for model in released_models()}
    found: dict[str, tuple[Released, int | None]] = {}
    for name, listed in ((name, Variants(**fields)) for name, fields in tomllib.loads(text).items()):
        lengths = {**dict.fromkeys((listed.same + " " + listed.nicknames).split()), **listed.longest}
        for repository, longest in lengths.items():
            for alias in {repository.lower(), repository.lower().rpartition("/")[2]}:
                found[alias] = (known[name], longest)
    return found


KEPT = re.compile(r"(?:[-_.](?:bf16|fp16|unsloth))*$")
"""Marks of weights in the model's own type."""

PACKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"nvfp4|mxfp4|gguf|q\d_|exl|bnb|nf4|hqq|qat|int3|[23]-?bit", {}),
    (r"fp8|w8a8", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    (r"int8|8-?bit|w8a16", {"quant_method": "gptq", "bits": 8, "group_size": 128}),
    (r"awq", {"quant_method": "awq", "bits": 4, "group_size": 128}),
    (r"gptq|int4|4-?bit|w4a16|auto-?round", {"quant_method": "gptq", "bits": 4, "group_size": 128}),
)
"""Packings of weights by marks, the first that is found; of empty ones the bytes are not known from the name."""


def packing_of(marks: str) -> dict[str, Any] | None:
    """The `quantization_config` that marks stand for, empty where they do not say how many bytes; None of none."""
    if KEPT.match(marks):
        return None
    return next((dict(packing) for pattern, packing in PACKED if re.search(pattern, marks)), {})


def resolve(name: str) -> Resolved | None:
    """The config for a name, in upper or lower case, or None where nothing says whose it is."""
    if (model := find(name)) is not None:
        return Resolved(model, model.config())
    known, marks = _known(name.lower())
    if known is None:
        return None
    model, longest = known
    config = model.config()
    if longest is not None:
        config.get("text_config", config)["max_position_embeddings"] = longest
    change = "" if longest is None else f", with {longest:,} tokens a request"
    packing, weights = packing_of(marks), ""
    if re.search("bf16|fp16", marks):
        config.pop("quantization_config", None)
    if packing is not None:
        weights = f", with quantized weights ({_described(packing)})"
        if packing.get("quant_method") != config.get("quantization_config", {}).get("quant_method", ""):
            config["quantization_config"] = packing
    note = f"config of {model.name}{change}, for {name}{weights}: its own file was not read"
    return Resolved(model, config, note, unweighed=marks if packing == {} else "")


def _described(packing: Mapping[str, Any]) -> str:
    if not packing:
        return "of how many bytes its name does not say"
    grouped = f"{packing.get('bits')} bits in groups of {packing.get('group_size')}"
    return f"weighed by its name, {grouped if 'bits' in packing else '8 bits'}"


def _known(name: str) -> tuple[tuple[Released, int | None] | None, str]:
    """Model and longest request of a name in lower case, and the marks of quantized weights that were taken off."""
    organisation, slash, rest = name.rpartition("/")
    for part in _unmarked(rest):
        marks = rest[len(part) :]
        if marks and organisation in PACKING:
            break
        for alias in (f"{organisation}/{part}", *([part] if not slash or organisation in COPIES else ())):
            listed, model = variants().get(alias), find(alias)
            if listed is not None and (slash or model is None):  # HKV's own name may be another repository's, too
                return listed, marks
            if model is not None:
                return (model, None), marks
        if not slash and (meant := typed().get(_plain(part))):
            return meant, marks
    begun = {meant[0].name: meant for plain, meant in typed().items() if not slash and plain.startswith(_plain(rest))}
    return (next(iter(begun.values())) if len(begun) == 1 else None), ""


@functools.cache
def typed() -> Mapping[str, tuple[Released, int | None]]:
    """Models by their names as people type them, letters and digits alone: `llama3.1:8b` as `llama318b`."""
    named = variants() | {alias: (model, None) for model in released_models() for alias in model.names}
    return {_plain(alias.rpartition("/")[2]): meant for alias, meant in named.items()}


def _plain(name: str) -> str:
    return re.sub("[-:](latest|instruct|it|chat|hf)(?=[-:]|$)|[^a-z0-9]", "", name.lower())


def _unmarked(name: str) -> Iterator[str]:
    """A name, then with one mark of quantized weights after the other taken off its end."""
    yield name
    while (shorter := MARKS.sub("", name)) != name:
        name = shorter
        yield name


def expected(name: str) -> str:
    """Text of an error: accepted forms, and names near to one that nothing is known of."""
    names = ", ".join(near(name)) or released_models()[0].name
    text = f"a readable config.json, the folder it is in, or a released model, such as {names}"
    organisation, _, rest = name.lower().rpartition("/")
    if organisation in PACKING and any(_known(part)[0] for part in _unmarked(rest)):
        return f"{text}; {organisation}'s quantized checkpoints may pack the cache too (--kv-cache-dtype fp8)"
    return text


def near(name: str, most: int = 6) -> list[str]:
    """Names for one that is not there, best first: those that begin with it, else of its family, by size."""
    lower = name.lower()
    begun = [model.name for model in released_models() if any(alias.startswith(lower) for alias in model.names)]
    if begun:
        return begun[:most]
    wanted = _words(lower.rpartition("/")[2])
    family = {model.name: _alike(wanted, _words(model.name)) for model in released_models()}
    best = max(family.values())
    if best:
        of_family = [each for each, alike in family.items() if alike == best]
        return sorted(of_family, key=lambda each: (_apart(lower, each), -_ratio(lower, each)))[:3]
    known = {alias: model.name for model in released_models() for alias in model.names}
    alike = difflib.get_close_matches(lower, known, n=12, cutoff=0.5)
    return list(dict.fromkeys(known[alias] for alias in alike))[:3]


def _words(name: str) -> list[str]:
    """A name's parts, without sizes: family, version, and what distinguishes it."""
    return [word for word in re.split(r"[-_/ ]", SIZE.sub("", name)) if word]


def _alike(wanted: list[str], found: list[str]) -> int:
    """Parts that two names have in common, from the family on; 0 for different families."""
    if not wanted or not found or wanted[0] not in (found[0], "meta"):
        return 0
    return len(set(wanted) & set(found))


def _apart(one: str, other: str) -> float:
    """Ratio of the sizes in two names, as a logarithm without its sign; 0 where one has none."""
    sizes = [SIZE.search(name) for name in (one, other)]
    if sizes[0] is None or sizes[1] is None:
        return 0.0
    numbers = [int(s[1] or 1) * float(s[2]) / (1000 if s[3] == "m" else 1) for s in sizes if s]
    return abs(math.log(max(numbers[0], 1e-9) / max(numbers[1], 1e-9)))


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
