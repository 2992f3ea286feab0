"""The interface between an exported graph and a runtime: names, shapes and types of its tensors.

B is the batch, S the new tokens of this step, C_g the capacity of cache group g, R the rows that want
logits, V the vocabulary; KV, dk and dv belong to layer l.

| tensor                        | shape                | type    | meaning                                       |
|-------------------------------|----------------------|---------|-----------------------------------------------|
| input_ids                     | [B, S]               | int64   | one token, a prefill chunk or a draft tree    |
| position_ids                  | [B, S]               | int64   | explicit: tree nodes sit at their depth       |
| new_bias                      | [B, 1, S, S]         | float32 | who among the new tokens sees whom            |
| past_bias.{g}                 | [B, 1, 1 or S, C_g]  | float32 | 0 for live slots, `MASKED` for empty ones and |
|                               |                      |         | for those outside a token's sliding window    |
| logit_rows                    | [R]                  | int64   | new tokens whose logits are wanted            |
| sequence_length               | [1]                  | int64   | tokens of the whole text, past, new and still |
|                               |                      |         | to come in this prompt; only in graphs whose  |
|                               |                      |         | rotary frequencies depend on it               |
| past_key_values.{l}.key       | [B, KV, dk, C_g]     | cache   | the cache, keys transposed; read only         |
| past_key_values.{l}.value     | [B, KV, C_g, dv]     | cache   |                                               |
| past_key_values.{l}.key_scale | [B, KV, 1, C_g]      | float32 | what a token's int8 codes are multiplied by;  |
| past_key_values.{l}.value_scale | [B, KV, 1, C_g]    | float32 | only of an int8 cache                         |
| logits                        | [B, R, V]            | float32 |                                               |
| new_key_values.{l}.key        | [B, KV, dk, S]       | cache   | rows that the runtime may append to the cache |
| new_key_values.{l}.value      | [B, KV, S, dv]       | cache   |                                               |
| new_key_values.{l}.key_scale  | [B, KV, 1, S]        | float32 |                                               |
| new_key_values.{l}.value_scale | [B, KV, 1, S]       | float32 |                                               |
| attention_mass.{l}            | [B, KV, C_g + S]     | float32 | probability that the query heads of a KV head |
|                               |                      |         | and the new tokens give each slot and each    |
|                               |                      |         | new token, summed; only when asked for at     |
|                               |                      |         | the export                                    |

The cache is float32, float16 or int8 (`edgekit.cache_layout`).

A graph that is lowered for a runtime of ours gives what the layers of a stack n have in common in one array each:
``new_key_values.stack{n}.key`` [layers, KV, dk, S] and so on, and ``attention_mass.stack{n}`` [layers, KV, C_g + S].

A cache group is the layers with one sliding window, or with none. Among new tokens the graph applies the windows
itself, by their positions; of the past it knows no positions, and its order does not matter: keys carry their
rotation, so a slot is only a place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASKED = -1e4
"""Additive score of a pair that must not attend: finite, so that a fully masked row stays a number in fp16."""

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
NEW_BIAS = "new_bias"
LOGIT_ROWS = "logit_rows"
SEQUENCE_LENGTH = "sequence_length"
LOGITS = "logits"


def past_bias(group: int) -> str:
    """Name of the bias over the past of a cache group."""
    return f"past_bias.{group}"


def is_cache(name: str) -> bool:
    """Whether an input is a part of the cache, or says which of its slots are seen."""
    return name.startswith(("past_key_values.", "past_bias."))


def past_key(layer: int) -> str:
    """Name of the cached keys of a layer."""
    return f"past_key_values.{layer}.key"


def past_value(layer: int) -> str:
    """Name of the cached values of a layer."""
    return f"past_key_values.{layer}.value"


def past_key_scale(layer: int) -> str:
    """Name of the scales of an int8 layer's cached keys."""
    return f"past_key_values.{layer}.key_scale"


def past_value_scale(layer: int) -> str:
    """Name of the scales of an int8 layer's cached values."""
    return f"past_key_values.{layer}.value_scale"


def new_key(layer: int) -> str:
    """Name of the new keys of a layer."""
    return f"new_key_values.{layer}.key"


def new_value(layer: int) -> str:
    """Name of the new values of a layer."""
    return f"new_key_values.{layer}.value"


def new_key_scale(layer: int) -> str:
    """Name of the scales of an int8 layer's new keys."""
    return f"new_key_values.{layer}.key_scale"


def new_value_scale(layer: int) -> str:
    """Name of the scales of an int8 layer's new values."""
    return f"new_key_values.{layer}.value_scale"


def attention_mass(layer: int) -> str:
    """Name of the attention that a layer's slots and new tokens get."""
    return f"attention_mass.{layer}"


def stacked(name: str, stack: int) -> str:
    """Name of what the layers of a stack have in common: ``stacked(new_key(0), 1)`` for their new keys."""
    prefix, _, rest = name.partition(".")
    return ".".join([prefix, f"stack{stack}", *rest.split(".")[1:]])


def window_bias(
    position_ids: npt.NDArray[np.int64], slot_positions: npt.NDArray[np.int64], window: int
) -> npt.NDArray[np.float32]:
    """Computes the bias of new tokens over the past of a group with a sliding window.

    Args:
        position_ids: Positions of the new tokens, shape (S,), int64.
        slot_positions: Positions of the past tokens by slot, shape (C,), int64; −1 for an empty slot.
        window: Positions that a token sees, its own included.

    Returns:
        shape (S, C), float32: 0 where a token sees a slot, `MASKED` elsewhere.
    """
    seen = (slot_positions >= 0) & (slot_positions > position_ids[:, None] - window)
    return np.where(seen, np.float32(0), np.float32(MASKED))
