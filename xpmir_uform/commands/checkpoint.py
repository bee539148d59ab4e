"""Show, verify, trace or compare checkpoints."""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("action", choices=("show", "verify", "lineage", "diff"))
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint, or the folder of a job")


def run(arguments: argparse.Namespace) -> int:
    """Answers 1 if a checkpoint is damaged."""
    raise ValueError(f"{arguments.action} is not there yet")
