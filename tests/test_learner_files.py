"""Folders that replace others are whole whenever the process that writes them is killed."""

import multiprocessing
import os
import signal
from itertools import count

import pytest

from xpmir_uform.base import atomic_files

FORK = multiprocessing.get_context("fork")


def fill(folder, text):
    for name in ("one", "two"):
        (folder / name).write_text(text)


def replace_until(path, place):
    """Replaces the folder ``path`` by a new one, killed right after the operation number ``place``."""
    made = count()

    def killed_after(operation):
        def call(*arguments, **settings):
            result = operation(*arguments, **settings)
            if next(made) == place:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    atomic_files.swap = killed_after(atomic_files.swap)
    for name in ("rename", "fsync", "unlink", "rmdir"):
        setattr(os, name, killed_after(getattr(os, name)))
    atomic_files.commit_folder(path, lambda folder: fill(folder, "new"))
    os._exit(0)


def test_a_folder_that_is_replaced_has_its_name_at_every_moment(tmp_path):
    found = []
    for place in count():
        path = tmp_path / str(place) / "model"
        atomic_files.commit_folder(path, lambda folder: fill(folder, "old"))
        if not atomic_files.swap(path, path):
            pytest.skip("this file system cannot exchange names")
        process = FORK.Process(target=replace_until, args=(path, place))
        process.start()
        process.join()
        texts = {file.name: file.read_text() for file in path.iterdir()}
        found.append(texts["one"])
        assert texts in ({"one": text, "two": text} for text in ("old", "new"))
        atomic_files.commit_folder(path, lambda folder: fill(folder, "newest"))
        assert {file.name: file.read_text() for file in path.parent.rglob("*") if file.is_file()} == {
            "one": "newest",
            "two": "newest",
        }
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert found == sorted(found, reverse=True)
    assert set(found) == {"old", "new"}


def test_without_an_exchange_of_names_a_folder_is_replaced_all_the_same(tmp_path, monkeypatch):
    path = tmp_path / "model"
    atomic_files.commit_folder(path, lambda folder: fill(folder, "old"))
    monkeypatch.setattr(atomic_files, "swap", lambda one, other: False)
    atomic_files.commit_folder(path, lambda folder: fill(folder, "new"))
    assert (path / "two").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
