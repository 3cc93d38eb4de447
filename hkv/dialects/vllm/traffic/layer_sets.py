"""Random sets of layers and the options of a plan, for comparing planners; geometry small, coincidences frequent."""

from __future__ import annotations

import dataclasses

from hkv.contract.traffic import Choices, RandomChoices
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.planning.plan import PlanOptions
from hkv.layout.orders import Order
from hkv.spec import LayerSpec, RequestLimits


@dataclasses.dataclass(frozen=True)
class LayerSet:
    """One case for planners.

    Attributes:
      workers: each worker's layers by name.
      memory: bytes for the cache on each.
      options: options that the plan is made with.
    """

    workers: tuple[dict[str, LayerSpec], ...]
    memory: tuple[int, ...]
    options: PlanOptions


def draw_layer_set(seed: int) -> LayerSet:
    """The layer set of that number, of all classes of layers in the shares that they say (`planned_weight`)."""
    choices = RandomChoices(seed)
    weighed = [cls for _, cls in sorted(kinds.layer_classes().items()) for _ in range(cls.planned_weight)]
    drawn = [choices.pick(weighed).draw_planned(choices) for _ in range(choices.pick((1, 1, 2, 2, 3, 4)))]
    if choices.chance(30):
        drawn.append(kinds.layer(choices.pick(drawn)).draw_near(choices))
    layers = [choices.pick(drawn) for _ in range(choices.integer(1, 14))]
    if choices.chance(40):
        layers = [drawn[i % len(drawn)] for i in range(len(layers))]
    if choices.chance(15):
        layers.append(dataclasses.replace(choices.pick(drawn), is_draft=True))
    named = {f"layer{i}": spec for i, spec in enumerate(layers)}
    options = _draw_options(choices)
    stages = choices.pick((1, 1, 1, 2, 3))
    cuts = [len(named) * i // stages for i in range(stages + 1)]
    items = list(named.items())
    workers = tuple(dict(items[cuts[i] : cuts[i + 1]]) for i in range(stages))
    workers = tuple(worker for worker in workers if worker)
    memory = tuple(choices.integer(1, 400) * 100_000 for _ in workers)
    return LayerSet(workers, memory, options)


def _draw_options(choices: Choices) -> PlanOptions:
    limits = RequestLimits(
        max_model_len=choices.pick((16, 100, 1000, 5000)),
        max_in_flight_tokens=choices.pick((1, 16, 64, 512)),
        max_num_encoder_input_tokens=choices.pick((1, 16, 100, 1000)),
        context_parallel=choices.pick((1, 1, 1, 2)),
        mamba_mode=choices.pick(("align", "align", "none")),
    )
    return PlanOptions(
        limits=limits,
        layout=choices.pick([order.value for order in Order]),
        tensor_parallel=choices.pick((1, 2, 4, 8)),
        hybrid=choices.chance(85),
        auto_fit=choices.chance(30),
        num_blocks=choices.pick((None, None, None, 50)),
        eagle=choices.chance(30),
        prefill_lookahead=choices.pick((0, 0, 0, 1, 3)),
        caching=choices.chance(80),
        prefix_match_unit=choices.pick((None, None, None, None, 4, 8)),
    )
