"""Figures of the house: lines, files, comments, words, members of a layer's spec, and how modules import one another.

    python -m benchmarks.house [--arrows]
    python -m benchmarks.house --words     # words alone: openings of docstrings, private words, classes of one name

Imports inside functions and those for type checkers count as others do: a module's reader has to know what it names. A
*circle* is a set of modules of which each reaches every other by imports. An *arrow that runs back up* is an import of
a module on a higher floor of `FLOORS` than the one that imports it.
"""

from __future__ import annotations

import ast
import collections
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterable, Mapping

from hkv.spec import LayerSpec

ROOT = pathlib.Path(__file__).parents[1]

PACKAGES = ("hkv", "reference", "pallas_kernels", "tests", "benchmarks", "examples")

FLOORS = (
    ("spec", "keys", "tier", "state"),
    ("model", "layout", "machine"),
    ("contract", "lowering", "paged"),
    tuple(f"dialects.*.{room}" for room in ("bugs", "config", "kinds", "rules", "machine", "offload.config")),
    tuple(
        f"dialects.*.{room}"
        for room in ("planning", "offload.capacity", "weights", "planned_cache", "planned", "pages", "addresses")
    ),
    ("cache", "block_tables", "chunks", "connectors", "mesh", "cluster", "views"),
    ("serving", "oracle"),
    ("replay", "testing"),
    ("dialects",),
    ("cli", "", "__main__", "rtp_llm"),
)
"""Rooms of `hkv`, from the bottom up; modules that stand in none are the ground below them. A dialect's rules, kinds
and plans serve a cache and stand below it; the rest of it serves the oracle, which loads it by name."""

ENTRANCES = (
    *("hkv", "hkv.__main__", "hkv.cli.", "hkv.serving.", "hkv.testing.", "hkv.views", "hkv.mesh", "hkv.block_tables"),
    *(
        "hkv.chunks",
        "hkv.rtp_llm",
        "hkv.connectors.__main__",
        "hkv.contract.",
        "hkv.tier.",
        "hkv.lowering",
        "hkv.spec.",
        "hkv.replay.plain",
        "hkv.oracle.log_schema",
    ),
    *("hkv.dialects.vllm.attach.plugin", "hkv.dialects.sglang.plugin", "hkv.dialects.vllm.kinds."),
    "hkv.model.huggingface.families.",
)
"""Modules at which a reader comes in, and packages of such modules, with a dot: commands, public names, entry points of
packages and programs, and what is found by listing a folder."""

PACKED = (
    "hkv.state",
    "hkv.dialects.vllm.rules",
    "hkv.cache",
    "hkv.machine",
    "pallas_kernels",
)
"""Rooms of packed words, in-place updates and orders that matter, where comments say why."""

OPENING = re.compile(r"(What|Who|Whose|Which|Where|Whether|How|Why|When)\b")
"""Question words, with which a docstring does not begin: it says what a thing is or does."""

COINAGES = (
    *("calm", "seat", "fate", "junction", "grain", "reach", "lack", "tally", "sort", "moment", "standing", "owed"),
    *("there is none", "comes of", "who ", "say what", "says what", "beside ", "likewise", "of its own", "be told"),
)
"""Words and turns of phrase that stood where the field has a word; one with a space is searched for as it is."""

Imports = Mapping[str, Mapping[str, int]]
"""Of each module, the modules of the same package that it imports, with the first line that does."""


def modules_of(package: str) -> dict[str, pathlib.Path]:
    """Files of a package by the names of their modules."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(modules: Mapping[str, pathlib.Path]) -> Imports:
    """Imports among modules, those inside functions and for type checkers included."""
    imports: dict[str, dict[str, int]] = {name: {} for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [full if full in modules else node.module for full in inner]
            for target in targets:
                if target in modules and target != name:
                    imports[name].setdefault(target, getattr(node, "lineno", 0))
    return imports


def circles(imports: Imports) -> list[list[str]]:
    """Sets of modules that reach one another, largest first (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in imports[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = stack.index(name)
            found.append(sorted(stack[place:]))
            del stack[place:]

    for name in imports:
        if name not in index:
            visit(name)
    return sorted((circle for circle in found if len(circle) > 1), key=len, reverse=True)


def islands(imports: Imports, modules: Mapping[str, pathlib.Path]) -> list[str]:
    """Modules that nobody reaches from an entrance, by imports or by names in strings, `module:name` included."""
    ways = {name: set(others) for name, others in imports.items()}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                ways[name] |= {node.value.partition(":")[0]} & ways.keys()
    left = [name for name in ways if name in ENTRANCES or name.startswith(tuple(e for e in ENTRANCES if e[-1] == "."))]
    reached: set[str] = set()
    while left:
        if (name := left.pop()) not in reached:
            reached.add(name)
            left += ways[name] | {name.rpartition(".")[0]} & ways.keys()
    return sorted(ways.keys() - reached)


def floor(module: str) -> int:
    """Floor of a module of `hkv`, the ground being 0; the longest name of a room that fits counts."""
    parts = module.split(".")[1:]
    best = (0, 0)
    for number, rooms in enumerate(FLOORS, 1):
        for names in ([name for name in room.split(".") if name] for room in rooms):
            if all(name in ("*", part) for name, part in zip(names, parts, strict=False)) and len(names) <= len(parts):
                best = max(best, (len(names) + 1, number)) if names or not parts else best
    return best[1]


def arrows_up(imports: Imports) -> list[str]:
    """Imports that run from a floor to a higher one."""
    pairs = [(name, other, line) for name, others in imports.items() for other, line in others.items()]
    return [f"{name}:{line} -> {other}" for name, other, line in pairs if floor(name) < floor(other)]


def lines_of(paths: Iterable[pathlib.Path]) -> collections.Counter[str]:
    """Lines, lines with code and comment lines of files; docstrings are neither code nor comments."""
    count: collections.Counter[str] = collections.Counter()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        code: set[int] = set()
        before = tokenize.NEWLINE
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            docstring = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            count["comments"] += token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                if token.string.strip() and not docstring:
                    code.update(range(token.start[0], token.end[0] + 1))
                before = token.type
        count.update(files=1, lines=len(text.splitlines()), code=len(code))
    return count


def prose_of(path: pathlib.Path) -> tuple[list[str], list[str]]:
    """Docstrings of a Python file, and its comments."""
    text = path.read_text(encoding="utf-8")
    values = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    told = [str(each.value) for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return told, [token.string for token in tokens if token.type == tokenize.COMMENT]


def words(packages: Iterable[str]) -> dict[str, collections.Counter[str]]:
    """Openings of docstrings that are question words, private words in prose and in names, and classes of one name.

    Returns:
      `openings` by word, `prose` and `names` by coinage, `classes` by name with its number of definitions.
    """
    found: dict[str, collections.Counter[str]] = {
        kind: collections.Counter() for kind in ("docstrings", "openings", "prose", "names", "classes")
    }
    for path in (path for package in packages for path in modules_of(package).values()):
        told, comments = prose_of(path)
        found["docstrings"]["all"] += len(told)
        found["openings"].update(match[1] for text in told if (match := OPENING.match(text.strip())))
        lowered = " ".join((*told, *comments)).lower()
        for coinage in COINAGES:
            pattern = re.escape(coinage) if " " in coinage else rf"\b{coinage}(s|es|ed|ing)?\b"
            found["prose"][coinage] += len(re.findall(rf"\b{pattern}" if " " in coinage else pattern, lowered))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found["classes"][node.name] += 1
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", node.name)}
                found["names"].update(coinage for coinage in COINAGES if parts & {coinage, f"{coinage}s"})
    return found


def print_words() -> None:
    """Prints `words` of the library, and of everything."""
    for title, packages in (("hkv, reference", ("hkv", "reference")), ("everything", PACKAGES)):
        found = words(packages)
        repeated = {name: count for name, count in found["classes"].most_common() if count > 2}
        print(
            f"{title}: {found['docstrings']['all']} docstrings, {found['openings'].total()} begin with a question word"
        )
        print("  in prose: " + ", ".join(f"{word.strip()} {count}" for word, count in found["prose"].most_common()))
        print("  in names: " + ", ".join(f"{word} {count}" for word, count in found["names"].most_common()))
        listed = ", ".join(f"{name} {count}" for name, count in repeated.items())
        print(f"  names of more than two classes: {len(repeated)} ({listed})")


def main() -> None:
    """Prints the figures, and the circles and arrows one by one."""
    if "--words" in sys.argv:
        print_words()
        return
    for package in PACKAGES:
        count = lines_of(modules_of(package).values())
        share = 100 * count["comments"] / count["code"]
        print(
            f"{package:16}{count['files']:6} files{count['lines']:8} lines{count['code']:8} code{share:7.2f} % comments"
        )
    for room in PACKED:
        files = modules_of(room.partition(".")[0])
        count = lines_of(path for name, path in files.items() if f"{name}.".startswith(f"{room}."))
        print(f"  {room:30}{count['code']:6} code{100 * count['comments'] / count['code']:7.2f} % comments")
    modules = modules_of("hkv")
    imports = imports_of(modules)
    found, arrows = circles(imports), arrows_up(imports)
    print(f"LayerSpec: {sum(not name.startswith('_') for name in dir(LayerSpec))} members")
    print(f"islands: {' '.join(islands(imports, modules)) or 'none'}")
    print(f"circles: {len(found)}, of {sum(map(len, found))} modules; arrows that run back up: {len(arrows)}")
    print(*(f"  circle of {len(circle)}: {' '.join(circle)}" for circle in found), sep="\n")
    print(*(f"  {arrow}" for arrow in arrows if "--arrows" in sys.argv), sep="\n")


if __name__ == "__main__":
    main()
