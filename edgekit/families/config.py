"""Reading Hugging Face configs: what the families share.

What a config declares and no family implements is refused by name; the rotary parameters are read by
`edgekit.families.rope_config`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

import msgspec

from edgekit.errors import CorruptArtifactError, UnsupportedError, one_of
from edgekit.rope import DynamicScaling
from edgekit.spec import Activation, DecoderSpec, LayerSpec

_StructT = TypeVar("_StructT", bound=msgspec.Struct)
_ConfigT = TypeVar("_ConfigT", bound="FamilyConfig")

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

# Keys that change the computation, and the values that do not. A family that implements one has it in its config.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "moe_intermediate_size": (None, 0),
    "pretraining_tp": (None, 1),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "logit_scale": (None, 1.0),
    "rope_interleaved": (None, False),
    "no_rope_layers": (None, []),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}

# Far beyond any model, and small enough that a damaged number cannot ask for all of memory.
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1e18)]


class FamilyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of config.json that every family reads; a default is what transformers assumes."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Count
    num_attention_heads: Count
    vocab_size: Size
    max_position_embeddings: Size
    hidden_act: str
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    layer_types: list[str] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


def read_config(config: Mapping[str, Any], kind: type[_ConfigT], family: str) -> _ConfigT:
    """Reads and checks the keys of a config that a family knows.

    Args:
        config: The parsed config.json.
        kind: The struct with the family's keys.
        family: Name for messages.

    Raises:
        UnsupportedError: The config declares a feature that no family implements.
        CorruptArtifactError: A key is missing, or has the wrong type or an impossible value.
    """
    for key, neutral in _NEUTRAL.items():
        if key not in kind.__struct_fields__ and config.get(key) not in neutral:
            refuse(family, key, config[key], neutral)
    read = convert(config, kind, f"the config of a {family} model")
    if "sliding_window" not in kind.__struct_fields__ and set(read.layer_types or ()) - {"full_attention"}:
        refuse(family, "layer_types", read.layer_types, ("full_attention",))
    return read


def convert(values: Mapping[str, Any], kind: type[_StructT], where: str) -> _StructT:
    """Reads a mapping as a struct; `where` names it in messages."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        # msgspec says what is wrong and, as a path, which key it is; not what the key holds.
        key = str(error).rpartition("$.")[2].partition("`")[0] if "$." in str(error) else ""
        value = f" (it is {reprlib.repr(values[key])})" if key in values else ""
        raise CorruptArtifactError(
            f"{where} cannot be read: {error}{value}; correct it or get the file again"
        ) from error


def refuse(family: str, key: str, value: Any, supported: tuple[Any, ...]) -> NoReturn:
    """Raises UnsupportedError for a config key with a value that is not implemented."""
    allowed = ", ".join(option if isinstance(option, str) else repr(option) for option in supported)
    raise UnsupportedError(f"{family} with {key} = {reprlib.repr(value)} is not supported; supported: {allowed}")


def require(config: FamilyConfig, family: str, values: Mapping[str, Any]) -> None:
    """Refuses a config whose keys have other values than the only ones that a family computes with."""
    for key, value in values.items():
        if getattr(config, key) != value:
            refuse(family, key, getattr(config, key), (value,))


def activation(hidden_act: str, family: str) -> Activation:
    """Returns the activation of a `hidden_act` value."""
    if hidden_act not in _ACTIVATIONS:
        raise UnsupportedError(f"{family} with hidden_act {one_of(hidden_act, _ACTIVATIONS)}")
    return _ACTIVATIONS[hidden_act]


def uniform_decoder(config: FamilyConfig, family: str, layer: LayerSpec) -> DecoderSpec:
    """Returns the spec of a decoder whose layers are all alike and whose final norm is of the same kind as theirs."""
    return decoder(config, family, (layer,) * config.num_hidden_layers)


def decoder(config: FamilyConfig, family: str, layers: Sequence[LayerSpec]) -> DecoderSpec:
    """Returns the spec of a decoder of these layers, whose final norm is of the same kind as theirs."""
    return DecoderSpec(
        family=family,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=_context_length(config, layers),
        layers=tuple(layers),
        norm=layers[0].norm,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_ids=token_ids(config.eos_token_id),
    )


def _context_length(config: FamilyConfig, layers: Sequence[LayerSpec]) -> int:
    """Returns the trained context, times what dynamic scaling stretches it by; other kinds declare the product."""
    scalings = [layer.attention.rope.scaling for layer in layers if layer.attention.rope is not None]
    factors = [scaling.factor for scaling in scalings if isinstance(scaling, DynamicScaling)]
    return int(config.max_position_embeddings * min(factors, default=1.0))


def layer_windows(config: FamilyConfig, window: int | None, family: str) -> tuple[int | None, ...]:
    """Returns the sliding window of every layer.

    Args:
        config: The config; its `layer_types` say which layers have a window, all of them when there are none.
        window: Positions that a token of such a layer sees; None when no layer may have a window.
        family: Name for messages.

    Raises:
        UnsupportedError: A layer is of another type.
        CorruptArtifactError: There is not one type for each layer.
    """
    kinds: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        kinds["sliding_attention"] = window
    if config.layer_types is None:
        return (window,) * config.num_hidden_layers
    if len(config.layer_types) != config.num_hidden_layers:
        raise CorruptArtifactError(
            f"a {family} config has {len(config.layer_types)} layer_types and {config.num_hidden_layers} layers; get "
            "the file again"
        )
    for kind in config.layer_types:
        if kind not in kinds:
            refuse(family, "layer_types", kind, tuple(kinds))
    return tuple(kinds[kind] for kind in config.layer_types)


def windowed(layer: LayerSpec, windows: Sequence[int | None]) -> tuple[LayerSpec, ...]:
    """Returns the layer once for every sliding window."""
    replace = msgspec.structs.replace
    return tuple(replace(layer, attention=replace(layer.attention, sliding_window=window)) for window in windows)


def even_heads(config: FamilyConfig, head_dim: int | None, family: str) -> int:
    """Returns the channels per head of a family whose heads divide the hidden size evenly, whatever head_dim says."""
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    if config.hidden_size % heads:
        refuse(family, "hidden_size", config.hidden_size, (f"multiples of the {heads} heads",))
    if head_dim not in (None, width):
        refuse(family, "head_dim", head_dim, (width,))
    return width


def head_groups(config: FamilyConfig, num_kv_heads: int | None, family: str) -> int:
    """Returns the number of KV heads, which must divide the query heads."""
    kv_heads = config.num_attention_heads if num_kv_heads is None else num_kv_heads
    if kv_heads <= 0 or config.num_attention_heads % kv_heads:
        refuse(family, "num_key_value_heads", kv_heads, (f"divisors of {config.num_attention_heads}",))
    return kv_heads


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns the ids of an `eos_token_id` entry: one, several or none, sorted."""
    if value is None:
        return ()
    return tuple(sorted(set(value))) if isinstance(value, list) else (value,)
