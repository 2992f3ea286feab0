"""SmolLM3: Llama in which every fourth layer or so does not rotate, and may have a sliding window instead.

Source: `SmolLM3ForCausalLM` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from edgekit.errors import CorruptArtifactError
from edgekit.families import llama
from edgekit.families.base import Family
from edgekit.families.config import Count, Positive, Size, decoder, layer_windows, read_config, windowed
from edgekit.spec import DecoderSpec

replace = msgspec.structs.replace


class Smollm3Config(llama.LlamaConfig, frozen=True, kw_only=True):
    """The keys of a SmolLM3 config."""

    num_key_value_heads: Count | None = 4
    rope_theta: Positive = 2e6
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    sliding_window: Size | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    # The published configs say 2, which nothing reads.
    pretraining_tp: int | None = None


def spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a SmolLM3 config."""
    read = read_config(config, Smollm3Config, "smollm3")
    rotates = _rotates(read)
    layers = [
        layer if rotated else replace(layer, attention=replace(layer.attention, rope=None))
        for layer, rotated in zip(
            windowed(llama.layer_spec(read, "smollm3"), _windows(read, rotates)), rotates, strict=True
        )
    ]
    return decoder(read, "smollm3", layers)


def _rotates(config: Smollm3Config) -> list[bool]:
    """Tells which layers rotate: those with a 1 in `no_rope_layers`, in spite of its name."""
    count, flags = config.num_hidden_layers, config.no_rope_layers
    if flags is None:
        return [(index + 1) % config.no_rope_layer_interval != 0 for index in range(count)]
    if len(flags) < count:
        raise CorruptArtifactError(
            f"a smollm3 config has {len(flags)} no_rope_layers and {count} layers; get the file again"
        )
    return [flag != 0 for flag in flags[:count]]


def _windows(config: Smollm3Config, rotates: Sequence[bool]) -> tuple[int | None, ...]:
    window = config.sliding_window if config.use_sliding_window else None
    if config.layer_types is None:
        return tuple(None if rotated else window for rotated in rotates)
    return layer_windows(config, window, "smollm3")


FAMILY = Family(
    name="smollm3",
    covers="SmolLM3",
    model_types=("smollm3",),
    gguf_architectures=("smollm3",),
    spec=spec,
    modules=llama.MODULES,
    gguf_rows=llama.gguf_rows,
)
