r"""The model `edgekit` of the EleutherAI evaluation harness: its tasks on a bundle.

The harness knows only the models that come with it and those of modules that are imported before it parses its command
line, so its command is run from here, with all its options:

    python -m edgekit.integrations.lm_eval_model run --model edgekit --model_args pretrained=model.edge --device cpu \
        --tasks arc_easy
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgekit.errors import DoesNotFitError, UnsupportedError, UsageError, one_of
from edgekit.integrations.arguments import MemoryOptions
from edgekit.integrations.causal_lm import EdgeModelForCausalLM

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lm_eval":
        raise
    raise UnsupportedError("lm_eval is not installed; run: pip install lm-eval") from error

if TYPE_CHECKING:
    from typing_extensions import Unpack


class HarnessOptions(MemoryOptions, total=False):
    """Options of memory, and those of the harness's own model for transformers with the meaning that they have there.

    Attributes:
        max_length: Longest text in tokens; as many as there is room for unless given.
        add_bos_token: Whether to put the beginning of text before every text.
        prefix_token_id: What likelihoods of whole texts begin with.
        truncation: Whether to cut prompts that are too long.
        logits_cache: Whether one-token continuations of one context share its logits.
        enable_thinking: Passed to the chat template.
        think_end_token: Where an answer begins after thinking.
        chat_template_args: Further variables of the chat template.
    """

    max_length: int | None
    add_bos_token: bool | None
    prefix_token_id: int | None
    truncation: bool | None
    logits_cache: bool
    enable_thinking: bool | None
    think_end_token: str | int | None
    chat_template_args: dict[str, Any] | None


@register_model("edgekit")
class EdgeKitLM(HFLM):  # type: ignore[misc] # lm_eval ships no type information
    """A bundle, behind the harness's interface."""

    def __init__(
        self,
        pretrained: str,
        *,
        threads: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Unpack[HarnessOptions],
    ) -> None:
        """Loads a bundle.

        Args:
            pretrained: The bundle.
            threads: Threads that compute; None for the physical cores that this process may use.
            batch_size: Texts per call. They are computed one after another, so that more than one gains nothing.
            max_batch_size: Has to be None.
            device: The CPU.
            **options: See `HarnessOptions`.

        Raises:
            UsageError: There is no such bundle, or an option is out of range.
            DoesNotFitError: The memory budget is too small.
            UnsupportedError: An option asks for something that EdgeKit does not have.
        """
        for name in options:
            if name not in HarnessOptions.__annotations__:
                known = ["pretrained", "threads", "batch_size", *HarnessOptions.__annotations__]
                raise UnsupportedError(f"the harness's model edgekit has no option {one_of(name, known)}")
        if max_batch_size is not None or not str(batch_size).isdigit() or int(batch_size) < 1:
            raise UsageError(
                f"batch_size is {batch_size!r} and max_batch_size {max_batch_size!r}; EdgeKit computes one text after "
                "another: give a number, such as 1, and no maximum"
            )
        if device not in (None, "cpu"):
            raise UnsupportedError(
                f"device is {device!r}, the harness's choice unless told otherwise; EdgeKit computes on the CPU: pass "
                "--device cpu"
            )
        model = EdgeModelForCausalLM.from_pretrained(
            pretrained,
            threads=threads,
            memory_budget=options.pop("memory_budget", None),
            ctx_size=options.pop("ctx_size", None),
            kv_cache_dtype=options.pop("kv_cache_dtype", "auto"),
            kv_policy=options.pop("kv_policy", "stop"),
        )
        # The harness cuts texts to what the model says it takes.
        limits = model.llm.limits
        options["max_length"] = _max_length(options.get("max_length"), min(limits.max_tokens, limits.max_positions))
        super().__init__(
            pretrained=model,
            backend="causal",
            tokenizer=AutoTokenizer.from_pretrained(pretrained),
            batch_size=int(batch_size),
            **options,
        )


def _max_length(asked: int | None, room: int) -> int:
    """Returns the longest text in tokens."""
    if asked is not None and asked > room:
        raise DoesNotFitError(
            f"max_length is {asked}, there is room for {room} tokens; ask for no more, or give more memory or a larger "
            "ctx_size"
        )
    return asked or room


if __name__ == "__main__":
    cli_evaluate()
