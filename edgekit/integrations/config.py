"""A bundle as transformers describes models: its config, and the defaults of its `generate`."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedConfig

from edgekit.bundle import Bundle
from edgekit.runtime.tokenizer import Tokenizer


class EdgeKitConfig(PreTrainedConfig):  # type: ignore[no-untyped-call] # of its __init_subclass__
    """What transformers and its users ask of a model's config; the manifest has the rest.

    Attributes:
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        num_hidden_layers: Layers.
        num_attention_heads: Query heads of the first layer.
        num_key_value_heads: Heads of the first layer's cache.
        head_dim: Channels per head of queries and keys of the first layer.
        max_position_embeddings: Trained context length in tokens.
        bos_token_id: First token of a text, if the model has one.
        eos_token_id: Tokens that end a generation; None if there are none.
        pad_token_id: Fills up the shorter rows of a batch, if the model has one.
        use_cache: Whether a forward pass keeps keys and values unless told otherwise.
    """

    model_type = "edgekit"

    vocab_size: int = 1
    hidden_size: int = 1
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 1
    max_position_embeddings: int = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True


def model_config(bundle: Bundle, tokenizer: Tokenizer) -> EdgeKitConfig:
    """Describes a bundle to transformers.

    Args:
        bundle: The bundle.
        tokenizer: Its tokenizer.
    """
    spec = bundle.manifest.spec
    attention = spec.layers[0].attention
    config = EdgeKitConfig(
        architectures=["EdgeModelForCausalLM"],
        dtype="float32",
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        head_dim=attention.key_dim,
        max_position_embeddings=spec.max_positions,
        bos_token_id=spec.bos_token_id,
        eos_token_id=_eos_token_ids(bundle),
        pad_token_id=_pad_token_id(bundle, tokenizer),
    )
    config.name_or_path = str(bundle.path)
    return config


def generation_config(bundle: Bundle, config: EdgeKitConfig) -> GenerationConfig:
    """Returns the sampling defaults of the model's authors, with every token that ends a generation.

    Args:
        bundle: The bundle.
        config: Its config.
    """
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    values = {"pad_token_id": config.pad_token_id, **bundle.generation().defaults, **ids}
    return GenerationConfig(**values)  # type: ignore[no-untyped-call]


def _eos_token_ids(bundle: Bundle) -> int | list[int] | None:
    published = bundle.generation().defaults.get("eos_token_id")
    first = published if isinstance(published, list) else [published]
    # In the order that the authors have them: where no padding is declared, transformers pads with the first.
    ids = [token for token in first if token is not None]
    ids += [token for token in bundle.manifest.spec.eos_token_ids if token not in ids]
    return ids[0] if len(ids) == 1 else ids or None


def _pad_token_id(bundle: Bundle, tokenizer: Tokenizer) -> int | None:
    generation = bundle.generation()
    text = generation.special_tokens.get("pad_token")
    return generation.defaults.get("pad_token_id") if text is None else tokenizer.token_to_id(text)
