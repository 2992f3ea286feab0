"""What the policies' tests compare with: the reference decoder in torch, run over a past that is spelled out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from edgekit.compress import decoder as reference
from edgekit.compress.decoder import Decoder, DecoderLayer, StepMask, softcap
from edgekit.runtime.sampling import SamplingParams
from edgekit.runtime.session import Session, SessionLimits
from edgekit.runtime.strategies.autoregressive import Autoregressive

VOCABULARY = 320


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng((seed, length)).integers(3, VOCABULARY, length)]


def start(
    backend: Any, policy: Any, *, max_tokens: int = 256, chunk_tokens: int = 16, digest: str | None = None
) -> Session:
    """A conversation over a backend, or over one that is watched."""
    spec = getattr(backend, "backend", backend).spec
    limits = SessionLimits(max_tokens=max_tokens, max_positions=256, chunk_tokens=chunk_tokens)
    return Session(spec, backend, Autoregressive(), limits, policy, digest)


def generate(session: Session, prompt: list[int]) -> Iterator[int]:
    """Generates greedily."""
    return (token.token_id for token in session.generate(prompt, SamplingParams(), VOCABULARY))


def take(session: Session, prompt: list[int], count: int) -> list[int]:
    """Generates greedily; the generation is left after so many tokens."""
    return list(itertools.islice(generate(session, prompt), count))


@dataclass
class Past:
    """Keys after rope and values of a layer, shape (1, KV, n, d), and the positions of its tokens, shape (n,)."""

    keys: Tensor
    values: Tensor
    positions: Tensor


@torch.no_grad()
def read(decoder: Decoder, tokens: Sequence[int], start: int, pasts: list[Past]) -> Any:
    """Reads tokens from a position on over a past of its own for each layer, to which theirs is added.

    Returns the logits, shape (n, V).
    """
    count = len(tokens)
    positions = torch.arange(start, start + count)[None]
    new = reference.causal_mask(count, 0).new
    hidden = decoder.embed_tokens(torch.tensor([list(tokens)])) * decoder.spec.embedding_scale
    for index, past in enumerate(pasts):
        layer = decoder.layers[index]
        assert isinstance(layer, DecoderLayer)
        mask = StepMask(new=new, past=torch.zeros(1, 1, 1, len(past.positions)), past_positions=past.positions[None])
        hidden, (keys, values) = layer(hidden, positions, mask, (past.keys, past.values))
        pasts[index] = Past(
            torch.cat([past.keys, keys], 2),
            torch.cat([past.values, values], 2),
            torch.cat([past.positions, positions[0]]),
        )
    head = decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head
    logits = functional.linear(decoder.norm(hidden), head.weight)
    return softcap(logits.float() * decoder.spec.logit_scale, decoder.spec.logit_softcap)[0].numpy()


def nothing(decoder: Decoder) -> list[Past]:
    """The past of a conversation that begins."""
    shapes = [(a.num_kv_heads, a.key_dim, a.value_dim) for a in (layer.attention for layer in decoder.spec.layers)]
    empty = torch.zeros(0, dtype=torch.int64)
    return [Past(torch.zeros(1, heads, 0, k), torch.zeros(1, heads, 0, v), empty) for heads, k, v in shapes]


def turned_to(decoder: Decoder, layer: int, keys: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Takes the rotation of some positions off keys, shape (1, KV, n, dk), and gives them that of others."""
    rope = decoder.spec.layers[layer].attention.rope
    if rope is None:
        return keys
    rows = keys.transpose(1, 2)
    cos, sin = reference._rotation(rope, before[None], 0)
    rows = reference._rotate(rows, cos, -sin)
    cos, sin = reference._rotation(rope, after[None], 0)
    return reference._rotate(rows, cos, sin).transpose(1, 2)


def chosen(past: Past, kept: Any) -> Past:
    """Of each head the tokens with the given indices, shape (KV, n)."""
    index = torch.as_tensor(np.asarray(kept))[None, :, :, None]
    take_keys = past.keys.gather(2, index.expand(-1, -1, -1, past.keys.shape[-1]))
    take_values = past.values.gather(2, index.expand(-1, -1, -1, past.values.shape[-1]))
    return Past(take_keys, take_values, past.positions[: index.shape[2]])


def attention_of(model: Any, tokens: Sequence[int], observed: int) -> list[Any]:
    """What the last tokens attend to, by Hugging Face, summed over them and the query heads of a KV head.

    Returns one array per layer, shape (KV, n), float32.
    """
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(torch.tensor([list(tokens)]), output_attentions=True).attentions
    heads = model.config.num_key_value_heads
    return [each[0, :, -observed:].sum(1).view(heads, -1, len(tokens)).sum(1).numpy() for each in attentions]


def kept_tokens(scores: Any, count: int, observed: int) -> Any:
    """SnapKV's choice, spelled out: the highest of the pooled scores, shape (KV, n), and all that was observed."""
    kept = []
    for head in scores:
        best = [max(head[max(0, i - 3) : i + 4]) for i in range(len(head))]
        ranked = sorted(range(len(head)), key=lambda i: (best[i], i), reverse=True)
        if 0 < count < len(head):
            limit, below = best[ranked[count - 1]], [value for value in best if value < best[ranked[count - 1]]]
            assert not below or limit - max(below) > 1e-6, "rounding may decide: take another prompt"
        kept.append([*sorted(ranked[:count]), *range(len(head), len(head) + observed)])
    return np.array(kept)
