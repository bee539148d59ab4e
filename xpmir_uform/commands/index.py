"""Write the vectors of a collection to disk, to be searched by xpmir-uform search.

The collection is a file with one text in each line, or a .jsonl file with an object of id and text in each line.
"""

import argparse
from pathlib import Path

from xpmir_uform.base.checked_files import printable


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the model and where it runs."""
    parser.add_argument("model", metavar="MODEL", help="the folder of a trained model")
    parser.add_argument("--device", default="auto", help="where the model runs (auto: the GPU if there is one)")
    parser.add_argument("--trust", action="append", default=[], metavar="MODULE.CLASS", help="of your own model")


def load(arguments: argparse.Namespace):
    """The model that was asked for, on its device."""
    from xpmir_uform.base.devices import device_of
    from xpmir_uform.export.pretrained import load_model

    try:
        return load_model(arguments.model, arguments.trust).to(device_of(arguments.device))
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the model cannot run on {arguments.device}: {error}") from error


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_model(parser)
    parser.add_argument("collection", type=Path, metavar="COLLECTION", help="a text file, or a .jsonl file")
    parser.add_argument("index", type=Path, metavar="INDEX", help="the folder to write; an older index is replaced")
    parser.add_argument(
        "--approximate", action="store_true", help="add a graph for faster, inexact search (needs usearch)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the index and prints what is in it."""
    from xpmir_uform.index import build_index, read_collection

    documents = read_collection(arguments.collection)
    index = build_index(load(arguments), documents, arguments.index, approximate=arguments.approximate)
    print(printable(f"{len(index)} documents in {arguments.index}"))
    return 0
