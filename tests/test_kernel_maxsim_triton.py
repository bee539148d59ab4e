"""MaxSim's Triton kernels against float64: awkward sizes, poisoned memory, NaN margins, addresses beyond 32 bits.

Without a GPU they run in Triton's interpreter, which is right for float32 and float16 and wrong for bfloat16.
"""

import itertools

import pytest
import torch

pytest.importorskip("triton")
from uform_kernels import maxsim

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WIDTHS = [1, 3, 48, 96, 100, 127, 128, 257]
QUERIES, DOCUMENTS = [33, 1, 2], [65, 1, 66]
PAIRS = [[2, 0], [0, 2], [1, 1], [2, 0]]
NEEDS_GPU = pytest.mark.skipif(not CUDA, reason="Triton's interpreter is wrong for bfloat16: needs a GPU")
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=NEEDS_GPU)]


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


def between_nans(tensor):
    """The same values with NaNs (or the largest integer) before and after them in memory."""
    filling = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    margin = tensor.new_full((16, *tensor.shape[1:]), filling)
    return torch.cat([margin, tensor, margin])[16:-16]


def offsets_of(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def problem(width, dtype, lengths=(QUERIES, DOCUMENTS)):
    generator = torch.Generator().manual_seed(width)
    tensors = []
    for part in lengths:
        tokens = torch.randn(sum(part), width, generator=generator, dtype=torch.float64)
        tokens = torch.nn.functional.normalize(tokens, dim=-1).to(dtype)
        tensors += [between_nans(tokens.to(DEVICE)), between_nans(offsets_of(part).to(DEVICE))]
    return tensors


def plain(queries, query_offsets, documents, document_offsets, pairs):
    """Plain torch in the tokens' own dtype."""
    spans = [list(itertools.pairwise(offsets.tolist())) for offsets in (query_offsets, document_offsets)]
    count = len(spans[0]), len(spans[1])
    cells = itertools.product(*map(range, count)) if pairs is None else pairs.tolist()
    scores = [(queries[slice(*spans[0][q])] @ documents[slice(*spans[1][d])].T).max(1).values.mean() for q, d in cells]
    return torch.stack(scores).view(count if pairs is None else len(scores))


def with_gradients(score, queries, documents):
    leaves = [tokens.detach().requires_grad_() for tokens in (queries, documents)]
    scores = score(*leaves)
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(scores)
    return scores.detach(), *torch.autograd.grad((scores * weights).sum(), leaves)


def errors(ours, truth):
    return [float((one.double() - true).norm() / true.norm()) for one, true in zip(ours, truth, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("pairs", [None, PAIRS], ids=["all", "listed"])
def test_error_is_at_most_twice_plain_torchs(dtype, width, pairs, poisoned):
    queries, query_offsets, documents, document_offsets = problem(width, dtype)
    pairs = None if pairs is None else between_nans(torch.tensor(pairs, device=DEVICE))

    def ours(q, d):
        return maxsim(q, query_offsets, d, document_offsets, pairs, backend="triton")

    def theirs(q, d):
        return plain(q, query_offsets, d, document_offsets, pairs)

    truth = with_gradients(theirs, queries.double(), documents.double())
    made = errors(with_gradients(ours, queries, documents), truth)
    allowed = errors(with_gradients(theirs, queries, documents), truth)
    # Where plain torch is lucky in every last bit, a last bit of float32 is allowed still.
    floor = torch.finfo(torch.float32).eps
    assert all(one <= max(2 * other, floor) for one, other in zip(made, allowed, strict=True)), (made, allowed)


@pytest.mark.parametrize("queries", [[1], [2], [63], [65], [130]])
@pytest.mark.parametrize("documents", [[1], [1, 1], [64, 65], [200]])
def test_awkward_lengths(queries, documents, poisoned):
    tokens, query_offsets, others, document_offsets = problem(17, torch.float32, (queries, documents))

    def ours(q, d):
        return maxsim(q, query_offsets, d, document_offsets, backend="triton")

    def theirs(q, d):
        return plain(q, query_offsets, d, document_offsets, None)

    truth = with_gradients(theirs, tokens.double(), others.double())
    for one, true in zip(with_gradients(ours, tokens, others), truth, strict=True):
        torch.testing.assert_close(one.double(), true, rtol=1e-5, atol=1e-6)


def test_float16_slopes_neither_vanish_nor_overflow():
    """Output gradients far outside float16, as a loss that is scaled, or averaged over many queries, gives them."""
    queries, query_offsets, documents, document_offsets = problem(48, torch.float16)
    documents = documents.detach().requires_grad_()
    scores = maxsim(queries, query_offsets, documents, document_offsets, normalize=False, backend="triton")
    scale = torch.tensor([1e-9, 1e-3, 3e4], device=DEVICE)
    (gradient,) = torch.autograd.grad((scores * scale).sum(), documents, retain_graph=True)
    truth = documents.detach().double().requires_grad_()
    expected = plain(queries.double(), query_offsets, truth, document_offsets, None)
    lengths = query_offsets.diff()[:, None]
    (expected,) = torch.autograd.grad((expected * lengths * scale.double()).sum(), truth)
    # The gradient itself is float16: what is left is its own rounding, and what it cannot hold.
    torch.testing.assert_close(gradient, expected.half(), rtol=2e-3, atol=1e-7)


@pytest.mark.skipif(CUDA, reason="reserves addresses that a GPU would have to hold: the device script has its own case")
def test_entries_beyond_31_bits():
    """Entry (document 2, row) lies past 2^31: int32 would wrap to an address before the buffer.

    The buffers are reserved, not filled: only the few pages that a kernel touches exist.
    """
    from uform_kernels.ops.maxsim.programs import all_pairs, query_gradient, sums

    tokens, rows = 1 << 30, 128
    queries, _, documents, offsets = problem(3, torch.float32, ([rows], [2, 1, 3]))
    best = torch.empty(2 * tokens + rows, dtype=torch.int8)
    winners = torch.empty(2 * tokens + rows, dtype=torch.int8)
    sizes = {"W": 3, "BW": 16}
    all_pairs[(1,)](16 * queries, documents, offsets, best, winners, tokens, 3, 3, BQ=128, BD=64, **sizes)
    products = 16 * queries @ documents[3:6].T
    assert torch.equal(winners[2 * tokens :].long(), products.argmax(1))
    assert torch.equal(best[2 * tokens :].float(), products.amax(1).trunc())

    added = torch.zeros(1, 3)
    sums[(1,)](best, offsets_of([rows]), added, tokens, 3, BS=16, BT=32)
    assert added[0, 2] == products.amax(1).trunc().sum()

    gradient = torch.zeros(1, 3)
    owner, slope = torch.zeros(1, dtype=torch.int64), torch.tensor([[0.0, 0.0, 2.0]])
    query_gradient[(1, 1)](
        documents, offsets, winners, slope, owner, offsets, None, None, None, None, gradient, tokens, 3,
        LISTED=False, BE=16, **sizes,
    )  # fmt: skip
    assert torch.equal(gradient[0], 2 * documents[3 + int(winners[2 * tokens])])
