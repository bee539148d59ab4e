"""The Triton kernel of pair losses against float64: awkward sizes, poisoned memory, NaN margins, far addresses.

Without a GPU it runs in Triton's interpreter, which is right for float32 and float16 and wrong for bfloat16.
"""

import itertools
import math

import pytest
import torch

pytest.importorskip("triton")
from uform_kernels import Edges, pair_loss
from uform_kernels.ops.pair_loss import kernel

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
COUNTS = [1, 2, 63, 65, 130]
WIDTHS = [1, 3, 48, 96, 100, 127, 128, 257]
NEEDS_GPU = pytest.mark.skipif(not CUDA, reason="Triton's interpreter is wrong for bfloat16: needs a GPU")
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=NEEDS_GPU)]

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture
def poisoned():
    """Uninitialised memory holds NaN, and the largest integer."""
    torch.use_deterministic_algorithms(True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


def margined(count, width, dtype, seed):
    """Vectors (count, width) inside a larger tensor of NaN."""
    storage = torch.full((count + 2, width + 2), math.nan, dtype=dtype, device=DEVICE)
    inside = storage[1 : count + 1, 1 : width + 1]
    inside.copy_(torch.randn(count, width, generator=torch.Generator().manual_seed(seed)))
    return inside


def neighbours(count):
    """Items 2k and 2k + 1 attract one another; item 0 repels item 2 and ignores item 3."""
    attract = [[i ^ 1] if i ^ 1 < count else [] for i in range(count)]
    repel, ignore = [[] for _ in range(count)], [[] for _ in range(count)]
    if count > 3:
        repel[0], ignore[0] = [2], [3]
    return [Edges.from_lists(ids).to(DEVICE) for ids in (attract, repel, ignore)]


def plain(vectors, temperature, bias, edges, form):
    """What one writes in plain torch, in the dtype of the vectors throughout."""
    attract, _, ignore = edges
    unit = torch.nn.functional.normalize(vectors, dim=1)
    scores = temperature.to(vectors.dtype) * (unit @ unit.T) + bias.to(vectors.dtype)
    ambient = ~torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    for kind in (attract, ignore):
        ambient[kind.anchors(), kind.ids] = False
    softplus = torch.nn.functional.softplus
    pulled, anchors = scores[attract.anchors(), attract.ids], attract.anchors()
    if form == "ranked":
        rows = (softplus(scores[anchors] - pulled[:, None]) * ambient[anchors]).sum(1) / ambient[anchors].sum(1)
        return rows[ambient[anchors].any(1)].mean()
    pulls, pushes = softplus(-pulled).sum(), (softplus(scores) * ambient).sum()
    weights = (len(anchors), int(ambient.sum())) if form == "balanced" else (len(unit), len(unit))
    return pulls / max(weights[0], 1) + pushes / max(weights[1], 1)


def solve(loss, vectors, dtype):
    leaves = [vectors.detach().to(dtype).requires_grad_()]
    leaves += [torch.tensor([value], device=DEVICE).to(dtype).requires_grad_() for value in (8.0, -2.0)]
    value = loss(*leaves)
    if not value.requires_grad:
        return [value.double(), *(torch.zeros_like(x, dtype=torch.float64) for x in leaves)]
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return [
        value.detach().double(),
        *(torch.zeros_like(x) if g is None else g.double() for x, g in zip(leaves, found, strict=True)),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["balanced", "sigmoid", "ranked"])
@pytest.mark.usefixtures("poisoned")
def test_errs_at_most_twice_as_much_as_plain_torch(form, dtype, monkeypatch):
    """Loss and all gradients, at every awkward size, in tiles of 64 and memory that starts as NaN."""
    monkeypatch.setattr(kernel.FusedWalk, "side", 64)
    sizes = [(65, width) for width in WIDTHS] + [(count, 48) for count in COUNTS]
    for count, width in sizes:
        edges, vectors = neighbours(count), margined(count, width, dtype, seed=count + width)

        def ours(e, t, b, edges=edges, backend="triton"):
            names = dict(zip(("attract", "repel", "ignore"), edges, strict=True))
            return pair_loss(e, **names, form=form, inverse_temperature=t, bias=b, backend=backend).loss

        truth = solve(lambda *x, ours=ours: ours(*x, backend="reference"), vectors, torch.float64)
        found = solve(ours, vectors, dtype)
        written = solve(lambda *x, edges=edges: plain(*x, edges, form), vectors, dtype)
        assert all(value.isfinite().all() for value in found), (count, width)
        for name, one, other, right in zip(("loss", "e", "t", "b"), found, written, truth, strict=True):
            if form == "ranked" and name == "b":
                assert (one == 0).all()
                continue
            # Plain torch may be lucky: a few units in the last place of the terms, which are about 1 and may cancel.
            luck = 8 * torch.finfo(dtype).eps * (right.norm() + 0.1)
            mine, theirs = (one - right).norm(), (other - right).norm()
            assert mine <= 2 * theirs.nan_to_num(nan=math.inf) + luck, (name, count, width, mine, theirs)


@pytest.mark.parametrize("dimensions", [(16, 48), (1, 2, 47, 48)])
@pytest.mark.parametrize("negatives", ["ambient", "across"])
@pytest.mark.usefixtures("poisoned")
def test_kept_numbers_give_the_same_cosines(negatives, dimensions, monkeypatch):
    """The products of embeddings as they are, scaled afterwards, which a GPU does in bfloat16."""
    monkeypatch.setattr(kernel.FusedWalk, "keeps", staticmethod(lambda _: True))
    monkeypatch.setattr(kernel.FusedWalk, "side", 50)
    vectors = margined(65, 48, torch.float32, 3) * torch.logspace(-6, 6, 65, device=DEVICE)[:, None]
    attract, repel, ignore = neighbours(65)
    options = {"negatives": negatives, "families": torch.arange(65, device=DEVICE) % 3, "dimensions": dimensions}
    for form in ("balanced", "ranked"):

        def loss(e, t, b, backend, form=form):
            return pair_loss(
                e, attract, repel, ignore, form=form, inverse_temperature=t, bias=b, backend=backend, **options
            ).loss

        found = solve(lambda *x: loss(*x, "triton"), vectors, torch.float32)
        right = solve(lambda *x: loss(*x, "reference"), vectors, torch.float64)
        lengths = vectors.double().norm(dim=1, keepdim=True)
        found[1], right[1] = found[1] * lengths, right[1] * lengths
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


def test_softplus_and_sigmoid_are_accurate_everywhere():
    """Of ambient cells, which alone pass through the kernel."""
    for score in (-80.0, -20.0, -10.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 10.0, 20.0, 80.0):
        vectors = torch.eye(2, device=DEVICE).requires_grad_()
        bias = torch.tensor([score], device=DEVICE, requires_grad=True)
        temperature = torch.tensor([1.0], device=DEVICE)
        edges = Edges.empty(2, DEVICE)
        out = pair_loss(vectors, edges, form="balanced", inverse_temperature=temperature, bias=bias, backend="triton")
        (slope,) = torch.autograd.grad(out.loss, bias)
        wide = torch.tensor(score, dtype=torch.float64)
        right = torch.logaddexp(wide, torch.zeros_like(wide))
        torch.testing.assert_close(out.loss.double().cpu(), right, rtol=5e-6, atol=0)
        torch.testing.assert_close(slope[0].double().cpu(), wide.sigmoid(), rtol=5e-6, atol=0)


def test_a_broken_embedding_is_not_hidden():
    vectors = torch.eye(4, device=DEVICE)
    vectors[2, 1] = math.nan
    scalars = {name: torch.ones(1, device=DEVICE) for name in ("inverse_temperature", "bias")}
    assert pair_loss(vectors, Edges.empty(4, DEVICE), **scalars, backend="triton").loss.isnan()


@pytest.mark.skipif(CUDA, reason="reserves addresses that a GPU would have to hold")
def test_cells_beyond_32_bits():
    """The last of 16 rows of 2^28 cells lies past 2^31: int32 would wrap to an address before the buffer.

    The buffer is reserved, not filled: only the few pages that the kernel touches exist.
    """
    columns, rows = 1 << 28, 16
    products = torch.empty(rows * columns, dtype=torch.int8).view(rows, columns)
    products[:, :128] = torch.arange(rows, dtype=torch.int8)[:, None]
    sums, ones, zeros = torch.zeros(4, 1, rows), torch.ones(128), torch.zeros(128)
    line = ones, zeros, ones
    kernel._forces[(1, 1)](
        products, products, sums, sums, products, products, *line, *line, products, products, rows, columns,
        SCALED=False, SAME=True, MIRRORED=False, PER_ANCHOR=False, MIXED=False, STORE=False,
        **kernel.block_sizes(4, "sm_90"), **kernel.OPTIONS,
    )  # fmt: skip
    scores = torch.arange(rows, dtype=torch.float32)
    torch.testing.assert_close(sums[kernel.FORCE, 0], 128 * scores.sigmoid())
    torch.testing.assert_close(sums[kernel.LOSS, 0], 128 * torch.nn.functional.softplus(scores))


def test_sizes_are_listed_for_both_vendors():
    labels = {(target, case[0]) for target in ("sm_80", "gfx942") for case in kernel.compile_cases(target)}
    assert len(labels) == 2 * len(kernel.compile_cases())
    assert {dtype for _, label in labels for dtype in ("fp32", "bf16") if dtype in label} == {"fp32", "bf16"}
    assert all(itertools.chain.from_iterable(case[4] for case in kernel.compile_cases()))


def test_several_threads_do_not_disturb_the_interpreter(monkeypatch):
    """It keeps the place in the grid in a global, so tiles may not be shared out over threads."""
    monkeypatch.setattr(kernel.FusedWalk, "side", 32)
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(200, 16, generator=generator)
    attract = Edges.from_lists([[i ^ 1] for i in range(200)])
    scale = {"inverse_temperature": torch.tensor([5.0]), "bias": torch.tensor([-2.0])}
    expected = pair_loss(embeddings, attract, form="sigmoid", backend="reference", **scale).loss
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [pair_loss(embeddings, attract, form="sigmoid", backend="triton", **scale).loss for _ in range(4)]
    finally:
        torch.set_num_threads(threads)
    for loss in found:
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
