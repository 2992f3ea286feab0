"""Rotary position embedding: what a model declares, and the frequencies that follow from it.

A scaling kind is a struct with one method that turns the base frequencies into the scaled ones. By the
time the graph or the reference decoder sees them they are numbers, so neither knows any kind.

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


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | FactorScaling


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rotary position embedding of one layer, in the half-split (NeoX) channel order.

    Attributes:
        theta: Base of the geometric series of frequencies.
        rotary_dim: Leading channels of each head that rotate (even); the rest passes through.
        scaling: How the frequencies are stretched for longer contexts; None for the default kind.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None

    def inverse_frequencies(self) -> FloatArray:
        """Returns radians per position, shape (rotary_dim / 2,), float64."""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        frequencies = self.theta**-exponents
        return frequencies if self.scaling is None else self.scaling.scale(frequencies)
