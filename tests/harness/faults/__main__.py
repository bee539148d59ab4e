"""Faults of every kind are injected into a small training; what is lost after running it again is counted.

    python tests/harness/faults [--quick] [GROUP ...]

Prints a table in Markdown, and fails if anything was lost. About a quarter of an hour on two quiet cores (``--quick``:
a minute or two).
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from faults.command import main

    main()
