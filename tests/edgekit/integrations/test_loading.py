"""What `from_pretrained` takes and refuses, what `save_pretrained` leaves, and what transformers makes of both."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from transformers import AutoTokenizer, TextIteratorStreamer, pipeline

from edgekit import EdgeModelForCausalLM, QuantizationOptions, open_bundle
from edgekit.errors import CorruptArtifactError, EdgeKitError, UnsupportedError, UsageError
from edgekit.integrations.config import EdgeKitConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TinyCheckpoint: TypeAlias = Callable[[str], Path]
TinyBundle: TypeAlias = Callable[[str], Path]
TinyModel: TypeAlias = Callable[[str], EdgeModelForCausalLM]
HuggingFaceModel: TypeAlias = Callable[[Path], "PreTrainedModel"]

IDS = torch.tensor([[5, 6, 7, 8]])
FP32 = QuantizationOptions(precision="fp32")


def _load(path: Path, **options: Any) -> EdgeModelForCausalLM:
    return EdgeModelForCausalLM.from_pretrained(path, threads=1, **options)


def test_a_saved_model_is_the_same_bundle(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    target = tmp_path / "new" / "copy.edge"
    model.save_pretrained(target)
    assert open_bundle(target).digest == model.llm.bundle.digest
    open_bundle(target).verify()
    model.save_pretrained(target)  # once more over what is there
    copied = _load(target)
    torch.testing.assert_close(copied(input_ids=IDS).logits, model(input_ids=IDS).logits, atol=0, rtol=0)
    copied.save_pretrained(target)  # over itself
    open_bundle(target).verify()


def test_nothing_but_a_bundle_is_replaced(tiny_model: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not a bundle"):
        tiny_model("llama").save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(UnsupportedError, match="push_to_hub is True"):
        tiny_model("llama").save_pretrained(tmp_path / "x.edge", push_to_hub=True)


def test_a_checkpoint_is_exported_when_asked(
    tiny_llama: Path, hugging_face: HuggingFaceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = _load(tiny_llama, export=True, quantization=FP32)
    with torch.inference_mode():
        expected = hugging_face(tiny_llama)(input_ids=IDS).logits
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, atol=1e-4, rtol=0)
    place = model.llm.bundle.path
    assert place.is_relative_to(tmp_path)
    del model
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_an_exported_checkpoint_stays_where_it_is_wanted(tiny_llama: Path, tmp_path: Path) -> None:
    model = _load(tiny_llama, export=True, output=tmp_path / "kept.edge")
    assert model.llm.bundle.path == tmp_path / "kept.edge"
    assert set(model.llm.bundle.manifest.storage.values()) == {"int4 affine block 32", "int8 symmetric block 32"}
    del model
    gc.collect()
    open_bundle(tmp_path / "kept.edge").verify()
    with pytest.raises(UsageError, match=r"kept\.edge.* exists"):
        _load(tiny_llama, export=True, output=tmp_path / "kept.edge")


def test_a_failed_export_leaves_nothing(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Path(shutil.copytree(tiny_llama, tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with pytest.raises(UnsupportedError, match="mamba"):
        _load(broken, export=True)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_checkpoint_or_a_hub_id_without_export_is_refused_with_a_hint(tiny_llama: Path) -> None:
    with pytest.raises(UsageError, match="is not a bundle; pass export=True"):
        _load(tiny_llama)
    with pytest.raises(UsageError, match=r"'Qwen/Qwen3-0\.6B' is no bundle on this machine; pass export=True"):
        _load(Path("Qwen/Qwen3-0.6B"))


def test_a_bundle_is_not_exported_again(tiny_bundle: TinyBundle) -> None:
    with pytest.raises(UsageError, match="is a bundle already"):
        _load(tiny_bundle("llama"), export=True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("revision", "main"),
        ("trust_remote_code", True),
        ("output", "x.edge"),
        ("quantization", FP32),
        ("dtype", torch.float16),
        ("torch_dtype", "bfloat16"),
        ("device", "cuda"),
        ("device_map", "auto"),
        ("attn_implementation", "sdpa"),
        ("token", "secret"),
        ("low_cpu_mem_usage", True),
    ],
)
def test_options_that_mean_nothing_for_a_bundle_are_refused_by_name(
    tiny_bundle: TinyBundle, option: str, value: object
) -> None:
    with pytest.raises(EdgeKitError, match=option):
        _load(tiny_bundle("llama"), **{option: value})


def test_options_that_mean_what_is_done_are_accepted(tiny_bundle: TinyBundle) -> None:
    model = _load(
        tiny_bundle("llama"),
        dtype=torch.float32,
        torch_dtype="auto",
        device="cpu",
        device_map={"": "cpu"},
        revision=None,
    )
    assert model.to("cpu").eval() is model
    with pytest.raises(UnsupportedError, match="device is 'cuda'"):
        model.to("cuda")


def test_the_config_is_that_of_the_checkpoint(
    tiny_model: TinyModel, tiny_llama: Path, hugging_face: HuggingFaceModel
) -> None:
    config, expected = tiny_model("llama").config, hugging_face(tiny_llama).config
    assert isinstance(config, EdgeKitConfig)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        assert getattr(config, name) == getattr(expected, name)
    assert (config.head_dim, config.max_position_embeddings, config.bos_token_id) == (16, 256, 0)
    assert (config.model_type, config.is_encoder_decoder) == ("edgekit", False)


def test_generation_defaults_are_those_of_the_checkpoint_with_every_end_token(
    tiny_model: TinyModel, tiny_llama: Path, tmp_path: Path
) -> None:
    defaults = tiny_model("llama").generation_config
    assert (defaults.do_sample, defaults.temperature, defaults.top_p) == (True, 0.7, 0.9)
    assert defaults.eos_token_id == [2, 1]
    changed = Path(shutil.copytree(tiny_llama, tmp_path / "changed"))
    (changed / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 7}))
    model = _load(changed, export=True, quantization=FP32)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == ([1, 2], 7)


def test_the_tokenizer_of_a_bundle_is_that_of_its_checkpoint(tiny_bundle: TinyBundle, tiny_llama: Path) -> None:
    tokenizer, expected = AutoTokenizer.from_pretrained(tiny_bundle("llama")), AutoTokenizer.from_pretrained(tiny_llama)
    for text in ("Hello, the quick brown fox", "<|im_start|>user\nÜnïcödé 世界<|im_end|>", "", "  two  spaces "):
        assert tokenizer(text).input_ids == expected(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == expected.decode(expected(text).input_ids)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert (len(tokenizer), tokenizer.model_max_length, tokenizer.padding_side) == (len(expected), 256, "left")
    messages = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_tokenizer_saved_over_a_bundle_is_noticed(tiny_model: TinyModel, tiny_llama: Path, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "m.edge")
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path / "m.edge")
    with pytest.raises(CorruptArtifactError, match="tokenizer"):
        _load(tmp_path / "m.edge")


def test_pipelines_take_a_bundle_for_a_model(
    tiny_model: TinyModel,
    tiny_bundle: TinyBundle,
    tiny_llama: Path,
    hugging_face: HuggingFaceModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bundle("llama"))
    tokenizer.pad_token = tokenizer.eos_token
    prompts = ["The quick", "Hello, the lazy brown dog is", "x"]
    texts = []
    for model in (tiny_model("llama"), hugging_face(tiny_llama)):
        run: Any = pipeline("text-generation", model=model, tokenizer=tokenizer)
        alone = [run(prompt, max_new_tokens=8, do_sample=False)[0]["generated_text"] for prompt in prompts]
        batch = [each[0]["generated_text"] for each in run(prompts, batch_size=3, max_new_tokens=8, do_sample=False)]
        assert batch == alone
        texts.append(alone)
    assert texts[0] == texts[1]
    assert "not supported" not in caplog.text


def test_streamers_get_every_token(tiny_model: TinyModel, tiny_bundle: TinyBundle) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bundle("llama"))
    streamer = TextIteratorStreamer(tokenizer)
    generated = tiny_model("llama").generate(input_ids=IDS, max_new_tokens=6, do_sample=False, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(generated[0])
