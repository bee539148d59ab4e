"""Cells of weight 0, numbers that are not finite, tiny prefixes and extreme weights: the same in every back end."""

import itertools

import pytest
import torch
from uform_kernels import Edges, choice_loss, maxsim, pair_loss

BACKENDS = ("reference", "chunked", "triton")
FORMS = ("balanced", "sigmoid", "ranked")
CUDA = torch.cuda.is_available()
INF, NAN = float("inf"), float("nan")

# The interpreter is numpy: a masked lane's -inf is a warning there.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def device_of(backend):
    return "cuda" if backend == "triton" and CUDA else "cpu"


def dtype_of(backend):
    return torch.float32 if backend == "triton" else torch.float64


def solve(backend, embeddings, edges, temperature=(4.0, 4.0), bias=(-1.0, -1.0), dtype=None, **options):
    """Loss, gradients of embeddings, temperature and bias, and statistics, in float64."""
    device, dtype = device_of(backend), dtype or dtype_of(backend)
    leaves = [torch.as_tensor(x).to(device, dtype).requires_grad_() for x in (embeddings, temperature, bias)]
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    named = [each.to(device) for each in edges]
    out = pair_loss(leaves[0], *named, inverse_temperature=leaves[1], bias=leaves[2], backend=backend, **options)
    found = torch.autograd.grad(out.loss, leaves, allow_unused=True, materialize_grads=True)
    values = [value.detach().double().cpu() for value in (out.loss, *found)]
    return values, {name: float(value) for name, value in out.stats.items()}


def vectors(count=9, width=6, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def around(broken, count=9, weight=0.0, extra="ignore"):
    """Edges of 9 items in which no cell that counts has to do with the item `broken`.

    All attract their neighbour; `broken` names all others and is named by them, with weight 0 or to ignore them.
    """
    rows = {name: ([[] for _ in range(count)], [[] for _ in range(count)]) for name in ("attract", "repel", "ignore")}
    for i in range(count):
        for j in range(count):
            if i == j:
                continue
            hit = broken in (i, j)
            name = extra if hit else "attract" if j == (i + 1) % count else None
            if name:
                rows[name][0][i].append(j)
                rows[name][1][i].append(weight if hit else 1.0)
    return [Edges.from_lists(*rows[name]) for name in ("attract", "repel", "ignore")]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("extra", ["attract", "repel", "ignore"])
@pytest.mark.parametrize("form", FORMS)
def test_an_item_whose_cells_weigh_nothing_does_not_exist(backend, form, extra, value):
    """Loss, gradients and statistics are those of a batch with any finite item in its place, to the bit."""
    edges, other = around(4, extra=extra), vectors()
    other[4] = 3.0
    bad = other.clone()
    bad[4, 2] = value
    options = {"form": form, "dimensions": (3, 6)}
    found, stats = solve(backend, bad, edges, **options)
    other[4] = 0
    expected, others = solve(backend, other, edges, **options)
    for one, two in zip(found, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-8)
    assert not found[1][4].any()
    assert stats == pytest.approx(others, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_without_ambient_weight_only_edges_count(backend, form):
    """Item 4 is named by nobody, and of the cells that name nobody none weighs anything."""
    edges = [Edges.from_lists([[1], [0], [3], [2], [], [6], [5], [8], [7]]), *around(4, extra="ignore")[1:2]]
    edges[1] = Edges.from_lists([[2], [3], [], [], [], [], [], [0], []])
    bad = vectors()
    bad[4] = NAN
    for options in ({"ambient_weight": 0.0}, {"negatives": "named"}):
        found, _ = solve(backend, bad, edges, form=form, **options)
        assert all(value.isfinite().all() for value in found)
        assert found[0] > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["anchor", "column", "ambient", "temperature", "bias", "level"])
def test_what_counts_is_nan_and_so_are_all_gradients(backend, where, form):
    empty = [[] for _ in range(9)]
    attract = [[i ^ 1] if i < 8 else [] for i in range(9)]
    repel = [row[:] for row in empty]
    options = {"form": form, "negatives": "named"}
    embeddings, scalars = vectors(), {}
    repel[0], repel[2] = [3], [5]
    if where == "anchor":
        embeddings[2, 0] = NAN
    elif where == "column":
        embeddings[5, 1] = -INF
    elif where == "ambient":
        options["negatives"] = "ambient"
        embeddings[8, 1] = NAN
    elif where == "level":
        embeddings[2, 5] = INF
        options["dimensions"] = (2, 6)
    else:
        options["groups"] = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 0])
        scalars[where] = (1.0, NAN if where == "bias" else INF)
    found, _ = solve(backend, embeddings, [Edges.from_lists(attract), Edges.from_lists(repel)], **scalars, **options)
    assert all(value.isnan().all() for value in found)


def test_a_group_whose_anchors_have_no_cell_may_hold_anything(backend):
    groups = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1])
    edges = [
        Edges.from_lists([[i ^ 1] if i < 8 else [0] for i in range(9)], [[1.0 if i < 8 else 0.0] for i in range(9)])
    ]
    options = {"groups": groups, "negatives": "named", "form": "sigmoid"}
    found, _ = solve(backend, vectors(), edges, temperature=(3.0, INF), bias=(0.0, NAN), **options)
    expected, _ = solve(backend, vectors(), edges, temperature=(3.0, 1.0), bias=(0.0, 1.0), **options)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_beyond_the_last_level_nothing_is_read(backend):
    bad = vectors()
    bad[:, 4:] = NAN
    found, _ = solve(backend, bad, around(4), dimensions=(2, 4))
    expected, _ = solve(backend, vectors(), around(4), dimensions=(2, 4))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_parts_of_the_rows_agree_on_what_counts(backend):
    """Anchor 0 alone meets the broken item: its part is NaN, that of the others what it is without anchor 0."""
    attract = Edges.from_lists([[4], [2], [1], [5], [], [3]])
    bad = vectors(6)
    bad[4] = NAN
    options = {"negatives": "named", "form": "sigmoid"}
    whole, _ = solve(backend, bad, [attract], **options)
    assert whole[0].isnan()
    part, _ = solve(backend, bad, [attract.part(1, 6)], rows=(1, 6), **options)
    assert all(value.isfinite().all() for value in part)


@pytest.mark.parametrize("faint", [1e-14, 1e-20, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_tiny_prefix_is_exact(backend, form, dtype, faint):
    """Against float64: the cosine of a prefix does not depend on how long the rest of the vector is."""
    embeddings = vectors(9, 8, 3)
    embeddings[[1, 2, 5], :3] *= faint
    embeddings = embeddings.to(dtype)
    options = {"form": form, "dimensions": (1, 3, 8), "dtype": dtype if backend != "reference" else None}
    scalars = {"temperature": (4.0, 4.0), "bias": (-1.0, -1.0)}
    found, stats = solve(backend, embeddings, around(7), **scalars, **options)
    expected, others = solve("reference", embeddings.double(), around(7), **scalars, **options | {"dtype": None})
    scale = torch.full((9, 8), 1.0, dtype=torch.float64)
    scale[[1, 2, 5], :3] = faint
    found[1], expected[1] = found[1] * scale, expected[1] * scale
    within = 2e-2 if dtype == torch.bfloat16 and backend != "reference" else 2e-5
    for one, two in zip(found, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, two, rtol=within, atol=within)
    assert stats == pytest.approx(others, rel=1e-4, abs=1e-5)


def test_a_vector_of_subnormal_numbers_is_a_zero_vector(backend):
    smallest = torch.finfo(dtype_of(backend)).tiny
    tiny, zero = vectors(), vectors()
    tiny[3], zero[3] = smallest / 8, 0
    tiny[6, :2], zero[6, :2] = smallest / 8, 0
    found, _ = solve(backend, tiny, around(4), dimensions=(2, 6))
    expected, _ = solve(backend, zero, around(4), dimensions=(2, 6))
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("form", ["balanced", "ranked"])
@pytest.mark.parametrize(("pull", "push"), [(1e9, 1e9), (1e-18, 1e-18), (1e9, 1e-18), (1e-18, 1e9)])
@pytest.mark.parametrize("negatives", ["named", "ambient"])
def test_extreme_weights_are_exact_in_float32(backend, form, negatives, pull, push):
    """A row's weights are only compared with one another: multiplied by any number they give the same loss."""

    def edges(pull, push):
        one = [[1, 2], [0, 2], [0, 1], [4], [3], [6], [5], [8], [7]]
        other = [[3], [4, 5], [6], [0, 1], [1], [1, 2], [1], [0], [2]]
        weights = [[1.0 + number for number in range(len(row))] for row in one]
        costs = [[2.0 + number for number in range(len(row))] for row in other]
        return [
            Edges.from_lists(one, [[pull * w for w in row] for row in weights]),
            Edges.from_lists(other, [[push * w for w in row] for row in costs]),
        ]

    pull, push = (min(each, 1e9 / 8) for each in (pull, push))
    options = {"form": form, "negatives": negatives}
    found, _ = solve(backend, vectors(), edges(pull, push), dtype=torch.float32, ambient_weight=push, **options)
    expected, _ = solve("reference", vectors(), edges(1.0, 1.0), **options)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("weight", [2e9, 1e30, 1e300, 1e-19, 1e-300])
def test_weights_beyond_the_bounds_are_refused(weight):
    with pytest.raises(ValueError, match=r"attract.weights\[0\] = .* of row 0; weights must be finite and at least 0"):
        solve("chunked", vectors(2), [Edges.from_lists([[1], []], [[weight], []])])
    with pytest.raises(ValueError, match=r"ambient_weight is .*; it must be finite and at least 0"):
        solve("chunked", vectors(2), [Edges.empty(2)], ambient_weight=weight)


@pytest.mark.parametrize("options", [
    {"dimensions": [1.9]}, {"dimensions": [2.0]}, {"dimensions": [True, 2]}, {"dimensions": ["2"]},
    {"rows": (0, 1.5)}, {"rows": (False, 2)},
])  # fmt: skip
def test_numbers_that_are_not_whole_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} holds .*; it must hold whole numbers"):
        solve("chunked", vectors(2), [Edges.empty(2)], **options)


def test_whole_numbers_of_any_library_are_taken():
    import numpy as np

    for levels in ([np.int64(2), np.uint8(6)], torch.tensor([2, 6])):
        solve("chunked", vectors(2), [Edges.empty(2)], dimensions=levels)


def offsets(*lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def score(backend, queries, query_offsets, documents, document_offsets, pairs=None):
    device = device_of(backend)
    leaves = [tokens.to(device, dtype_of(backend)).requires_grad_() for tokens in (queries, documents)]
    pairs = None if pairs is None else pairs.to(device)
    ends = query_offsets.to(device), document_offsets.to(device)
    return leaves, maxsim(leaves[0], ends[0], leaves[1], ends[1], pairs, backend=backend)


@pytest.mark.parametrize("pairs", [None, torch.tensor([[0, 0], [0, 1], [1, 0], [1, 2], [2, 2], [1, 1]])])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_score_that_nothing_depends_on_spoils_no_gradient(backend, value, pairs):
    """Document 1 and query 2 are broken."""
    queries, documents = vectors(9, 5, 1), vectors(11, 5, 2)
    ends = offsets(3, 4, 2), offsets(4, 3, 4)
    bad = queries.clone(), documents.clone()
    bad[0][8, 1], bad[1][5, 2] = value, value
    leaves, scores = score(backend, bad[0], ends[0], bad[1], ends[1], pairs)
    hit = torch.zeros(3, 3, dtype=torch.bool)
    hit[2], hit[:, 1] = True, True
    hit = hit if pairs is None else hit[pairs[:, 0], pairs[:, 1]]
    assert torch.equal(scores.isnan().cpu(), hit)
    found = torch.autograd.grad(scores[~hit.to(scores.device)].sum(), leaves, retain_graph=True)
    whole, clean = score(backend, queries, ends[0], documents, ends[1], pairs)
    expected = torch.autograd.grad(clean[~hit.to(clean.device)].sum(), whole)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
    through = torch.autograd.grad(scores.nansum() + scores[hit.to(scores.device)].sum(), leaves)
    assert all(gradient.isnan().any() for gradient in through)


def alike(seed, width=None):
    """Query tokens, and documents in which some vectors occur several times, also across the borders of tiles."""
    generator = torch.Generator().manual_seed(seed)
    width = width or int(torch.randint(1, 70, (1,), generator=generator))
    lengths = torch.randint(1, 40, (5,), generator=generator).tolist()
    queries = torch.randn(12, width, generator=generator)
    pool = torch.randn(4, width, generator=generator)
    documents = torch.cat([pool[torch.randint(4, (length,), generator=generator)] for length in lengths])
    return queries, offsets(5, 7), documents, offsets(*lengths)


@pytest.mark.parametrize("listed", [False, True])
def test_the_first_of_equal_vectors_takes_the_gradient(backend, listed):
    """In float32, where the products of equal vectors may be rounded otherwise: no other of them gets any."""
    pairs = torch.tensor([[1, 4], [0, 0], [1, 2], [0, 1], [0, 3]]) if listed else None
    for seed in range(6 if backend == "triton" else 40):
        queries, query_offsets, documents, document_offsets = alike(seed)
        device = device_of(backend)
        tokens = documents.to(device).requires_grad_()
        ends = query_offsets.to(device), document_offsets.to(device)
        chosen = None if pairs is None else pairs.to(device)
        scores = maxsim(queries.to(device), ends[0], tokens, ends[1], chosen, backend=backend)
        slope = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)).to(device)
        (gradient,) = torch.autograd.grad((scores * slope).sum(), tokens)
        later = torch.zeros(len(documents), dtype=torch.bool)
        for start, stop in itertools.pairwise(document_offsets.tolist()):
            part = documents[start:stop]
            first = (part[:, None] == part).all(2).to(torch.uint8).argmax(1)
            later[start:stop] = first != torch.arange(len(part))
        assert later.any()
        assert not gradient.cpu()[later].any()
        plain = documents.double().requires_grad_()
        exact = maxsim(queries.double(), query_offsets, plain, document_offsets, pairs, backend="reference")
        (expected,) = torch.autograd.grad((exact * slope.double().cpu()).sum(), plain)
        torch.testing.assert_close(gradient.double().cpu(), expected, rtol=1e-5, atol=1e-6)


def test_a_vector_that_shares_a_hash_is_compared_in_full(monkeypatch):
    from uform_kernels.ops.maxsim import screen

    monkeypatch.setattr(screen, "hashes", lambda documents, owners: torch.zeros_like(owners))
    documents = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0], [1.0, 2.0], [2.0, 1.0], [2.0, 1.0]])
    rows, firsts = screen.equal_rows(documents, offsets(3, 3))
    assert (rows.tolist(), firsts.tolist()) == ([0, 2, 4, 5], [0, 0, 4, 4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zeros_of_both_signs_are_equal_and_documents_are_apart(dtype):
    from uform_kernels.ops.maxsim import screen

    documents = torch.tensor([[0.0, 1.0], [2.0, 1.0], [-0.0, 1.0], [0.0, 1.0]], dtype=dtype)
    before = documents.clone()
    rows, firsts = screen.equal_rows(documents, offsets(3, 1))
    assert (rows.tolist(), firsts.tolist()) == ([0, 2], [0, 0])
    assert torch.equal(documents, before)


@pytest.mark.parametrize("value", [-INF, 0.0])
def test_a_byte_that_is_not_offered_and_a_target_of_0_may_have_any_logit(backend, value):
    """Loss and gradient; the second row offers nothing and is not finite."""
    logits = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    clean = logits.clone()
    logits[0, 9], logits[2, 7], logits[1] = NAN, INF, NAN
    logits[0, 4] = clean[0, 4] = value
    choices = torch.tensor([3, 4, 5, 8, 9], dtype=torch.uint8)
    targets = torch.tensor([0.25, 0.0, 0.75, 1.0, 0.0])
    found = []
    for given in (logits, clean):
        leaf = given.to(device_of(backend)).requires_grad_()
        ends = torch.tensor([0, 3, 3, 5])
        loss = choice_loss(
            leaf, choices.to(leaf.device), ends.to(leaf.device), targets.to(leaf.device), backend=backend
        )
        found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    assert found[0][0].isfinite()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(("byte", "value"), [(4, INF), (4, NAN), (3, NAN), (3, INF)])
def test_an_offered_byte_whose_logit_has_no_softmax_is_nan(backend, byte, value):
    logits = torch.zeros(1, 256, device=device_of(backend))
    logits[0, byte] = value
    logits.requires_grad_()
    choices, ends = torch.tensor([3, 4], dtype=torch.uint8), torch.tensor([0, 2])
    targets = torch.tensor([1.0, 0.0])
    loss = choice_loss(logits, *(x.to(logits.device) for x in (choices, ends, targets)), backend=backend)
    assert loss.isnan()
    assert torch.autograd.grad(loss, logits)[0][0, 3:5].isnan().all()
