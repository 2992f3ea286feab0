"""Conversations of models whose rotations or attention change with the length of the text."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgekit.runtime import cache, session
from edgekit.runtime.cache_arrays import StackArrays
from edgekit.runtime.sampling import SamplingParams
from edgekit.runtime.session import Session
from edgekit.runtime.strategies.autoregressive import Autoregressive
from tests.runtime.conftest import load_backend

VOCABULARY = 320
LIMIT = 24
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0],
    "original_max_position_embeddings": LIMIT,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("llama", {"rope_parameters": _LONGROPE}),
    "dynamic": ("llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": LIMIT}),
    "window": ("mistral", {"sliding_window": 7}),
}


class Model:
    """A model in ONNX Runtime, and Hugging Face's implementation of it."""

    def __init__(self, bundle: Any, oracle: Any) -> None:
        self.backend = load_backend(bundle)
        self._oracle = oracle

    def session(self) -> Session:
        return Session(self.backend.spec, self.backend, Autoregressive())

    def expected(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens, each from a forward pass over the whole text so far."""
        import torch

        tokens = list(prompt)
        for _ in range(count):
            with torch.no_grad():
                logits = self._oracle(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            best = logits.topk(2).values
            assert float(best[0] - best[1]) > 2e-4, "rounding may decide a token of this prompt: take another one"
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def models(export_changed: Any, hugging_face: Any) -> Any:
    """The models of `MODELS` by name, made once."""
    made: dict[str, Model] = {}

    def make(name: str) -> Model:
        if name not in made:
            variant, changes = MODELS[name]
            bundle = export_changed(variant, files={"config.json": changes})
            made[name] = Model(bundle, hugging_face(Path(bundle.path).parent / "checkpoint"))
        return made[name]

    return make


def _prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng((seed, length)).integers(3, VOCABULARY, length)]


def _take(conversation: Session, prompt: list[int], count: int) -> list[int]:
    generation = conversation.generate(prompt, SamplingParams(), VOCABULARY)
    return [token.token_id for token in itertools.islice(generation, count)]


# Far below the limit, across it while decoding, right at it, and a prompt beyond it in several chunks.
@pytest.mark.parametrize("length", [3, LIMIT - 4, LIMIT - 1, LIMIT, LIMIT + 1, 3 * LIMIT])
@pytest.mark.parametrize("name", ["longrope", "window"])
def test_greedy_tokens_are_those_of_whole_forward_passes(
    name: str, length: int, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PREFILL_CHUNK_TOKENS", 20)
    monkeypatch.setattr(cache, "BUCKET_TOKENS", 16)
    model, prompt = models(name), _prompt(length)
    assert _take(model.session(), prompt, 10) == model.expected(prompt, 10)


def test_a_conversation_that_shrinks_below_the_limit_is_read_again(models: Any) -> None:
    model, prompt = models("longrope"), _prompt(LIMIT + 6)
    conversation = model.session()
    _take(conversation, prompt, 3)
    assert conversation.shared_prefix(prompt) == LIMIT + 5
    assert conversation.shared_prefix(prompt[:10]) == 0
    assert _take(conversation, prompt[:10], 5) == model.expected(prompt[:10], 5)
    assert conversation.shared_prefix(prompt[:8]) == 7
    assert _take(conversation, prompt, 5) == model.expected(prompt, 5)


@pytest.mark.parametrize("length", [LIMIT - 1, LIMIT + 1, 4 * LIMIT])
def test_dynamic_scaling_reads_a_prompt_by_its_whole_length(
    length: int, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PREFILL_CHUNK_TOKENS", 20)
    model, prompt = models("dynamic"), _prompt(length)
    assert model.backend.spec.max_positions == 8 * LIMIT
    assert _take(model.session(), prompt, 1) == model.expected(prompt, 1)


def _biases(slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], window: int) -> list[list[int]]:
    """Which slots each new token sees, from the definition."""
    return [[int(slot) for slot in slots if position - window < slot <= position] for position in positions]


def test_a_window_is_seen_through_the_slots_of_the_cache(models: Any) -> None:
    layout = models("window").backend.layout
    held = cache.KVCache(layout, 100)
    rows = [StackArrays.empty(stack, "fp32", 12) for stack in layout.stacks]
    held.append(rows, range(12))
    held.truncate(9)
    positions = np.array([9, 10, 14])
    seen = [np.flatnonzero(row == 0).tolist() for row in held.window_bias(0, positions)]
    assert seen == _biases(np.arange(9), positions, 7) == [[3, 4, 5, 6, 7, 8], [4, 5, 6, 7, 8], [8]]
