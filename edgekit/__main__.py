"""``python -m edgekit``: the command line, for where scripts are not on the path."""

from __future__ import annotations

from edgekit.cli import main

if __name__ == "__main__":
    main()
