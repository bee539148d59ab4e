"""Pair losses: golden values, known cases and rules that every back end keeps (Triton interpreted without a GPU)."""

import importlib
import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch
from uform_kernels import Edges, Normalizers, pair_loss, pair_normalizers

GOLDEN = json.loads((Path(__file__).parent / "assets/golden/pair_loss.json").read_text())
BACKENDS = ("reference", "chunked", "triton")
FORMS = ("balanced", "sigmoid", "ranked")
NEGATIVES = ("ambient", "named", "across")
COMBINATIONS = list(itertools.product(FORMS, NEGATIVES))
CUDA = torch.cuda.is_available()

# The interpreter is numpy: a masked lane's -inf is a warning there.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles, chunks and tables so small that few items make many of them."""
    for name, values in {
        "matryoshka": {"EDGE_CHUNK": 5},
        "row_sums": {"RANKED_CELLS": 60, "HELD_CELLS": 300, "LEAST_ROWS": 3},
        "ranked_form": {"TABLE_FROM": 2, "TABLE_SHARE": math.inf},
    }.items():
        for constant, value in values.items():
            monkeypatch.setattr(importlib.import_module(f"uform_kernels.ops.pair_loss.{name}"), constant, value)
    monkeypatch.setattr(importlib.import_module("uform_kernels.ops.pair_loss.tiles").TileWalk, "side", 7)
    if importlib.util.find_spec("triton"):
        monkeypatch.setattr(importlib.import_module("uform_kernels.ops.pair_loss.kernel").FusedWalk, "side", 7)


def device_of(backend):
    return "cuda" if backend == "triton" and CUDA else "cpu"


def dtype_of(backend):
    return torch.float32 if backend == "triton" else torch.float64


def tolerance(backend):
    return {"reference": 1e-12, "chunked": 1e-11, "triton": 2e-5}[backend]


def random_edges(count, seed, rows=None, weighted=True, most=None):
    """Disjoint attract, repel and ignore edges; some anchors have none of a kind, some weights are zero."""
    rng = random.Random(seed)
    ids, weights = ([[], [], []] for _ in range(2))
    for anchor in range(*(rows or (0, count))):
        others = [item for item in range(count) if item != anchor]
        rng.shuffle(others)
        for kind in range(3):
            take = rng.randint(0, min(len(others), most or max(1, count // 4)))
            chosen, others = sorted(others[:take]), others[take:]
            ids[kind].append(chosen)
            weights[kind].append([rng.choice([0.0, 0.5, 1.0, rng.uniform(0.1, 2)]) for _ in chosen])
    return [Edges.from_lists(i, w if weighted else None) for i, w in zip(ids, weights, strict=True)]


def problem(seed=0, count=20, width=6, groups=1, **edges):
    """Keyword arguments of `pair_loss` in float64."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    names = dict(zip(("attract", "repel", "ignore"), random_edges(count, seed, **edges), strict=True))
    return names | {
        "embeddings": torch.randn(count, width, generator=generator, dtype=torch.float64),
        "inverse_temperature": 1 + 9 * uniform(groups),
        "bias": -3 * uniform(groups),
        "groups": torch.randint(groups, (count,), generator=generator),
        "families": torch.randint(2, (count,), generator=generator),
    }


LEAVES = ("embeddings", "inverse_temperature", "bias")


def solve(backend, arguments, grad=True, **changes):
    """The loss, its three gradients (0 where a tensor has none) and the statistics, in float64."""
    device, dtype = device_of(backend), dtype_of(backend)
    arguments = arguments | changes
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor | Edges):
            arguments[name] = value.to(device)
    for name in LEAVES:
        arguments[name] = arguments[name].to(dtype).detach().requires_grad_(grad)
    out = pair_loss(**arguments, backend=backend)
    leaves = [arguments[name] for name in LEAVES]
    found = torch.autograd.grad(out.loss, leaves, allow_unused=True) if grad else (None,) * 3
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return [value.detach().double().cpu() for value in (out.loss, *gradients)], out.stats


def assert_same(one, other, within):
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=within, atol=within)


@pytest.mark.parametrize("case", range(len(GOLDEN["cases"])))
def test_golden_values_and_gradients(backend, case):
    case = GOLDEN["cases"][case]
    arguments = {name: torch.tensor(case[name], dtype=torch.float64) for name in LEAVES}
    arguments |= {name: Edges(**case[name]) for name in ("attract", "repel", "ignore")}
    arguments |= {name: torch.tensor(case[name]) for name in ("families", "groups")}
    arguments |= {name: case[name] for name in ("form", "negatives", "ambient_weight", "dimensions")}
    (loss, *gradients), _ = solve(backend, arguments)
    triton = backend == "triton"
    assert abs(loss.item() - case["loss"]) < (1e-5 if triton else GOLDEN["tolerance"]["loss"])
    for name, gradient in zip(LEAVES, gradients, strict=True):
        right = torch.tensor(case[f"grad_{name}"], dtype=torch.float64)
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=GOLDEN["tolerance"]["grad"])


def test_golden_cases_cover_every_form_and_kind_of_negative():
    seen = {(case["form"], case["negatives"]) for case in GOLDEN["cases"]}
    assert seen == set(COMBINATIONS)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("negatives", NEGATIVES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_tiles")
def test_back_ends_agree(form, negatives, seed):
    """Many tiles, many chunks, tables: levels, groups, weights, zero and equal vectors."""
    arguments = problem(seed, count=23, groups=1 + 2 * (seed % 2), most=1 if seed == 2 else None)
    arguments["embeddings"][3] = 0
    arguments["embeddings"][5] = arguments["embeddings"][6]
    options = {"form": form, "negatives": negatives, "dimensions": [None, (2, 3, 6), (4,), (1, 5)][seed]}
    options["ambient_weight"] = [1.0, 0.7, 0.3, 1.0][seed]
    right, statistics = solve("reference", arguments, **options)
    for backend in ("chunked", "triton"):
        if backend == "triton":
            pytest.importorskip("triton")
        found, stats = solve(backend, arguments, **options)
        assert_same(found, right, tolerance(backend))
        assert set(stats) == set(statistics)
        for name, value in statistics.items():
            torch.testing.assert_close(stats[name].double().cpu(), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("form", "negatives"), COMBINATIONS)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_gradcheck(backend, form, negatives):
    arguments = problem(3, count=7, width=3, groups=2)
    leaves = [arguments.pop(name).requires_grad_() for name in LEAVES]

    def loss(*inputs):
        named = dict(zip(LEAVES, inputs, strict=True))
        return pair_loss(**named, **arguments, form=form, negatives=negatives, dimensions=(2, 3), backend=backend).loss

    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize(("form", "negatives"), COMBINATIONS)
def test_the_order_of_items_changes_nothing(backend, form, negatives):
    arguments = problem(4, count=12, groups=2)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(9))
    place = order.argsort()
    moved = dict(arguments)
    for name in ("embeddings", "families", "groups"):
        moved[name] = arguments[name][order]
    for name in ("attract", "repel", "ignore"):
        edges = arguments[name]
        anchors, ids = place[edges.anchors()], place[edges.ids]
        sort = (anchors * 12 + ids).argsort()
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(anchors, minlength=12).cumsum(0)])
        moved[name] = Edges(offsets, ids[sort], edges.weights[sort])
    one, _ = solve(backend, arguments, form=form, negatives=negatives)
    other, _ = solve(backend, moved, form=form, negatives=negatives)
    other[1] = other[1][place]
    assert_same(one, other, tolerance(backend))


def part_of(edges, start, stop):
    low, high = int(edges.offsets[start]), int(edges.offsets[stop])
    return Edges(edges.offsets[start : stop + 1] - low, edges.ids[low:high], edges.weights[low:high])


@pytest.mark.parametrize(("form", "negatives"), COMBINATIONS)
@pytest.mark.usefixtures("small_tiles")
def test_parts_of_the_rows_add_up(backend, form, negatives):
    """With the whole batch's normalizers, which add up from the parts' own, and in float64 to 1e-12."""
    arguments = problem(5, count=19, groups=2)
    options = {"form": form, "negatives": negatives, "dimensions": (3, 6), "ambient_weight": 0.7}
    whole, statistics = solve(backend, arguments, **options)
    names = ("attract", "repel", "ignore")
    ranges = [(0, 8), (8, 8), (8, 9), (9, 19)]
    edges = [{name: part_of(arguments[name], *rows) for name in names} for rows in ranges]
    counted = [
        pair_normalizers(
            **named, count=19, form=form, negatives=negatives, families=arguments["families"], ambient_weight=0.7,
            rows=rows,
        )
        for named, rows in zip(edges, ranges, strict=True)
    ]  # fmt: skip
    total = counted[0] + counted[1] + counted[2] + counted[3]
    counts = torch.stack([statistics[name].cpu() for name in ("attract_weight", "repel_weight", "anchors")])
    torch.testing.assert_close(total.values, counts, rtol=1e-14, atol=0)
    total = Normalizers(total.values.to(device_of(backend)))
    parts = [
        solve(backend, arguments, **options, **named, rows=rows, normalizers=total)
        for named, rows in zip(edges, ranges, strict=True)
    ]
    within = 1e-12 if backend != "triton" else 2e-5
    assert_same([sum(values) for values in zip(*(part for part, _ in parts), strict=True)], whole, within)
    for name in ("attract_loss", "repel_loss", "attract_cosine", "repel_cosine"):
        summed = sum(stats[name] for _, stats in parts)
        torch.testing.assert_close(summed, statistics[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_weights_multiply(backend, form):
    """Twice the weight is the same edge from two equal anchors, or to two equal items."""
    ids, anchor = [[1], [0], [], []], [2.0]
    attract = Edges.from_lists(ids, [anchor, [1.0], [], []])
    vectors = problem(6, count=4)["embeddings"]
    scalars = {"inverse_temperature": torch.tensor([4.0]), "bias": torch.tensor([-1.0])}
    named = {"form": form, "negatives": "named", **scalars}
    repel = Edges.from_lists([[2, 3], [2], [], []], [[1.0, 3.0], [1.0], [], []])
    once, _ = solve(backend, {"embeddings": vectors, "attract": attract, "repel": repel}, **named)
    doubled = torch.cat([vectors, vectors[1:2], vectors[3:4], vectors[3:4]])
    attract = Edges.from_lists([[1, 4], [0], [], [], [], [], []])
    repel = Edges.from_lists([[2, 3, 5, 6], [2], [], [], [], [], []])
    twice, _ = solve(backend, {"embeddings": doubled, "attract": attract, "repel": repel}, **named)
    gathered = twice[1][:4].clone()
    gathered[1] += twice[1][4]
    gathered[3] += twice[1][5] + twice[1][6]
    assert_same(once, [twice[0], gathered, *twice[2:]], tolerance(backend))


@pytest.mark.parametrize("form", FORMS)
def test_an_ignored_pair_has_no_effect(backend, form):
    """Ignoring 0 -> 5 and 5 -> 0 in a batch where nothing else joins them: moving one moves nothing of the other."""
    attract = Edges.from_lists([[1], [0], [3], [2], [5], [4]])
    ignore = Edges.from_lists([[2, 3, 4, 5], [2, 3, 4, 5], [0, 1], [0, 1], [0, 1], [0, 1]])
    vectors = problem(7, count=6)["embeddings"]
    scalars = {"inverse_temperature": torch.tensor([4.0]), "bias": torch.tensor([-1.0])}
    fixed = {"attract": attract, "ignore": ignore, "form": form, **scalars}
    before, _ = solve(backend, {"embeddings": vectors, **fixed})
    moved = vectors.clone()
    moved[4:] = moved[4:].flip(1)
    after, _ = solve(backend, {"embeddings": moved, **fixed})
    torch.testing.assert_close(before[1][:2], after[1][:2], rtol=1e-6, atol=1e-7)
    assert form == "ranked" or before[1][:2].abs().max() > 1e-3


def test_duplicates_of_an_anchor_share_its_gradient(backend):
    """Two equal items in equal places get equal gradients."""
    vectors = problem(8, count=5)["embeddings"]
    vectors[1] = vectors[0]
    attract = Edges.from_lists([[2], [2], [0, 1], [4], [3]])
    ignore = Edges.from_lists([[1], [0], [], [], []])
    for form in FORMS:
        scalars = {"inverse_temperature": torch.tensor([4.0]), "bias": torch.tensor([-1.0])}
        found, _ = solve(backend, {"embeddings": vectors, "attract": attract, "ignore": ignore, **scalars}, form=form)
        torch.testing.assert_close(found[1][0], found[1][1], rtol=1e-5, atol=1e-7)
        assert found[1][0].abs().max() > 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_no_gradient_at_an_optimum(backend, form):
    """Positives equal, negatives opposite: every cosine is at its bound, so no direction lowers the loss."""
    axis = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    attract = Edges.from_lists([[1], [0], [3], [2]])
    vectors = torch.stack([axis, axis * 2, -axis, -axis / 3])
    scalars = {"inverse_temperature": torch.tensor([3.0]), "bias": torch.tensor([-1.0])}
    (loss, gradient, *_), _ = solve(backend, {"embeddings": vectors, "attract": attract, **scalars}, form=form)
    assert loss > 0
    assert gradient.abs().max() < (1e-6 if backend == "triton" else 1e-15)


def test_across_with_one_to_one_edges_is_siglip(backend):
    generator = torch.Generator().manual_seed(2)
    images, texts = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    logits = 10 * torch.nn.functional.normalize(images, dim=1) @ torch.nn.functional.normalize(texts, dim=1).T - 10
    signs = 2 * torch.eye(5, dtype=torch.float64) - 1
    siglip = -torch.nn.functional.logsigmoid(signs * logits).sum() / 5
    attract = Edges.from_lists([[i + 5] for i in range(5)] + [[i] for i in range(5)])
    arguments = {"embeddings": torch.cat([images, texts]), "attract": attract, "families": torch.arange(10) // 5}
    scalars = {"inverse_temperature": torch.tensor([10.0]), "bias": torch.tensor([-10.0])}
    (loss, *_), _ = solve(backend, arguments | scalars, form="sigmoid", negatives="across")
    assert loss.item() == pytest.approx(siglip.item(), rel=1e-12 if backend != "triton" else 1e-6)


def test_two_items_sum_and_gradients(backend):
    """Scores of the identity, t = 10, b = -10: N = 2 images and texts; the sum over all pairs is 1.386385 a side."""
    vectors = torch.eye(2, dtype=torch.float64).repeat(2, 1)
    attract = Edges.from_lists([[2], [3], [0], [1]])
    arguments = {"embeddings": vectors, "attract": attract, "families": torch.tensor([0, 0, 1, 1])}
    scalars = {"inverse_temperature": torch.tensor([10.0]), "bias": torch.tensor([-10.0])}
    (loss, _, by_temperature, by_bias), stats = solve(backend, arguments | scalars, form="sigmoid", negatives="across")
    assert loss.item() == pytest.approx(0.693193, abs=1e-6)
    assert stats["attract_loss"].item() == pytest.approx(math.log(2), abs=1e-6)
    # Each similarity of an image with a text is two cells; by the temperature only the diagonal counts: -0.25 * 2.
    assert by_temperature.item() == pytest.approx(-2.5 * 2 / 10, abs=1e-6)
    assert by_bias.item() == pytest.approx((-2.5 * 2 + 2.2699e-4 * 2) / 10, abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("attract", "repel"), [([[1], [0]], [[], []]), ([[], []], [[1], [0]]), ([[], []], [[], []]), ([[1], []], [[], [0]])]
)
def test_a_half_without_weight_adds_nothing(backend, form, attract, repel):
    named = {"attract": Edges.from_lists(attract), "repel": Edges.from_lists(repel)}
    scalars = {"inverse_temperature": torch.tensor([4.0]), "bias": torch.tensor([-1.0])}
    vectors = torch.tensor([[1.0, 2.0], [0.5, -1.0]], dtype=torch.float64)
    found, stats = solve(backend, {"embeddings": vectors, **named, **scalars}, form=form, negatives="named")
    assert all(value.isfinite().all() for value in [*found, *stats.values()])
    if form == "ranked" or not any(attract + repel):
        assert all((value == 0).all() for value in found)
    if not any(attract):
        assert stats["attract_loss"] == 0


def test_an_anchor_without_positives_counts_in_no_ranked_mean(backend):
    attract = Edges.from_lists([[1], [0], []])
    scalars = {"inverse_temperature": torch.tensor([5.0]), "bias": torch.tensor([0.0])}
    (loss, *_), stats = solve(backend, {"embeddings": torch.eye(3), "attract": attract, **scalars}, form="ranked")
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert stats["anchors"] == 2


def test_a_zero_vector_has_no_cosine_and_no_gradient(backend):
    vectors = problem(9, count=6)["embeddings"]
    vectors[2] = 0
    vectors[4, :3] = 0
    attract = Edges.from_lists([[1], [0], [3], [2], [5], [4]])
    scalars = {"inverse_temperature": torch.tensor([5.0]), "bias": torch.tensor([-2.0])}
    for form, dimensions in itertools.product(FORMS, (None, (3, 6))):
        found, _ = solve(
            backend, {"embeddings": vectors, "attract": attract, **scalars}, form=form, dimensions=dimensions
        )
        assert all(value.isfinite().all() for value in found)
        assert (found[1][2] == 0).all()


def test_lengths_do_not_matter_and_large_ones_do_not_overflow(backend):
    arguments = problem(10, count=6)
    one, _ = solve(backend, arguments)
    lengths = torch.tensor([1e-3, 1.0, 1e18, 7.0, 1e-12, 1e10], dtype=torch.float64)[:, None]
    other, _ = solve(backend, arguments, embeddings=arguments["embeddings"] * lengths)
    assert_same([one[0], one[2]], [other[0], other[2]], tolerance(backend))
    assert_same([one[1]], [other[1] * lengths], tolerance(backend))


@pytest.mark.parametrize("form", FORMS)
def test_a_capped_temperature_stays_finite(backend, form):
    """exp(12) is what a free parameter reaches; capped at 100 the loss and its gradients are finite in any dtype."""
    arguments = problem(11, count=8)
    temperature = torch.tensor([12.0]).exp().clamp(max=100)
    for dtype in (torch.float16, torch.float32):
        vectors = arguments["embeddings"].to(device_of(backend), dtype).requires_grad_()
        scalars = [value.to(vectors.device).requires_grad_() for value in (temperature, torch.tensor([-10.0]))]
        edges = {name: arguments[name].to(vectors.device) for name in ("attract", "repel", "ignore")}
        out = pair_loss(vectors, **edges, inverse_temperature=scalars[0], bias=scalars[1], form=form, backend=backend)
        assert out.loss.dtype == torch.float32
        out.loss.backward()
        assert vectors.grad.dtype == dtype
        assert all(x.grad is None or x.grad.isfinite().all() for x in (vectors, *scalars))


def test_a_wrong_model_lowers_its_temperature(backend):
    """Scale 100, similarities [[0, 1], [1, 0]]: d loss / d log scale is 100 for the summed pairs' mean."""
    vectors = torch.tensor([[1.0, 0], [0, 1], [0, 1], [1, 0]], dtype=torch.float64)
    attract = Edges.from_lists([[2], [3], [], []])
    repel = Edges.from_lists([[3], [2], [], []])
    scalars = {"inverse_temperature": torch.tensor([100.0]), "bias": torch.tensor([0.0])}
    (_, _, by_temperature, _), _ = solve(
        backend, {"embeddings": vectors, "attract": attract, "repel": repel, **scalars}, form="ranked",
        negatives="named",
    )  # fmt: skip
    assert 100 * by_temperature.item() == pytest.approx(100, rel=1e-6)


def test_strided_expanded_and_offset_inputs(backend):
    arguments = problem(12, count=9, groups=2)
    right, _ = solve(backend, arguments)
    device, dtype = device_of(backend), dtype_of(backend)
    storage = torch.full((6, 40), math.nan, dtype=dtype, device=device)
    strided = storage.T[3:30:3, 0:6]
    strided.copy_(arguments["embeddings"])
    found, _ = solve(backend, arguments, embeddings=strided)
    assert_same(found, right, tolerance(backend))
    expanded = torch.tensor([4.0], dtype=dtype, device=device).expand(2)
    one, _ = solve(backend, arguments, inverse_temperature=expanded)
    other, _ = solve(backend, arguments, inverse_temperature=torch.tensor([4.0, 4.0]))
    assert_same(one, other, 1e-12)


def test_the_output_serves_twice_and_takes_any_gradient(backend):
    arguments = problem(13, count=8)
    vectors = arguments.pop("embeddings").to(device_of(backend), dtype_of(backend)).requires_grad_()
    arguments = {
        name: value.to(vectors.device) if isinstance(value, Edges) else value.to(vectors)
        for name, value in arguments.items()
        if name not in ("families", "groups")
    }
    loss = pair_loss(vectors, **arguments, backend=backend).loss
    (once,) = torch.autograd.grad(loss, vectors, retain_graph=True)
    (twice,) = torch.autograd.grad(loss * 2 + loss, vectors, retain_graph=True)
    (expanded,) = torch.autograd.grad(loss.expand(3).sum(), vectors, retain_graph=True)
    torch.testing.assert_close(twice, 3 * once)
    torch.testing.assert_close(expanded, 3 * once)
    torch.testing.assert_close(torch.autograd.grad(loss, vectors)[0], once, rtol=0, atol=0)


@pytest.mark.parametrize("asked", LEAVES)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_only_where_asked(backend, asked, form):
    arguments = problem(14, count=10, groups=2)
    right, _ = solve(backend, arguments, form=form)
    moved = {name: v.to(device_of(backend)) for name, v in arguments.items() if isinstance(v, torch.Tensor | Edges)}
    for name in LEAVES:
        moved[name] = moved[name].to(dtype_of(backend)).requires_grad_(name == asked)
    loss = pair_loss(**moved, form=form, backend=backend).loss
    if asked == "bias" and form == "ranked":
        return
    (found,) = torch.autograd.grad(loss, [moved[asked]])
    assert_same([found.double().cpu()], [right[1 + LEAVES.index(asked)]], tolerance(backend))
    with torch.no_grad():
        assert not pair_loss(**moved, form=form, backend=backend).loss.requires_grad


def test_autocast_does_not_reach_the_cosines(backend):
    arguments = problem(15, count=12)
    plain, _ = solve(backend, arguments, grad=False)
    with torch.autocast(device_of(backend), dtype=torch.bfloat16):
        cast, _ = solve(backend, arguments, grad=False)
    assert_same(plain[:1], cast[:1], 0)


def test_temperature_gradient_in_float32():
    """Random vectors at the initial temperature, where the attract cells nearly cancel: to 1e-6 of float64."""
    count = 700
    attract = Edges(torch.arange(count + 1), torch.arange(count) ^ 1)
    vectors = torch.randn(count, 64, generator=torch.Generator().manual_seed(1))
    for shift, dimensions in itertools.product((0.0, 1.0), (None, (16, 32, 64))):
        arguments = {"embeddings": vectors + shift, "attract": attract, "dimensions": dimensions}
        found = []
        for dtype in (torch.float32, torch.float64):
            temperature = torch.tensor([10.0], dtype=dtype, requires_grad=True)
            bias = torch.tensor([-10.0], dtype=dtype)
            out = pair_loss(
                **arguments | {"embeddings": arguments["embeddings"].to(dtype)}, inverse_temperature=temperature,
                bias=bias, backend="chunked",
            )  # fmt: skip
            found.append(torch.autograd.grad(out.loss, temperature)[0].double().item())
        assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_are_wide(dtype):
    """4,096 equal terms: a running sum in bfloat16 would stop at 256 of them."""
    vectors = torch.ones(4096, 4, dtype=dtype)
    attract = Edges(torch.arange(4097), torch.arange(4096) ^ 1)
    scalars = {"inverse_temperature": torch.tensor([5.0]), "bias": torch.tensor([-12.0])}
    out = pair_loss(vectors, attract, form="sigmoid", **scalars, backend="chunked")
    right = math.log1p(math.exp(7)) + 4094 * math.log1p(math.exp(-7))
    assert out.loss.item() == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("most", [1, None])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_tiles")
def test_threads_share_the_work(form, most):
    """Any number of threads to rounding, the same number bit by bit; and the number is left as it was."""
    arguments = problem(16, count=40, groups=2, most=most)
    before = torch.get_num_threads()
    found = {}
    try:
        for threads in (1, 2, 3, 3):
            torch.set_num_threads(threads)
            values, _ = solve("chunked", arguments, form=form, dimensions=(3, 6))
            assert torch.get_num_threads() == threads
            if threads in found:
                assert all(torch.equal(*pair) for pair in zip(values, found[threads], strict=True))
            found[threads] = values
        with torch.inference_mode():
            loss, *_ = solve("chunked", arguments, grad=False, form=form, dimensions=(3, 6))
    finally:
        torch.set_num_threads(before)
    assert_same(found[1], found[2], 1e-12)
    assert_same(found[1], found[3], 1e-12)
    assert_same([found[1][0]], [loss[0]], 1e-12)
