"""Text models in their released form: beside the towers of a multimodal wrapper.

The towers are as small as their configs allow and never called; what is asked is
whether the text model is found and read inside.
"""

from collections.abc import Callable
from typing import Any

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from benchmarks.speed.tiny_models import N_TEXT_IDS, tiny_model

_TINY = {"hidden_size": 16, "intermediate_size": 16}
_QWEN_IDS = {
    f"{name}_token_id": N_TEXT_IDS + index
    for index, name in enumerate(("image", "video", "vision_start", "vision_end"))
}
_QWEN_VISION = {
    **_TINY,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_SIGLIP = {
    **_TINY,
    "model_type": "siglip_vision_model",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "vision_use_head": False,
}
_GEMMA4_VISION = {
    **_TINY,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}


def _qwen3_5(text: dict[str, Any]) -> PreTrainedModel:
    config = Qwen3_5Config(text_config=text, vision_config=_QWEN_VISION, **_QWEN_IDS)
    return Qwen3_5ForConditionalGeneration(config)


def _qwen3_5_moe(text: dict[str, Any]) -> PreTrainedModel:
    config = Qwen3_5MoeConfig(text_config=text, vision_config=_QWEN_VISION, **_QWEN_IDS)
    return Qwen3_5MoeForConditionalGeneration(config)


def _gemma3(text: dict[str, Any]) -> PreTrainedModel:
    config = Gemma3Config(
        text_config=text,
        vision_config=_SIGLIP,
        mm_tokens_per_image=4,
        boi_token_index=N_TEXT_IDS,
        eoi_token_index=N_TEXT_IDS + 1,
        image_token_index=N_TEXT_IDS + 2,
    )
    return Gemma3ForConditionalGeneration(config)


def _gemma4(text: dict[str, Any]) -> PreTrainedModel:
    tokens = ("eoi", "boi", "image", "audio", "video")
    ids = {f"{name}_token_id": N_TEXT_IDS + index for index, name in enumerate(tokens)}
    config = Gemma4Config(
        text_config=text, vision_config=_GEMMA4_VISION, audio_config=None, **ids
    )
    return Gemma4ForConditionalGeneration(config)


WRAPPERS: dict[str, Callable[[dict[str, Any]], PreTrainedModel]] = {
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_moe": _gemma4,
}


def multimodal_wrapper(family: str) -> PreTrainedModel:
    """Build the released form: the text model of `tiny_model` beside its towers."""
    text = tiny_model(family)
    wrapper = WRAPPERS[family](text.config.to_dict())
    wrapper.get_decoder().load_state_dict(text.get_decoder().state_dict())
    wrapper.get_output_embeddings().load_state_dict(
        text.get_output_embeddings().state_dict()
    )
    return wrapper.eval().requires_grad_(False)
