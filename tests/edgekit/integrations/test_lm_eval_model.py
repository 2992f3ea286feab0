"""The harness's answers about a bundle against its answers about the same model in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from transformers import AutoTokenizer

from edgekit.errors import EdgeKitError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytest.importorskip("lm_eval", reason="the EleutherAI harness is not installed; get it with: pip install lm-eval")


TinyBundle: TypeAlias = Callable[[str], Path]
HuggingFaceModel: TypeAlias = Callable[[Path], "PreTrainedModel"]
Pair: TypeAlias = tuple[Any, Any]

TASKS = Path(__file__).resolve().parents[3] / "benchmarks" / "tasks"


@pytest.fixture
def pair(tiny_bundle: TinyBundle, tiny_llama: Path, hugging_face: HuggingFaceModel) -> Pair:
    """The harness's view of a bundle, and of the checkpoint in transformers, in batches of different lengths."""
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    import edgekit.integrations.lm_eval_model  # noqa: F401 - registers the model

    bundle = get_model("edgekit")(pretrained=str(tiny_bundle("llama")), threads=1, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    return bundle, HFLM(pretrained=hugging_face(tiny_llama), tokenizer=tokenizer, backend="causal", batch_size=3)


def _requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)]


def test_likelihoods_are_those_of_transformers(pair: Pair) -> None:
    endings = [("The quick", " brown"), ("It's still jumping, isn't", " it?"), ("a", "b"), ("", "lazy dogs")]
    (bundle, oracle), requests = pair, _requests("loglikelihood", endings)
    for got, expected in zip(
        bundle.loglikelihood(requests, disable_tqdm=True),
        oracle.loglikelihood(requests, disable_tqdm=True),
        strict=True,
    ):
        assert got == (pytest.approx(expected[0], abs=1e-3), expected[1])


def test_whole_texts_are_as_likely_as_in_transformers(pair: Pair) -> None:
    (bundle, oracle), requests = pair, _requests("loglikelihood_rolling", [("The quick brown fox. " * 40,), ("Hi",)])
    expected = oracle.loglikelihood_rolling(requests, disable_tqdm=True)
    assert bundle.loglikelihood_rolling(requests, disable_tqdm=True) == pytest.approx(expected, abs=1e-2)


def test_generated_texts_are_those_of_transformers(pair: Pair) -> None:
    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    (bundle, oracle), requests = pair, _requests("generate_until", [("The quick", options), ("It is", options)])
    expected = oracle.generate_until(requests, disable_tqdm=True)
    assert bundle.generate_until(requests, disable_tqdm=True) == expected


def test_the_task_of_facts_runs_and_scores_a_bundle_as_transformers(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(TASKS.parents[1])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    scores = []
    for model in pair:
        found = simple_evaluate(
            model,
            tasks=["edgekit_facts"],
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            limit=20,
            bootstrap_iters=0,
        )
        assert found is not None
        scores.append([found["results"]["edgekit_facts"][f"{metric},none"] for metric in ("acc", "acc_norm")])
    assert scores[0] == scores[1]
    assert 0 < scores[0][0] < 1


def test_every_fact_has_four_endings_one_of_which_is_true() -> None:
    facts = [json.loads(line) for line in (TASKS / "edgekit_facts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(facts) == 100
    assert len({fact["beginning"] for fact in facts}) == 100
    assert all(len(set(fact["endings"])) == 4 for fact in facts)
    # Whoever always takes the same place scores what whoever guesses does.
    places = [sum(fact["answer"] == place for fact in facts) for place in range(4)]
    assert min(places) >= 15
    assert sum(places) == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:0"}, "pass --device cpu"),
        ({"batch_size": "auto"}, "batch_size is 'auto'"),
        ({"max_batch_size": 8}, "max_batch_size 8"),
        ({"dtype": "float16"}, "no option 'dtype'"),
        ({"parallelize": True}, "no option 'parallelize'"),
    ],
)
def test_options_that_mean_nothing_here_are_refused_by_name(
    tiny_bundle: TinyBundle, options: dict[str, Any], message: str
) -> None:
    from edgekit.integrations.lm_eval_model import EdgeKitLM

    with pytest.raises(EdgeKitError, match=message):
        EdgeKitLM(str(tiny_bundle("llama")), **options)


def test_the_options_of_memory_reach_the_model_and_texts_are_cut_to_what_fits(tiny_bundle: TinyBundle) -> None:
    from edgekit.integrations.lm_eval_model import EdgeKitLM

    path = str(tiny_bundle("llama"))
    model = EdgeKitLM(path, threads=1, memory_budget="64GiB", ctx_size=100, kv_cache_dtype="int8", kv_policy="stop")
    memory = model.model.llm.plan.memory
    assert (memory.budget_bytes, memory.context_tokens, memory.layout.dtype) == (64 << 30, 100, "int8")
    assert model.max_length == 100
    long = _requests("loglikelihood", [("The quick brown fox " * 60, " jumps")])
    ((likelihood, _),) = model.loglikelihood(long, disable_tqdm=True)
    assert -100 < likelihood < 0
    assert EdgeKitLM(path, threads=1, max_length=50).max_length == 50
    assert EdgeKitLM(path, threads=1).max_length == 256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": "50MiB"}, "this model does not fit into the memory budget 50 MiB"),
        ({"memory_budget": 512}, "memory budget is 512; it must be a text with a unit"),
        ({"kv_cache_dtype": "int4"}, "KV cache dtype 'int4'"),
        ({"kv_policy": "window"}, "KV policy 'window' drops tokens"),
        ({"kv_budget_tokens": 64}, "no option 'kv_budget_tokens'"),
        ({"max_length": 257}, "max_length is 257, there is room for 256 tokens"),
        ({"ctx_size": 100, "max_length": 101}, "max_length is 101, there is room for 100 tokens"),
    ],
)
def test_memory_that_is_not_there_is_refused(tiny_bundle: TinyBundle, options: dict[str, Any], message: str) -> None:
    from edgekit.integrations.lm_eval_model import EdgeKitLM

    with pytest.raises(EdgeKitError, match=message):
        EdgeKitLM(str(tiny_bundle("llama")), threads=1, **options)
