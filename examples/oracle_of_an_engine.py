"""An engine developer asks the oracle: is my engine right, where not, and on which small case?

Example: python examples/oracle_of_an_engine.py
"""

from __future__ import annotations

import pathlib
import tempfile

import hkv
from hkv.oracle.found_difference import DiffResult

EXAMPLES = pathlib.Path(__file__).resolve().parent


def compare(engine: str) -> DiffResult:
    """The engine next to the reference, in traffic that it implements."""
    return hkv.diff(
        f"{EXAMPLES / engine}", features=["core"], seeds=6, kinds=["full_attention"], max_groups=1, version=1
    )


def main() -> None:
    """Compares the toy engine, which is right, and the wrong one with the reference."""
    with tempfile.TemporaryDirectory() as folder:
        right = compare("toy_engine.py:ToyEngine")
        print(f"ToyEngine: {right.operations} operations, agrees: {right.agrees}")

        wrong = compare("wrong_engine.py:WrongEngine")
        (found,) = wrong.found
        print(f"WrongEngine: {len(found.case.operations)} operations, breaks the invariant {found.invariant}")

        log = pathlib.Path(folder) / "small.jsonl"
        found.write(log)
        checked = hkv.check(log, f"{EXAMPLES / 'wrong_engine.py'}:WrongEngine")
        (difference,) = checked.differences
        story = hkv.explain(log, difference.line)
        print(f"line {story.line}: the reference finds {story.hit} tokens for request {story.request}")


if __name__ == "__main__":
    main()
