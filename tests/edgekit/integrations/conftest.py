from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from edgekit import EdgeModelForCausalLM
from edgekit.export.exporter import ExportOptions, export_bundle
from edgekit.export.storage_plan import QuantizationOptions

TinyCheckpoint: TypeAlias = Callable[[str], Path]
TinyBundle: TypeAlias = Callable[[str], Path]
TinyModel: TypeAlias = Callable[[str], EdgeModelForCausalLM]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from a second thread, and wait for it while the machine does other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: TinyCheckpoint) -> TinyBundle:
    """Exports a variant in fp32, once. Do not change the bundle."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            output = tmp_path_factory.mktemp("bundle") / f"{variant}.edge"
            options = ExportOptions(quantization=QuantizationOptions(precision="fp32"))
            made[variant] = export_bundle(tiny_checkpoint(variant), output, options, lambda *_: None).path
        return made[variant]

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_bundle: TinyBundle) -> TinyModel:
    """Loads a variant's bundle, once."""
    loaded: dict[str, EdgeModelForCausalLM] = {}

    def load(variant: str) -> EdgeModelForCausalLM:
        if variant not in loaded:
            loaded[variant] = EdgeModelForCausalLM.from_pretrained(tiny_bundle(variant), threads=1)
        return loaded[variant]

    return load
