"""vLLM's plugin of HKV (entry point group `vllm.general_plugins`): observes every cache if the environment says so.

vLLM loads it in every process it starts. Without `HKV_ATTACH` in the environment it does nothing.
"""

from __future__ import annotations

from hkv.dialects.vllm.attach.attach import Attached, is_attached
from hkv.oracle.attach.judged import judge_stores
from hkv.oracle.attach.session import Session
from hkv.oracle.attach.settings import settings_from


def register() -> None:
    """Observes the managers of this process, once."""
    settings = settings_from()
    if settings is not None and not is_attached():
        session = Session(settings)
        Attached(session)
        judge_stores(session)
