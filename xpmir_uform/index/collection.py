"""Collections of documents, in files and as they are given."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from xpmir_uform.data.items import Item


class Document(NamedTuple):
    """What is searched for.

    Args:
        id: its name, once in a collection.
        content: a text, or an item of any modality that the model reads.
    """

    id: str
    content: str | Item

    @property
    def text(self) -> str:
        """What is shown of it: the text, or nothing for another modality."""
        if isinstance(self.content, str):
            return self.content
        return "" if self.content.modality else self.content.content.decode("utf-8", "replace")


def read_collection(path: Path) -> Iterator[Document]:
    """The documents of a file, one at a time.

    Args:
        path: ``.jsonl``: an object with ``id`` and ``text`` in each line, other fields are left out. Any other name: a
            text in each line, whose id is the number of the line, from 1 on. Lines without a character are left out,
            as is a byte order mark. A pipe will do.

    Raises:
        ValueError: there is no such file, or a line is not as it should be; names the line.
    """
    if path.is_dir() or not path.exists():
        raise ValueError(f"there is no file {path}: expected one text a line, or .jsonl with id and text in each line")
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                raise ValueError(f"{where} is not UTF-8 ({error.reason}): convert the file") from error
            if line:
                yield _record(line, where) if path.suffix.lower() == ".jsonl" else Document(str(number), line)


def _record(line: str, where: str) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): expected an object with id and text") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str) or not _named(record.get("id")):
        raise ValueError(f'{where}: expected {{"id": a string or a number, "text": a string}}, got {line[:80]}')
    return Document(str(record["id"]), record["text"])


def _named(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def as_documents(things: Iterable[Document | str]) -> Iterator[Document]:
    """Documents, and texts as documents whose id is their number, from 0 on.

    Raises:
        ValueError: an id occurs twice, or something is neither.
    """
    seen: set[str] = set()
    for number, thing in enumerate(things):
        if not isinstance(thing, Document | str):
            raise ValueError(f"number {number} is a {type(thing).__name__}: expected a Document(id, content) or a text")
        document = Document(str(number), thing) if isinstance(thing, str) else thing
        _check(document, number)
        if document.id in seen:
            raise ValueError(f"the id {document.id!r} occurs twice: give each document its own")
        seen.add(document.id)
        yield document


def _check(document: Document, number: int) -> None:
    """Refuses a document whose fields are not what they should be, or cannot be written."""
    named, content = document
    if not isinstance(named, str) or not isinstance(content, str | Item):
        kinds = f"an id of type {type(named).__name__} and a content of type {type(content).__name__}"
        raise ValueError(f"document number {number} has {kinds}: expected a str, and a str or an Item")
    texts = {"id": named, "text": content} if isinstance(content, str) else {"id": named}
    for what, text in texts.items():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the {what} of document {named!r} is no UTF-8 ({error.reason}): decode its bytes as UTF-8"
            ) from error
