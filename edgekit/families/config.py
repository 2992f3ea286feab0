"""Reading Hugging Face configs: what the families share.

Both spellings of the rotary parameters are read: `rope_parameters` (transformers 5) and `rope_theta` with
`rope_scaling` (before). What a config declares and no family implements is refused by name.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

import msgspec

from edgekit.errors import CorruptArtifactError, UnsupportedError, one_of
from edgekit.rope import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec
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

# Keys that change the computation in a way that no family implements, and the values that do not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "moe_intermediate_size": (None, 0),
    "pretraining_tp": (None, 1),
    "use_sliding_window": (None, False),
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


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The rotary parameters of every kind, and the only ones of the default kind."""

    rope_theta: Positive | None = None
    partial_rotary_factor: Positive | None = None

    def scaling(self) -> RopeScaling | None:
        """Returns how the frequencies are scaled."""
        return None


class _LinearParameters(RopeParameters, frozen=True, kw_only=True):
    factor: Positive

    def scaling(self) -> RopeScaling:
        return LinearScaling(factor=self.factor)


class _Llama3Parameters(RopeParameters, frozen=True, kw_only=True):
    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Size

    def scaling(self) -> RopeScaling:
        return Llama3Scaling(
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            original_max_positions=self.original_max_position_embeddings,
        )


_ROPE_KINDS: Mapping[str, type[RopeParameters]] = {
    "default": RopeParameters,
    "linear": _LinearParameters,
    "llama3": _Llama3Parameters,
}


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
        if config.get(key) not in neutral:
            refuse(family, key, config[key], neutral)
    read = _convert(config, kind, f"the config of a {family} model")
    if set(read.layer_types or ()) - {"full_attention"}:
        refuse(family, "layer_types", read.layer_types, ("full_attention",))
    return read


def _convert(values: Mapping[str, Any], kind: type[_StructT], where: str) -> _StructT:
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


def activation(hidden_act: str, family: str) -> Activation:
    """Returns the activation of a `hidden_act` value."""
    if hidden_act not in _ACTIVATIONS:
        raise UnsupportedError(f"{family} with hidden_act {one_of(hidden_act, _ACTIVATIONS)}")
    return _ACTIVATIONS[hidden_act]


def rope_spec(config: FamilyConfig, head_dim: int, family: str, *, default_fraction: float = 1.0) -> RopeSpec:
    """Reads the rotary embedding of a config.

    Args:
        config: The config.
        head_dim: Channels per head.
        family: Name for messages.
        default_fraction: Fraction of the channels that rotate when the config does not say.

    Raises:
        UnsupportedError: A scaling kind, parameter or odd rotary width that is not implemented.
        CorruptArtifactError: A parameter of the scaling kind is missing or mistyped.
    """
    # transformers lets rope_scaling, the older spelling, win when a config carries both.
    values = dict(config.rope_scaling or config.rope_parameters or {})
    older_kind = values.pop("type", "default")
    kind = str(values.pop("rope_type", older_kind))
    if kind not in _ROPE_KINDS:
        raise UnsupportedError(f"{family} with rope_type {one_of(kind, _ROPE_KINDS)}")
    known = _ROPE_KINDS[kind].__struct_fields__
    unknown = sorted(key for key in values if key not in known and values[key] is not None)
    if unknown:
        raise UnsupportedError(
            f"{family} with rope parameter {unknown[0]!r} for rope_type {kind!r} is not supported; "
            f"known for it: {', '.join(sorted(known))}"
        )
    if config.original_max_position_embeddings is not None:
        values["original_max_position_embeddings"] = config.original_max_position_embeddings
    values.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    parameters = _convert(values, _ROPE_KINDS[kind], f"{family} rope_parameters of kind {kind!r}")
    theta = parameters.rope_theta or config.rope_theta or 10000.0
    fraction = parameters.partial_rotary_factor or config.partial_rotary_factor or default_fraction
    rotary_dim = int(head_dim * fraction)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        refuse(family, "rotary width", rotary_dim, (f"even, up to the head's {head_dim} channels",))
    return RopeSpec(theta=theta, rotary_dim=rotary_dim, scaling=parameters.scaling())


def uniform_decoder(config: FamilyConfig, family: str, layer: LayerSpec) -> DecoderSpec:
    """Returns the spec of a decoder whose layers are all alike and whose final norm is of the same kind as theirs."""
    return DecoderSpec(
        family=family,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        layers=(layer,) * config.num_hidden_layers,
        norm=layer.norm,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_ids=token_ids(config.eos_token_id),
    )


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
