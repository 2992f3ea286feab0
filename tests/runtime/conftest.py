from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import (
    Tokenizer as Backend,
)

from edgekit.cache_layout import CacheLayout, KVCacheDtype, cache_layout
from edgekit.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu
from edgekit.runtime.cache import KVCache
from edgekit.runtime.llm import LLM
from edgekit.runtime.lowered import lowered_graph
from edgekit.runtime.step import Backend as StepBackend
from edgekit.runtime.step import StepInputs, StepOutputs, StepRunner
from edgekit.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgekit.bundle import Bundle

Load: TypeAlias = Callable[[Backend], Tokenizer]
TinyBundle: TypeAlias = Callable[..., "Bundle"]
ExportChanged: TypeAlias = Callable[..., "Bundle"]
TinyBackend: TypeAlias = Callable[..., OnnxRuntimeCpu]
Greedy: TypeAlias = Callable[..., list[int]]

VOCABULARY = 320
CORPUS = (
    "The quick brown fox jumps over the lazy dog. It's 12:30, and the dog doesn't care!",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich, sagte sie.",
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter en canoë.",
    "你好，世界！今天天气很好。東京の天気は晴れです。 Hello world, hello there, hello again.",
    "def add(left, right):\n    return left + right\n\n\nprint(add(1, 2))  # 3",
)
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>")


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """A function that stores a tokenizer and loads it as the runtime does."""

    def load_backend(backend: Backend) -> Tokenizer:
        backend.save(str(tmp_path / "tokenizer.json"))
        return Tokenizer(tmp_path / "tokenizer.json")

    return load_backend


@pytest.fixture
def byte_level() -> Backend:
    """GPT-2, Llama 3, Qwen: bytes written as printable characters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<s>", "</s>", *CHAT_TOKENS])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


@pytest.fixture
def byte_fallback() -> Backend:
    """Llama 2, Mistral, Phi-3, Gemma: sentencepiece BPE, whose unknown characters fall back to byte tokens."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.train_from_iterator(CORPUS[:1], trainers.BpeTrainer(vocab_size=100, show_progress=False))

    def with_bytes(model: dict[str, Any]) -> None:
        tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *sorted(model["vocab"], key=model["vocab"].__getitem__)]
        model.update(vocab={token: i for i, token in enumerate(tokens)}, byte_fallback=True, unk_token="<unk>")

    backend = _edited(backend, with_bytes)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture
def unigram() -> Backend:
    """sentencepiece Unigram with byte fallback, decoded by Metaspace."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS[:1], trainer)

    def with_bytes(model: dict[str, Any]) -> None:
        model.update(vocab=[*model["vocab"], *([token, -20.0] for token in BYTE_TOKENS)], byte_fallback=True)

    backend = _edited(backend, with_bytes)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return backend


@pytest.fixture
def word_piece() -> Backend:
    """BERT: continuations are marked, and spaces before punctuation are cleaned up."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return backend


@pytest.fixture
def word_suffix() -> Backend:
    """GPT-1: the end of a word is marked, so a space appears only with the token after it."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


BACKENDS = ("byte_level", "byte_fallback", "unigram", "word_piece", "word_suffix")
BYTE_TOKENS = tuple(f"<0x{value:02X}>" for value in range(256))


@pytest.fixture(params=BACKENDS)
def any_tokenizer(request: pytest.FixtureRequest, load: Load) -> Tokenizer:
    """One tokenizer of each kind."""
    backend: Backend = request.getfixturevalue(request.param)
    return load(backend)


def _edited(backend: Backend, edit: Callable[[dict[str, Any]], None]) -> Backend:
    content = json.loads(backend.to_str())
    edit(content["model"])
    return Backend.from_str(json.dumps(content))


@pytest.fixture(scope="session")
def export_changed(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Any) -> ExportChanged:
    """Exports a variant after changes: `files` maps names to new fields of JSON, whole texts, or None to remove."""
    from edgekit.export.exporter import ExportOptions, export_bundle
    from edgekit.export.storage_plan import QuantizationOptions

    def export(variant: str, precision: Any = "fp32", files: Mapping[str, Any] | None = None) -> Bundle:
        directory = tmp_path_factory.mktemp("changed")
        shutil.copytree(tiny_checkpoint(variant), directory / "checkpoint")
        for name, change in (files or {}).items():
            file = directory / "checkpoint" / name
            if change is None:
                file.unlink()
            else:
                content = change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change)
                file.write_text(content, encoding="utf-8")
        options = ExportOptions(quantization=QuantizationOptions(precision=precision))
        return export_bundle(directory / "checkpoint", directory / "model.edge", options, lambda *_: None)

    return export


@pytest.fixture(scope="session")
def tiny_bundle(export_changed: ExportChanged) -> TinyBundle:
    """A variant's bundle, made once: ``tiny_bundle("qwen3")``, ``tiny_bundle("llama", "int4")``. Do not change it."""
    made: dict[tuple[str, str], Bundle] = {}

    def make(variant: str = "llama", precision: str = "fp32") -> Bundle:
        if (variant, precision) not in made:
            made[variant, precision] = export_changed(variant, precision)
        return made[variant, precision]

    return make


@pytest.fixture
def tiny_llm(tiny_bundle: TinyBundle) -> LLM:
    """A tiny Llama in fp32, nothing generated yet."""
    return LLM(tiny_bundle().path, threads=1)


def load_backend(bundle: Bundle, dtype: KVCacheDtype = "fp32") -> OnnxRuntimeCpu:
    """Loads a bundle's graph, lowered for a cache of this dtype."""
    layout = cache_layout(bundle.manifest.spec, dtype)
    return OnnxRuntimeCpu(lowered_graph(bundle, layout), bundle.manifest.spec, 1, layout)


@pytest.fixture(scope="session")
def tiny_backend(tiny_bundle: TinyBundle) -> TinyBackend:
    """A variant in ONNX Runtime, lowered and loaded once."""
    made: dict[tuple[str, ...], OnnxRuntimeCpu] = {}

    def make(*variant: str) -> OnnxRuntimeCpu:
        if variant not in made:
            bundle = tiny_bundle(*variant)
            made[variant] = load_backend(bundle)
        return made[variant]

    return make


@pytest.fixture(scope="session")
def scoring_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Any) -> TinyBundle:
    """A variant's bundle that says which tokens are attended to, made once. Do not change it."""
    from edgekit.export.exporter import ExportOptions, export_bundle
    from edgekit.export.graph.kv_cache import GraphOptions
    from edgekit.export.storage_plan import QuantizationOptions

    made: dict[str, Bundle] = {}

    def make(variant: str = "llama") -> Bundle:
        if variant not in made:
            output = tmp_path_factory.mktemp("scoring") / "model.edge"
            exact = QuantizationOptions(precision="fp32")
            options = ExportOptions(quantization=exact, graph=GraphOptions(attention_scores=True))
            made[variant] = export_bundle(tiny_checkpoint(variant), output, options, lambda *_: None)
        return made[variant]

    return make


@pytest.fixture(scope="session")
def scoring_backend(scoring_bundle: TinyBundle) -> TinyBackend:
    """The same in ONNX Runtime, by cache dtype: ``scoring_backend("llama", "int8")``."""
    made: dict[tuple[str, KVCacheDtype], OnnxRuntimeCpu] = {}

    def make(variant: str = "llama", dtype: KVCacheDtype = "fp32") -> OnnxRuntimeCpu:
        if (variant, dtype) not in made:
            made[variant, dtype] = load_backend(scoring_bundle(variant), dtype)
        return made[variant, dtype]

    return make


@dataclass
class Watched:
    """A backend that notes what it is asked to compute, after calling `before`, which may raise."""

    backend: StepBackend
    steps: list[StepInputs] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None

    @property
    def layout(self) -> CacheLayout:
        return self.backend.layout

    @property
    def has_attention_mass(self) -> bool:
        return self.backend.has_attention_mass

    def runner(self, cache: KVCache) -> StepRunner:
        return _WatchedRunner(self, self.backend.runner(cache))


@dataclass
class _WatchedRunner:
    watched: Watched
    inner: StepRunner

    def step(self, inputs: StepInputs) -> StepOutputs:
        self.watched.before()
        self.watched.steps.append(inputs)
        outputs = self.inner.step(inputs)
        self.watched.logits.append(outputs.logits.copy())
        self.watched.after()
        return outputs


@pytest.fixture
def watched(tiny_backend: TinyBackend) -> Watched:
    """The tiny Llama, watched."""
    return Watched(tiny_backend("llama"))


@pytest.fixture(scope="session")
def greedy(tiny_checkpoint: Any, hugging_face: Any) -> Greedy:
    """The tokens that Hugging Face's `generate` adds to a prompt: ``greedy("llama", prompt, 20)``."""

    known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def generate(variant: str, prompt: list[int], count: int) -> list[int]:
        key = (variant, tuple(prompt))
        if len(known.get(key, ())) < count:
            known[key] = _hugging_face_greedy(hugging_face(tiny_checkpoint(variant)), prompt, count)
        return known[key][:count]

    return generate


def _hugging_face_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=VOCABULARY,  # no token, for it not to stop
        output_logits=True,
        return_dict_in_generate=True,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for matrices this small, more of them wait for each other
    with torch.no_grad():
        done = model.generate(torch.tensor([prompt]), generation_config=config)
    torch.set_num_threads(threads)
    best = torch.stack(done.logits).topk(2).values
    margin = float((best[..., 0] - best[..., 1]).min())
    assert margin > 2e-4, f"rounding may decide a token of this prompt (margin {margin:g}): take another one"
    tokens: list[int] = done.sequences[0, len(prompt) :].tolist()
    return tokens
