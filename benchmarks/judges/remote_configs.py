"""Config classes that come with a model's repository as code, of which vLLM 0.33 has the model class alone."""

from __future__ import annotations

import importlib
from typing import Any


def register() -> None:
    """Has `transformers` know them by `model_type`. Once in a process, after the platform is simulated."""
    transformers = importlib.import_module("transformers")
    base: Any = transformers.PretrainedConfig

    class NemotronParseTextConfig(base):
        """The decoder of Nemotron-Parse. Its query heads are the encoder's in name."""

        model_type = "nemotron_parse_text"

        def __init__(self, encoder_attention_heads: int = 16, max_sequence_length: int = 9000, **fields: Any) -> None:
            super().__init__(**fields)
            self.num_attention_heads = self.encoder_attention_heads = encoder_attention_heads
            self.max_sequence_length = max_sequence_length

    class NemotronParseConfig(base):
        """Nemotron-Parse, whose longest request is also its decoder's."""

        model_type = "nemotron_parse"

        def __init__(
            self, encoder: Any = None, decoder: Any = None, max_sequence_length: int = 9000, **fields: Any
        ) -> None:
            super().__init__(max_sequence_length=max_sequence_length, **fields)
            self.encoder = base(**(encoder or {}))
            self.decoder = NemotronParseTextConfig(**{**(decoder or {}), "max_sequence_length": max_sequence_length})
            self.is_encoder_decoder = fields.get("is_encoder_decoder", True)

    for config in (NemotronParseTextConfig, NemotronParseConfig):
        transformers.AutoConfig.register(config.model_type, config)
