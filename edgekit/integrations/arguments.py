"""What `EdgeModelForCausalLM` is given: which options mean something, and tensors as arrays.

transformers has many options for models of its own making. Those that mean what EdgeKit does are accepted, all others
refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch

from edgekit.errors import UnsupportedError, UsageError, one_of
from edgekit.runtime.memory_plan import DtypeChoice

if TYPE_CHECKING:
    from edgekit.integrations.conversations import ConversationCache, Flags, Tokens

__all__ = [
    "ForwardOptions",
    "LoadOptions",
    "MemoryOptions",
    "as_array",
    "check_device",
    "check_forward_options",
    "check_load_options",
    "check_policy",
    "check_positions",
    "present_tokens",
    "wanted_columns",
]

_FLOAT32 = (None, "auto", "float32", torch.float32)
_CPU = (None, "cpu", torch.device("cpu"), {"": "cpu"})


class MemoryOptions(TypedDict, total=False):
    """Options of memory and KV cache, as of `edgekit.runtime.llm.LLM`.

    Attributes:
        memory_budget: Most memory of the whole process, such as "512MiB"; None for what the machine has left. All rows
            of a batch share it; logits, which belong to the caller, come on top.
        ctx_size: Tokens that a row must have room for; None for as many as fit, up to the model's context.
        kv_cache_dtype: "fp32", "fp16" or "int8"; "auto" for the bundle's own, or int8 where that does not fit.
        kv_policy: Has to be "stop".
    """

    memory_budget: str | None
    ctx_size: int | None
    kv_cache_dtype: DtypeChoice
    kv_policy: str


class LoadOptions(MemoryOptions, total=False):
    """Further options of `from_pretrained`, by the names of transformers and optimum.

    Attributes:
        revision: Branch, tag or commit of a hub id, with export=True.
        trust_remote_code: Accept a config that names its own model code, which is never run, with export=True.
        dtype: float32, which the logits have; how weights are stored is up to `quantization`.
        torch_dtype: The same by its older name.
        device: The CPU.
        device_map: The CPU.
    """

    revision: str | None
    trust_remote_code: bool
    dtype: str | torch.dtype | None
    torch_dtype: str | torch.dtype | None
    device: str | torch.device | None
    device_map: str | torch.device | dict[str, str] | None


class ForwardOptions(TypedDict, total=False):
    """Further options of `forward`, as transformers passes them.

    Attributes:
        cache: What `past_key_values` is called since transformers 5.24.
        use_cache: Whether to return the cache; config.use_cache unless given.
        return_dict: Has to be True.
        output_attentions: Has to be False.
        output_hidden_states: Has to be False.
    """

    cache: ConversationCache | None
    use_cache: bool | None
    return_dict: bool | None
    output_attentions: bool | None
    output_hidden_states: bool | None


def check_load_options(options: LoadOptions) -> None:
    """Refuses options of `from_pretrained` that are unknown, or whose values mean something else than what is done.

    Raises:
        UnsupportedError: There is one.
    """
    for name in options:
        if name not in LoadOptions.__annotations__:
            known = ["export", "output", "quantization", "threads", *LoadOptions.__annotations__]
            raise UnsupportedError(f"EdgeModelForCausalLM has no option {one_of(name, known)}")
    for name in ("dtype", "torch_dtype"):
        if options.get(name) not in _FLOAT32:
            raise UnsupportedError(
                f"{name} is {options.get(name)!r}; logits are float32, and how weights are stored is up to quantization"
            )
    for name in ("device", "device_map"):
        check_device(name, options.get(name))
    check_policy(options.get("kv_policy", "stop"))


def check_policy(name: str) -> None:
    """Refuses KV policies that drop tokens: transformers counts on every token of a row.

    Args:
        name: The policy.

    Raises:
        UnsupportedError: It is another one than "stop".
    """
    if name != "stop":
        raise UnsupportedError(
            f"KV policy {name!r} drops tokens, and transformers counts on all of them: EdgeModelForCausalLM has 'stop' "
            "only; for others use edgekit.LLM"
        )


def check_device(name: str, value: object) -> None:
    """Refuses devices but the CPU.

    Args:
        name: The option.
        value: Its value.

    Raises:
        UnsupportedError: It is another device.
    """
    if value not in _CPU:
        raise UnsupportedError(f"{name} is {value!r}; EdgeModelForCausalLM computes on the CPU; leave it out")


def check_forward_options(options: ForwardOptions) -> None:
    """Refuses options of `forward` that are unknown, or ask for what is not computed.

    Raises:
        UnsupportedError: There is one.
    """
    for name, value in options.items():
        if name not in ForwardOptions.__annotations__:
            raise UnsupportedError(f"forward has no option {one_of(name, ForwardOptions.__annotations__)}")
        if name.startswith("output_") and value:
            raise UnsupportedError(f"{name} is {value!r}; a bundle's graph returns logits only; leave it out")
    if options.get("return_dict") is False:
        raise UnsupportedError("return_dict is False; EdgeModelForCausalLM returns CausalLMOutputWithPast only")


def as_array(tensor: object, name: str, dimensions: int) -> Tokens:
    """Returns a tensor of integers as an array of int64.

    Args:
        tensor: The tensor.
        name: What it is called in the error.
        dimensions: How many it has to have.

    Raises:
        UsageError: It is something else.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != dimensions or tensor.is_floating_point():
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise UsageError(f"{name} is {shape}; it must be an integer tensor of {dimensions} dimensions")
    return tensor.detach().cpu().numpy().astype(np.int64)


def present_tokens(mask: torch.Tensor | None, shape: tuple[int, ...], past: Flags) -> Flags:
    """Returns where the new columns have tokens, shape (B, S), bool.

    Args:
        mask: 0 for padding; shape (B, past columns + S) or (B, S); None when there is none.
        shape: (B, S).
        past: What was returned for the columns in the cache, shape (B, past columns), bool.

    Raises:
        UsageError: The mask has another shape, or differs where the past is.
    """
    rows, new = shape
    if mask is None:
        return np.ones((rows, new), np.bool_)
    given = as_array(mask.long() if mask.dtype == torch.bool else mask, "attention_mask", 2) != 0
    whole = (rows, past.shape[1] + new)
    if given.shape not in ((rows, new), whole):
        raise UsageError(
            f"attention_mask has shape {given.shape}; it must be {whole} or, without the past, {(rows, new)}"
        )
    if given.shape == whole and past.size and not np.array_equal(given[:, : past.shape[1]], past):
        raise UsageError("attention_mask is not what it was for columns in the cache; these cannot be masked any more")
    present: Flags = given[:, given.shape[1] - new :]
    return present


def check_positions(positions: torch.Tensor | None, expected: Tokens, present: Flags) -> None:
    """Refuses positions that are not those of the tokens in their rows.

    Args:
        positions: shape (B or 1, S); None when they are not given.
        expected: What they are, shape (B, S), int64.
        present: Where they matter, shape (B, S), bool.

    Raises:
        UsageError: Their shape is another.
        UnsupportedError: They are others.
    """
    if positions is None:
        return
    given = as_array(positions, "position_ids", 2)
    if given.shape[1] != expected.shape[1] or given.shape[0] not in (1, len(expected)):
        raise UsageError(f"position_ids has shape {given.shape}; it must be {expected.shape}")
    if not np.array_equal(np.broadcast_to(given, expected.shape)[present], expected[present]):
        raise UnsupportedError(
            "position_ids do not count each row's own tokens from 0, in order, padding left out; other positions are "
            "unknown to EdgeKit, so leave position_ids out"
        )


def wanted_columns(logits_to_keep: int | torch.Tensor, count: int) -> Tokens:
    """Returns the columns whose logits are wanted, shape (C,), int64.

    Args:
        logits_to_keep: How many from the end, 0 for all, or the columns themselves, shape (C,).
        count: How many there are.

    Raises:
        UsageError: There are no such columns.
    """
    if isinstance(logits_to_keep, int):
        if logits_to_keep < 0:
            raise UsageError(f"logits_to_keep is {logits_to_keep}; it must be at least 0, which stands for all")
        return np.arange(count - (min(logits_to_keep, count) or count), count)
    columns = as_array(logits_to_keep, "logits_to_keep", 1)
    if ((columns < -count) | (columns >= count)).any():
        raise UsageError(f"logits_to_keep names columns {columns.tolist()} of {count}")
    return columns % count
