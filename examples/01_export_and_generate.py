"""Exports a model and continues a text.

    python examples/01_export_and_generate.py models/SmolLM2-135M-Instruct.Q4_1.gguf smollm2.edge "Water boils at"

The export needs `pip install 'edgekit[export]'`; for a device, which only loads the bundle, `pip install edgekit` does.
"""

from __future__ import annotations

import argparse
import sys

from edgekit import LLM, EdgeKitError, ExportOptions, QuantizationOptions, SamplingParams, export_bundle


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Export a model and continue a text.")
    parser.add_argument("model", help="directory with safetensors, .gguf file or Hugging Face id")
    parser.add_argument("bundle", help="directory that the bundle becomes; it must not exist")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    arguments = parser.parse_args()

    options = ExportOptions(quantization=QuantizationOptions(precision="int4"))
    bundle = export_bundle(arguments.model, arguments.bundle, options, lambda *_: None)
    print(f"{bundle.path}: {bundle.size_bytes / 1e6:.1f} MB")

    # The first load makes the graph for this machine, which takes seconds; later ones find it.
    llm = LLM(bundle.path)
    output = llm.generate(arguments.prompt, SamplingParams(max_tokens=24))
    print(f"{arguments.prompt}{output.text}")
    print(f"{output.timings.decode_tokens_per_s:.0f} tokens/s, ended by {output.finish_reason}")


if __name__ == "__main__":
    try:
        main()
    except EdgeKitError as error:
        sys.exit(f"error: {error}")
