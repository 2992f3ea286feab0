"""`EdgeModelForCausalLM`: a bundle where transformers and optimum expect a model."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekit.bundle import MANIFEST, open_bundle, staged_directory
from edgekit.errors import MissingExtraError, UnsupportedError, UsageError
from edgekit.runtime.llm import LLM
from edgekit.runtime.loading import KVCacheOptions

try:
    import torch
    from optimum.modeling_base import OptimizedModel
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, GenerationMixin
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ModuleNotFoundError as error:
    raise MissingExtraError((error.name or "optimum").partition(".")[0], "optimum") from error

from edgekit.integrations.arguments import (
    as_array,
    check_device,
    check_forward_options,
    check_load_options,
    check_policy,
    check_positions,
    present_tokens,
    wanted_columns,
)
from edgekit.integrations.config import EdgeKitConfig, generation_config, model_config
from edgekit.integrations.conversations import ConversationCache, Tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edgekit.export.storage_plan import QuantizationOptions
    from edgekit.integrations.arguments import ForwardOptions, LoadOptions

# Which of its two names for the cache this transformers uses.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class EdgeModelForCausalLM(OptimizedModel, GenerationMixin):  # type: ignore[misc] # optimum ships no type information
    """A bundle with the interface of a transformers model.

        model = EdgeModelForCausalLM.from_pretrained("model.edge")
        tokenizer = AutoTokenizer.from_pretrained("model.edge")
        print(pipeline("text-generation", model=model, tokenizer=tokenizer)("The capital of France is"))

    Rows of a batch are computed one after another, each from its own tokens alone: padding, on either side, costs
    nothing and changes nothing.

    Attributes:
        llm: The loaded bundle.
        config: Its description, an `EdgeKitConfig`.
        generation_config: Defaults of `generate`: those of the model's authors.
        device: The CPU.
        dtype: float32, of the logits.
    """

    config_class = EdgeKitConfig
    auto_model_class = AutoModelForCausalLM
    base_model_prefix = "edgekit"
    main_input_name = "input_ids"
    input_modalities = ("text",)
    device = torch.device("cpu")
    dtype = torch.float32
    _is_stateful = False

    config: EdgeKitConfig
    generation_config: GenerationConfig

    def __init__(self, llm: LLM) -> None:
        """Wraps a loaded bundle.

        Args:
            llm: The bundle, with the KV policy "stop".

        Raises:
            UnsupportedError: It has another one.
        """
        check_policy(llm.plan.policy.name)
        super().__init__(llm, model_config(llm.bundle, llm.tokenizer))
        self.llm = llm
        self.generation_config = generation_config(llm.bundle, self.config)

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | os.PathLike[str],
        *,
        export: bool = False,
        output: str | os.PathLike[str] | None = None,
        quantization: QuantizationOptions | None = None,
        threads: int | None = None,
        **options: Unpack[LoadOptions],
    ) -> EdgeModelForCausalLM:
        """Loads a bundle, or exports a checkpoint and loads that.

        Args:
            model_id: A bundle; with export=True a directory with safetensors, a .gguf file or a hub id.
            export: Whether to export first.
            output: Where the exported bundle stays; None for a temporary place that goes with the object.
            quantization: How the exported matrices are stored; `QuantizationOptions()`, int4, when None.
            threads: Threads that compute; None for the physical cores that this process may use.
            **options: See `LoadOptions`.

        Raises:
            UsageError: There is no such bundle, an option is unknown or needs export=True, or the output is taken.
            UnsupportedError: An option or the model asks for something that EdgeKit does not have.
            DoesNotFitError: The memory budget is too small.
            CorruptArtifactError: A file is damaged.
            ParityError: The exported graph's logits are not the model's.
        """
        check_load_options(options)
        if export:
            bundle, temporary = _export(model_id, output, quantization, options)
            try:
                model = cls(_loaded(bundle, threads, options))
            except BaseException:
                if temporary is not None:
                    shutil.rmtree(temporary, ignore_errors=True)
                raise
            if temporary is not None:
                weakref.finalize(model, shutil.rmtree, temporary, ignore_errors=True)
            return model
        needless = {"output": output, "quantization": quantization, **_export_options(options)}
        for name, value in needless.items():
            if value not in (None, False):
                raise UsageError(f"{name} is {value!r}, which is for exports; pass export=True or leave it out")
        return cls(_loaded(_bundle_at(model_id), threads, options))

    def save_pretrained(self, save_directory: str | os.PathLike[str], *, push_to_hub: bool = False) -> None:
        """Copies the bundle, its tokenizer included.

        Args:
            save_directory: Where to; a bundle that is there is replaced.
            push_to_hub: Has to be False.

        Raises:
            UsageError: Something else is there.
            UnsupportedError: A push is asked for.
            StorageError: The disk refused a write.
        """
        if push_to_hub:
            raise UnsupportedError(
                f"push_to_hub is {push_to_hub!r}; save the bundle, and upload the folder with: hf upload REPO FOLDER"
            )
        Path(save_directory).parent.mkdir(parents=True, exist_ok=True)
        self._save_pretrained(save_directory)

    def push_to_hub(self, *_: Any, **__: Any) -> Any:
        """Refuses: a bundle is uploaded as a folder."""
        raise UnsupportedError(
            "push_to_hub is not supported; save the bundle, and upload it with: hf upload REPO FOLDER"
        )

    def _save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        bundle = self.llm.bundle
        with staged_directory(Path(save_directory), force=True) as staging:
            for name in (*bundle.manifest.files, MANIFEST):
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(bundle.file(name), staging / name)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: ConversationCache | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **options: Unpack[ForwardOptions],
    ) -> CausalLMOutputWithPast:
        """Computes logits.

        Args:
            input_ids: Token ids, shape (B, S).
            attention_mask: 0 for padding, which is left out, and 1 for tokens, shape (B, past columns + S) or, of the
                new columns alone, (B, S).
            position_ids: Positions, shape (B or 1, S). They count a row's own tokens, as `generate` counts them; others
                are refused.
            past_key_values: What an earlier call returned. It goes on from there, and changes.
            labels: Targets of the same columns, shape (B, S), -100 where there are none; the loss is the mean negative
                log-likelihood in nats of the targets, each predicted from the column before.
            logits_to_keep: How many columns from the end have logits, 0 for all; or the columns themselves, shape (C,).
            **options: See `ForwardOptions`.

        Returns:
            Logits, shape (B, C, V), float32, 0 where there is padding, and the cache.

        Raises:
            UsageError: Shapes, positions or token ids are wrong, or the mask differs from an earlier call's.
            UnsupportedError: An option asks for something that EdgeKit does not compute.
            DoesNotFitError: A row is longer than the context, or the rows do not fit into the memory budget.
        """
        check_forward_options(options)
        cache = past_key_values if options.get("cache") is None else options["cache"]
        if cache is None:
            cache = ConversationCache(self.llm)
        self._check_cache(cache)
        token_ids = as_array(input_ids, "input_ids", 2)
        present = present_tokens(attention_mask, token_ids.shape, cache.present)
        check_positions(position_ids, cache.positions(present), present)
        self._check_tokens(token_ids[present])
        columns = wanted_columns(logits_to_keep, token_ids.shape[1])
        logits = torch.from_numpy(cache.read(token_ids, present, columns))
        use_cache = options.get("use_cache")
        kept = self.config.use_cache if use_cache is None else use_cache
        output = CausalLMOutputWithPast(logits=logits)
        if kept:
            output[_CACHE] = cache
        if labels is not None:
            output["loss"] = _loss(logits, labels, tuple(input_ids.shape))
        return output

    def _check_cache(self, cache: object) -> None:
        if not isinstance(cache, ConversationCache):
            raise UnsupportedError(
                f"the cache is a {type(cache).__name__}; pass what an earlier call of this model returned, or nothing"
            )
        if cache.backend is not self.llm.backend:
            raise UsageError("the cache belongs to another EdgeModelForCausalLM; pass what this one returned")

    def _check_tokens(self, token_ids: Tokens) -> None:
        wrong = token_ids[(token_ids < 0) | (token_ids >= self.config.vocab_size)]
        if len(wrong):
            raise UsageError(
                f"token id {int(wrong[0])} is not in the model's vocabulary of {self.config.vocab_size}; is it padding "
                "that attention_mask should leave out?"
            )

    def _prepare_cache_for_generation(  # type: ignore[override] # it declares a result that it never returns
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *_: Any
    ) -> None:
        """What `generate` calls once it knows all its options: refuses some, and makes the cache."""
        meaningless = {
            "cache_implementation": (None, "dynamic"),
            "output_attentions": (None, False),
            "output_hidden_states": (None, False),
            "compile_config": (None,),
        }
        for name, allowed in meaningless.items():
            value = getattr(generation_config, name, None)
            if value not in allowed:
                raise UnsupportedError(f"{name} is {value!r}; EdgeKit has its own graph and cache; leave it out")
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise UsageError(
                "a row of the batch ends in padding, after which nothing can be generated; pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
        if generation_config.use_cache is not False and model_kwargs.get(_CACHE) is None:
            model_kwargs[_CACHE] = ConversationCache(self.llm)

    def generate_batch(self, *_: Any, **__: Any) -> Any:
        """Refuses continuous batching, which `cache_implementation="paged"` asks for."""
        raise UnsupportedError("continuous batching (generate_batch, paged caches) is unknown to EdgeKit; use generate")

    @classmethod
    def can_generate(cls) -> bool:
        """True: there is a head."""
        return True

    def to(self, device: str | torch.device) -> EdgeModelForCausalLM:
        """Stays on the CPU.

        Raises:
            UnsupportedError: Another device is asked for.
        """
        check_device("device", device)
        return self

    def eval(self) -> EdgeModelForCausalLM:
        """Changes nothing: a bundle cannot be trained."""
        return self

    def get_experts_implementation(self) -> dict[str, str]:
        """Returns nothing; transformers asks every model for its mixture of experts."""
        return {}

    def is_remote_code(self) -> bool:
        """False: no code comes with a bundle."""
        return False


AutoConfig.register(EdgeKitConfig.model_type, EdgeKitConfig, exist_ok=True)
# This is what keeps pipelines from warning that they do not know the class.
AutoModelForCausalLM.register(EdgeKitConfig, EdgeModelForCausalLM, exist_ok=True)


def _loaded(bundle: Path, threads: int | None, options: LoadOptions) -> LLM:
    return LLM(
        bundle,
        threads=threads,
        memory_budget=options.get("memory_budget"),
        ctx_size=options.get("ctx_size"),
        kv_cache=KVCacheOptions(dtype=options.get("kv_cache_dtype", "auto")),
    )


def _export_options(options: LoadOptions) -> dict[str, Any]:
    return {"revision": options.get("revision"), "trust_remote_code": options.get("trust_remote_code", False)}


def _export(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    quantization: QuantizationOptions | None,
    options: LoadOptions,
) -> tuple[Path, str | None]:
    """Exports a checkpoint; returns the bundle, and the temporary directory that it is in, if it is."""
    from edgekit.export.exporter import ExportOptions, export_bundle
    from edgekit.export.storage_plan import QuantizationOptions

    if (Path(source) / MANIFEST).is_file():
        raise UsageError(f"{str(source)!r} is a bundle already; leave export=True out")
    chosen = ExportOptions(quantization=quantization or QuantizationOptions(), **_export_options(options))
    temporary = tempfile.mkdtemp(prefix="edgekit-") if output is None else None
    try:
        target = Path(temporary) / "model.edge" if temporary is not None else output
        assert target is not None
        return export_bundle(source, target, chosen, _no_progress).path, temporary
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, ModuleNotFoundError):
            raise MissingExtraError(_library(error), "export") from error
        raise


def _library(error: ModuleNotFoundError) -> str:
    return (error.name or str(error)).partition(".")[0]


def _no_progress(*_: object) -> None:
    """Says nothing: libraries are quiet."""


def _bundle_at(model_id: str | os.PathLike[str]) -> Path:
    path = Path(model_id)
    if not (path / MANIFEST).is_file():
        what = "is not a bundle" if path.exists() else "is no bundle on this machine"
        raise UsageError(f"{str(model_id)!r} {what}; pass export=True to export a checkpoint, or the path of a bundle")
    return open_bundle(path).path


def _loss(logits: torch.Tensor, labels: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(labels.shape) != shape or logits.shape[1] != shape[1]:
        raise UsageError(
            f"labels has shape {tuple(labels.shape)}; it must be {shape}, and logits_to_keep be left out, for a loss"
        )
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
