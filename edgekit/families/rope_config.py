"""Reading the rotary parameters of Hugging Face configs.

Both spellings are read: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before). Formulas that
derive one parameter from others are those of transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from edgekit.errors import CorruptArtifactError, UnsupportedError, one_of
from edgekit.families.config import FamilyConfig, Positive, Size, convert, refuse
from edgekit.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The rotary parameters of every kind, and the only ones of the default kind."""

    rope_theta: Positive | None = None
    partial_rotary_factor: Positive | None = None

    def scaling(self, config: FamilyConfig) -> RopeScaling | None:  # noqa: ARG002 - the kinds need it
        """Returns how the frequencies are scaled."""
        return None

    def attention_factor_of(self, config: FamilyConfig) -> float:  # noqa: ARG002
        """Returns what cosines and sines are multiplied by."""
        return 1.0


class _LinearParameters(RopeParameters, frozen=True, kw_only=True):
    factor: Positive

    def scaling(self, config: FamilyConfig) -> RopeScaling:  # noqa: ARG002
        return LinearScaling(factor=self.factor)


class _DynamicParameters(RopeParameters, frozen=True, kw_only=True):
    factor: Positive

    def scaling(self, config: FamilyConfig) -> RopeScaling:
        # transformers goes by the model's context, not by original_max_position_embeddings.
        return DynamicScaling(factor=self.factor, original_max_positions=config.max_position_embeddings)


class _Llama3Parameters(RopeParameters, frozen=True, kw_only=True):
    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Size

    def scaling(self, config: FamilyConfig) -> RopeScaling:  # noqa: ARG002
        return Llama3Scaling(
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            original_max_positions=self.original_max_position_embeddings,
        )


class _YarnParameters(RopeParameters, frozen=True, kw_only=True):
    original_max_position_embeddings: Size
    factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def scaling(self, config: FamilyConfig) -> RopeScaling:
        return YarnScaling(
            factor=self._factor(config),
            original_max_positions=self.original_max_position_embeddings,
            beta_fast=self.beta_fast or 32.0,
            beta_slow=self.beta_slow or 1.0,
            truncate=self.truncate,
        )

    def attention_factor_of(self, config: FamilyConfig) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._attention_scale(config, self.mscale) / self._attention_scale(config, self.mscale_all_dim)
        return self._attention_scale(config, 1.0)

    def _factor(self, config: FamilyConfig) -> float:
        return self.factor or config.max_position_embeddings / self.original_max_position_embeddings

    def _attention_scale(self, config: FamilyConfig, mscale: float) -> float:
        """Peng et al. 2023, eq. 22, where the product of two of them scales the scores."""
        factor = self._factor(config)
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class _LongRopeParameters(RopeParameters, frozen=True, kw_only=True):
    short_factor: tuple[Positive, ...]
    long_factor: tuple[Positive, ...]
    original_max_position_embeddings: Annotated[int, msgspec.Meta(ge=2, le=1 << 24)]  # its logarithm divides
    factor: Positive | None = None
    attention_factor: Positive | None = None

    def scaling(self, config: FamilyConfig) -> RopeScaling:  # noqa: ARG002
        return LongRopeScaling(
            short_factors=self.short_factor,
            long_factors=self.long_factor,
            original_max_positions=self.original_max_position_embeddings,
        )

    def attention_factor_of(self, config: FamilyConfig) -> float:
        """Ding et al. 2024, section 3.3, unless the config says."""
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        factor = self.factor or config.max_position_embeddings / original
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


_ROPE_KINDS: Mapping[str, type[RopeParameters]] = {
    "default": RopeParameters,
    "linear": _LinearParameters,
    "dynamic": _DynamicParameters,
    "llama3": _Llama3Parameters,
    "yarn": _YarnParameters,
    "longrope": _LongRopeParameters,
}
# Older spellings that mean the same.
_RENAMED_KINDS: Mapping[str, str] = {"su": "longrope"}


def rope_spec(
    config: FamilyConfig,
    head_dim: int,
    family: str,
    *,
    default_fraction: float = 1.0,
) -> RopeSpec:
    """Reads the rotary embedding of a config.

    Args:
        config: The config.
        head_dim: Channels per head.
        family: Name for messages.
        default_fraction: Fraction of the channels that rotate when the config does not say.

    Raises:
        UnsupportedError: A scaling kind, parameter or odd rotary width that is not implemented.
        CorruptArtifactError: A parameter of the scaling kind is missing, mistyped or impossible.
    """
    # transformers lets rope_scaling, the older spelling, win when a config carries both.
    parameters = _read_parameters(config.rope_scaling or config.rope_parameters or {}, config, family)
    theta = parameters.rope_theta or config.rope_theta or 10000.0
    fraction = parameters.partial_rotary_factor or config.partial_rotary_factor or default_fraction
    rotary_dim = int(head_dim * fraction)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        refuse(family, "rotary width", rotary_dim, (f"even, up to the head's {head_dim} channels",))
    scaling = parameters.scaling(config)
    _check_scaling(scaling, theta, rotary_dim, family)
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling=scaling,
        attention_factor=parameters.attention_factor_of(config),
    )


def _read_parameters(declared: Mapping[str, Any], config: FamilyConfig, family: str) -> RopeParameters:
    values = dict(declared)
    older_kind = values.pop("type", "default")
    kind = str(values.pop("rope_type", older_kind))
    kind = _RENAMED_KINDS.get(kind, kind)
    if kind not in _ROPE_KINDS:
        raise UnsupportedError(f"{family} with rope_type {one_of(kind, _ROPE_KINDS)}")
    known = _ROPE_KINDS[kind].__struct_fields__
    # Some configs of every kind carry it, and only some kinds have a use for it.
    unknown = sorted(
        key
        for key in values
        if key not in known and key != "original_max_position_embeddings" and values[key] is not None
    )
    if unknown:
        raise UnsupportedError(
            f"{family} with rope parameter {unknown[0]!r} for rope_type {kind!r} is not supported; "
            f"known for it: {', '.join(sorted(known))}"
        )
    if config.original_max_position_embeddings is not None:
        values["original_max_position_embeddings"] = config.original_max_position_embeddings
    values.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return convert(values, _ROPE_KINDS[kind], f"{family} rope_parameters of kind {kind!r}")


def _check_scaling(scaling: RopeScaling | None, theta: float, rotary_dim: int, family: str) -> None:
    """Refuses numbers that no frequencies follow from."""
    if isinstance(scaling, LongRopeScaling):
        for name, factors in (("short_factor", scaling.short_factors), ("long_factor", scaling.long_factors)):
            if len(factors) != rotary_dim // 2:
                raise CorruptArtifactError(
                    f"a {family} config has {len(factors)} numbers in {name}; expected {rotary_dim // 2}, one per "
                    "frequency; get the file again"
                )
    # One frequency alone has no series: no growth of its base, no place on a ramp.
    if isinstance(scaling, DynamicScaling | YarnScaling) and rotary_dim < 4:
        refuse(family, "rotary width", rotary_dim, (f"4 and more with rope_type {scaling.__struct_config__.tag}",))
    if isinstance(scaling, YarnScaling) and theta <= 1:
        refuse(family, "rope_theta", theta, ("numbers above 1 with rope_type yarn",))
