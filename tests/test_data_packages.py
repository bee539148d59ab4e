"""Descriptions of Debian's programs, read from lists that the tests write."""

import json
import shutil
from hashlib import sha256
from itertools import product

import numpy as np
import pytest

from xpmir_uform import BagSampler, Batch, ContrastiveLoss, Side, UFormTrainer
from xpmir_uform.base.configuration import validate
from xpmir_uform.datasets import EmojiCollection, EmojiPairs, PackagePairs, PairBags, PairRetrieval, packages
from xpmir_uform.datasets.packages import CannotFetch, cut, fetch, programs, tags, unwrapped

PACKAGES = """Package: zeta
Source: tools (1.2)
Description-md5: 11
Tag: role::program, use::checking

Package: alpha
Source: tools
Description-md5: 22
Tag: interface::{commandline,x11},
 role::{plugin,program}

Package: library
Description-md5: 33
Tag: role::shared-lib

Package: mute
Description-md5: 44
Tag: role::program

Package: plain
Description-md5: 55
Tag: role::program
"""
TRANSLATION = """Package: alpha
Description-md5: 22
Description-en: first of the tools
 It reads things
 and writes them.
 .
 It also sings: ✓.

Package: zeta
Description-md5: 11
Description-en: second of the tools
 Long.

Package: library
Description-md5: 33
Description-en: a library
 Long.

Package: plain
Description-md5: 55
Description-en: without a long description
"""
ROWS = [
    ["alpha", "first of the tools", "It reads things and writes them. It also sings: ✓."],
    ["plain", "without a long description", ""],
]


@pytest.fixture
def lists(tmp_path):
    pytest.importorskip("debian", reason="needs the extra demo-text")
    (tmp_path / "x_main_binary-amd64_Packages").write_text(PACKAGES)
    (tmp_path / "x_main_i18n_Translation-en").write_text(TRANSLATION)
    return tmp_path


@pytest.fixture
def collection(tmp_path):
    file = tmp_path / "packages.jsonl"
    rows = [[f"p{n}", f"short {n}", f"text {n} of a long description"] for n in range(12)] + [["none", "x", ""]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PackagePairs.fetched(tmp_path, held_out=4, document_bytes=20)


def test_the_first_program_of_each_source_with_its_text(lists):
    assert [*map(list, programs(lists))] == ROWS


def test_line_separators_within_a_line_are_content(tmp_path):
    pytest.importorskip("debian", reason="needs the extra demo-text")
    # python-debian wants white space after what it takes for the end of a line.
    odd = "a\u2028 b\u2029 c\x85 d\x1c e\x0b f"
    (tmp_path / "x_main_binary-amd64_Packages").write_bytes(PACKAGES.encode())
    long = TRANSLATION.replace("It reads things", odd).replace("first of", f"first {odd} of")
    (tmp_path / "x_main_i18n_Translation-en").write_bytes(long.encode())
    rows = [list(row) for row in programs(tmp_path)]
    assert rows[0] == ["alpha", f"first {odd} of the tools", f"{odd} and writes them. It also sings: ✓."]
    file = tmp_path / "packages.jsonl"
    rows = [[f"p{number}", f"{odd} {number}", f"{number} {odd}"] for number in range(3)]
    file.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    found = PackagePairs.fetched(tmp_path, held_out=1).instance().all
    assert sorted([pair.name, pair.query, pair.document] for pair in found) == rows


def test_tags_in_braces_are_many():
    assert tags("a::{b,c}, d::e") == {"a::b", "a::c", "d::e"}


def test_lines_are_joined():
    assert unwrapped(" one\n two\n .\n three") == "one two three"


@pytest.mark.parametrize(
    ("text", "size", "kept"),
    [("one two", 7, "one two"), ("one two", 6, "one"), ("one two", 3, "one"), ("one two", 2, "on"), ("✓✓ x", 4, "✓")],
)
def test_a_long_text_is_cut_at_the_end_of_a_word(text, size, kept):
    assert cut(text, size) == kept


def test_fetching_writes_the_file_once_and_leaves_nothing_else(lists, tmp_path, monkeypatch):
    calls = []

    def update(folder):
        calls.append(folder)
        for file in lists.glob("x_*"):
            shutil.copy(file, folder)

    monkeypatch.setattr(packages, "update", update)
    folder = tmp_path / "data"
    assert fetch(folder) == fetch(folder) == folder / "packages.jsonl"
    assert [json.loads(line) for line in fetch(folder).read_text().splitlines()] == ROWS
    assert [path.name for path in folder.iterdir()] == ["packages.jsonl"]
    assert len(calls) == 1


def test_without_apt_the_message_says_what_it_takes(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotFetch, match="which takes Debian and a network"):
        fetch(tmp_path / "data")


def test_pairs_are_split_by_key_and_know_their_sides(collection):
    made = collection.instance()
    train, test = made.train(), made.test()
    assert (len(train), len(test)) == (8, 4)
    assert not {pair.name for pair in train} & {pair.name for pair in test}
    bag = PairBags.C(collection=collection).instance().bag(0, 1, 2)
    assert [item.side for item in bag.items] == [Side.QUERY, Side.DOCUMENT]
    assert bag.items[1].content.decode() == f"text {train[0].name[1:]} of a long"[:20].rstrip()
    assert bag.attract == ((0, 1), (1, 0))


def test_each_held_out_query_asks_for_its_document(collection):
    found = PairRetrieval.C(collection=collection, limit=3).instance().load()
    assert found.relevant == [[0], [1], [2]]
    assert [item.content.split()[-1] for item in found.queries] == [pair.name[1:].encode() for pair in
                                                                   collection.instance().test()[:3]]  # fmt: skip


def test_a_search_problem_of_no_pair_is_refused(collection, monkeypatch):
    with pytest.raises(ValueError, match="limit is -1, expected at least 0"):
        validate(PairRetrieval.C(collection=collection, limit=-1))
    problem = PairRetrieval.C(collection=collection).instance()
    monkeypatch.setattr(type(problem.collection), "test", lambda self: [])
    with pytest.raises(ValueError, match="the collection holds out no pair"):
        problem.load()


def test_a_changed_file_is_refused(collection, tmp_path):
    (tmp_path / "packages.jsonl").write_text("[]")
    found = sha256(b"[]").hexdigest()
    with pytest.raises(ValueError, match=f"has sha256 {found}, expected .*: restore that file"):
        collection.instance().train()


def test_more_held_out_than_there_are_is_refused(collection):
    path = collection.path
    with pytest.raises(ValueError, match="held_out is 12, expected less than the 12 pairs there are"):
        PackagePairs.C(sha256=collection.sha256, path=path, held_out=12).instance().test()
    with pytest.raises(ValueError, match="held_out is 0, expected at least 1"):
        validate(PackagePairs.C(sha256=collection.sha256, path=path, held_out=0))


def test_too_few_bags_for_a_step_are_refused_before_submission(collection):
    def trainer(batch_size, data=collection):
        sampler = BagSampler.C(source=PairBags.C(collection=data))
        return UFormTrainer.C(sampler=sampler, batch_size=batch_size, losses=[ContrastiveLoss.C()])

    validate(trainer(8))
    with pytest.raises(ValueError, match="batch_size is 9, expected 1 to 8, the number of bags in the data set"):
        validate(trainer(9))
    elsewhere = PackagePairs.C(sha256="0" * 64, path=collection.path.with_name("none"))
    validate(trainer(9, elsewhere))
    none_left = PackagePairs.C(sha256=collection.sha256, path=collection.path, held_out=12)
    with pytest.raises(ValueError, match="held_out is 12, expected less than the 12 pairs there are"):
        validate(trainer(1, none_left))
    with pytest.raises(ValueError, match="held_out is 4 and limit 4, which leaves no pairs for training"):
        validate(PackagePairs.C(sha256=collection.sha256, path=collection.path, held_out=4, limit=4))
    collection.held_out = 3


def test_emoji_are_pairs_of_names():
    pytest.importorskip("emoji", reason="needs the extra demo")
    made = EmojiPairs.C(collection=EmojiCollection.installed(held_out=5, limit=20)).instance()
    assert len(made.train()) == 15 * 5
    assert len({pair.document for pair in made.test()}) == 5
    # One batch may hold several names of one emoji, each a query of its own.
    bags = [pair.bag() for pair in made.train()[3:12]]
    batch = Batch.of(bags)
    assert len({bag.key for bag in bags}) == 3
    about = np.repeat([bag.key for bag in bags], 2)
    same = {(i, j) for i, j in product(range(18), repeat=2) if i != j and about[i] == about[j]}
    known = {
        (int(i), int(j)) for edges in (batch.attract, batch.ignore)
        for i, j in zip(edges.anchors(), edges.ids, strict=True)
    }  # fmt: skip
    assert same <= known
    assert len(known) < 18 * 17
