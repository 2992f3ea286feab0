"""`EdgeModelForCausalLM` against transformers' own models: logits by value, generated tokens one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from edgekit import EdgeModelForCausalLM
from edgekit.errors import DoesNotFitError, UnsupportedError, UsageError
from edgekit.integrations import conversations
from edgekit.runtime.prefill import Chunk, read_chunks

TinyCheckpoint: TypeAlias = Callable[[str], Path]
TinyModel: TypeAlias = Callable[[str], EdgeModelForCausalLM]
HuggingFaceModel: TypeAlias = Callable[[Path], PreTrainedModel]
Pair: TypeAlias = tuple[EdgeModelForCausalLM, Any]

PADDING = 9
# transformers has renamed it.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


@pytest.fixture(params=["llama", "gpt_neox", "qwen3", "mistral"])
def pair(
    request: pytest.FixtureRequest,
    tiny_model: TinyModel,
    tiny_checkpoint: TinyCheckpoint,
    hugging_face: HuggingFaceModel,
) -> Pair:
    """A model of every cache layout, one with windows among them, and transformers' own."""
    return tiny_model(request.param), hugging_face(tiny_checkpoint(request.param))


@pytest.fixture
def llama(tiny_model: TinyModel, tiny_llama: Path, hugging_face: HuggingFaceModel) -> Pair:
    return tiny_model("llama"), hugging_face(tiny_llama)


@pytest.fixture
def ids(token_ids: npt.NDArray[np.int64]) -> torch.Tensor:
    """Two rows of 24 tokens."""
    return torch.from_numpy(token_ids)


@pytest.fixture
def left_padded(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same, the first row with 9 tokens of padding in front."""
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    return {"input_ids": ids.where(mask == 1, 2), "attention_mask": mask}


def _logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs).logits
    return logits


def _generate(model: Any, inputs: Mapping[str, torch.Tensor], **options: Any) -> list[list[int]]:
    torch.manual_seed(5)
    generated: list[list[int]] = model.generate(**inputs, max_new_tokens=20, **options).tolist()
    return generated


def test_logits_are_those_of_transformers(pair: Pair, ids: torch.Tensor) -> None:
    model, oracle = pair
    expected = _logits(oracle, input_ids=ids)
    torch.testing.assert_close(_logits(model, input_ids=ids), expected, atol=1e-4, rtol=0)
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))


def test_rows_padded_on_the_left_have_the_logits_that_they_have_alone(
    pair: Pair, left_padded: dict[str, torch.Tensor]
) -> None:
    model, oracle = pair
    logits = _logits(model, **left_padded)
    alone = left_padded["input_ids"][:1, PADDING:]
    torch.testing.assert_close(logits[:1, PADDING:], _logits(model, input_ids=alone), atol=0, rtol=0)
    torch.testing.assert_close(logits[:1, PADDING:], _logits(oracle, input_ids=alone), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[1:], _logits(oracle, input_ids=left_padded["input_ids"][1:]), atol=1e-4, rtol=0)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("masked", [True, False])
def test_rows_padded_on_the_right_have_the_logits_that_they_have_alone(
    pair: Pair, ids: torch.Tensor, masked: bool
) -> None:
    # Unmasked is how the EleutherAI harness pads: what comes later can change nothing.
    model, oracle = pair
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    inputs = {"input_ids": ids * mask, **({"attention_mask": mask} if masked else {})}
    logits = _logits(model, **inputs)
    torch.testing.assert_close(logits[:1], _logits(oracle, input_ids=ids[:1]), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[1:, :15], _logits(oracle, input_ids=ids[1:, :15]), atol=1e-4, rtol=0)
    assert torch.isfinite(logits).all()


def test_only_the_columns_asked_for_have_logits(llama: Pair, left_padded: dict[str, torch.Tensor]) -> None:
    model, _ = llama
    whole = _logits(model, **left_padded)
    torch.testing.assert_close(_logits(model, **left_padded, logits_to_keep=3), whole[:, -3:], atol=1e-5, rtol=0)
    columns = torch.tensor([20, 4, -1])
    torch.testing.assert_close(
        _logits(model, **left_padded, logits_to_keep=columns), whole[:, columns], atol=1e-5, rtol=0
    )
    assert _logits(model, **left_padded, logits_to_keep=99).shape == whole.shape


def test_a_text_longer_than_a_chunk_of_the_runtime_is_read_whole(
    tiny_model: TinyModel,
    tiny_checkpoint: TinyCheckpoint,
    hugging_face: HuggingFaceModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks: list[int] = []

    def recorded(*arguments: Any) -> Iterator[Chunk]:
        chunks.append(arguments[4].chunk_tokens)
        return read_chunks(*arguments)

    monkeypatch.setattr(conversations, "read_chunks", recorded)
    llm = tiny_model("mistral").llm
    memory = dataclasses.replace(llm.plan.memory, chunk_tokens=16)
    monkeypatch.setattr(llm, "plan", dataclasses.replace(llm.plan, memory=memory))
    ids = torch.from_numpy(np.random.default_rng(3).integers(3, 320, (2, 250)))
    expected = _logits(hugging_face(tiny_checkpoint("mistral")), input_ids=ids)
    torch.testing.assert_close(_logits(tiny_model("mistral"), input_ids=ids), expected, atol=1e-4, rtol=0)
    part = _logits(tiny_model("mistral"), input_ids=ids, logits_to_keep=torch.tensor([3, 100]))
    torch.testing.assert_close(part, expected[:, [3, 100]], atol=1e-4, rtol=0)
    assert set(chunks) == {16}


def test_the_cache_goes_on_where_it_ended(pair: Pair, left_padded: dict[str, torch.Tensor]) -> None:
    model, _ = pair
    ids, mask = left_padded["input_ids"], left_padded["attention_mask"]
    first = model(input_ids=ids[:, :14], attention_mask=mask[:, :14])
    second = _logits(model, input_ids=ids[:, 14:], attention_mask=mask, past_key_values=first.past_key_values)
    torch.testing.assert_close(second, _logits(model, **left_padded)[:, 14:], atol=1e-4, rtol=0)
    assert model(input_ids=ids, use_cache=False).past_key_values is None


def test_the_loss_is_that_of_transformers(llama: Pair, ids: torch.Tensor) -> None:
    model, oracle = llama
    labels = ids.clone()
    labels[0, :5] = -100
    with torch.inference_mode():
        expected = oracle(input_ids=ids, labels=labels).loss
        torch.testing.assert_close(model(input_ids=ids, labels=labels).loss, expected, atol=1e-5, rtol=0)
    with pytest.raises(UsageError, match="logits_to_keep be left out"):
        model(input_ids=ids, labels=labels, logits_to_keep=2)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "num_beams": 3},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"do_sample": False, "prefill_chunk_size": 5},
    ],
    ids=lambda options: "-".join(options),
)
def test_a_padded_batch_generates_the_tokens_of_transformers(
    pair: Pair, left_padded: dict[str, torch.Tensor], options: dict[str, Any]
) -> None:
    model, oracle = pair
    assert _generate(model, left_padded, **options) == _generate(oracle, left_padded, **options)


def test_a_row_generates_in_a_padded_batch_what_it_generates_alone(
    pair: Pair, left_padded: dict[str, torch.Tensor]
) -> None:
    model, _ = pair
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    together = _generate(model, left_padded, **options)
    alone = _generate(model, {"input_ids": left_padded["input_ids"][:1, PADDING:]}, **options)
    assert together[0][PADDING:] == alone[0]


def test_a_text_that_outgrows_a_range_of_rotations_goes_on_as_in_transformers(
    tiny_model: TinyModel, tiny_checkpoint: TinyCheckpoint, hugging_face: HuggingFaceModel, ids: torch.Tensor
) -> None:
    model, oracle = tiny_model("phi3_longrope_short"), hugging_face(tiny_checkpoint("phi3_longrope_short"))
    spec = model.llm.bundle.manifest.spec
    limit = max(length for length in range(256) if not spec.rope_range(length))
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = {"input_ids": ids.repeat(1, 4)[:1, : limit - 10]}
    expected = _generate(oracle, prompt, **options)
    assert _generate(model, prompt, **options) == expected
    assert _generate(model, prompt, num_beams=2, **options) == _generate(oracle, prompt, num_beams=2, **options)
    whole = torch.tensor(expected)
    complete = _logits(oracle, input_ids=whole)
    torch.testing.assert_close(_logits(model, input_ids=whole), complete, atol=1e-4, rtol=0)
    cache = model(input_ids=whole[:, :limit]).past_key_values
    assert not torch.allclose(model(input_ids=whole[:, :limit]).logits[:, -1], complete[:, limit - 1], atol=1e-2)
    rest = _logits(model, input_ids=whole[:, limit:], past_key_values=cache)
    torch.testing.assert_close(rest, complete[:, limit:], atol=1e-4, rtol=0)


def test_guessing_ahead_from_the_prompt_changes_no_token(llama: Pair, ids: torch.Tensor) -> None:
    model, oracle = llama
    prompt = {"input_ids": ids[:1].repeat(1, 3)}
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = _generate(oracle, prompt, **options)
    assert _generate(model, prompt, prompt_lookup_num_tokens=4, **options) == expected


def test_generation_continues_with_its_own_cache(llama: Pair, ids: torch.Tensor) -> None:
    model, _ = llama
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cache = model(input_ids=ids[:1, :10]).past_key_values
    expected = _generate(model, {"input_ids": ids[:1]}, **options)
    assert _generate(model, {"input_ids": ids[:1]}, **{CACHE: cache}, **options) == expected
    assert cache.get_seq_length() == 24 + 20 - 1


def test_a_prompt_that_ends_in_padding_is_not_continued(llama: Pair, ids: torch.Tensor) -> None:
    model, _ = llama
    mask = torch.ones_like(ids)
    mask[1, -1] = 0
    with pytest.raises(UsageError, match="pad on the left"):
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2)


def test_a_text_longer_than_the_context_is_refused_before_any_row_is_read(llama: Pair) -> None:
    model, _ = llama
    mask = torch.ones((2, 257), dtype=torch.int64)
    mask[0, :200] = 0
    with pytest.raises(DoesNotFitError, match="257 tokens are more than the context of 256; shorten"):
        model(input_ids=mask * 5, attention_mask=mask)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("output_attentions", True),
        ("output_hidden_states", True),
        ("return_dict", False),
        ("inputs_embeds", torch.zeros(1, 3, 64)),
        ("past_key_values", DynamicCache()),
    ],
)
def test_what_a_graph_cannot_do_is_refused_by_name(llama: Pair, ids: torch.Tensor, option: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match="DynamicCache" if option == "past_key_values" else option):
        llama[0](input_ids=ids, **{option: value})


@pytest.mark.parametrize("implementation", ["static", "quantized", "offloaded", "paged"])
def test_caches_of_transformers_are_refused_by_name(llama: Pair, ids: torch.Tensor, implementation: str) -> None:
    with pytest.raises(UnsupportedError, match="paged" if implementation == "paged" else implementation):
        llama[0].generate(input_ids=ids, max_new_tokens=2, cache_implementation=implementation)


def test_attentions_of_a_generation_are_refused_by_name(llama: Pair, ids: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="output_attentions"):
        llama[0].generate(input_ids=ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)


def test_positions_that_do_not_count_the_tokens_are_refused(llama: Pair, left_padded: dict[str, torch.Tensor]) -> None:
    model, _ = llama
    counted = (left_padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = _logits(model, **left_padded)
    torch.testing.assert_close(_logits(model, **left_padded, position_ids=counted), expected, atol=0, rtol=0)
    with pytest.raises(UnsupportedError, match="do not count each row's own tokens"):
        model(**left_padded, position_ids=torch.arange(24)[None])
    with pytest.raises(UsageError, match="position_ids has shape"):
        model(**left_padded, position_ids=counted[:, 1:])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, "2 dimensions"),
        ({"input_ids": torch.zeros(1, 3)}, "integer tensor"),
        ({"input_ids": [[1, 2]]}, "integer tensor"),
        ({"input_ids": torch.tensor([[5, 320]])}, "token id 320 is not in the model's vocabulary of 320"),
        ({"input_ids": torch.tensor([[-1, 5]])}, "token id -1"),
        ({"input_ids": torch.tensor([[4, 5]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}, "shape"),
        ({"input_ids": torch.tensor([[4, 5]]), "attention_mask": torch.ones(1, 1, 2, 2, dtype=torch.int64)}, "mask"),
        ({"input_ids": torch.tensor([[4, 5]]), "logits_to_keep": -1}, "logits_to_keep is -1"),
        ({"input_ids": torch.tensor([[4, 5]]), "logits_to_keep": torch.tensor([2])}, "names columns"),
    ],
)
def test_wrong_tensors_are_refused(llama: Pair, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llama[0](**inputs)
