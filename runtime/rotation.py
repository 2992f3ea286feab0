"""Turning cached keys: a key rotated to one position becomes one rotated to another.

Rotary embedding turns the channel pair i of a key at position p by p·ωᵢ (Su et al. 2021, section 3.4.2). Turning it by
Δ·ωᵢ more makes it the key at p + Δ; an attention factor that multiplies keys stays what it is.
"""

from __future__ import annotations

import numpy as np

from edgekit.cache_layout import Stack
from edgekit.rope import RopeSpec
from edgekit.runtime.cache_arrays import FloatArray
from edgekit.spec import DecoderSpec


def turned(keys: FloatArray, spec: DecoderSpec, stack: Stack, positions: int) -> FloatArray:
    """Moves keys by some positions.

    Args:
        keys: shape (layers, KV, dk, n), float32.
        spec: The decoder.
        stack: The layers they belong to.
        positions: How far, forward or back; the same for all.

    Returns:
        The same shape; layers without rotary embedding are unchanged.
    """
    result = keys.copy()
    by_rope: dict[RopeSpec, list[int]] = {}
    for index, layer in enumerate(stack.layers):
        rope = spec.layers[layer].attention.rope
        if rope is not None:
            by_rope.setdefault(rope, []).append(index)
    for rope, indices in by_rope.items():
        half = rope.rotary_dim // 2
        angles = positions * rope.inverse_frequencies()[:, None]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        a, b = keys[indices, :, :half], keys[indices, :, half : rope.rotary_dim]
        result[indices, :, :half] = a * cos - b * sin
        result[indices, :, half : rope.rotary_dim] = b * cos + a * sin
    return result
