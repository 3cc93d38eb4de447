"""Blocks of a request: for each of its sequences, blocks per group and cache keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.errors import OperationError
from hkv.model.topology import Topology
from tests.rtp_llm.witness.block_ids import BlockIds


@dataclasses.dataclass(frozen=True)
class Dependency:
    """Key that a cached block builds on, and its position.

    Attributes:
      ordinal: position among the keys of the sequence.
      parent: the key before it, None for the first.
    """

    ordinal: int = 0
    parent: int | None = None


ROOT = Dependency()


def linear_dependencies(keys: Sequence[int]) -> list[Dependency]:
    """Each key builds on the one before it."""
    return [Dependency(i, keys[i - 1] if i else None) for i in range(len(keys))]


class Resource:
    """One sequence (RTP-LLM `KVCacheResource`).

    Attributes:
      groups: for each group, the blocks.
      keys: one a logical block, the last maybe of a partly filled one.
      canonical: the keys are those of virtual blocks, one for each `cp_size` logical ones.
      aligned: no key stands for a partly filled block.
      device_reuse: blocks taken over from the device cache; `memory_reuse` and `remote_reuse` from elsewhere.
    """

    def __init__(self, topology: Topology, keys: Sequence[int] = (), *, aligned: bool = True) -> None:
        self.topology = topology
        self.groups = [BlockIds(ratio=group.kernel_blocks_per_block) for group in topology.groups]
        self.canonical = False
        self.aligned = aligned
        self.device_reuse = self.memory_reuse = self.remote_reuse = 0
        self.set_keys(keys)

    def set_keys(self, keys: Sequence[int]) -> None:
        """Replace the keys; they are no longer canonical, and their dependencies are linear."""
        self.keys = list(keys)
        self._dependencies: list[Dependency] | None = None
        self.canonical = False

    @property
    def dependencies(self) -> list[Dependency]:
        """Dependency of each key: the key before it, unless others were set."""
        if self._dependencies is None:
            self._dependencies = linear_dependencies(self.keys)
        return self._dependencies

    @dependencies.setter
    def dependencies(self, dependencies: list[Dependency]) -> None:
        self._dependencies = dependencies

    @property
    def reused(self) -> int:
        """Blocks that need not be computed, wherever they came from."""
        return self.device_reuse + self.memory_reuse + self.remote_reuse

    def blocks(self, tag: str) -> BlockIds:
        """The blocks in the group of that tag.

        Raises:
          TopologyError: there is no such group.
        """
        return self.groups[self.topology.group_index(tag)]

    def layer_blocks(self) -> dict[str, BlockIds]:
        """The blocks of each layer.

        Raises:
          TopologyError: a layer belongs to several groups.
        """
        return {layer.name: self.blocks(self.topology.group_of(layer.name).tag) for layer in self.topology.layers}

    def copy(self) -> Resource:
        """Another sequence with the same keys and equal, but separate, lists. No reference is taken."""
        twin = Resource(self.topology, self.keys, aligned=self.aligned)
        twin.dependencies, twin.canonical = list(self.dependencies), self.canonical
        twin.device_reuse, twin.memory_reuse, twin.remote_reuse = (
            self.device_reuse,
            self.memory_reuse,
            self.remote_reuse,
        )
        for mine, others in zip(twin.groups, self.groups, strict=True):
            mine.assign(others.blocks)
        return twin


class BatchResource:
    """The sequences of one request, beams or samples (RTP-LLM `BatchKVCacheResource`).

    Attributes:
      rows: the sequences.
    """

    def __init__(self, config: RtpConfig, batch: int = 1) -> None:
        if batch < 1:
            raise OperationError("batch", batch, "at least one sequence")
        self.config = config
        self.rows = [Resource(config.topology) for _ in range(batch)]

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.rows)

    @property
    def current_blocks(self) -> int:
        """Slots of the longest list of the first sequence, holes included; 0 means that nothing was allocated yet."""
        return max(len(blocks) for blocks in self.rows[0].groups) if self.rows else 0

    @property
    def aligned(self) -> bool:
        """True if no sequence has a key for a partly filled block."""
        return all(row.aligned for row in self.rows)

    def clear_blocks(self) -> None:
        """Empty every list. No reference is given back."""
        for row in self.rows:
            for blocks in row.groups:
                blocks.resize(0)

    def tables(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Block tables as kernels read them: 0 after a row's end, `NULL` in its holes.

        Args:
          width: slots per row.

        Returns:
          int32[groups, batch, width] of blocks, and int32[groups, batch, width * kernel blocks per block], the latter
          as wide as the group with the most kernel blocks needs.
        """
        groups = range(len(self.config.topology.groups))
        ratio = max(group.kernel_blocks_per_block for group in self.config.topology.groups)
        tables = [np.zeros((len(groups), self.batch, width * n), np.int32) for n in (1, ratio)]
        for group in groups:
            for row, resource in enumerate(self.rows):
                ids = resource.groups[group]
                for table, values in zip(tables, (ids.blocks, ids.kernel), strict=True):
                    table[group, row, : len(values)] = values
        return tables[0], tables[1]
