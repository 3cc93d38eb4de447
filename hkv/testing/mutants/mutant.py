"""What a mutant is: a published bug, written as an edit of code that is right."""

from __future__ import annotations

import dataclasses

from hkv.testing.mutants.patch import Patch


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One bug that shipped in an engine, or nearly did, planted here.

    Attributes:
      name: in a few words joined by hyphens; unique.
      upstream: where the bug was published: `vllm#33775`, or a commit, `rtp-llm@04e47d7b1`.
      wrong: what goes wrong, in one line.
      expected: names of the invariants that may notice it first.
      suite: name of the suite that judges it (`hkv.testing.suites`).
      patches: the edits.
      topics: what the suite's cases should be about, for suites that have several topics; all of them if empty.
      section: the kind of bug; set by the catalogue.
    """

    name: str
    upstream: tuple[str, ...]
    wrong: str
    expected: tuple[str, ...]
    suite: str
    patches: tuple[Patch, ...]
    topics: tuple[str, ...] = ()
    section: str = ""


def edits(
    name: str,
    upstream: str,
    wrong: str,
    expected: str,
    suite: str,
    *patches: tuple[str, str, str],
    topics: tuple[str, ...] = (),
) -> Mutant:
    """A mutant of several edits, each `(target, old, new)`; else as `mutant`."""
    made = tuple(Patch(*patch) for patch in patches)
    return Mutant(name, tuple(upstream.split()), wrong, tuple(expected.split("|")), suite, made, topics)


def mutant(
    name: str,
    upstream: str,
    wrong: str,
    expected: str,
    suite: str,
    target: str,
    old: str,
    new: str,
    topics: tuple[str, ...] = (),
) -> Mutant:
    """A mutant of one edit.

    Args:
      name: see `Mutant`.
      upstream: ids, separated by blanks.
      wrong: see `Mutant`.
      expected: invariants, separated by `|`.
      suite: see `Mutant`.
      target: of the patch; `module:function`.
      old: text to replace.
      new: its replacement.
      topics: see `Mutant`.
    """
    patch = Patch(target, old, new)
    return Mutant(name, tuple(upstream.split()), wrong, tuple(expected.split("|")), suite, (patch,), topics)
