"""The executable of a whole replay says the same in the process that made it and in those that read it."""

from __future__ import annotations

import json
import subprocess
import sys

from hkv.machine.kept_programs import SUFFIX


def test_it_is_the_same_program_in_every_process(tmp_path):
    """Also when it is made again beside JAX's own cache, whose executables cannot be written once more."""
    cache, trace, report = tmp_path / "cache", tmp_path / "chat.jsonl", tmp_path / "report.json"
    hkv = [sys.executable, "-m", "hkv", "--compilation-cache", str(cache)]
    subprocess.run([*hkv, "trace", "chat", "--requests", "40", "-o", str(trace)], check=True, capture_output=True)
    command = [*hkv, "replay", str(trace), "--groups", "full:16,swa:16:128", "--num-blocks", "400"]

    def replayed() -> object:
        subprocess.run([*command, "--json", str(report)], check=True, capture_output=True, timeout=300)
        found = json.loads(report.read_text())
        del found["totals"]["seconds"]
        return found

    def kept() -> list[tuple[str, bytes]]:
        return [(path.name, path.read_bytes()) for path in cache.glob(f"*{SUFFIX}")]

    first = replayed()
    (made,) = kept()
    assert replayed() == first
    assert kept() == [made]
    (cache / made[0]).unlink()
    assert replayed() == first
    assert [name for name, _ in kept()] == [made[0]]
    assert replayed() == first
