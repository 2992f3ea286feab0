"""Summarises a text file, however long.

    python examples/04_summarise.py smollm2.edge README.md

A text that is longer than a part is summarised part by part, and then the summaries are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgekit import LLM, EdgeKitError, SamplingParams


def parts_of(llm: LLM, text: str, tokens: int) -> list[str]:
    """Cuts a text at line breaks into parts of about so many tokens; a longer line is a part of its own."""
    parts, length = [""], 0
    for line in text.splitlines(keepends=True):
        count = len(llm.tokenizer.encode(line, add_special_tokens=False))
        if parts[-1] and length + count > tokens:
            parts, length = [*parts, ""], 0
        parts[-1] += line
        length += count
    return [part for part in parts if part.strip()]


def summary(llm: LLM, text: str, max_tokens: int) -> str:
    """Asks the model for a summary."""
    question = f"Summarize the following text in two sentences.\n\n{text.strip()}"
    params = SamplingParams(max_tokens=max_tokens)
    return llm.chat([{"role": "user", "content": question}], params).text.strip()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Summarise a text file.")
    parser.add_argument("bundle", help="directory that edgekit export made")
    parser.add_argument("file", type=Path, help="text in UTF-8")
    parser.add_argument("--part-tokens", type=int, default=1500, metavar="N", help="tokens that are read at once")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="tokens of a summary")
    arguments = parser.parse_args()
    text = arguments.file.read_text(encoding="utf-8")
    llm = LLM(arguments.bundle)
    parts = parts_of(llm, text, arguments.part_tokens)
    if not parts:
        sys.exit(f"error: {str(arguments.file)!r} has no text")
    summaries = []
    for number, part in enumerate(parts, 1):
        summaries.append(summary(llm, part, arguments.max_tokens))
        if len(parts) > 1:
            print(f"[{number}/{len(parts)}] {summaries[-1]}\n", flush=True)
    print(summaries[0] if len(parts) == 1 else summary(llm, "\n".join(summaries), arguments.max_tokens))


if __name__ == "__main__":
    try:
        main()
    except (EdgeKitError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"error: {error}")
