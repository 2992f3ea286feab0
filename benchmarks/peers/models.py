"""The same model in the format of every engine, made from one GGUF file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import onnx

from edgekit.bundle import open_bundle, sha256_file
from peers.protocol import AbsentError

TABLES = ("token_embd.weight", "output.weight")
NAMES = {"fp32": "float32", "fp16": "float16", "int8": "int8"}
BUILDER = "onnxruntime_genai.models.builder"


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A model as one engine loads it.

    Attributes:
        path: The file or the directory.
        format: How its weights are stored.
        kv_cache: Type of the keys and values that the engine keeps for it.
    """

    path: Path
    format: str
    kv_cache: str

    @property
    def size_bytes(self) -> int:
        """All of its files."""
        files = self.path.iterdir() if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files)


class ModelStore:
    """Makes the models, keeping what takes long in a directory that may be deleted at any time.

    EdgeKit's bundles are made in every run, since their exporter is what this repository changes.
    """

    def __init__(self, source: Path, cache: Path, scratch: Path) -> None:
        """Names the places.

        Args:
            source: The GGUF file.
            cache: Where the peers' models are kept between runs.
            scratch: Where bundles go, for this run only.
        """
        self._source = source
        self._cache = cache / f"{source.stem}-{sha256_file(source)[:12]}"
        self._scratch = scratch

    def bundle(self, scheme: str, kv_cache_dtype: str) -> ModelFile:
        """Exports an int4 bundle, keeping the file's own blocks where they have this scheme."""
        path = self._scratch / f"{scheme}-{kv_cache_dtype}.edge"
        options = ["--precision", "int4", "--scheme", scheme, "--requantize", "--json"]
        options += ["--kv-cache-dtype", kv_cache_dtype]
        command = [sys.executable, "-m", "edgekit", "export", str(self._source), str(path), *options]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        stored = Counter(kind for kind in open_bundle(path).manifest.storage.values() if "block" in kind)
        return ModelFile(path=path, format=_counted(stored), kv_cache=NAMES[kv_cache_dtype])

    def gguf(self, kind: str) -> ModelFile:
        """Returns the file with all matrices but the tables in blocks of a type, such as ``Q4_0``.

        That is the source itself where it has them already; else they are dequantized and rounded once more.
        """
        wanted = gguf.GGMLQuantizationType[kind]
        reader = gguf.GGUFReader(self._source)
        if all(tensor.tensor_type == wanted for tensor in reader.tensors if _is_projection(tensor)):
            path = self._source
        else:
            path = self._made(f"{kind}.gguf", lambda target: _requantize(reader, target, wanted))
        types = Counter(t.tensor_type.name for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1)
        return ModelFile(path=path, format=_counted(types), kv_cache="float16")

    def genai(self, python: str, version: str) -> ModelFile:
        """Runs onnxruntime-genai's builder: int4 for the CPU with its defaults, from float32 weights.

        Args:
            python: An interpreter with onnxruntime-genai, torch, transformers and onnx-ir.
            version: The builder's version, so that another one builds anew.

        Raises:
            AbsentError: The interpreter lacks one of them.
        """
        path = self._made(f"{version.replace(' ', '-')}-int4", lambda target: self._build_genai(python, target))
        graph = onnx.load(str(path / "model.onnx"), load_external_data=False).graph
        products = Counter(_attributes(node) for node in graph.node if node.op_type == "MatMulNBits")
        past = next(value for value in graph.input if value.name.startswith("past_key_values."))
        kv_cache = onnx.helper.tensor_dtype_to_np_dtype(past.type.tensor_type.elem_type).name
        return ModelFile(path=path, format=_counted(products), kv_cache=kv_cache)

    def _build_genai(self, python: str, target: Path) -> None:
        source = self._made("float32", self._dequantize)
        log = target.with_suffix(".log")
        command = [python, "-m", BUILDER, "-p", "int4", "-e", "cpu"]
        command += ["-i", str(source), "-o", str(target), "-c", str(target.with_suffix(".tmp"))]
        with log.open("w", encoding="utf-8") as output:
            status = subprocess.run(command, stdout=output, stderr=output, cwd=target.parent, check=False).returncode
        if status:
            last = log.read_text(encoding="utf-8").strip().splitlines()[-1]
            kind = AbsentError if last.startswith(("ModuleNotFoundError", "ImportError")) else RuntimeError
            raise kind(f"{python} -m {BUILDER}: {last} (see {log})")
        shutil.rmtree(target.with_suffix(".tmp"), ignore_errors=True)

    def _dequantize(self, target: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        folder, name = self._source.parent, self._source.name
        loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
        # What was loaded still counts as quantized, and refuses to be saved.
        make: Any = AutoModelForCausalLM.from_config
        plain = make(AutoConfig.from_pretrained(folder, gguf_file=name))
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(target)
        AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        """Returns a file or directory of the cache, which appears there only when it is complete."""
        path, partial = self._cache / name, self._cache / f"partial-{name}"
        if not path.exists():
            self._cache.mkdir(parents=True, exist_ok=True)
            if partial.is_dir():
                shutil.rmtree(partial)
            make(partial)
            partial.rename(path)
        return path


def _is_projection(tensor: gguf.ReaderTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.name not in TABLES


def _requantize(reader: gguf.GGUFReader, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Copies a GGUF file with its projections rounded to another type; tables, vectors and metadata stay."""
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(
                field.name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None
            )
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}"])
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if _is_projection(tensor) and stored != kind:
            data, stored = gguf.quantize(gguf.dequantize(data, stored), kind), kind
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _attributes(node: onnx.NodeProto) -> str:
    values = {attribute.name: attribute.i for attribute in node.attribute}
    scheme = "affine" if len(node.input) > 3 and node.input[3] else "symmetric"
    return f"int{values['bits']} {scheme} block {values['block_size']}"


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common())
