"""vLLM's plugin of HKV (entry point group `vllm.general_plugins`): observes every cache if the environment says so.

vLLM loads it in every process it starts. Without `HKV_ATTACH` in the environment it does nothing.
"""

from __future__ import annotations

import importlib.metadata
import re

from hkv.contract import registry
from hkv.dialects.vllm.attach.attach import attach_all, is_attached
from hkv.dialects.vllm.config import NAME
from hkv.dialects.vllm.offload.log import CHUNKS
from hkv.errors import ConfigError, HKVError
from hkv.oracle.attach.attach import Session, judge_stores, say, settings_from


def register() -> None:
    """Observes the managers of this process, once, and says so, or why not, in one line on standard error."""
    try:
        settings = settings_from()
        if settings is None or is_attached():
            return
        check_version()
        session = Session(settings)
    except (HKVError, OSError) as error:
        say(f"this process is not observed: {' '.join(str(error).split())}")
        return
    attach_all(session)
    registry.dialect_of(CHUNKS).attach_all(session)
    judge_stores(session)
    session.say("vLLM's cache managers")


def check_version() -> None:
    """Raises ConfigError unless the installed vLLM is of the version whose rules are HKV's."""
    found, expected = importlib.metadata.version("vllm"), registry.dialect_of(NAME).engine_versions["vllm"]
    if not re.match(rf"{re.escape(expected)}(\.|$)", found):
        raise ConfigError("vllm", found, f"version {expected}, whose rules HKV has")
