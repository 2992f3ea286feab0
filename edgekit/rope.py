"""Rotary position embedding: what a model declares, and the frequencies that follow from it.

A scaling kind is a struct. Most turn the base frequencies into scaled ones once and for all: by the time the graph
or the reference decoder sees them they are numbers. Two depend on how long the text is, so the graph computes them
from the length that a step is told.

Source: RoFormer (Su et al. 2021, eq. 15) for the base frequencies; each kind names its own.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]


class LinearScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="linear"):
    """Position interpolation (Chen et al. 2023, eq. 4): every frequency divided by `factor`."""

    factor: float

    def scale(self, frequencies: FloatArray) -> FloatArray:
        """Scales base frequencies, shape (rotary_dim / 2,), float64."""
        return frequencies / self.factor


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="llama3"):
    """The by-parts interpolation of Llama 3.1 (Meta's reference `apply_scaling`).

    Wavelengths longer than ``original_max_positions / low_freq_factor`` are divided by `factor`, those
    shorter than ``original_max_positions / high_freq_factor`` are kept, the rest is a linear blend.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def scale(self, frequencies: FloatArray) -> FloatArray:
        """Scales base frequencies, shape (rotary_dim / 2,), float64."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return keep * frequencies + (1 - keep) * frequencies / self.factor


class FactorScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="factors"):
    """Every frequency divided by a factor of its own, as GGUF files store in `rope_freqs.weight`.

    Attributes:
        factors: One per frequency, rotary_dim / 2 of them.
    """

    factors: tuple[float, ...]

    def scale(self, frequencies: FloatArray) -> FloatArray:
        """Scales base frequencies, shape (rotary_dim / 2,), float64."""
        return frequencies / np.asarray(self.factors, dtype=np.float64)


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="yarn"):
    """YaRN (Peng et al. 2023, section 3.2): interpolation by parts, with a ramp over channels.

    Attributes:
        factor: By how much the context is stretched.
        original_max_positions: Context before stretching, tokens.
        beta_fast: Channels that turn at least this often within the original context are kept.
        beta_slow: Channels that turn at most this often are divided by `factor`.
        truncate: Whether the ends of the ramp are rounded outwards to whole channels.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def scale(self, frequencies: FloatArray) -> FloatArray:
        """Scales base frequencies, shape (rotary_dim / 2,), float64."""
        count = len(frequencies)
        # The series is geometric: a frequency f has the (fractional) index log f / log(its ratio).
        ratio = math.log(frequencies[1]) if count > 1 else -1.0
        low, high = (
            math.log(2 * math.pi * turns / self.original_max_positions) / ratio
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * count - 1)
        width = 0.001 if low == high else high - low
        interpolate = np.clip((np.arange(count) - low) / width, 0.0, 1.0)
        scaled: FloatArray = frequencies * (interpolate / self.factor + 1 - interpolate)
        return scaled


class DynamicScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="dynamic"):
    """Dynamic NTK scaling (u/emozilla 2023; Peng et al. 2023, section 3.3): the base grows with the text.

    Attributes:
        factor: Speed of the growth; the context is this many times the original one.
        original_max_positions: Length up to which nothing changes, tokens.
    """

    factor: float
    original_max_positions: int

    def base_growth(self, sequence_length: int, rotary_dim: int) -> float:
        """Returns what the base is multiplied by for a text of this many tokens."""
        stretch = max(sequence_length, self.original_max_positions) / self.original_max_positions
        return float((self.factor * stretch - (self.factor - 1)) ** (rotary_dim / (rotary_dim - 2)))


class LongRopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="longrope"):
    """LongRoPE (Ding et al. 2024): one set of factors for short texts and another for long ones.

    Attributes:
        short_factors: What each frequency is divided by, for texts up to `original_max_positions` tokens.
        long_factors: The same for longer texts, all of whose positions they apply to.
        original_max_positions: Longest short text, tokens.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int


StaticScaling: TypeAlias = LinearScaling | Llama3Scaling | FactorScaling | YarnScaling
LengthScaling: TypeAlias = DynamicScaling | LongRopeScaling
RopeScaling: TypeAlias = StaticScaling | LengthScaling


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rotary position embedding of one layer, in the half-split (NeoX) channel order.

    Attributes:
        theta: Base of the geometric series of frequencies.
        rotary_dim: Leading channels of each head that rotate (even); the rest passes through.
        scaling: How the frequencies are stretched for longer contexts; None for the default kind.
        attention_factor: Multiplies cosines and sines, and so the scores of rotated channels twice.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    attention_factor: float = 1.0

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies follow from the length of the text."""
        return isinstance(self.scaling, LengthScaling)

    def inverse_frequencies(self, sequence_length: int = 0) -> FloatArray:
        """Computes radians per position.

        Args:
            sequence_length: Tokens of the whole text, past and new; 0 for a short one.

        Returns:
            shape (rotary_dim / 2,), float64.
        """
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        frequencies = self.theta**-exponents
        match self.scaling:
            case None:
                return frequencies
            case DynamicScaling() as scaling:
                base = self.theta * scaling.base_growth(sequence_length, self.rotary_dim)
                return np.power(base, -exponents)
            case LongRopeScaling() as scaling:
                is_long = sequence_length > scaling.original_max_positions
                return np.divide(frequencies, scaling.long_factors if is_long else scaling.short_factors)
            case scaling:
                return scaling.scale(frequencies)
