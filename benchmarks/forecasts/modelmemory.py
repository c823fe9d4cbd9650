"""How much memory a loaded model needs while it generates or is read."""

from extract.backbone.loading import Backbone


def weight_bytes(backbone: Backbone) -> int:
    """Return the bytes of the weights; tied ones count once."""
    return sum(p.numel() * p.element_size() for p in backbone.model.parameters())


def cache_bytes(backbone: Backbone, n_tokens: int) -> int:
    """Return the bytes of the keys and values of so many tokens."""
    config = backbone.model.config.get_text_config()
    n_kv = getattr(config, "num_key_value_heads", None) or backbone.n_heads
    d_head = getattr(config, "head_dim", None) or backbone.d_model // backbone.n_heads
    per_token = 2 * len(backbone.attention_layers) * n_kv * d_head
    return n_tokens * per_token * backbone.dtype.itemsize


def generation_bytes(backbone: Backbone, tokens_per_batch: int) -> int:
    """Return weights, cache and two layers' activations of the largest batch.

    An estimate: what the framework keeps for itself comes on top, as does the logits'
    `[n_rows, vocabulary]` float32, which is small beside them.
    """
    config = backbone.model.config.get_text_config()
    widest = max(backbone.d_model, getattr(config, "intermediate_size", 0) or 0)
    activations = 2 * tokens_per_batch * widest * backbone.dtype.itemsize
    return (
        weight_bytes(backbone) + cache_bytes(backbone, tokens_per_batch) + activations
    )


def reading_bytes(backbone: Backbone, tokens_per_batch: int, row_bytes: int) -> int:
    """Return weights, activations and the kept signals of the largest batch.

    Args:
      backbone: the model.
      tokens_per_batch: padding included.
      row_bytes: of one token's signals in all families, float32.
    """
    without_cache = generation_bytes(backbone, tokens_per_batch) - cache_bytes(
        backbone, tokens_per_batch
    )
    return without_cache + tokens_per_batch * row_bytes
