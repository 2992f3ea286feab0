from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgekit.errors import CorruptArtifactError, UnsupportedError
from edgekit.families import _REFUSED, FAMILIES, family_for
from edgekit.rope import LinearScaling, Llama3Scaling, RopeSpec
from edgekit.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec

# The published config.json of each model, some less the keys that say nothing about the computation.
PUBLISHED: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "published").glob("*.json"))
}
SMOLLM2_135M = PUBLISHED["SmolLM2-135M"]
LLAMA_3_2_1B = PUBLISHED["Llama-3.2-1B-Instruct"]
QWEN3_0_6B = PUBLISHED["Qwen3-0.6B"]
PYTHIA_160M = PUBLISHED["pythia-160m"]


def read(config: dict[str, Any], **changes: Any) -> DecoderSpec:
    config = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    return family_for(config).spec(config)


def rope(config: dict[str, Any], **changes: Any) -> RopeSpec:
    rope = read(config, **changes).layers[0].attention.rope
    assert rope is not None
    return rope


def test_smollm2() -> None:
    norm = NormSpec(kind="rms", epsilon=1e-5)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=9,
            num_kv_heads=3,
            key_dim=64,
            value_dim=64,
            scale=0.125,
            qkv_bias=False,
            o_bias=False,
            rope=RopeSpec(theta=100000.0, rotary_dim=64),
        ),
        mlp=MlpSpec(width=1536, activation="silu", gated=True, bias=False),
        norm=norm,
    )
    assert read(SMOLLM2_135M) == DecoderSpec(
        family="llama",
        hidden_size=576,
        vocab_size=49152,
        max_positions=8192,
        layers=(layer,) * 30,
        norm=norm,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_llama_3_2() -> None:
    spec = read(LLAMA_3_2_1B)
    scaling = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    assert spec.layers[0].attention.rope == RopeSpec(theta=500000.0, rotary_dim=64, scaling=scaling)
    assert spec.eos_token_ids == (128001, 128008, 128009)


def test_qwen3() -> None:
    attention = read(QWEN3_0_6B).layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.key_dim) == (16, 8, 128)
    assert attention.qk_norm == NormSpec(kind="rms", epsilon=1e-6)


def test_pythia() -> None:
    spec = read(PYTHIA_160M)
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    assert attention.rope == RopeSpec(theta=10000.0, rotary_dim=16)
    assert (attention.num_kv_heads, attention.qkv_bias, attention.o_bias) == (12, True, True)
    assert mlp == MlpSpec(width=3072, activation="gelu", gated=False, bias=True)
    assert spec.norm == NormSpec(kind="layer", epsilon=1e-5)
    assert spec.layers[0].parallel_residual


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_that_transformers_wrote_again_gives_the_same_spec(name: str) -> None:
    from transformers import AutoConfig

    values = dict(PUBLISHED[name])
    rewritten = AutoConfig.for_model(values.pop("model_type"), **values).to_dict()
    assert "rope_parameters" in rewritten
    assert "rope_theta" not in rewritten
    assert read(rewritten) == read(PUBLISHED[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_config_leaves_out_is_what_transformers_assumes(name: str) -> None:
    from transformers import AutoConfig

    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
    family = PUBLISHED[name]["model_type"]
    values = {"num_attention_heads": 32, **{key: PUBLISHED[name][key] for key in sizes}}
    complete = AutoConfig.for_model(family, **values).to_dict()
    # Their classes have token ids of one model each; a config without ids has none.
    ids = {"bos_token_id": None, "eos_token_id": None}
    assert read({"model_type": family, **values}) == read({**complete, **ids})


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=128, rope_parameters={**parameters, "rope_theta": 500000.0})
    oracle = LlamaRotaryEmbedding(config)
    frequencies = rope(config.to_dict()).inverse_frequencies()
    np.testing.assert_allclose(frequencies, oracle.inv_freq.double().numpy(), rtol=1e-6)


def test_partial_frequencies_are_those_of_transformers() -> None:
    from transformers import AutoConfig, GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

    config = AutoConfig.for_model("gpt_neox", rotary_pct=0.5, rotary_emb_base=5000.0)
    assert isinstance(config, GPTNeoXConfig)
    oracle = GPTNeoXRotaryEmbedding(config)
    spec = rope(config.to_dict())
    assert spec.rotary_dim == 48
    torch.testing.assert_close(torch.from_numpy(spec.inverse_frequencies()).float(), oracle.inv_freq)


def test_both_spellings_of_linear_scaling_are_read() -> None:
    wanted = RopeSpec(theta=10000.0, rotary_dim=64, scaling=LinearScaling(factor=2.0))
    old = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 10000.0}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 10000}, "rope_scaling": None}
    assert rope(LLAMA_3_2_1B, **old) == wanted
    assert rope(LLAMA_3_2_1B, **new, rope_theta=...) == wanted


def test_a_context_given_outside_the_scaling_is_the_original_one() -> None:
    scaling = rope(LLAMA_3_2_1B, original_max_position_embeddings=4096).scaling
    assert isinstance(scaling, Llama3Scaling)
    assert scaling.original_max_positions == 4096


def test_the_head_width_is_the_configs_where_it_has_one() -> None:
    assert read(LLAMA_3_2_1B, head_dim=96).layers[0].attention.key_dim == 96
    assert read(LLAMA_3_2_1B, head_dim=None).layers[0].attention.key_dim == 64
    assert read(QWEN3_0_6B, head_dim=...).layers[0].attention.key_dim == 128


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA_3_2_1B, {"model_type": "lama"}, r"model_type 'lama'; known: .*, llama, .* \(did you mean 'll"),
        (LLAMA_3_2_1B, {"model_type": ...}, r"config.json names no model_type; known: .*, llama, "),
        (
            LLAMA_3_2_1B,
            {"quantization_config": {"quant_method": "awq"}},
            r"quantization_config = \{'quant_method': 'awq'",
        ),
        (LLAMA_3_2_1B, {"num_local_experts": 8}, r"num_local_experts = 8 .* supported: None, 0"),
        (QWEN3_0_6B, {"num_experts": 128}, r"qwen3 with num_experts = 128"),
        (LLAMA_3_2_1B, {"pretraining_tp": 2}, r"pretraining_tp = 2 .* supported: None, 1"),
        (LLAMA_3_2_1B, {"hidden_act": "quick_gelu"}, r"hidden_act 'quick_gelu'; known: gelu, .* silu"),
        (LLAMA_3_2_1B, {"sliding_window": 4096}, r"sliding_window = 4096"),
        (LLAMA_3_2_1B, {"rope_interleaved": True}, r"rope_interleaved = True"),
        (LLAMA_3_2_1B, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5"),
        (LLAMA_3_2_1B, {"num_key_value_heads": 5}, r"num_key_value_heads = 5 .* supported: divisors of 32"),
        (LLAMA_3_2_1B, {"head_dim": 63}, r"rotary width = 63 .* supported: even"),
        (LLAMA_3_2_1B, {"rope_scaling": {"rope_type": "ntk", "factor": 4}}, r"'ntk'; known: default, dynamic, linear"),
        (LLAMA_3_2_1B, {"rope_scaling": {"type": "axial", "factor": 4}}, r"rope_type 'axial'; known: default"),
        (
            LLAMA_3_2_1B,
            {"rope_scaling": {"rope_type": "linear", "factor": 4, "mscale": 2}},
            r"rope parameter 'mscale' for rope_type 'linear' is not supported; known for it: factor, partial",
        ),
        (LLAMA_3_2_1B, {"rope_scaling": {"factor": 4}}, r"rope parameter 'factor' for rope_type 'default'"),
        (QWEN3_0_6B, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"parameter 'full_attention'"),
        (LLAMA_3_2_1B, {"use_sliding_window": True}, r"llama with use_sliding_window = True"),
        (
            LLAMA_3_2_1B,
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types = \[.*sliding_attention",
        ),
        (PYTHIA_160M, {"num_key_value_heads": 4}, r"gpt_neox with num_key_value_heads = 4 .* supported: 12"),
        (PYTHIA_160M, {"head_dim": 32}, r"gpt_neox with head_dim = 32 .* supported: 64"),
        (PYTHIA_160M, {"hidden_size": 770}, r"hidden_size = 770 .* supported: multiples of the 12 heads"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read(config, **changes)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            LLAMA_3_2_1B,
            {"hidden_size": ...},
            r"the config of a llama model cannot be read: .*missing required field `hidden_size`",
        ),
        (
            QWEN3_0_6B,
            {"num_hidden_layers": "28"},
            r"the config of a qwen3 model cannot be read: Expected `int`, got `str` - at .*layers` \(it is '28'\)",
        ),
        (
            PYTHIA_160M,
            {"vocab_size": 0},
            r"the config of a gpt_neox model cannot be read: Expected `int` >= 1 - at `\$\.vocab_size`",
        ),
        (PYTHIA_160M, {"num_attention_heads": -12}, r"Expected `int` >= 1 - at `\$\.num_attention_heads`"),
        (
            LLAMA_3_2_1B,
            {"eos_token_id": "</s>"},
            r"the config of a llama model cannot be read: .*eos_token_id` \(it is '</s>'\)",
        ),
        (
            LLAMA_3_2_1B,
            {"rope_scaling": {"rope_type": "linear"}},
            r"llama rope_parameters of kind 'linear' cannot be read: .*missing required field `factor`",
        ),
        (
            LLAMA_3_2_1B,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            r"missing required field `low_freq_factor`",
        ),
        (
            LLAMA_3_2_1B,
            {"rope_scaling": {"rope_type": "linear", "factor": "big"}},
            r"Expected `float`, got `str` - at `\$\.factor`",
        ),
        (LLAMA_3_2_1B, {"num_hidden_layers": 2**31}, r"Expected `int` <= 4096 - at `\$\.num_hidden_layers`"),
        (LLAMA_3_2_1B, {"rope_theta": 0}, r"Expected `float` > 0.0 - at `\$\.rope_theta`"),
        (LLAMA_3_2_1B, {"rms_norm_eps": float("nan")}, r"at `\$\.rms_norm_eps`"),
        (PYTHIA_160M, {"rotary_pct": -1}, r"at `\$\.rotary_pct`"),
    ],
)
def test_what_cannot_be_read_is_named(config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptArtifactError, match=message):
        read(config, **changes)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mixtral", "is a mixture of experts; supported: dense models"),
        ("qwen3_moe", "is a mixture of experts; supported: dense models"),
        ("gpt_oss", "is a mixture of experts; supported: dense models"),
        ("qwen2_vl", "has parts for images or sound; supported: text-only decoders"),
        ("llava", "has parts for images or sound; supported: text-only decoders"),
        ("mamba", "has recurrent or state-space layers; supported: attention in every layer"),
        ("qwen3_next", "has recurrent or state-space layers; supported: attention in every layer"),
    ],
)
def test_a_relative_that_is_no_dense_decoder_of_text_is_refused_with_the_reason(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^a model of model_type '{model_type}' {reason}$"):
        read(LLAMA_3_2_1B, model_type=model_type)


def test_every_refused_model_is_one_of_transformers_or_comes_with_its_own_code() -> None:
    from transformers.models.auto import configuration_auto

    own_code = {"phi3_v", "phi3small", "phi4mm"}
    assert own_code < _REFUSED.keys()
    assert _REFUSED.keys() - own_code <= set(vars(configuration_auto)["CONFIG_MAPPING_NAMES"])
    assert not _REFUSED.keys() & {name for family in FAMILIES for name in family.model_types}


def test_a_message_shows_the_start_of_a_long_value() -> None:
    value = {f"key{index}": index for index in range(1000)}
    with pytest.raises(UnsupportedError) as caught:
        read(LLAMA_3_2_1B, quantization_config=value)
    assert len(str(caught.value)) < 200


def test_no_name_belongs_to_two_families() -> None:
    names = [name for family in FAMILIES for name in (*family.model_types, *family.gguf_architectures)]
    own = [{*family.model_types, *family.gguf_architectures} for family in FAMILIES]
    assert sum(map(len, own)) == len(set(names))
