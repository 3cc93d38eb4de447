"""Random traffic on the reference in which only some invariants are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hkv.contract.invariant import Invariant, InvariantError
from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.invariants import INVARIANTS, Watch
from hkv.dialects.vllm.traffic.headers import FEATURES, draw_header
from hkv.dialects.vllm.traffic.live import drive

SEEDS = 64

LATER = {"event fields": 3, "zeroing": 3, "offers": 3, "connector hits": 4, "supplied": 4, "truncation": 4}
"""Versions of the log that first say what invariants are about; 2 for others."""

VERSION_3 = "version 3"
"""In the place of a feature: traffic of version 3."""


def keeps(name: str, *features: str) -> None:
    """The invariant holds in every example, as far as the engine comes; where it fails by itself, nothing is shown.

    Raises:
      InvariantError: it is what breaks.
    """
    version = 3 if VERSION_3 in features else LATER.get(name, 2)
    features = tuple(feature for feature in features if feature != VERSION_3)
    for number in range(SEEDS):
        try:
            play(number, features or FEATURES, [INVARIANTS[name]], version)
        except InvariantError:
            raise
        except Exception:
            continue


def play(number: int, features: Sequence[str], invariants: Iterable[Invariant], version: int = 2) -> None:
    """One example, of that version of the log."""
    choices = RandomChoices(number)
    header = draw_header(choices, features[number % len(features)], version)
    watch = Watch(NumpyEngine(header), header, invariants)
    drive(header, choices, watch.perform, steps=10)
