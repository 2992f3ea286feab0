"""Which matrix is stored how: the user's options against what the checkpoint already holds."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase

from edgekit.blocks import QuantizedBlocks, Scheme
from edgekit.checkpoint import Checkpoint
from edgekit.checkpoint.base import BlockFormat
from edgekit.errors import UnsupportedError, UsageError, one_of
from edgekit.export.weights import BITS, PRECISIONS, Precision, Storage

BLOCK_SIZES = (16, 32, 64, 128)
DEFAULT_BLOCK_SIZE = 32
# Offsets take 6 % of an int8 matrix and leave a quarter less squared error; the tables are read once per step, and
# their size and speed count for more.
DEFAULT_SCHEME: Scheme = "affine"
TABLE_SCHEME: Scheme = "symmetric"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions:
    """How matrices are stored.

    Attributes:
        precision: For the projections. The embedding and the head take int8 when this is int4 or int8.
        scheme: `affine` or `symmetric` blocks of the projections; None for affine, or for what a GGUF's blocks are.
        block_size: Inputs that share a scale: 16, 32, 64 or 128; None for 32, and for what a GGUF's blocks have.
        keep: Glob patterns of module names, such as ``layers.0.*``, that stay fp16.
        requantize: Round blocks that a GGUF has already rounded once more, where the options differ from them.
    """

    precision: Precision = "int4"
    scheme: Scheme | None = None
    block_size: int | None = None
    keep: tuple[str, ...] = ()
    requantize: bool = False

    def __post_init__(self) -> None:
        """Refuses values and combinations that mean nothing.

        Raises:
            UsageError: For an unknown precision, scheme or block size, or options that would have no effect.
        """
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision {one_of(self.precision, PRECISIONS)}")
        if self.scheme not in (None, "symmetric", "affine"):
            raise UsageError(f"scheme {one_of(str(self.scheme), ('symmetric', 'affine'))}")
        if self.block_size not in (None, *BLOCK_SIZES):
            raise UsageError(f"block size {self.block_size}; allowed: {', '.join(map(str, BLOCK_SIZES))}")
        of_blocks = {
            "scheme": self.scheme is not None,
            "block size": self.block_size is not None,
            "keep": bool(self.keep),
            "requantize": self.requantize,
        }
        given = [name for name, is_given in of_blocks.items() if is_given]
        if self.precision not in BITS and given:
            raise UsageError(
                f"{' and '.join(given)} {'has' if len(given) == 1 else 'have'} no effect with precision "
                f"{self.precision}; use int4 or int8"
            )


def plan_storage(checkpoint: Checkpoint, options: QuantizationOptions) -> dict[str, Storage]:
    """Decides how every tensor of the checkpoint is stored, by canonical name.

    Args:
        checkpoint: The model.
        options: What the user asks for.

    Blocks of a GGUF are kept, each tensor's with its own size and scheme: with precision int8 their codes are held in
    8 bits, which changes no value, and with int4 an 8-bit block stays 8 bits wide. They are rounded again only with
    `requantize`. Types of which only the values can be read are rounded like floats.

    Raises:
        UsageError: A `keep` pattern matches no module.
        UnsupportedError: The options would round a GGUF's blocks again and `requantize` is not set.
    """
    plan: dict[str, Storage] = {}
    modules = [
        name.removesuffix(".weight") for name, shape in checkpoint.spec.tensor_shapes().items() if len(shape) == 2
    ]
    for pattern in options.keep:
        if not any(fnmatchcase(module, pattern) for module in modules):
            raise UsageError(f"keep pattern {pattern!r} matches no module; modules are named like {modules[1]!r}")
    for name, shape in checkpoint.spec.tensor_shapes().items():
        plan[name] = Storage(precision="fp32") if len(shape) == 1 else _matrix_storage(checkpoint, name, options)
    counts = Counter(str(plan[f"{module}.weight"]) for module in modules)
    logger.info("storage: %s", ", ".join(f"{count} × {kind}" for kind, count in counts.most_common()))
    return plan


def _matrix_storage(checkpoint: Checkpoint, name: str, options: QuantizationOptions) -> Storage:
    module = name.removesuffix(".weight")
    if options.precision not in BITS:
        return Storage(precision=options.precision)
    if any(fnmatchcase(module, pattern) for pattern in options.keep):
        return Storage(precision="fp16")
    table = module in ("embed_tokens", "lm_head")
    precision: Precision = "int8" if table else options.precision
    stored = checkpoint.block_format(name)
    if stored is not None and not options.requantize:
        other_scheme = options.scheme not in (None, stored.scheme)
        if not table and (other_scheme or options.block_size not in (None, stored.block_size)):
            option = f"scheme {options.scheme!r}" if other_scheme else f"block size {options.block_size}"
            raise UnsupportedError(
                f"{module} is stored as {stored.scheme} int{stored.bits} blocks of {stored.block_size}, {option} would "
                "round it a second time; leave the option out to keep them, or pass --requantize to accept the loss"
            )
        wide: Precision = "int8" if stored.bits == 8 else precision
        return Storage(precision=wide, block_size=stored.block_size, scheme=stored.scheme)
    scheme = TABLE_SCHEME if table else options.scheme or DEFAULT_SCHEME
    return Storage(precision=precision, block_size=options.block_size or DEFAULT_BLOCK_SIZE, scheme=scheme)


def keeps_blocks(stored: BlockFormat | QuantizedBlocks | None, storage: Storage) -> bool:
    """Tells whether the blocks that a checkpoint holds are stored as they are, perhaps with more bits per code.

    Args:
        stored: What the checkpoint holds; None for a float tensor.
        storage: How the matrix is stored.
    """
    if stored is None or storage.precision not in BITS:
        return False
    same_blocks = (stored.block_size, stored.scheme) == (storage.block_size, storage.scheme)
    return same_blocks and stored.bits <= BITS[storage.precision]
