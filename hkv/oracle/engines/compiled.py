"""The compiled cache's engine for a header: the one that follows the rules of the header's dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkv.dialects.rtp_llm.log.structs import RtpHeader
from hkv.dialects.vllm.log.structs import Header

if TYPE_CHECKING:
    from hkv.dialects.rtp_llm.engines.jax import RtpJaxEngine
    from hkv.dialects.vllm.engines.jax import JaxEngine


def jax_engine(header: Header | RtpHeader) -> JaxEngine | RtpJaxEngine:
    """The compiled engine.

    Raises:
      UnsupportedConfigError: a configuration that only the reference implements.
      HKVError: a configuration the dialect forbids.
    """
    if isinstance(header, RtpHeader):
        from hkv.dialects.rtp_llm.engines.jax import RtpJaxEngine

        return RtpJaxEngine(header)
    from hkv.dialects.vllm.engines.jax import JaxEngine

    return JaxEngine(header)
