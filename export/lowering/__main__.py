"""``python -m edgekit.export.lowering TARGET GRAPH OUT LAYOUT``: the lowering in a process of its own.

LAYOUT is a `CacheLayout` as JSON. A failure's code and message are the last line on stderr, with a tab between them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from edgekit.cache_layout import CacheLayout
from edgekit.errors import EdgeKitError
from edgekit.export.lowering import lower_graph


def main(arguments: list[str]) -> int:
    """Lowers one graph; returns the exit status, with the reason of a failure on stderr."""
    target, graph, output, layout = arguments
    try:
        lower_graph(Path(graph), target, Path(output), msgspec.json.decode(layout, type=CacheLayout))
    except EdgeKitError as error:
        sys.stderr.write(f"{error.code}\t{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
