"""The embedded API: text in and out, what ends a generation, what is counted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from edgekit.errors import DoesNotFitError, UnsupportedError, UsageError
from edgekit.runtime.detokenizer import StreamingDetokenizer
from edgekit.runtime.llm import LLM
from edgekit.runtime.output import CompletionOutput
from edgekit.runtime.sampling import SamplingParams

VOCABULARY = 320
CONTEXT = 256
PROMPT = "The quick brown fox"
MESSAGES = [{"role": "user", "content": "Hello dogs"}]
# Random tokens of every kind, so broken UTF-8 and special tokens too.
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams.from_mapping({"max_tokens": 40, "temperature": 1.0, "ignore_eos": True} | changes)


def _ids(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, length)]


def _stream(llm: LLM, prompt: Any, params: SamplingParams) -> tuple[list[str], CompletionOutput]:
    chunks = list(llm.stream(prompt, params))
    assert all(chunk.output is None for chunk in chunks[:-1])
    assert all(chunk.text for chunk in chunks[:-1]), "there is no piece without text but the last"
    output = chunks[-1].output
    assert output is not None
    return [chunk.text for chunk in chunks], output


@pytest.mark.parametrize("seed", range(8))
def test_the_pieces_add_up_to_the_text(seed: int, tiny_llm: LLM) -> None:
    pieces, output = _stream(tiny_llm, PROMPT, _params(seed=seed))
    assert "".join(pieces) == output.text == tiny_llm.tokenizer.decode(output.token_ids)
    assert len(pieces) > 10
    assert len(output.token_ids) == 40
    assert tiny_llm.generate(PROMPT, _params(seed=seed)).text == output.text


def test_greedy_text_is_that_of_hugging_face(tiny_llm: LLM, greedy: Any) -> None:
    prompt = tiny_llm.tokenizer.encode_prompt(PROMPT)
    expected = greedy("llama", prompt, 30)
    output = tiny_llm.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    assert list(output.token_ids) == expected
    assert output.text == tiny_llm.tokenizer.decode(expected)
    assert tiny_llm.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True)).text == output.text


def test_a_quantized_bundle_generates_too(tiny_bundle: Any, tiny_llm: LLM) -> None:
    quantized = LLM(tiny_bundle("llama", "int4").path, threads=1).generate(PROMPT, SAMPLED)
    assert len(quantized.token_ids) == 40
    assert quantized.token_ids != tiny_llm.generate(PROMPT, SAMPLED).token_ids, "these are other weights"


def test_text_after_a_stop_string_is_never_emitted(tiny_llm: LLM) -> None:
    free = tiny_llm.generate(PROMPT, SAMPLED)
    across = 0
    for length in (1, 2, 5):
        for start in range(len(free.text) - length):
            stop = free.text[start : start + length]
            pieces, output = _stream(tiny_llm, PROMPT, _params(seed=1, stop=["never there", stop]))
            assert "".join(pieces) == output.text == free.text[: free.text.index(stop)]
            assert output.finish_reason == "stop"
            assert output.token_ids == free.token_ids[: len(output.token_ids)]
            detokenizer = StreamingDetokenizer(tiny_llm.tokenizer)
            texts = [detokenizer.push(token_id) for token_id in output.token_ids]
            assert stop not in "".join(texts[:-1]), "it took no more tokens than the stop string needs"
            across += stop not in texts[-1]
    assert across > 20, "many of the strings must lie across tokens"


def test_the_beginning_of_a_stop_string_appears_in_the_end(tiny_llm: LLM) -> None:
    free = tiny_llm.generate(PROMPT, SAMPLED)
    pieces, output = _stream(tiny_llm, PROMPT, _params(seed=1, stop=[free.text[-3:] + "never there"]))
    assert "".join(pieces) == output.text == free.text
    assert len(pieces[-1]) >= 3
    assert output.finish_reason == "length"


@pytest.fixture(scope="module")
def ending(export_changed: Any, tiny_bundle: Any) -> tuple[LLM, list[int]]:
    """A model whose end token is an ordinary one, the fourth that it generates, and what it generates without."""
    prompt = _ids(12, seed=3)
    free = LLM(tiny_bundle().path, threads=1).generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True)).token_ids
    assert free[3] not in free[:3]
    config = {"eos_token_id": free[3]}
    bundle = export_changed("llama", files={"config.json": config, "generation_config.json": config})
    return LLM(bundle.path, threads=1), list(free)


def test_an_end_token_ends_the_text_and_is_not_part_of_it(ending: tuple[LLM, list[int]]) -> None:
    llm, free = ending
    output = llm.generate(_ids(12, seed=3), SamplingParams(max_tokens=8))
    assert list(output.token_ids) == free[:4]
    assert output.text == llm.tokenizer.decode(free[:3])
    assert llm.tokenizer.decode(free[3:4]), "its text would show"
    assert output.finish_reason == "stop"
    assert output.usage.completion_tokens == 4


def test_an_end_token_may_be_ignored(ending: tuple[LLM, list[int]]) -> None:
    llm, free = ending
    output = llm.generate(_ids(12, seed=3), SamplingParams(max_tokens=8, ignore_eos=True))
    assert list(output.token_ids) == free
    assert output.text == llm.tokenizer.decode(free)
    assert output.finish_reason == "length"


def test_a_stop_string_that_an_end_token_leaves_unfinished_is_emitted(ending: tuple[LLM, list[int]]) -> None:
    llm, free = ending
    text = llm.tokenizer.decode(free[:3])
    output = llm.generate(
        _ids(12, seed=3), SamplingParams(max_tokens=8, stop=(text + llm.tokenizer.decode(free[3:4]),))
    )
    assert output.text == text
    assert output.finish_reason == "stop"


def test_end_tokens_of_both_configs_and_of_the_chat_template_count(export_changed: Any) -> None:
    files = {"config.json": {"eos_token_id": 0}, "generation_config.json": {"eos_token_id": [1, 5]}}
    llm = LLM(export_changed("llama", files=files).path, threads=1)
    assert llm.end_token_ids == {0, 1, 5, llm.tokenizer.token_to_id("<|im_end|>")}
    for end in llm.end_token_ids:
        # A prompt after which that token is likely enough to be drawn some time.
        params = SamplingParams(max_tokens=200, temperature=2.0, seed=end)
        output = llm.generate(_ids(9, seed=end), params)
        assert output.finish_reason == "stop"
        assert output.token_ids[-1] in llm.end_token_ids
        assert not llm.end_token_ids.intersection(output.token_ids[:-1])


@pytest.mark.parametrize("count", [1, 2, 7])
def test_no_more_tokens_than_asked_for(count: int, tiny_llm: LLM) -> None:
    free = tiny_llm.generate(PROMPT, SAMPLED)
    output = tiny_llm.generate(PROMPT, _params(seed=1, max_tokens=count))
    assert output.token_ids == free.token_ids[:count]
    assert output.finish_reason == "length"


def test_a_full_context_ends_a_generation(tiny_llm: LLM) -> None:
    output = tiny_llm.generate(_ids(CONTEXT - 4), _params(seed=1, max_tokens=100))
    assert len(output.token_ids) == 5
    assert output.finish_reason == "length"


def test_a_cancelled_generation_keeps_its_text(tiny_llm: LLM) -> None:
    session = tiny_llm.new_session()
    pieces = []
    for chunk in tiny_llm.stream(PROMPT, SAMPLED, session=session):
        pieces.append(chunk.text)
        if len(pieces) == 5:
            session.cancel()
    assert chunk.output is not None
    assert chunk.output.finish_reason == "cancelled"
    assert "".join(pieces) == chunk.output.text == tiny_llm.tokenizer.decode(chunk.output.token_ids)
    assert len(chunk.output.token_ids) < 40
    assert tiny_llm.generate(PROMPT, SAMPLED, session=session).finish_reason == "length"


def test_a_seed_makes_the_text_reproducible(tiny_llm: LLM, tiny_bundle: Any) -> None:
    first = tiny_llm.generate(PROMPT, _params(seed=7))
    assert tiny_llm.generate(PROMPT, _params(seed=7)).token_ids == first.token_ids
    assert LLM(tiny_bundle().path, threads=1).generate(PROMPT, _params(seed=7)).token_ids == first.token_ids
    assert tiny_llm.generate(PROMPT, _params(seed=8)).token_ids != first.token_ids
    assert tiny_llm.generate(PROMPT, _params()).token_ids != tiny_llm.generate(PROMPT, _params()).token_ids


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_are_those_of_hugging_face(count: int, tiny_llm: LLM, hugging_face: Any, tiny_checkpoint: Any) -> None:
    import torch

    # The temperature changes what is drawn, and not what the model says.
    prompt, params = _ids(10), _params(seed=2, temperature=0.5, logprobs=count)
    output = tiny_llm.generate(prompt, params)
    ids = torch.tensor([[*prompt, *output.token_ids]])
    with torch.no_grad():
        expected = hugging_face(tiny_checkpoint("llama"))(ids).logits[0, 9:-1].log_softmax(-1).numpy()
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    for entry, row in zip(output.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert len(entry.top_logprobs) == count
        np.testing.assert_allclose([value for _, value in entry.top_logprobs], np.sort(row)[::-1][:count], atol=1e-4)
        for token_id, value in entry.top_logprobs:
            assert value == pytest.approx(row[token_id], abs=1e-4)


def test_logprobs_are_not_reported_unasked(tiny_llm: LLM) -> None:
    assert tiny_llm.generate(PROMPT, SAMPLED).logprobs is None


def test_tokens_and_times_are_counted(tiny_llm: LLM) -> None:
    first = tiny_llm.generate(_ids(20), _params(seed=1))
    assert (first.usage.prompt_tokens, first.usage.cached_tokens, first.usage.completion_tokens) == (20, 0, 40)
    again = tiny_llm.generate([*_ids(20), *first.token_ids, 5, 6], _params(seed=1, max_tokens=3))
    # All but the last generated token, which had not been read.
    assert (again.usage.prompt_tokens, again.usage.cached_tokens, again.usage.completion_tokens) == (62, 59, 3)
    for output in (first, again):
        assert output.timings.first_token_s > 0
        assert output.timings.decode_s > 0
        rate = (output.usage.completion_tokens - 1) / output.timings.decode_s
        assert output.timings.decode_tokens_per_s == pytest.approx(rate)
    single = tiny_llm.generate(_ids(20), _params(max_tokens=1))
    assert single.timings.decode_s == single.timings.decode_tokens_per_s == 0


def test_a_chat_is_the_prompt_that_the_template_makes(tiny_llm: LLM, tiny_checkpoint: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("llama"))
    expected: Any = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    session = tiny_llm.new_session()
    output = tiny_llm.chat(MESSAGES, SAMPLED, session=session)
    assert list(session.token_ids[: len(expected)]) == expected
    assert output.usage.prompt_tokens == len(expected)
    assert output.token_ids == tiny_llm.generate(expected, SAMPLED).token_ids
    assert [chunk.output for chunk in tiny_llm.stream_chat(MESSAGES, SAMPLED)][-1] is not None


@pytest.fixture(scope="module")
def with_bos(export_changed: Any, tiny_tokenizer: Any) -> LLM:
    """A model whose tokenizer puts a beginning of text first, and whose template spells one out."""
    post_processor = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    template = "{{ bos_token }}" + (tiny_tokenizer / "chat_template.jinja").read_text()
    files = {"tokenizer.json": {"post_processor": post_processor}, "chat_template.jinja": template}
    return LLM(export_changed("llama", files=files).path, threads=1)


def test_a_beginning_of_text_is_never_doubled(with_bos: LLM) -> None:
    for text in (PROMPT, "<|endoftext|>" + PROMPT, with_bos.render_chat(MESSAGES)):
        session = with_bos.new_session()
        with_bos.generate(text, SAMPLED, session=session)
        assert session.token_ids[0] == 0
        assert session.token_ids[1] != 0
    assert with_bos.render_chat(MESSAGES).startswith("<|endoftext|>")


def test_token_ids_are_taken_as_they_are(with_bos: LLM) -> None:
    session = with_bos.new_session()
    with_bos.generate([9, 8, 7], _params(max_tokens=1), session=session)
    assert session.token_ids == (9, 8, 7)
    with_bos.generate(np.array([9, 8, 6]), _params(max_tokens=1), session=session)  # type: ignore[arg-type]
    assert session.token_ids == (9, 8, 6)


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(prompt: Any, tiny_llm: LLM, with_bos: LLM) -> None:
    for llm in (tiny_llm, with_bos):
        with pytest.raises(UsageError, match="the prompt is empty"):
            llm.stream(prompt)


def test_a_prompt_longer_than_the_context_is_refused_at_once(tiny_llm: LLM) -> None:
    with pytest.raises(DoesNotFitError, match="the prompt has 257 tokens, the model's context 256"):
        tiny_llm.stream(_ids(CONTEXT + 1))
    assert len(tiny_llm.generate(_ids(CONTEXT), SAMPLED).token_ids) == 1


@pytest.mark.parametrize("token", [-1, VOCABULARY, 3.0, "a", None])
def test_a_token_id_that_the_model_does_not_have_is_refused_at_once(token: Any, tiny_llm: LLM) -> None:
    with pytest.raises(UsageError, match=f"token id {token!r} is not in the model's vocabulary of {VOCABULARY}"):
        tiny_llm.stream([5, token])


def test_a_session_of_another_model_is_refused(tiny_llm: LLM, tiny_bundle: Any) -> None:
    other = LLM(tiny_bundle("qwen3").path, threads=1)
    with pytest.raises(UsageError, match="the session belongs to another LLM"):
        tiny_llm.stream(PROMPT, session=other.new_session())


# As many as the last would take all memory for their stacks.
@pytest.mark.parametrize("threads", [0, -1, "x", 1.5, True, 100_000])
def test_an_impossible_number_of_threads_is_refused(threads: Any, tiny_bundle: Any) -> None:
    with pytest.raises(UsageError, match=rf"threads is {threads!r}; it must be an integer from 1 to \d+$"):
        LLM(tiny_bundle().path, threads=threads)


def test_a_bundle_without_a_template_cannot_chat(export_changed: Any) -> None:
    bundle = export_changed("llama", files={"chat_template.jinja": None})
    llm = LLM(bundle.path, threads=1)
    assert llm.end_token_ids == {1, 2}
    assert llm.generate(PROMPT, SAMPLED).token_ids
    for ask in (llm.chat, llm.stream_chat, llm.render_chat):
        with pytest.raises(UnsupportedError, match="has no chat template, so it cannot chat; use generate"):
            ask(MESSAGES)


def test_a_broken_template_hinders_nothing_but_chats(export_changed: Any, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(export_changed("llama", files={"chat_template.jinja": "{% if %}"}).path, threads=1)
    assert "the chat template cannot be used" in caplog.text
    assert llm.generate(PROMPT, SAMPLED).token_ids
    with pytest.raises(UnsupportedError, match="the chat template cannot be compiled"):
        llm.chat(MESSAGES)


@pytest.mark.parametrize("size", [290, 340])
def test_a_tokenizer_of_another_size_than_the_embedding_never_yields_what_it_cannot_decode(
    size: int, export_changed: Any, tiny_tokenizer: Any
) -> None:
    content = json.loads((tiny_tokenizer / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    if size < VOCABULARY:
        content["model"]["vocab"] = {token: place for token, place in vocabulary.items() if place < size}
        content["model"]["merges"] = [pair for pair in content["model"]["merges"] if vocabulary["".join(pair)] < size]
    else:
        vocabulary.update({f"extra{place}": place for place in range(VOCABULARY, size)})
        content["added_tokens"] += [_added(place, f"extra{place}") for place in range(VOCABULARY, size)]
    llm = LLM(export_changed("llama", files={"tokenizer.json": content}).path, threads=1)
    assert llm.tokenizer.vocab_size == size
    output = llm.generate(PROMPT, _params(max_tokens=200, temperature=50.0, seed=1, logprobs=20))
    assert len(set(output.token_ids)) > 100, "nearly any token may be drawn"
    assert output.logprobs is not None
    seen = {*output.token_ids, *(token_id for entry in output.logprobs for token_id, _ in entry.top_logprobs)}
    assert max(seen) < min(size, VOCABULARY)
    assert all(llm.tokenizer.id_to_token(token_id) is not None for token_id in seen)
    if size > VOCABULARY:
        with pytest.raises(UsageError, match=f"token id {size - 1} is not in the model's vocabulary"):
            llm.generate(f"a extra{size - 1}")


def _added(place: int, token: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": place, "content": token, **flags}


def test_arguments_of_another_type_are_refused_by_name(tiny_llm: Any) -> None:
    with pytest.raises(UsageError, match=r"params is \{'max_tokens': 2\}; it must be SamplingParams"):
        tiny_llm.generate("hi", {"max_tokens": 2})
    for prompt in (None, b"hi", bytearray(b"hi"), np.array(5), np.zeros((1, 2), np.int64)):
        with pytest.raises(UsageError, match="it must be text or token ids"):
            tiny_llm.generate(prompt)
    wrong: Any = 5
    with pytest.raises(UsageError, match="bundle is 5; it must be a path"):
        LLM(wrong)
