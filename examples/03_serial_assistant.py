"""Says what each line that a house sends is about, as the lines come.

    python examples/03_serial_assistant.py smollm2.edge                      # lines of a made-up house
    cat /dev/ttyUSB0 | python examples/03_serial_assistant.py smollm2.edge -

The label is the one that the model finds likeliest, so that the answer is always one of the labels. What all lines have
in common, the instruction and its examples, is read once and stays in the KV cache: a line costs its own few tokens. Of
the 28 lines that the tests have, the demo model (135M, int4) labels 22 as people would; guessing gets 7. The wording of
the instruction was chosen on those same lines, so expect less on others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgekit import LLM, EdgeKitError
from edgekit.runtime.step import causal_step

LABELS = ("power", "network", "climate", "security")
EXAMPLES = (
    ("wifi signal is weak", "network"),
    ("window in the kitchen is open", "security"),
    ("battery fully charged", "power"),
    ("air is dry, humidity 21%", "climate"),
    ("key card refused at the gate", "security"),
    ("power supply switched to mains", "power"),
    ("it is 17 degrees in the cellar", "climate"),
    ("download from the server finished", "network"),
)
HOUSE = (
    "battery low: 14% left",
    "cannot reach server 10.0.0.7",
    "temperature 31 degrees, rising",
    "front door opened",
    "charger unplugged",
    "wrong code entered three times",
)


class Classifier:
    """Compares the probabilities of labels after a line."""

    def __init__(self, llm: LLM) -> None:
        """Reads the instruction and its examples."""
        self._tokenizer = llm.tokenizer
        self._cache = llm.new_cache()
        self._runner = llm.backend.runner(self._cache)
        shown = "".join(f"{line} => {label}\n" for line, label in EXAMPLES)
        self._read(f"Messages of a device and their labels.\n\n{shown}")
        self._prefix = self._cache.length
        # How likely the labels are when there is nothing to label is a habit of the model, not the line's merit
        # (Zhao et al. 2021, "Calibrate before use").
        self._habit = np.zeros(len(LABELS))
        self._habit = self.scores("N/A")

    def scores(self, line: str) -> npt.NDArray[np.float64]:
        """Returns how much likelier the line makes each label, in nats, shape (labels,)."""
        self._cache.truncate(self._prefix)
        after_line = self._read(f"{line} =>")
        length = self._cache.length
        found = []
        for label in LABELS:
            # The line break makes sure that no label is the beginning of another.
            tokens = self._tokenizer.encode(f" {label}\n", add_special_tokens=False)
            predictions = np.concatenate([after_line[-1:], self._read_tokens(tokens[:-1])])
            found.append(_log_softmax(predictions)[np.arange(len(tokens)), tokens].sum())
            self._cache.truncate(length)
        return np.array(found) - self._habit

    def label(self, line: str) -> str:
        """Returns the label of a line."""
        return LABELS[int(self.scores(line).argmax())]

    def _read(self, text: str) -> npt.NDArray[np.float32]:
        return self._read_tokens(self._tokenizer.encode(text, add_special_tokens=False))

    def _read_tokens(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        """Appends tokens to the cache; returns the logits after each, shape (tokens, V)."""
        self._cache.reserve(len(token_ids))
        inputs = causal_step(np.array(token_ids), self._cache.length, np.arange(len(token_ids)))
        outputs = self._runner.step(inputs)
        self._cache.append(outputs.stacks, range(len(token_ids)))
        return outputs.logits.copy()  # the next step writes over it


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _lines(source: str | None) -> Iterator[str]:
    """Yields the lines of a file, of stdin for "-", or of the made-up house."""
    if source is None:
        yield from HOUSE
    elif source == "-":
        yield from (line.strip() for line in sys.stdin)
    else:
        with Path(source).open(encoding="utf-8", errors="replace") as file:
            yield from (line.strip() for line in file)


def main() -> None:
    """Reads the command line, then lines."""
    parser = argparse.ArgumentParser(description="Label the lines that a house sends.")
    parser.add_argument("bundle", help="directory that edgekit export made")
    parser.add_argument("source", nargs="?", help="file with lines, or - for stdin; a made-up house unless given")
    arguments = parser.parse_args()
    classifier = Classifier(LLM(arguments.bundle))
    for line in filter(None, _lines(arguments.source)):
        print(f"{classifier.label(line)}\t{line}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (EdgeKitError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
