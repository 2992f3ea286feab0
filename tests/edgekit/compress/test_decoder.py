from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from edgekit.checkpoint import open_checkpoint
from edgekit.compress import decoder as decoder_module
from edgekit.compress.decoder import (
    Decoder,
    DecoderOutput,
    KeyValue,
    StepMask,
    causal_mask,
    load_decoder,
    load_layer,
    stream_logits,
)
from edgekit.contract import MASKED

HuggingFaceModel: TypeAlias = Callable[[Path], Any]
TinyCheckpoint: TypeAlias = Callable[[str], Path]
Tokens: TypeAlias = npt.NDArray[np.int64]


@pytest.fixture
def decoder(every_tiny_checkpoint: Path) -> Decoder:
    with open_checkpoint(every_tiny_checkpoint) as checkpoint:
        return load_decoder(checkpoint)


@pytest.fixture
def llama_decoder(tiny_llama: Path) -> Decoder:
    with open_checkpoint(tiny_llama) as checkpoint:
        return load_decoder(checkpoint)


@torch.no_grad()
def _run(decoder: Decoder, tokens: Tensor, **inputs: Any) -> DecoderOutput:
    output = decoder(tokens, **inputs)
    assert isinstance(output, DecoderOutput)
    return output


@torch.no_grad()
def _hugging_face_logits(model: Any, tokens: Tensor, **inputs: Any) -> npt.NDArray[np.float32]:
    logits: npt.NDArray[np.float32] = model(tokens, **inputs).logits.numpy()
    return logits


def _append(past: Sequence[KeyValue] | None, new: Sequence[KeyValue]) -> list[KeyValue]:
    if past is None:
        return list(new)
    return [
        (torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2))
        for (keys, values), (new_keys, new_values) in zip(past, new, strict=True)
    ]


def test_logits_are_those_of_transformers(
    decoder: Decoder, every_tiny_checkpoint: Path, hugging_face: HuggingFaceModel, token_ids: Tokens
) -> None:
    tokens = torch.from_numpy(token_ids)
    wanted = _hugging_face_logits(hugging_face(every_tiny_checkpoint), tokens)
    logits = _run(decoder, tokens).logits
    assert logits.dtype == torch.float32
    np.testing.assert_allclose(logits.numpy(), wanted, rtol=0, atol=1e-4)


def test_streaming_one_layer_at_a_time_gives_the_same_logits(
    every_tiny_checkpoint: Path, hugging_face: HuggingFaceModel, token_ids: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Smaller than the vocabulary and no divisor of it, so that the head is multiplied in uneven pieces.
    monkeypatch.setattr(decoder_module, "_HEAD_ROWS", 77)
    with open_checkpoint(every_tiny_checkpoint) as checkpoint:
        logits = stream_logits(checkpoint, token_ids)
    wanted = _hugging_face_logits(hugging_face(every_tiny_checkpoint), torch.from_numpy(token_ids))
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)


def test_the_state_dict_is_what_the_spec_says(decoder: Decoder) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}
    assert shapes == decoder.spec.tensor_shapes()
    assert {name: tuple(tensor.shape) for name, tensor in Decoder(decoder.spec).state_dict().items()} == shapes


@pytest.mark.parametrize("chunks", [(23, 1), (1, 23), (5, 1, 10, 8)])
def test_steps_over_a_past_give_the_logits_of_the_whole(
    decoder: Decoder,
    every_tiny_checkpoint: Path,
    hugging_face: HuggingFaceModel,
    token_ids: Tokens,
    chunks: tuple[int, ...],
) -> None:
    tokens, past, logits = torch.from_numpy(token_ids), None, []
    for chunk in tokens.split_with_sizes(chunks, dim=1):
        output = _run(decoder, chunk, past=past, sequence_length=24)
        past = _append(past, output.key_values)
        logits.append(output.logits)
    wanted = _hugging_face_logits(hugging_face(every_tiny_checkpoint), tokens)
    np.testing.assert_allclose(torch.cat(logits, 1).numpy(), wanted, rtol=0, atol=1e-4)


def test_new_keys_and_values_are_the_cache_of_transformers(
    decoder: Decoder, every_tiny_checkpoint: Path, hugging_face: HuggingFaceModel, token_ids: Tokens
) -> None:
    tokens = torch.from_numpy(token_ids)
    with torch.no_grad():
        cache = hugging_face(every_tiny_checkpoint)(tokens, use_cache=True).past_key_values
    output = _run(decoder, tokens)
    for spec, layer, (keys, values) in zip(decoder.spec.layers, cache.layers, output.key_values, strict=True):
        # Of a layer with a window, transformers caches what the next token can see.
        kept = slice(1 - spec.attention.sliding_window if spec.attention.sliding_window else 0, None)
        torch.testing.assert_close(keys[:, :, kept], layer.keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(values[:, :, kept], layer.values, rtol=0, atol=1e-4)


def test_positions_are_those_that_are_given(
    decoder: Decoder, every_tiny_checkpoint: Path, hugging_face: HuggingFaceModel, token_ids: Tokens
) -> None:
    tokens = torch.from_numpy(token_ids)
    positions = torch.from_numpy(np.random.default_rng(3).integers(0, 200, token_ids.shape))
    model = hugging_face(every_tiny_checkpoint)
    # An explicit mask: given positions alone, transformers takes jumps in them for packed sequences.
    hidden = torch.finfo(torch.float32).min
    mask: Any = torch.full((24, 24), hidden).triu(1).expand(2, 1, 24, 24)
    window = getattr(model.config, "sliding_window", None)
    if window is not None:
        outside = positions[:, None, :, None] - positions[:, None, None, :] >= window
        windowed = mask.masked_fill(outside, hidden)
        kinds = {"full_attention": mask, "sliding_attention": windowed}
        mask = kinds if hasattr(model.config, "layer_types") else windowed
    wanted = _hugging_face_logits(model, tokens, position_ids=positions, attention_mask=mask)
    np.testing.assert_allclose(_run(decoder, tokens, position_ids=positions).logits.numpy(), wanted, rtol=0, atol=1e-4)


def test_each_path_of_a_tree_gives_the_logits_of_that_path_alone(
    decoder: Decoder, every_tiny_checkpoint: Path, hugging_face: HuggingFaceModel, token_ids: Tokens
) -> None:
    prefix = torch.from_numpy(token_ids[:1, :7])
    parents = [-1, 0, 0, 1, 1, 2, -1, 6]
    nodes = torch.from_numpy(token_ids[:1, 7 : 7 + len(parents)])
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    bias = torch.full((1, 1, len(parents), len(parents)), MASKED)
    for node, path in enumerate(paths):
        bias[0, 0, node, path] = 0
    output = _run(
        decoder,
        nodes,
        position_ids=torch.tensor([[7 + len(path) - 1 for path in paths]]),
        past=_run(decoder, prefix).key_values,
        mask=StepMask(new=bias, past=torch.zeros(1, 1, 1, 7)),
    )
    model = hugging_face(every_tiny_checkpoint)
    for node, path in enumerate(paths):
        wanted = _hugging_face_logits(model, torch.cat([prefix, nodes[:, path]], 1))[0, -1]
        np.testing.assert_allclose(output.logits[0, node].numpy(), wanted, rtol=0, atol=1e-4)


def test_the_order_of_the_past_does_not_matter_and_masked_slots_do_not_count(
    llama_decoder: Decoder, token_ids: Tokens
) -> None:
    tokens = torch.from_numpy(token_ids)
    past = _run(llama_decoder, tokens[:, :16]).key_values
    wanted = _run(llama_decoder, tokens[:, 16:], past=past).logits
    slots = torch.from_numpy(np.random.default_rng(5).permutation(20))
    scattered = [
        tuple(torch.cat([part, torch.full_like(part[:, :, :4], 50.0)], 2)[:, :, slots] for part in layer)
        for layer in past
    ]
    mask = StepMask(new=causal_mask(8, 0).new, past=torch.where(slots < 16, 0.0, MASKED).reshape(1, 1, 1, 20))
    positions = torch.arange(16, 24).expand(2, 8)
    output = _run(llama_decoder, tokens[:, 16:], past=scattered, mask=mask, position_ids=positions)
    torch.testing.assert_close(output.logits, wanted, rtol=0, atol=1e-5)


def test_each_query_may_see_another_part_of_the_past(llama_decoder: Decoder, token_ids: Tokens) -> None:
    tokens = torch.from_numpy(token_ids)
    past = _run(llama_decoder, tokens[:, :10]).key_values
    window = torch.full((2, 1, 3, 10), MASKED)
    window[0, 0, 0, 2:], window[0, 0, 1, 5:], window[0, 0, 2, 9:] = 0, 0, 0
    window[1, 0, :, :4] = 0
    alone = torch.full((1, 1, 3, 3), MASKED)
    alone[0, 0, range(3), range(3)] = 0
    positions = torch.full((2, 3), 10)
    together = _run(llama_decoder, tokens[:, 10:13], past=past, mask=StepMask(alone, window), position_ids=positions)
    for row, query, seen in ((0, 0, slice(2, 10)), (0, 1, slice(5, 10)), (0, 2, slice(9, 10)), (1, 1, slice(0, 4))):
        part = [(keys[row : row + 1, :, seen], values[row : row + 1, :, seen]) for keys, values in past]
        token = tokens[row : row + 1, 10 + query : 11 + query]
        single = _run(llama_decoder, token, past=part, position_ids=torch.tensor([[10]]))
        torch.testing.assert_close(together.logits[row, query], single.logits[0, 0], rtol=0, atol=1e-5)


def test_gradients_are_those_of_transformers(
    tiny_checkpoint: TinyCheckpoint, hugging_face: HuggingFaceModel, token_ids: Tokens
) -> None:
    directory, tokens = tiny_checkpoint("gpt_neox"), torch.from_numpy(token_ids)
    with open_checkpoint(directory) as checkpoint:
        decoder = load_decoder(checkpoint)
        sources = checkpoint.family.sources(checkpoint.spec)
    decoder(tokens).logits.logsumexp(-1).sum().backward()
    model = hugging_face(directory)
    try:
        model(tokens).logits.logsumexp(-1).sum().backward()
        wanted = {
            name.replace("lm_head", "embed_out"): parameter.grad.clone() for name, parameter in model.named_parameters()
        }
    finally:
        model.zero_grad()
    for name, parameter in decoder.named_parameters():
        source, gradient = sources[name], parameter.grad
        assert gradient is not None
        expected = wanted[source.name] if source.rows is None else wanted[source.name][torch.from_numpy(source.rows)]
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)


def test_inputs_are_left_as_they_were(llama_decoder: Decoder, token_ids: Tokens) -> None:
    tokens = torch.from_numpy(token_ids)
    past = _run(llama_decoder, tokens[:, :10]).key_values
    mask, positions = causal_mask(14, 10), torch.arange(10, 24).expand(2, 14).clone()
    inputs = [tokens, positions, mask.new, mask.past, *(part for layer in past for part in layer)]
    before = [tensor.clone() for tensor in inputs]
    _run(llama_decoder, tokens[:, 10:], position_ids=positions, past=past, mask=mask)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


def test_a_layer_works_on_its_own(llama_decoder: Decoder, tiny_llama: Path) -> None:
    hidden = torch.randn(2, 24, llama_decoder.spec.hidden_size, generator=torch.Generator().manual_seed(2))
    positions, mask = torch.arange(24).expand(2, 24), causal_mask(24, 0)
    with open_checkpoint(tiny_llama) as checkpoint:
        layer = load_layer(checkpoint, 1)
    with torch.no_grad():
        alone, _ = layer(hidden, positions, mask)
        within, _ = llama_decoder.layers[1](hidden, positions, mask)
        other, _ = llama_decoder.layers[0](hidden, positions, mask)
    assert torch.equal(alone, within)
    assert not torch.allclose(alone, other, atol=1e-2)
