"""Encoders, which vLLM 0.33 serves and which keep nothing between steps."""

from __future__ import annotations

from hkv.model.huggingface.decoder import Decoder
from hkv.model.huggingface.family import Family, words
from hkv.model.huggingface.model import Model


def _read(decoder: Decoder) -> Model:
    """No cache in any layer (vLLM 0.33 `EncoderOnlyAttention`)."""
    return decoder.model(decoder.fields.num_layers)


INERT = words(
    """hidden_size num_attention_heads type_vocab_size position_embedding_type embedding_size summary_last_dropout
    use_task_id task_type_vocab_size shape_embed_dim pronunciation_embed_dim shape_vocab_size pronunciation_vocab_size
    enable_shape enable_pronunciation concat_input pre_norm adapter_reduction_factor adapter_layer_norm
    adapter_reuse_layer_norm ln_before_adapter languages default_language num_key_value_heads"""
)

NAMES = {
    "bert": "BERT",
    "bert-generation": "BERT generation",
    "camembert": "CamemBERT",
    "data2vec-text": "data2vec text",
    "electra": "ELECTRA",
    "ernie": "ERNIE",
    "roberta": "RoBERTa",
    "roberta-prelayernorm": "RoBERTa with layer norm first",
    "roc_bert": "RoCBert",
    "xlm-roberta": "XLM-RoBERTa",
    "xlm-roberta-xl": "XLM-RoBERTa-XL",
    "xmod": "X-MOD",
}

LAYERS = {"bert-generation": 24, "xlm-roberta-xl": 36}
LENGTHS = {"xlm-roberta-xl": 514}

FAMILIES = {
    model_type: Family(
        name,
        _read,
        {"num_hidden_layers": LAYERS.get(model_type, 12), "max_position_embeddings": LENGTHS.get(model_type, 512)},
        INERT,
        only={"is_decoder": False},
    )
    for model_type, name in NAMES.items()
}
