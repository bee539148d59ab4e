"""Make an HTML page and a PNG of what a job did.

The page holds curves, throughput, memory, alerts, the lineage of the checkpoints and the configuration, and needs no
network. The job may run, be done, or have failed.
"""

import argparse
from pathlib import Path

from xpmir_uform.base.checked_files import printable


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("job", type=Path, metavar="JOB", help="the folder of a job")
    parser.add_argument(
        "--output", type=Path, metavar="PAGE.html", help="the page, the PNG beside it (JOB/report.html if left out)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes both and prints where they are."""
    from xpmir_uform.reports.job.page import report

    for path in report(arguments.job, arguments.output):
        print(printable(path))
    return 0
