"""The compiled cache under SGLang's rules beside the reference: every answer and the whole state, at random."""

from __future__ import annotations

import msgspec
import pytest

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.engines.jax import SGLangJaxEngine
from hkv.dialects.sglang.engines.numpy import SGLangNumpyEngine
from hkv.dialects.sglang.rules.parameters import of_config
from hkv.errors import ConfigError
from hkv.oracle.record import Only, differ, draw

ONLY = Only(dialect=structs.NAME)

ATTENTION, STATES = ({"kind": kind, "block_size": 1} for kind in ("full_attention", "mamba"))


def compiled(header: structs.Header) -> bool:
    """True if a configuration has a compiled form."""
    try:
        of_config(structs.to_config(header))
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("feature", ["full", "window", "eagle", "namespaces", "sorted"])
def test_random_operations_leave_the_same_state(feature: str) -> None:
    seeds = [seed for seed in range(60) if compiled(draw(feature, seed, 2, ONLY)[0])]
    assert len(seeds) > 15
    for seed in seeds[:15]:
        recording, parted = differ(SGLangJaxEngine, SGLangNumpyEngine, feature, seed, 2, 12, only=ONLY)
        assert parted is None, (seed, parted, recording.operations[-1])


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"tree": True}, "tree"), ({"num_blocks": [4, 4], "groups": [ATTENTION, STATES]}, "states")],
)
def test_what_has_no_compiled_form_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    header = structs.Header(dialect=structs.NAME, feature="hand", num_blocks=[4], groups=[ATTENTION])
    with pytest.raises(ConfigError) as error:
        SGLangJaxEngine(msgspec.structs.replace(header, **changes))
    assert error.value.argument == field
