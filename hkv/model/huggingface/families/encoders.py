"""Encoders, which keep nothing between steps, and decoders, whose layers cache an encoder's output too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hkv.errors import ConfigError
from hkv.limits import MAX_TOKENS, check_whole
from hkv.model.huggingface.decoder import CROSS, Decoder
from hkv.model.huggingface.families.attention import FULL
from hkv.model.huggingface.family import INERT, ONLY, words
from hkv.model.huggingface.fields import MOST_LAYERS, Field, Fields
from hkv.model.huggingface.model import Model

Sizes = tuple[Field, Field, Field, Field]
"""Layers, heads, elements of a head, and tokens of the encoder's output for one request."""


def _encoder(decoder: Decoder) -> Model:
    """No cache in any layer (vLLM 0.33 `EncoderOnlyAttention`)."""
    return decoder.model(decoder.fields.num_layers)


def _reader(sizes: Callable[[Fields], Sizes]) -> Callable[[Decoder], Model]:
    """A reader of decoders with one geometry, whose layers have full attention and cross attention."""

    def read(decoder: Decoder) -> Model:
        layers, heads, head_dim, encoded = sizes(decoder.fields)
        decoder.divide(heads)
        if layers.value > MOST_LAYERS:
            raise ConfigError(layers.names[0], layers.value, f"at most {MOST_LAYERS}")
        geometry: dict[str, Any] = {"heads": heads, "head_dim": head_dim}
        for index in range(layers.value):
            decoder.attention(index, FULL, layers.names, **geometry)
            decoder.attention(index, CROSS, layers.names, **geometry, window=encoded, part="encoder_attn")
        return decoder.model(layers.value)

    return read


def _whisper(fields: Fields) -> Sizes:
    """As vLLM 0.33 `WhisperDecoderLayer`, `WhisperProcessingInfo.get_num_audio_tokens`."""
    heads = fields.integer("decoder_attention_heads")
    layers, size = fields.integer("decoder_layers"), fields.integer("d_model")
    return layers, heads, size.over(heads), fields.integer("max_source_positions")


STRIDE = 0.01
"""Seconds between two frames where the file does not say (vLLM 0.33 `CohereASRProcessingInfo`)."""

TRANSF_DECODER = words("hidden_size inner_size num_attention_heads num_layers hidden_act max_sequence_length")
"""Fields of Cohere Transcribe's decoder; how many positions it embeds does not bound a request in vLLM 0.33."""


def _cohere_asr(fields: Fields) -> Sizes:
    """As vLLM 0.33 `CohereASRDecoder`, `CohereAsrForConditionalGeneration.get_num_audio_tokens`."""
    _check_inside(fields, "transf_decoder.config_dict", TRANSF_DECODER)
    heads = _number(fields, "transf_decoder", "config_dict", "num_attention_heads")
    audio_heads = _number(fields, "encoder", "n_heads")
    if audio_heads.value != heads.value:
        raise ConfigError(audio_heads.names[0], audio_heads.value, f"{heads.value}, the decoder's heads")
    layers, size = (_number(fields, "transf_decoder", "config_dict", name) for name in ("num_layers", "hidden_size"))
    return layers, heads, size.over(heads), _encoded_audio(fields)


def _encoded_audio(fields: Fields) -> Field:
    """Tokens of the longest clip: as many as it has hops, of which the encoder makes one of several."""
    rate, factor = _number(fields, "preprocessor", "sample_rate"), _number(fields, "encoder", "subsampling_factor")
    seconds, stride = fields.raw("max_audio_clip_s"), fields.nested("preprocessor").get("window_stride", STRIDE)
    place = f"{fields.place('preprocessor')}.window_stride"
    for name, value in ((fields.place("max_audio_clip_s"), seconds), (place, stride)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_TOKENS:
            raise ConfigError(name, value, "a positive number of seconds")
    hop, samples = int(stride * rate.value), int(seconds * rate.value)
    if not 1 <= hop <= samples:
        raise ConfigError(place, stride, f"one of {rate.value} samples a second at least, and no longer than the clip")
    count = -(-(samples // hop) // factor.value)
    return Field(count, (fields.place("max_audio_clip_s"), *rate.names, place, *factor.names))


DECODER = words(
    """
    activation_dropout activation_function add_final_layer_norm classifier_dropout cross_attention_hidden_size d_model
    decoder_attention_heads decoder_ffn_dim decoder_layerdrop decoder_layers encoder_attention_heads encoder_ffn_dim
    encoder_layerdrop encoder_layers hidden_size init_std max_sequence_length num_attention_heads num_hidden_layers
    num_labels scale_embedding use_bfloat16
    """
)
"""Fields of Nemotron-Parse's decoder; its longest request is that of the whole file."""


def _nemotron_parse(fields: Fields) -> Sizes:
    """As vLLM 0.33 `MBartDecoderNoPos`, `NemotronParseProcessingInfo.get_num_image_tokens`."""
    _check_inside(fields, "decoder", DECODER)
    size, place = fields.raw("image_size"), fields.place("image_size")
    patch = _number(fields, "encoder", "patch_size")
    if not isinstance(size, list) or len(size) != 2:
        raise ConfigError(place, size, "[height, width] in pixels")
    for number in size:
        check_whole(place, number, 1, MAX_TOKENS)
    names = ("decoder_attention_heads", "decoder_layers", "d_model")
    heads, layers, width = (_number(fields, "decoder", name) for name in names)
    encoded = size[0] // patch.value * (size[1] // patch.value // 4) + 1
    return layers, heads, width.over(heads), Field(encoded, (place, *patch.names))


def _number(fields: Fields, name: str, *path: str) -> Field:
    """A positive integer inside an object of the file; the family's default, noted, if it is not there."""
    place = ".".join((fields.place(name), *path))
    value = _inside(fields.nested(name), path)
    if value is None and (value := _inside(fields.family.fields[name], path)) is not None:
        fields.notes[place] = f"{place} = {value}, {fields.family.name}'s default: not in the file"
    if value is None:
        raise ConfigError(place, None, f"a value: {fields.family.name} has no default for it")
    check_whole(place, value, 1, MAX_TOKENS)
    return Field(value, (place,))


def _inside(value: Any, path: Iterable[str]) -> Any:
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _check_inside(fields: Fields, path: str, known: frozenset[str]) -> None:
    """Makes sure that an object of the file has no unknown field, null ones apart."""
    name, *rest = path.split(".")
    found = _inside(fields.nested(name), rest)
    if not isinstance(found, Mapping):
        raise ConfigError(f"{fields.path}{path}", found, "an object")
    for field, value in found.items():
        if value is not None and field not in known | INERT | ONLY.keys():
            expected = f"a field of {fields.family.name}'s {path}; if no byte depends on it, remove it from the file"
            raise ConfigError(f"{fields.path}{path}.{field}", value, expected)


READERS: Mapping[str, Callable[[Decoder], Model]] = {
    "encoder": _encoder,
    "whisper": _reader(_whisper),
    "cohere_asr": _reader(_cohere_asr),
    "nemotron_parse": _reader(_nemotron_parse),
}
