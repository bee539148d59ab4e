"""Search an index that xpmir-uform index wrote.

The nearest documents by the cosine of their embeddings, reordered by late interaction if the model has a token head.
"""

import argparse
from pathlib import Path

from xpmir_uform.base.checked_files import printable
from xpmir_uform.commands.index import add_model, load


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    add_model(parser)
    parser.add_argument("index", type=Path, metavar="INDEX", help="the folder of an index of this model")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="what is looked for")
    parser.add_argument("-k", type=int, default=10, help="how many documents are shown (10)")
    parser.add_argument("--candidates", type=int, help="how many of the nearest are reordered (as many as are shown)")
    parser.add_argument("--max-query-span", type=int, help="the first tokens of a text that are compared (all)")
    parser.add_argument("--exact", action="store_true", help="compare every document, although there is a graph")


def run(arguments: argparse.Namespace) -> int:
    """Prints the documents that are found: score, id and text, separated by tabs."""
    from xpmir_uform.index import Index

    index = Index(arguments.index, load(arguments))
    found = index.search_all(
        arguments.texts, arguments.k, arguments.candidates, arguments.exact, arguments.max_query_span
    )
    for text, hits in zip(arguments.texts, found, strict=True):
        if len(arguments.texts) > 1:
            print(f"# {_line(text)}")
        for hit in hits:
            print(f"{hit.score:.4f}\t{_line(hit.id)}\t{_line(hit.text)}")
    return 0


def _line(text: str) -> str:
    """A text on one line, without what a terminal obeys."""
    return printable(" ".join(text.split()))
