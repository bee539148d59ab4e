"""Indexes: what is written, found, refused, and how the command does it."""

import json
import os
import struct
import sys
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from xpmir_uform import ImageShape, Item, Modality, PooledHead, TokenHead, UFormEncoder, save_model
from xpmir_uform.base.atomic_files import Occupied
from xpmir_uform.base.checked_files import describe, seal
from xpmir_uform.commands import main
from xpmir_uform.index import Document, Index, build_index, builder, nearest, read_collection
from xpmir_uform.index.graph import graph_nearest, open_graph
from xpmir_uform.index.shards import Shard, shard_tensors, write_shard

COLOURS = "red green blue black white pink grey gold teal plum".split()
THINGS = "apple pear plum car boat tree house lamp shoe hat cup door key fish bird stone".split()
TEXTS = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
QUERIES = ["a red apple", "blue", "boats in teal", ""]


def configuration(**params):
    heads = {"pooled": PooledHead.C(width=32), "tokens": TokenHead.C(width=16)}
    return UFormEncoder.C(**{"depth": 1, "hidden": 128, **heads, **params})


def build(**params):
    model = configuration(**params).instance()
    model.initialize()
    return model


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def index(model, tmp_path_factory):
    return build_index(model, TEXTS, tmp_path_factory.mktemp("index") / "i")


def plainly(model, query, k, candidates):
    """Numbers, scores and cosines by plain products of vectors that are rounded as the index rounds them."""
    pooled = normalize(model.encode(TEXTS), dim=1).half().double()
    cosines = pooled @ normalize(model.encode([query]), dim=1)[0].double()
    near = cosines.sort(descending=True, stable=True).indices[:candidates]
    vectors, offsets = model.encode_tokens(TEXTS)
    own = model.encode_tokens([query])[0].double()
    tokens = [vectors[offsets[number] : offsets[number + 1]].half().double() for number in near.tolist()]
    scores = torch.stack([(own @ each.T).amax(1).mean() for each in tokens])
    order = scores.sort(descending=True, stable=True).indices[:k]
    return near[order], scores[order], cosines[near[order]]


class Rows:
    """A model whose embeddings are given."""

    token_projection = None

    def __init__(self, *rows, dtype=torch.float32):
        self.rows = torch.tensor(rows, dtype=dtype)

    def encode(self, items, batch_tokens=0):
        return self.rows


@pytest.mark.parametrize("scale", [1e-30, 1e-13, 1.0, 1e30])
def test_vectors_of_any_length_are_kept_as_directions_and_zero_as_zero(scale):
    rows = [[3 * scale, 4 * scale], [0.0, 0.0], [-scale, 0.0]]
    pooled = shard_tensors(Rows(*rows), [Document(str(n), str(n)) for n in range(3)], 1)["pooled"]
    assert torch.equal(pooled, torch.tensor([[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]]).half())


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize(("k", "candidates"), [(5, None), (5, 40), (1000, None)])
def test_hits_are_the_nearest_reordered_by_late_interaction(model, index, query, k, candidates):
    hits = index.search(query, k, candidates)
    numbers, scores, cosines = plainly(model, query, min(k, len(TEXTS)), candidates or k)
    assert [hit.text for hit in hits] == [TEXTS[number] for number in numbers]
    assert [hit.id for hit in hits] == [str(number) for number in numbers.tolist()]
    np.testing.assert_allclose([hit.score for hit in hits], scores, atol=1e-5)
    np.testing.assert_allclose([hit.cosine for hit in hits], cosines, atol=1e-5)


def test_queries_together_are_answered_as_alone(index):
    together = index.search_all(QUERIES, k=7)
    for query, hits in zip(QUERIES, together, strict=True):
        alone = index.search(query, k=7)
        assert [hit.id for hit in hits] == [hit.id for hit in alone]
        np.testing.assert_allclose([hit.score for hit in hits], [hit.score for hit in alone], atol=1e-5)
    assert index.search_all([]) == []


def test_a_query_may_be_cut(model, index):
    best = index.search("red apple", k=1, max_query_span=3)[0]
    vectors, own = model.encode_tokens([best.text])[0].half().float(), model.encode_tokens(["red apple"])[0][:3]
    assert best.score == pytest.approx(float((own @ vectors.T).amax(1).mean()), abs=1e-5)


def test_shards_change_nothing(model, index, tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "SHARD_TOKENS", 100)
    parts = build_index(model, iter(TEXTS), tmp_path / "i")
    assert len(parts.shards) > 10
    assert len(parts) == len(index) == len(TEXTS)
    for query in QUERIES:
        found, expected = parts.search(query, 9, 30), index.search(query, 9, 30)
        assert [hit.id for hit in found] == [hit.id for hit in expected]
        np.testing.assert_allclose([hit.score for hit in found], [hit.score for hit in expected], atol=1e-5)


def test_an_index_is_opened_again(model, index):
    assert Index(index.folder, model).search("red apple") == index.search("red apple")
    wide = build().double()
    found = Index(index.folder, wide).search("red apple")
    assert [hit.id for hit in found] == [hit.id for hit in index.search("red apple")]


def test_a_model_without_a_token_head_orders_by_cosine(tmp_path):
    found = build_index(build(tokens=None), TEXTS, tmp_path / "i").search("red apple", 5)
    assert (
        [hit.score for hit in found] == [hit.cosine for hit in found] == sorted((h.score for h in found), reverse=True)
    )


def test_items_of_other_modalities_are_found(tmp_path):
    model = build(image=ImageShape.C(patch_side=4, max_side=16))
    file = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 12, 3), dtype=np.uint8)).save(file, "PNG")
    picture = Item(Modality.IMAGE, file.getvalue(), 7)
    made = build_index(
        model, [Document("p", picture), Document("t", "red"), Document("u", Item.text("blue"))], tmp_path / "i"
    )
    assert made.search(picture, 1)[0] == ("p", pytest.approx(1, abs=1e-3), pytest.approx(1, abs=1e-3), "")
    assert [hit.text for hit in made.search("blue", 1)] == ["blue"]


@pytest.mark.parametrize("rows", [1, 7, 65_536])
def test_exact_search_is_a_stable_sort(rows, monkeypatch):
    monkeypatch.setattr(nearest, "BLOCK_ROWS", rows)
    draw = torch.Generator().manual_seed(0)
    documents = torch.randint(-2, 3, (40, 3), generator=draw).half()
    queries = torch.randint(-2, 3, (6, 3), generator=draw).float()
    expected = (queries @ documents.float().T).sort(dim=1, descending=True, stable=True)
    for k in (1, 9, 40, 99):
        numbers, products = nearest.exact_nearest(queries, documents.split([11, 0, 29]), k)
        assert torch.equal(numbers, expected.indices[:, :k])
        assert torch.equal(products, expected.values[:, :k])


def test_opening_an_index_reads_no_vectors(tmp_path):
    none = {name: torch.zeros(0, dtype=torch.uint8) for name in ("ids", "texts")}
    ends = {f"{name}_offsets": torch.zeros(500_001, dtype=torch.int64) for name in none}
    write_shard({"pooled": torch.ones(500_000, 64, dtype=torch.float16), **none, **ends}, tmp_path / "s")
    del ends

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    shard = Shard(tmp_path / "s")
    assert len(shard) == 500_000
    assert resident() - before < 8e6
    assert float(shard.pooled[400_000].sum()) == 64
    assert resident() - before < 16e6


def test_a_graph_finds_nearly_the_same(model, index, tmp_path):
    pytest.importorskip("usearch", reason="needs the extra 'search'")
    made = build_index(model, TEXTS, tmp_path / "i", approximate=True)
    build_index(model, TEXTS, tmp_path / "again", approximate=True)
    first, second = ((tmp_path / name / "pooled.usearch").read_bytes() for name in ("i", "again"))
    assert first == second
    found = common = 0
    for query in TEXTS[::5]:
        expected = {hit.id: hit for hit in index.search(query, 10)}
        assert [hit.id for hit in made.search(query, 10, exact=True)] == list(expected)
        for hit in made.search(query, 10):
            found += 1
            if hit.id in expected:
                common += 1
                assert hit == (hit.id, *(pytest.approx(x, abs=1e-5) for x in expected[hit.id][1:3]), hit.text)
    assert common >= 0.95 * found
    assert len(made.search("red", 1000)) == len(TEXTS)


def test_a_graph_that_is_cut_or_of_another_index_is_refused(model, tmp_path):
    pytest.importorskip("usearch", reason="needs the extra 'search'")
    folder = tmp_path / "i"
    build_index(model, TEXTS[:9], folder, approximate=True)
    build_index(model, TEXTS[:5], tmp_path / "other", approximate=True)
    whole = (folder / "pooled.usearch").read_bytes()
    for size in (0, 3, 64, len(whole) // 2, len(whole) - 1):
        (folder / "pooled.usearch").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"pooled\.usearch was changed: its size is .*, or build the index again"):
            Index(folder, model)
        reseal(folder)
        with pytest.raises(ValueError, match=r"pooled\.usearch is no whole graph .*: build the index again"):
            Index(folder, model)
    (folder / "pooled.usearch").write_bytes((tmp_path / "other" / "pooled.usearch").read_bytes())
    reseal(folder)
    with pytest.raises(ValueError, match=r"pooled\.usearch is no whole graph of 9 documents .*: build the index again"):
        Index(folder, model)


GRAPH_HEAD = 8 + 2 * 8 * 300


def number(place, value, form="<Q"):
    return lambda data: struct.pack_into(form, data, place, value)


def first_node(data):
    """Where the nodes of a graph of 300 vectors begin."""
    return GRAPH_HEAD + 64 + 40 + 2 * 300


HOSTILE_GRAPHS = {
    "more vectors than there are": number(0, 1 << 30, "<I"),
    "longer vectors than there are": number(4, 1 << 30, "<I"),
    "another library": lambda data: data.__setitem__(GRAPH_HEAD, 0),
    "another type of vectors": lambda data: data.__setitem__(GRAPH_HEAD + 14, 11),
    "more documents": number(GRAPH_HEAD + 17, 1 << 40),
    "wider vectors": number(GRAPH_HEAD + 33, 1 << 20),
    "more nodes": number(GRAPH_HEAD + 64, 1 << 60),
    "more neighbours": number(GRAPH_HEAD + 64 + 8, 1 << 20),
    "a higher level": number(GRAPH_HEAD + 64 + 24, 30000),
    "an entry beyond": number(GRAPH_HEAD + 64 + 32, 1 << 62),
    "a level of a node": number(GRAPH_HEAD + 64 + 40, 30000, "<h"),
    "a level below the lowest": number(GRAPH_HEAD + 64 + 40, -1, "<h"),
    "a key beyond": lambda data: struct.pack_into("<Q", data, first_node(data), 1 << 50),
    "another level in the node": lambda data: struct.pack_into("<h", data, first_node(data) + 8, 5),
    "a neighbour beyond": lambda data: struct.pack_into("<I", data, first_node(data) + 14, 300),
    "a neighbour far beyond": lambda data: struct.pack_into("<I", data, first_node(data) + 14, 0xFFFFFFFF),
    "more neighbours than places": lambda data: struct.pack_into("<I", data, first_node(data) + 10, 33),
}  # fmt: skip


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory):
    usearch = pytest.importorskip("usearch.index", reason="needs the extra 'search'")
    vectors = np.random.default_rng(3).normal(size=(300, 8)).astype(np.float16)
    graph = usearch.Index(ndim=8, metric="ip", dtype="f16")
    graph.add(np.arange(300), vectors, threads=1)
    path = tmp_path_factory.mktemp("graph") / "pooled.usearch"
    graph.save(str(path))
    return path


def refused_or_harmless(path):
    """Opens and searches a graph: in this process, which a number that leads elsewhere would end."""
    try:
        graph = open_graph(path, 300, 8)
    except ValueError as error:
        return str(error)
    found = graph_nearest(torch.ones(20, 8), graph, 50)
    assert found is None or (int(found.min()) >= 0 and int(found.max()) < 300)
    return ""


@pytest.mark.parametrize("kind", HOSTILE_GRAPHS)
def test_a_graph_that_leads_elsewhere_is_refused(graph_file, tmp_path, kind):
    assert refused_or_harmless(graph_file) == ""
    data = bytearray(graph_file.read_bytes())
    HOSTILE_GRAPHS[kind](data)
    (tmp_path / "g").write_bytes(data)
    assert "is no whole graph of 300 documents" in refused_or_harmless(tmp_path / "g")


def test_upper_levels_lead_nowhere_else_either(graph_file, tmp_path):
    data = bytearray(graph_file.read_bytes())
    levels = np.frombuffer(data, np.int16, 300, first_node(data) - 600)
    node = int(np.flatnonzero(levels)[0])
    start = first_node(data) + node * 142 + int(levels[:node].sum()) * 68
    assert struct.unpack_from("<Q", data, start) == (node,)
    for neighbour in (301, int(np.flatnonzero(levels == 0)[0])):
        struct.pack_into("<2I", data, start + 142, 1, neighbour)
        (tmp_path / "g").write_bytes(data)
        assert "names neighbours" in refused_or_harmless(tmp_path / "g")


def test_graphs_of_any_bytes_do_not_end_the_process(graph_file, tmp_path):
    draw = np.random.default_rng(8)
    whole = np.frombuffer(graph_file.read_bytes(), np.uint8)
    refused = 0
    for count in range(1, 60):
        data = whole.copy()
        data[draw.choice(len(data), count)] = draw.integers(0, 256, count)
        (tmp_path / "g").write_bytes(data.tobytes())
        refused += bool(refused_or_harmless(tmp_path / "g"))
    assert refused > 40


def test_any_changed_byte_is_refused_before_a_library_sees_it(model, tmp_path, monkeypatch):
    pytest.importorskip("usearch", reason="needs the extra 'search'")
    folder, draw = tmp_path / "i", np.random.default_rng(5)
    build_index(model, TEXTS[:7], folder, approximate=True)
    monkeypatch.setattr("xpmir_uform.index.index.Shard", pytest.fail)
    monkeypatch.setattr("xpmir_uform.index.index.open_graph", pytest.fail)
    for name in ("pooled.usearch", "00000.safetensors", "index.json"):
        whole = (folder / name).read_bytes()
        for place in draw.choice(len(whole), 12):
            (folder / name).write_bytes(
                whole[:place] + bytes([whole[place] ^ 1 << draw.integers(8)]) + whole[place + 1 :]
            )
            with pytest.raises(ValueError, match=f"{name}.*build the index again"):
                Index(folder, model)
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize("name", ["index.json", "00000.safetensors"])
@pytest.mark.parametrize("kind", ["a link", "a pipe", "a folder"])
def test_an_index_is_of_regular_files_in_its_folder(model, tmp_path, name, kind):
    build_index(model, ["one", "two"], tmp_path / "i")
    path = tmp_path / "i" / name
    path.rename(tmp_path / "elsewhere")
    make = {
        "a link": lambda: path.symlink_to("../elsewhere"),
        "a pipe": lambda: os.mkfifo(path),
        "a folder": path.mkdir,
    }
    make[kind]()
    with pytest.raises(ValueError, match=r"is damaged|holds no index\.json|is missing or no file"):
        Index(tmp_path / "i", model)


@pytest.mark.parametrize("names", [["../secret.safetensors"], ["00001.safetensors"], ["00000.safetensors", "x"], []])
def test_a_manifest_names_the_files_of_an_index_alone(model, tmp_path, names):
    build_index(model, ["one"], tmp_path / "i")
    (held,) = json.loads((tmp_path / "i" / "index.json").read_text())["files"].values()
    tell(tmp_path / "i", files=dict.fromkeys(names, held))
    with pytest.raises(ValueError, match="lists other files"):
        Index(tmp_path / "i", model)


def test_of_two_builds_in_one_folder_the_second_leaves_and_touches_nothing(model, tmp_path):
    def documents():
        yield "one"
        with pytest.raises(Occupied, match=r"another process writes .*wait until it ends"):
            build_index(model, ["three"], tmp_path / "i")
        yield "two"

    built = build_index(model, documents(), tmp_path / "i")
    assert [hit.text for hit in built.search("one", 2)] in (["one", "two"], ["two", "one"])
    assert [path.name for path in tmp_path.iterdir()] == ["i"]


def test_a_build_that_was_killed_leaves_nothing_to_the_next(model, tmp_path):
    (tmp_path / ".i.part").mkdir()
    (tmp_path / ".i.part" / "00007.safetensors").write_bytes(b"of an older build")
    assert len(build_index(model, ["one"], tmp_path / "i")) == 1
    assert sorted(path.name for path in (tmp_path / "i").iterdir()) == ["00000.safetensors", "index.json"]


def test_a_graph_without_usearch_says_what_to_install(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    with pytest.raises(ValueError, match=r"usearch is not installed: pip install 'xpmir-uform\[search\]'"):
        build_index(model, TEXTS, tmp_path / "i", approximate=True)
    assert not (tmp_path / "i").exists()


def test_another_model_is_refused(index):
    with pytest.raises(ValueError, match=r"was built by another model .*: open it with that model, or build it again"):
        Index(index.folder, build(seed=1))


def test_a_model_that_reads_pictures_otherwise_is_another(tmp_path):
    made = build_index(build(image=ImageShape.C(patch_side=4, max_side=16)), ["a"], tmp_path / "i")
    with pytest.raises(ValueError, match="was built by another model"):
        Index(made.folder, build(image=ImageShape.C(patch_side=4, max_side=32)))


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "the collection is empty"),
        ([Document("a", "x"), Document("a", "y")], "the id 'a' occurs twice"),
        ([Document("0", "x"), 7], "number 1 is a int: expected a Document"),
        ("red", "expected a sequence of documents and got one str: put it in a list"),
        (Document("a", "x"), "got one Document: put it in a list"),
        (None, "got one NoneType"),
        ({"a": "x"}, "expected a sequence of documents and got a dict, of which the keys would be taken"),
        (StringIO("x\ny\n"), r"an open file \(StringIO\), .* or read_collection\(path\) to build an index"),
        (["x", Document(7, "y")], "number 1 has an id of type int and a content of type str: expected a str"),
        (["x", Document("b", 7)], "number 1 has an id of type str and a content of type int: expected a str"),
        (["x", Document("b", "\ud800")], "the text of document 'b' is no UTF-8"),
        ([Document("\ud800", "x")], r"the id of document '\\ud800' is no UTF-8"),
        ([Document("i", Item(Modality.IMAGE, b"x", 0))], "no image input"),
        ([Document("i", Item(Modality.TEXT, b"\xff", 0))], "is not UTF-8"),
    ],
)
def test_an_impossible_collection_leaves_what_was_there(model, tmp_path, documents, message):
    with pytest.raises(ValueError, match=message):
        build_index(model, documents, tmp_path / "i")
    assert list(tmp_path.iterdir()) == []
    build_index(model, ["one", "two"], tmp_path / "i")
    with pytest.raises(ValueError, match=message):
        build_index(model, documents, tmp_path / "i")
    assert len(Index(tmp_path / "i", model)) == 2


def test_an_index_replaces_an_index_and_nothing_else(model, tmp_path, caplog):
    build_index(model, ["one", "two"], tmp_path / "i")
    assert caplog.messages == []
    assert len(build_index(model, ["three"], tmp_path / "i")) == 1
    assert caplog.messages == [f"{tmp_path / 'i'} holds 2 documents: it is replaced when the new index is whole"]
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a").write_text("dear")
    with pytest.raises(ValueError, match="letters is there and is no index: choose another place, or remove it"):
        build_index(model, ["one"], tmp_path / "letters")
    assert (tmp_path / "letters" / "a").read_text() == "dear"


def test_a_model_without_a_pooled_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no pooled head, which an index needs"):
        build_index(build(pooled=None), ["one"], tmp_path / "i")


def test_an_embedding_that_is_not_finite_is_refused_by_id(tmp_path):
    broken = build()
    broken.pooling.projection.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="the embedding of document 'x' is not finite"):
        build_index(broken, [Document("x", "one")], tmp_path / "i")


def test_a_token_vector_that_is_not_finite_is_refused_by_id(tmp_path, monkeypatch):
    model = build()
    told = model.encode_both

    def encode_both(*args):
        pooled, tokens, offsets = told(*args)
        tokens[4] = float("nan")
        return pooled, tokens, offsets

    monkeypatch.setattr(model, "encode_both", encode_both)
    with pytest.raises(ValueError, match="a token vector of document 'y' is not finite"):
        build_index(model, [Document("x", "one"), Document("", ""), Document("y", "two")], tmp_path / "i")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "index.json").unlink(),
            "holds no index.json: expected a folder that xpmir-uform index",
        ),
        (lambda folder: (folder / "index.json").write_text("{"), "index.json is damaged"),
        (lambda folder: (folder / "index.json").write_text('{"format": 1}'), "of another format than 2"),
        (lambda folder: tell(folder, format=3), "has the format 3, expected 2"),
        (lambda folder: (folder / "00000.safetensors").unlink(), "00000.safetensors is missing"),
        (
            lambda folder: (folder / "00000.safetensors").write_bytes((folder / "00000.safetensors").read_bytes()[:-9]),
            "00000.safetensors was changed: its size is",
        ),
        (lambda folder: (folder / "index.json").write_text("[" * 100_000), "index.json is damaged"),
        (lambda folder: tell(folder, shards=10**12), "lists other files"),
        (
            lambda folder: tell(folder, files={"00000.safetensors": {}}),
            "index.json is damaged .its fields are of other types",
        ),
        (lambda folder: tell(folder, documents=3), "holds 2 of 3 documents"),
        (lambda folder: tell(folder, shards="1"), "index.json is damaged .its fields are of other types"),
        (lambda folder: tell(folder, model=None), "index.json is damaged .its fields are of other types"),
        (lambda folder: (folder / "index.json").write_text(seal({"format": 2})), "index.json is damaged .its fields"),
        (lambda folder: (folder / "index.json").write_bytes(b"\xff\xfe"), "index.json is damaged"),
        *(
            (lambda folder, name=name: keep(folder, name), f"00000.safetensors is no whole part of an index .*{name}")
            for name in ("pooled", "ids", "ids_offsets", "texts", "texts_offsets", "tokens", "token_offsets")
        ),
        (lambda folder: keep(folder, "", tokens=4), "token_offsets and tokens do not fit"),
        (lambda folder: change(folder, pooled=lambda x: x[:, :4]), "pooled is of another type or width"),
        (lambda folder: change(folder, pooled=lambda x: x[:, 0]), "pooled is of another type or width"),
        (lambda folder: change(folder, pooled=lambda x: x.float()), "pooled is of another type or width"),
        (lambda folder: change(folder, tokens=lambda x: x[:, :4]), "tokens is of another type or width"),
        (lambda folder: change(folder, ids_offsets=lambda x: x[:, None]), "ids_offsets is of another type or width"),
        (lambda folder: change(folder, texts_offsets=lambda x: x.double()), "texts_offsets is of another type"),
        (lambda folder: change(folder, **{"\x1b[2J": lambda x: torch.zeros(1)}), r"\\x1b\[2J is of another type"),
        (lambda folder: tell(folder, format="\x1b[2J\n" + "x" * 1000), r"the format \\x1b\[2J\\nx{60,75}…, expected 2"),
        (lambda folder: tell(folder, model="\x1b[2J"), r"its fingerprint is \\x1b\[2J,"),
    ],
)
def test_a_damaged_index_is_refused(model, tmp_path, damage, message):
    build_index(model, ["one", "two"], tmp_path / "i")
    damage(tmp_path / "i")
    with pytest.raises(ValueError, match=message):
        Index(tmp_path / "i", model)


def tell(folder, **fields):
    """Writes the manifest with other fields, as a stranger would."""
    told = json.loads((folder / "index.json").read_text())
    del told["digest"]
    (folder / "index.json").write_text(seal({**told, **fields}))


def reseal(folder):
    """Makes the manifest say what is there."""
    tell(folder, files={path.name: describe(path) for path in folder.iterdir() if path.name != "index.json"})


def change(folder, **changes):
    """Writes the shard again with other tensors, as a stranger would."""
    path = folder / "00000.safetensors"
    tensors = load_file(path)
    made = {name: make(tensors.get(name)).contiguous().clone() for name, make in changes.items()}
    save_file({**tensors, **made}, path)
    reseal(folder)


@pytest.mark.parametrize("name", ["ids_offsets", "texts_offsets", "token_offsets"])
@pytest.mark.parametrize("value", [-3, 1 << 40, 0])
def test_offsets_that_lead_elsewhere_are_refused_when_they_are_used(model, tmp_path, name, value):
    def moved(offsets):
        offsets[2] = value
        return offsets

    build_index(model, ["one", "two", "three"], tmp_path / "i")
    change(tmp_path / "i", **{name: moved})
    with pytest.raises(ValueError, match=rf"00000\.safetensors is no whole part of an index .{name} descend"):
        Index(tmp_path / "i", model).search("one", 3)


def keep(folder, without, **rows):
    """Writes the shard again without one tensor, and with the first rows of others."""
    path = folder / "00000.safetensors"
    tensors = {name: value[: rows.get(name)].clone() for name, value in load_file(path).items() if name != without}
    path.unlink()
    write_shard(tensors, path)
    reseal(folder)


@pytest.mark.parametrize(("k", "candidates"), [(0, None), (5, 4), (2.5, None), ("3", None), (None, 4), (2, 3.5)])
def test_impossible_searches_are_refused(index, k, candidates):
    with pytest.raises(
        ValueError, match=rf"k is {k!r} and candidates .*: expected whole numbers, 1 <= k <= candidates"
    ):
        index.search("red", k, candidates)


def test_queries_that_are_none_are_refused(index):
    for query, message in [(3, "number 0 is a int"), ("\udcff", r"the text '\\udcff' is no UTF-8")]:
        with pytest.raises(ValueError, match=message):
            index.search(query)
    with pytest.raises(ValueError, match="got one str: put it in a list"):
        index.search_all("red")
    with pytest.raises(ValueError, match="max_query_span is 0: expected a whole number"):
        index.search("red", max_query_span=0)


def test_more_than_there_is_and_queries_that_are_walked_once(index):
    assert len(index.search("red", 10**30)) == len(TEXTS)
    assert len(index.search("red", 5, 10**30)) == 5
    assert [len(hits) for hits in index.search_all(iter(QUERIES), 2)] == [2] * len(QUERIES)


def test_collections_in_files(tmp_path):
    (tmp_path / "a.txt").write_bytes("red apple\n\nun café\r\nlast".encode())
    assert list(read_collection(tmp_path / "a.txt")) == [("1", "red apple"), ("3", "un café"), ("4", "last")]
    lines = [{"id": "x", "text": "red"}, {"id": 7, "text": "", "more": 1}]
    for name in ("a.jsonl", "A.JSONL"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)) + "\n\n")
        assert list(read_collection(tmp_path / name)) == [("x", "red"), ("7", "")]
    (tmp_path / "marked.txt").write_text("red\nblue", encoding="utf-8-sig")
    assert list(read_collection(tmp_path / "marked.txt")) == [("1", "red"), ("2", "blue")]
    assert list(read_collection(Path("/dev/null"))) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\n\xff\n", "a.txt, line 2 is not UTF-8"),
        ("a.jsonl", b'{"id": 1, "text": "x"}\n{"id"', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b"[" * 200_000, "a.jsonl, line 1 is not JSON"),
        ("a.jsonl", b'{"id": ' + b"9" * 5000 + b', "text": "x"}', "a.jsonl, line 1 is not JSON"),
        ("a.jsonl", b'{"id": 1}', "a.jsonl, line 1: expected"),
        ("a.jsonl", b'{"text": "x"}', "a.jsonl, line 1: expected"),
        ("a.jsonl", b'{"id": true, "text": "x"}', "a.jsonl, line 1: expected"),
        ("a.jsonl", b"[1]", "a.jsonl, line 1: expected"),
        ("a.txt", None, "there is no file .*a.txt: expected one text a line, or .jsonl"),
    ],
)
def test_files_that_are_no_collections_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_collection(tmp_path / name))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    build().save_model(folder / "weights")
    save_model(configuration().loader_config(folder / "weights"), folder / "model")
    return str(folder / "model")


def test_the_command_writes_and_searches(saved, index, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    folder = str(tmp_path / "i")
    assert main(["index", saved, str(tmp_path / "texts.txt"), folder]) == 0
    assert capsys.readouterr().out == f"160 documents in {folder}\n"
    assert main(["search", saved, folder, "red apple", "-k", "3", "--candidates", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = index.search("red apple", 3, 9)
    assert lines == [f"{hit.score:.4f}\t{int(hit.id) + 1}\t{hit.text}" for hit in expected]
    assert main(["search", saved, folder, "red apple", "-k", "2", "--max-query-span", "3"]) == 0
    cut = [f"{hit.score:.4f}\t{int(hit.id) + 1}\t{hit.text}" for hit in index.search("red apple", 2, max_query_span=3)]
    assert capsys.readouterr().out.splitlines() == cut
    assert main(["search", saved, folder, "red", "blue", "-k", "1"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")] == ["# red", "# blue"]


def test_the_command_writes_one_line_for_each_hit(saved, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "a\tb\nc", "text": "red\n\tapple"}))
    assert main(["index", saved, str(tmp_path / "a.jsonl"), str(tmp_path / "i")]) == 0
    capsys.readouterr()
    assert main(["search", saved, str(tmp_path / "i"), "red"]) == 0
    assert capsys.readouterr().out.split("\t")[1:] == ["a b c", "red apple\n"]


def test_hits_hold_nothing_that_a_terminal_obeys(saved, tmp_path, capsys):
    """Joiners, of which emoji and many scripts are made, stay."""
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "\x1b[2J", "text": f"{family} \x1b]0;title\x07 \u202eder"}))
    assert main(["index", saved, str(tmp_path / "a.jsonl"), str(tmp_path / "i")]) == 0
    capsys.readouterr()
    assert main(["search", saved, str(tmp_path / "i"), "red", "\x1b[1m"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2] == "# \\x1b[1m"
    assert out.splitlines()[1].split("\t")[1:] == ["\\x1b[2J", rf"{family} \x1b]0;title\x07 \u202eder"]


class Wider(UFormEncoder):
    """A model of one's own."""

    __xpmid__ = "test.index.wider"


def test_the_command_takes_a_model_of_ones_own_where_it_is_trusted(tmp_path, capsys):
    model = Wider.C(depth=1, hidden=128, pooled=PooledHead.C(width=8))
    built = model.instance()
    built.initialize()
    built.save_model(tmp_path / "weights")
    save_model(model.loader_config(tmp_path / "weights"), tmp_path / "model")
    (tmp_path / "texts.txt").write_text("red\nblue\n")
    arguments = ["index", str(tmp_path / "model"), str(tmp_path / "texts.txt"), str(tmp_path / "i")]
    assert main(arguments) == 1
    assert "which is not of this package" in capsys.readouterr().err
    trust = ["--trust", f"{Wider.__module__}.Wider"]
    assert main([*arguments, *trust]) == 0
    assert main(["search", str(tmp_path / "model"), str(tmp_path / "i"), "red", *trust]) == 0
    assert capsys.readouterr().out.startswith("2 documents in ")


def test_the_command_says_what_is_wrong(saved, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    for arguments, message in [
        (["index", saved, str(tmp_path / "empty.txt"), str(tmp_path / "i")], "the collection is empty"),
        (["index", saved, str(tmp_path / "none"), str(tmp_path / "i")], "there is no file"),
        (["index", str(tmp_path), str(tmp_path / "empty.txt"), str(tmp_path / "i")], "holds no experimaestro.json"),
        (["search", saved, str(tmp_path), "red"], "holds no index.json"),
        (["search", saved, str(tmp_path), "red", "--device", "nowhere"], "the model cannot run on nowhere"),
    ]:
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
