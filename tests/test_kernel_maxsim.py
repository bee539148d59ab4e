"""MaxSim: golden values, gradients and rules that every back end keeps (Triton in its interpreter without a GPU)."""

import importlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from uform_kernels import maxsim

GOLDEN = json.loads((Path(__file__).parent / "assets/golden/maxsim.json").read_text())
BACKENDS = ("reference", "chunked", "triton")
PLAIN = ("reference", "chunked")
CUDA = torch.cuda.is_available()


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def device_of(backend):
    return "cuda" if backend == "triton" and CUDA else "cpu"


def dtype_of(backend):
    return torch.float32 if backend == "triton" else torch.float64


def tolerance_of(backend):
    return 2e-6 if backend == "triton" else 1e-12


def offsets_of(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def packed(lengths, width, backend, seed=0, ternary=False):
    """Random token vectors as a leaf, and their offsets; `ternary` ones tie often and multiply exactly."""
    generator = torch.Generator().manual_seed(seed)
    shape = sum(lengths), width
    values = (
        torch.randint(-1, 2, shape, generator=generator).double()
        if ternary
        else torch.randn(shape, generator=generator, dtype=torch.float64)
    )
    tokens = values.to(dtype_of(backend)).to(device_of(backend))
    return tokens.requires_grad_(), offsets_of(lengths).to(tokens.device)


def problem(backend, width=8, ternary=False, queries=(3, 1, 34), documents=(5, 1, 70, 2, 129)):
    return (
        *packed(list(queries), width, backend, 1, ternary),
        *packed(list(documents), width, backend, 2, ternary),
    )


def gradients(scores, tokens, seed=3):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(scores.shape, generator=generator, dtype=torch.float64).to(scores)
    return torch.autograd.grad((scores * weights).sum(), tokens)


def close(one, other, backend):
    torch.testing.assert_close(one, other, rtol=tolerance_of(backend), atol=tolerance_of(backend))


PAIRS = [[2, 4], [0, 0], [1, 3], [2, 4], [2, 0], [0, 2], [2, 1]]


@pytest.mark.parametrize(("key", "normalize"), [("mean", True), ("sum", False)])
def test_golden(backend, key, normalize):
    packs = []
    for name in ("queries", "documents"):
        tokens = torch.cat([torch.tensor(part, dtype=dtype_of(backend)) for part in GOLDEN[name]])
        packs += [tokens.to(device_of(backend)), offsets_of(map(len, GOLDEN[name])).to(device_of(backend))]
    expected = torch.tensor(GOLDEN[key], dtype=torch.float64)
    close(maxsim(*packs, normalize=normalize, backend=backend).cpu(), expected.to(dtype_of(backend)), backend)
    pairs = torch.tensor([[2, 0], [0, 3], [2, 0]], device=packs[0].device)
    listed = maxsim(*packs, pairs=pairs, normalize=normalize, backend=backend)
    close(listed.cpu(), expected[[2, 0, 2], [0, 3, 0]].to(dtype_of(backend)), backend)


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("pairs", [None, PAIRS])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradcheck(backend, pairs, normalize):
    queries, query_offsets, documents, document_offsets = problem(
        backend, 3, queries=(2, 1, 4), documents=(3, 1, 4, 1, 5)
    )
    pairs = None if pairs is None else torch.tensor(pairs)

    def scores(q, d):
        return maxsim(q, query_offsets, d, document_offsets, pairs, normalize, backend)

    assert torch.autograd.gradcheck(scores, (queries, documents))


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("pairs", [None, PAIRS])
@pytest.mark.parametrize("ternary", [False, True])
def test_agrees_with_the_reference(backend, pairs, ternary):
    """With ternary vectors most maxima tie, so that a gradient sent to any but the first would show."""
    pack = problem(backend, 8, ternary)
    pairs = None if pairs is None else torch.tensor(pairs, device=pack[0].device)
    ours, plain = (maxsim(*pack, pairs=pairs, backend=name) for name in (backend, "reference"))
    close(ours, plain, backend)
    for one, other in zip(gradients(ours, pack[::2]), gradients(plain, pack[::2]), strict=True):
        close(one, other, backend)


@pytest.mark.parametrize("places", [(0, 1), (70, 140), (63, 64), (128, 199), (5, 199)])
def test_the_first_maximum_takes_the_whole_gradient(backend, places):
    """Equal tokens far apart in one document, beyond the borders of any tile."""
    documents = torch.full((200, 4), -1.0, dtype=dtype_of(backend), device=device_of(backend))
    documents[list(places)] = 1.0
    documents.requires_grad_()
    queries = torch.ones(2, 4, dtype=documents.dtype, device=documents.device)
    offsets = offsets_of([2]).to(queries.device), offsets_of([200]).to(queries.device)
    scores = maxsim(queries, offsets[0], documents, offsets[1], normalize=False, backend=backend)
    assert scores.item() == 8
    (gradient,) = torch.autograd.grad(scores.sum(), documents)
    expected = torch.zeros_like(documents)
    expected[places[0]] = 2
    assert torch.equal(gradient, expected)


def test_a_filled_up_document_keeps_its_last_token(backend):
    """Tiles repeat it beyond the document's end; a copy's product may round up and win, yet stands for the token."""
    lengths = [*range(50, 66)]
    generator = torch.Generator().manual_seed(9)
    queries = torch.rand(70, 96, generator=generator).to(device_of(backend))
    ends = offsets_of(lengths).to(queries.device)
    documents = -torch.rand(sum(lengths), 96, generator=generator).to(queries.device)
    documents[ends[1:] - 1] *= -1
    documents.requires_grad_()
    scores = maxsim(queries, offsets_of([70]).to(queries.device), documents, ends, backend=backend)
    (gradient,) = torch.autograd.grad(scores.sum(), documents)
    expected = torch.zeros_like(documents)
    expected[ends[1:] - 1] = queries.mean(0)
    torch.testing.assert_close(gradient, expected)


def test_permuting_queries_and_documents_permutes_scores(backend):
    queries, query_offsets, documents, document_offsets = (x.detach() for x in problem(backend))
    scores = maxsim(queries, query_offsets, documents, document_offsets, backend=backend)
    order = [2, 0, 4, 3, 1]
    parts = [documents[document_offsets[i] : document_offsets[i + 1]] for i in order]
    moved = offsets_of(map(len, parts)).to(queries.device)
    close(maxsim(queries, query_offsets, torch.cat(parts), moved, backend=backend), scores[:, order], backend)
    parts = [queries[query_offsets[i] : query_offsets[i + 1]] for i in (1, 2, 0)]
    moved = offsets_of(map(len, parts)).to(queries.device)
    close(maxsim(torch.cat(parts), moved, documents, document_offsets, backend=backend), scores[[1, 2, 0]], backend)


def test_listed_pairs_are_gathered_scores(backend):
    """Also in their gradients, and a pair that is listed twice counts twice."""
    pack = problem(backend)
    pairs = torch.tensor(PAIRS, device=pack[0].device)
    listed = maxsim(*pack, pairs=pairs, backend=backend)
    gathered = maxsim(*pack, backend=backend)[pairs[:, 0], pairs[:, 1]]
    close(listed, gathered, backend)
    for one, other in zip(gradients(listed, pack[::2]), gradients(gathered, pack[::2]), strict=True):
        close(one, other, backend)


@pytest.mark.parametrize("pairs", [None, PAIRS])
def test_small_tiles_change_nothing(pairs, monkeypatch):
    pack = problem("chunked")
    pairs = None if pairs is None else torch.tensor(pairs)
    whole = maxsim(*pack, pairs=pairs, backend="chunked")
    chunked = importlib.import_module("uform_kernels.ops.maxsim.chunked")
    for name, value in (("TILE_CELLS", 300), ("RUN_TOKENS", 6), ("GRADIENT_ENTRIES", 11)):
        monkeypatch.setattr(chunked, name, value)
    tiled = maxsim(*pack, pairs=pairs, backend="chunked")
    close(tiled, whole, "chunked")
    for one, other in zip(gradients(tiled, pack[::2]), gradients(whole, pack[::2]), strict=True):
        close(one, other, "chunked")


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [1, 2, 1]])
def test_documents_of_one_token(backend, lengths):
    queries, query_offsets = packed([1, 2], 5, backend)
    documents, document_offsets = packed(lengths, 5, backend, 1)
    scores = maxsim(queries, query_offsets, documents, document_offsets, normalize=False, backend=backend)
    close(scores[0, 0], queries[0] @ documents[0], backend)
    close(scores[1, 0], (queries[1:] @ documents[0]).sum(), backend)


@pytest.mark.parametrize("layout", ["strided rows", "transposed", "offset", "expanded"])
@pytest.mark.parametrize("pairs", [None, PAIRS])
def test_any_strides(backend, layout, pairs):
    queries, query_offsets, documents, document_offsets = (x.detach() for x in problem(backend, ternary=True))
    pairs = None if pairs is None else torch.tensor(pairs, device=queries.device)

    def relaid(tokens):
        if layout == "strided rows":
            return tokens.repeat_interleave(2, 0)[::2]
        if layout == "transposed":
            return tokens.T.contiguous().T
        if layout == "offset":
            return torch.cat([tokens.new_full((3, tokens.shape[1]), float("nan")), tokens])[3:]
        return tokens[:1].expand_as(tokens)

    views = [relaid(tokens).requires_grad_() for tokens in (queries, documents)]
    copies = [view.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for view in views]
    ours = maxsim(views[0], query_offsets, views[1], document_offsets, pairs, backend=backend)
    expected = maxsim(copies[0], query_offsets, copies[1], document_offsets, pairs, backend=backend)
    close(ours, expected, backend)
    for one, other in zip(gradients(ours, views), gradients(expected, copies), strict=True):
        close(one, other, backend)


@pytest.mark.parametrize("pairs", [None, PAIRS])
def test_broadcast_gradients_and_double_use(backend, pairs):
    pack = problem(backend)
    pairs = None if pairs is None else torch.tensor(pairs, device=pack[0].device)
    scores = maxsim(*pack, pairs=pairs, backend=backend)
    spread = torch.autograd.grad(scores.sum(), pack[::2], retain_graph=True)
    twice = torch.autograd.grad((scores + scores * 3).sum(), pack[::2], retain_graph=True)
    full = torch.autograd.grad(scores, pack[::2], torch.ones_like(scores))
    for one, two, other in zip(spread, twice, full, strict=True):
        close(one, other, backend)
        close(two, 4 * other, backend)


def test_gradients_only_where_asked(backend):
    queries, query_offsets, documents, document_offsets = problem(backend)
    both = gradients(maxsim(queries, query_offsets, documents, document_offsets, backend=backend), (queries, documents))
    scores = maxsim(queries, query_offsets, documents.detach(), document_offsets, backend=backend)
    assert torch.equal(gradients(scores, (queries,))[0], both[0])
    scores = maxsim(queries.detach(), query_offsets, documents, document_offsets, backend=backend)
    assert torch.equal(gradients(scores, (documents,))[0], both[1])
    scores = maxsim(queries.detach(), query_offsets, documents.detach(), document_offsets, backend=backend)
    assert not scores.requires_grad


@pytest.mark.parametrize("pairs", [None, PAIRS])
def test_thirty_runs_agree_to_the_bit(pairs):
    pack = problem("chunked", 32, queries=[32] * 6, documents=[100] * 5)
    pack = [x.detach().float().requires_grad_() if x.is_floating_point() else x for x in pack]
    pairs = None if pairs is None else torch.tensor([[i % 6, i % 5] for i in range(40)])
    runs = []
    for _ in range(30):
        scores = maxsim(*pack, pairs=pairs, backend="chunked")
        runs.append((scores.detach(), *gradients(scores, pack[::2])))
    assert all(torch.equal(one, other) for run in runs for one, other in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("pairs", [None, [[0, 0], [0, 1]]])
def test_large_negative_products_in_half_precision(backend, pairs):
    """No filling value may win over a real product, nor a sum leave float16's range."""
    device = device_of(backend)
    queries = torch.full((3, 1), -150.0, dtype=torch.float16, device=device)
    documents = torch.tensor([[200.0], [200.0], [210.0], [220.0]], dtype=torch.float16, device=device)
    offsets = offsets_of([3]).to(device), offsets_of([1, 3]).to(device)
    pairs = None if pairs is None else torch.tensor(pairs, device=device)
    scores = maxsim(queries, offsets[0], documents, offsets[1], pairs, normalize=False, backend=backend)
    assert scores.dtype == torch.float32
    assert scores.flatten().tolist() == [-90000.0, -90000.0]
    assert maxsim(queries, offsets[0], documents, offsets[1], pairs, backend=backend).flatten().tolist() == [-3e4, -3e4]


@pytest.mark.parametrize("pairs", [None, PAIRS])
def test_a_nan_shows_in_its_scores_alone(backend, pairs):
    pack = problem(backend)
    with torch.no_grad():
        pack[2][7, 3] = float("nan")  # a token of document 2
    pairs = None if pairs is None else torch.tensor(pairs, device=pack[0].device)
    scores = maxsim(*pack, pairs=pairs, backend=backend)
    gradients(scores, pack[::2])
    hit = torch.zeros(3, 5, dtype=torch.bool, device=scores.device)
    hit[:, 2] = True
    assert torch.equal(scores.isnan(), hit if pairs is None else hit[pairs[:, 0], pairs[:, 1]])


@pytest.mark.parametrize(("queries", "documents", "pairs", "shape"), [
    ([], [2, 3], None, (0, 2)),
    ([2], [], None, (1, 0)),
    ([2], [3], [], (0,)),
])  # fmt: skip
def test_nothing_to_score(backend, queries, documents, pairs, shape):
    pack = *packed(queries, 4, backend), *packed(documents, 4, backend)
    pairs = None if pairs is None else torch.empty(0, 2, dtype=torch.int64, device=pack[0].device)
    scores = maxsim(*pack, pairs=pairs, backend=backend)
    assert scores.shape == shape
    for gradient, tokens in zip(torch.autograd.grad(scores.sum(), pack[::2]), pack[::2], strict=True):
        assert torch.equal(gradient, torch.zeros_like(tokens))


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("pairs", [None, PAIRS])
def test_keeps_one_int32_for_each_query_token_and_pair(backend, pairs):
    pack = problem(backend)
    entries = 38 * 5 if pairs is None else sum((3, 1, 34)[query] for query, _ in pairs)
    pairs = None if pairs is None else torch.tensor(pairs, device=pack[0].device)
    saved = maxsim(*pack, pairs=pairs, backend=backend).grad_fn.saved_tensors
    inputs = {tensor.data_ptr() for tensor in (*pack, pairs) if tensor is not None}
    own = [tensor for tensor in saved if tensor is not None and tensor.data_ptr() not in inputs]
    assert [(tensor.dtype, tensor.numel()) for tensor in own] == [(torch.int32, entries)]


def test_autocast_lowers_nothing(backend):
    pack = problem(backend)
    pack = [x.detach().float().requires_grad_() if x.is_floating_point() else x for x in pack]
    plain = maxsim(*pack, backend=backend)
    with torch.autocast(pack[0].device.type, torch.bfloat16):
        lowered = maxsim(*pack, backend=backend)
    assert torch.equal(plain, lowered)


@pytest.mark.parametrize("backend", PLAIN)
def test_bfloat16_is_scored_in_float32(backend):
    pack = [x.detach().bfloat16() if x.is_floating_point() else x for x in problem(backend, 128)]
    wide = [x.double() if x.is_floating_point() else x for x in pack]
    scores = maxsim(*pack, backend=backend)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), maxsim(*wide, backend="reference"), rtol=1e-6, atol=1e-6)


def test_auto_is_chunked_on_a_cpu():
    pack = problem("chunked")
    assert torch.equal(maxsim(*pack), maxsim(*pack, backend="chunked"))


VALID = {
    "queries": torch.zeros(3, 4),
    "query_offsets": torch.tensor([0, 1, 3]),
    "documents": torch.zeros(5, 4),
    "document_offsets": torch.tensor([0, 2, 5]),
}


@pytest.mark.parametrize(("change", "message"), [
    ({"query_offsets": torch.tensor([0, 0, 3])}, "query_offsets gives query 0 nothing"),
    ({"query_offsets": torch.tensor([0, 3, 3])}, "query_offsets gives query 1 nothing"),
    ({"document_offsets": torch.tensor([0, 0, 5])}, "document_offsets gives document 0 nothing"),
    ({"document_offsets": torch.tensor([0, 5, 5])}, "document_offsets gives document 1 nothing"),
    ({"document_offsets": torch.tensor([0, 2, 2, 2, 5])}, "document_offsets gives document 1 nothing"),
    ({"document_offsets": torch.tensor([0, 4, 2, 5])}, "document_offsets decreases from 4 to 2 at document 1"),
    ({"document_offsets": torch.tensor([1, 5])}, "document_offsets starts at 1"),
    ({"document_offsets": torch.tensor([0, 4])}, "document_offsets ends at 4; it must end at len(documents) = 5"),
    ({"query_offsets": torch.tensor([0.0, 3.0])}, "query_offsets is torch.float32; it must hold integers"),
    ({"query_offsets": [0, 3]}, "query_offsets is a list"),
    ({"documents": torch.zeros(5, 3)}, "documents has shape (5, 3); it must be (document tokens, 4)"),
    ({"documents": torch.zeros(5, 4).half()}, "documents is torch.float16; it must be torch.float32"),
    ({"queries": torch.zeros(3)}, "queries has shape (3,)"),
    ({"queries": torch.zeros(3, 0)}, "token vectors need at least one coordinate"),
    ({"queries": torch.zeros(3, 4, dtype=torch.int32)}, "queries is torch.int32"),
    ({"pairs": torch.tensor([[0, 1, 1]])}, "pairs has shape (1, 3); it must be (P, 2)"),
    ({"pairs": torch.tensor([[0.0, 1.0]])}, "pairs is torch.float32; it must hold integers"),
    ({"pairs": torch.tensor([[0, 1], [2, 0]])}, "pairs[1, 0] = 2 names no query; it must be in 0..1"),
    ({"pairs": torch.tensor([[0, -1]])}, "pairs[0, 1] = -1 names no document; it must be in 0..1"),
    ({"documents": torch.zeros(5, 4, device="meta")}, "documents is on meta"),
    ({"backend": "fast"}, "backend is 'fast'"),
])  # fmt: skip
def test_refusals(change, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        maxsim(**(VALID | change))
    assert message in str(caught.value)
