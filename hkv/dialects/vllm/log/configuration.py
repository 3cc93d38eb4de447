"""Conversion of a log's header to a dialect's configuration, and back."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm import config as vllm
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.log.structs import Header
from hkv.errors import ConfigError
from hkv.keys.chained import GIVEN, SEED
from hkv.model.topology import Topology
from hkv.spec import KINDS, LayerSpec, log_variants, spec_from_log, spec_to_log

VERSIONS = (1, 2, 3, 4)


def to_config(header: Header) -> vllm.VllmConfig:
    """The configuration that a header describes.

    Raises:
      HKVError: unknown version or dialect, or a configuration that the dialect forbids.
    """
    if header.oplog not in VERSIONS:
        raise ConfigError("oplog", header.oplog, f"one of the versions {VERSIONS}")
    if header.dialect != vllm.NAME:
        raise ConfigError("dialect", header.dialect, vllm.NAME)
    if header.oplog == 1:
        _check_version_1(header)
    if header.oplog < 3:
        _check_before_version_3(header)
    specs = [spec_from_log(group) for group in header.groups]
    return vllm.VllmConfig(
        topology=Topology.of_specs(specs, header.eagle_groups),
        num_blocks=header.num_blocks,
        hash=header.hash,
        hash_seed=header.hash_seed,
        hash_block_size=header.hash_block_size,
        scheduler_block_size=header.scheduler_block_size,
        hash_lookahead=header.hash_lookahead,
        caching=header.caching,
        eagle=header.eagle,
        prefill_lookahead=header.prefill_lookahead,
        retention_interval=header.retention_interval,
        partial_hits=header.partial_hits,
        max_model_len=header.max_model_len,
        max_in_flight_tokens=header.max_in_flight_tokens,
        context_parallel=header.context_parallel,
        watermark=header.watermark,
        shared_prefix_checkpoint=header.shared_prefix_checkpoint,
        bugs=frozenset(header.bugs),
        zeroing=header.zeroing,
        offloads=header.offloads,
    )


def to_header(config: vllm.VllmConfig, feature: str, version: int = 2) -> Header:
    """The header that describes a configuration, as recorded logs write it."""
    return Header(
        oplog=version,
        dialect=vllm.NAME,
        feature=feature,
        num_blocks=config.num_blocks,
        groups=[_entry(spec, version) for spec in config.topology.specs],
        hash=config.hash,
        hash_seed=config.hash_seed,
        hash_block_size=config.hash_block_size,
        scheduler_block_size=config.scheduler_block_size,
        hash_lookahead=config.hash_lookahead,
        caching=config.caching,
        eagle=config.eagle,
        eagle_groups=list(config.topology.eagle_groups),
        prefill_lookahead=config.prefill_lookahead,
        retention_interval=config.retention_interval,
        partial_hits=config.partial_hits,
        max_model_len=config.max_model_len,
        max_in_flight_tokens=config.max_in_flight_tokens,
        context_parallel=config.context_parallel,
        watermark=config.watermark,
        shared_prefix_checkpoint=config.shared_prefix_checkpoint,
        bugs=sorted(config.bugs),
        zeroing=config.zeroing,
        offloads=config.offloads,
    )


def _entry(spec: LayerSpec, version: int) -> dict[str, Any]:
    entry = spec_to_log(spec)
    if version == 1 and entry.get("cache_mode") == "align":
        del entry["cache_mode"]
    return entry


def _check_before_version_3(header: Header) -> None:
    given = {"hash": header.hash == GIVEN, "hash_seed": header.hash_seed != SEED, "zeroing": header.zeroing}
    given["offloads"] = header.offloads
    for name, used in given.items():
        if used:
            raise ConfigError(name, getattr(header, name), "version 3 of the log format")
    for group in header.groups:
        if group.get("kind") not in KINDS:
            continue
        layer = kinds.of_kind(group["kind"])
        if layer.log_version > max(2, header.oplog):
            raise ConfigError("kind", group["kind"], f"version {layer.log_version} of the log format")
        later = dict.fromkeys((cls.written.variant for cls in log_variants(layer.of)), 3)
        for name, version in (later | dict(layer.later_log_fields)).items():
            if name in group and header.oplog < version:
                raise ConfigError(name, group[name], f"version {version} of the log format")


def _check_version_1(header: Header) -> None:
    for name, unused in (("watermark", 0.0), ("shared_prefix_checkpoint", False), ("bugs", [])):
        if getattr(header, name) != unused:
            raise ConfigError(name, getattr(header, name), "version 2 of the log format")
    for group in header.groups:
        if group.get("kind") in KINDS and kinds.of_kind(group["kind"]).log_version > 1:
            raise ConfigError("kind", group["kind"], "version 2 of the log format")
        if "cache_mode" in group:
            raise ConfigError("cache_mode", group["cache_mode"], "version 2 of the log format")
