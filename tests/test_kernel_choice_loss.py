"""Choices: golden values, known cases and rules that every back end keeps (Triton in its interpreter without a GPU)."""

import importlib
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from uform_kernels import choice_loss

GOLDEN = json.loads((Path(__file__).parent / "assets/golden/choices.json").read_text())
BACKENDS = ("reference", "chunked", "triton")
CUDA = torch.cuda.is_available()
INF = math.inf

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


def close(one, other, backend):
    tolerance = 1e-6 if backend == "triton" else 1e-12
    torch.testing.assert_close(one.double().cpu(), other.double().cpu(), rtol=tolerance, atol=tolerance)


def packed(choices, targets, device="cpu"):
    offsets = torch.tensor([0, *itertools.accumulate(map(len, choices))], device=device)
    flat = torch.tensor([*itertools.chain(*choices)], dtype=torch.uint8, device=device)
    return flat, offsets, torch.tensor([*itertools.chain(*targets)], dtype=torch.float64, device=device)


def problem(backend, counts=(2, 0, 4, 1, 256, 7), seed=0, dtype=None):
    """Logits as a leaf, and random choices and targets of the given numbers."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(counts), 256, generator=generator, dtype=torch.float64) * 3
    choices = [torch.randperm(256, generator=generator)[:count].tolist() for count in counts]
    targets = [torch.rand(count, generator=generator, dtype=torch.float64).softmax(0).tolist() for count in counts]
    device = device_of(backend)
    logits = logits.to(dtype or dtype_of(backend)).to(device)
    return logits.requires_grad_(), *packed(choices, targets, device)


def one_row(backend, logits, targets):
    """Loss and legal gradients of a row that offers bytes 10, 11, ... with these logits and targets."""
    full = torch.zeros(1, 256, dtype=dtype_of(backend), device=device_of(backend))
    full[0, 10 : 10 + len(logits)] = torch.tensor(logits, dtype=full.dtype)
    full.requires_grad_()
    loss = choice_loss(full, *packed([range(10, 10 + len(logits))], [targets], full.device), backend=backend)
    (gradient,) = torch.autograd.grad(loss, full)
    return loss.item(), gradient[0, 10 : 10 + len(logits)]


def test_golden(backend):
    logits = torch.tensor(GOLDEN["logits"], dtype=dtype_of(backend), device=device_of(backend), requires_grad=True)
    loss = choice_loss(logits, *packed(GOLDEN["choices"], GOLDEN["targets"], logits.device), backend=backend)
    assert loss.item() == pytest.approx(GOLDEN["loss"], rel=1e-6 if backend == "triton" else 1e-12)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = torch.tensor(GOLDEN["grad_logits"], dtype=torch.float64)
    # The file's gradient is a finite difference.
    torch.testing.assert_close(gradient.double().cpu(), expected, rtol=1e-6, atol=1e-7 if backend == "triton" else 2e-9)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_gradcheck(backend):
    logits, *offers = problem(backend, (2, 0, 5, 1))
    assert torch.autograd.gradcheck(lambda x: choice_loss(x, *offers, backend=backend), (logits,))


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_agrees_with_the_reference(backend):
    logits, *offers = problem(backend)
    losses = [choice_loss(logits, *offers, backend=name) for name in (backend, "reference")]
    close(*losses, backend)
    close(*(torch.autograd.grad(loss, logits)[0] for loss in losses), backend)


def test_targets_off_by_the_tolerance_keep_forward_and_backward_consistent(backend):
    """(sum p) softmax - p, not softmax - p: seen by a finite difference along the logits."""
    targets, step = [0.5, 0.4992], 1e-2
    logits = [0.3, -0.2]
    loss, gradient = one_row(backend, logits, targets)
    up, _ = one_row(backend, [logits[0] + step, logits[1] + step], targets)
    assert up == pytest.approx(loss, abs=1e-6)
    assert float(gradient.sum()) == pytest.approx(0, abs=1e-7)
    softmax = torch.tensor(logits, dtype=torch.float64).softmax(0)
    close(gradient, sum(targets) * softmax - torch.tensor(targets, dtype=torch.float64), backend)


def test_minus_infinity_with_probability_zero(backend):
    loss, gradient = one_row(backend, [2, 1, -INF], [0.7, 0.3, 0])
    assert loss == pytest.approx(0.613262, abs=1e-6)
    expected = torch.tensor([0.031059, -0.031059, 0], dtype=torch.float64)
    torch.testing.assert_close(gradient.double().cpu(), expected, rtol=0, atol=1e-6)
    assert gradient[2] == 0


@pytest.mark.parametrize("low", [-1e4, -3e38])
def test_very_negative_logits_with_probability_zero(backend, low):
    loss, gradient = one_row(backend, [2, 1, low], [0.7, 0.3, 0])
    assert loss == pytest.approx(0.613262, abs=1e-6)
    assert gradient.isfinite().all()


def test_an_impossible_choice_that_is_wanted_costs_infinity(backend):
    loss, gradient = one_row(backend, [2, 1, -INF], [0.5, 0.3, 0.2])
    assert loss == INF
    assert gradient.isfinite().all()


def test_one_choice_costs_nothing(backend):
    for logit in (-700.0, 0.0, 3.0):
        loss, gradient = one_row(backend, [logit], [1])
        assert loss == 0
        assert gradient.tolist() == [0]


def test_large_logits_do_not_overflow(backend):
    loss, gradient = one_row(backend, [3e4, 3e4 - 2, -3e4], [0.25, 0.75, 0])
    assert loss == pytest.approx(math.log1p(math.exp(-2)) + 1.5, rel=1e-4)
    assert gradient.isfinite().all()


def test_zero_gradient_where_softmax_meets_the_targets(backend):
    logits, choices, offsets, _ = problem(backend)
    rows = torch.arange(len(logits), device=offsets.device).repeat_interleave(offsets.diff())
    cells = logits.detach()[rows, choices.long()]
    targets = torch.cat([cells[rows == row].double().softmax(0) for row in range(len(logits))])
    (gradient,) = torch.autograd.grad(choice_loss(logits, choices, offsets, targets, backend=backend), logits)
    assert float(gradient.abs().max()) < (1e-7 if backend == "triton" else 1e-16)


def test_illegal_bytes_have_no_influence(backend):
    logits, choices, offsets, targets = problem(backend)
    loss = choice_loss(logits, choices, offsets, targets, backend=backend)
    (gradient,) = torch.autograd.grad(loss, logits)
    legal = torch.zeros_like(logits, dtype=torch.bool)
    legal[torch.arange(len(logits), device=legal.device).repeat_interleave(offsets.diff()), choices.long()] = True
    assert gradient[~legal].count_nonzero() == 0
    moved = torch.where(legal, logits, float("nan")).detach()
    assert torch.equal(choice_loss(moved, choices, offsets, targets, backend=backend), loss)


def test_rows_without_choices_are_not_counted(backend):
    logits, choices, offsets, targets = problem(backend, (3, 2))
    more = torch.cat([logits.detach()[:1], logits.detach().new_full((2, 256), float("nan")), logits.detach()[1:]])
    more.requires_grad_()
    apart = torch.tensor([0, 3, 3, 3, 5], device=offsets.device)
    loss = choice_loss(more, choices, apart, targets, backend=backend)
    expected = choice_loss(logits, choices, offsets, targets, backend=backend)
    close(loss, expected, backend)
    (gradient,) = torch.autograd.grad(loss, more)
    (plain,) = torch.autograd.grad(expected, logits)
    close(gradient[[0, 3]], plain, backend)
    assert gradient[1:3].count_nonzero() == 0


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_no_row_offers_anything(backend, rows):
    logits, *offers = problem(backend, (0,) * rows)
    loss = choice_loss(logits, *offers, backend=backend)
    assert loss.item() == 0
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.count_nonzero() == 0


def test_permuting_rows_and_choices_changes_nothing(backend):
    counts = (2, 5, 4)
    logits, choices, offsets, targets = (x.detach() for x in problem(backend, counts))
    loss = choice_loss(logits, choices, offsets, targets, backend=backend)
    order = [2, 0, 1]
    spans = [range(offsets[row], offsets[row + 1])[::-1] for row in order]
    entries = torch.tensor([*itertools.chain(*spans)], device=choices.device)
    moved = torch.tensor([0, *itertools.accumulate(counts[row] for row in order)], device=choices.device)
    close(choice_loss(logits[order], choices[entries], moved, targets[entries], backend=backend), loss, backend)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_small_tiles_change_nothing(rows, monkeypatch):
    logits, *offers = problem("chunked")
    whole = choice_loss(logits, *offers, backend="chunked")
    monkeypatch.setattr(importlib.import_module("uform_kernels.ops.choice_loss.chunked"), "TILE_ROWS", rows)
    tiled = choice_loss(logits, *offers, backend="chunked")
    close(tiled, whole, "chunked")
    close(*(torch.autograd.grad(loss, logits)[0] for loss in (tiled, whole)), "chunked")


@pytest.mark.parametrize("layout", ["strided rows", "strided bytes", "offset", "expanded"])
def test_any_strides(backend, layout):
    logits, *offers = problem(backend)
    logits = logits.detach()
    view = {
        "strided rows": lambda: logits.repeat_interleave(2, 0)[::2],
        "strided bytes": lambda: logits.T.contiguous().T,
        "offset": lambda: torch.cat([torch.full_like(logits[:1], float("nan")), logits])[1:],
        "expanded": lambda: logits[:1].expand_as(logits),
    }[layout]().requires_grad_()
    copy = view.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    strided = [x.repeat_interleave(3)[::3] for x in offers]
    losses = choice_loss(view, *strided, backend=backend), choice_loss(copy, *offers, backend=backend)
    close(*losses, backend)
    close(torch.autograd.grad(losses[0], view)[0], torch.autograd.grad(losses[1], copy)[0], backend)


def test_scaled_and_double_use(backend):
    logits, *offers = problem(backend)
    loss = choice_loss(logits, *offers, backend=backend)
    (plain,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (twice,) = torch.autograd.grad(loss * 2 + loss.expand(3).sum(), logits)
    close(twice, 5 * plain, backend)
    assert not choice_loss(logits.detach(), *offers, backend=backend).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_error_is_at_most_twice_plain_torchs(backend, dtype):
    if backend == "triton" and dtype == torch.bfloat16 and not CUDA:
        pytest.skip("Triton's interpreter is wrong for bfloat16: needs a GPU")
    logits, choices, offsets, targets = problem(backend, (1, 2, 63, 65, 130, 256) * 2, dtype=dtype)

    def plain(x):
        spans = list(itertools.pairwise(offsets.tolist()))
        rows = [x[row][choices[start:stop].long()].log_softmax(0) for row, (start, stop) in enumerate(spans)]
        wanted = [targets[start:stop].to(x.dtype) for start, stop in spans]
        return -torch.stack([(p * q).sum() for p, q in zip(wanted, rows, strict=True)]).mean()

    wide = logits.detach().double().requires_grad_()
    truth = plain(wide)
    truths = truth.detach(), torch.autograd.grad(truth, wide)[0]
    errors = []
    for loss in (choice_loss(logits, choices, offsets, targets, backend=backend), plain(logits)):
        results = loss.detach(), torch.autograd.grad(loss, logits)[0]
        errors.append([float((one - true).norm() / true.norm()) for one, true in zip(results, truths, strict=True)])
    # Where plain torch is lucky in every last bit, a last bit of float32 is allowed still.
    floor = torch.finfo(torch.float32).eps
    assert all(ours <= max(2 * other, floor) for ours, other in zip(*errors, strict=True)), errors


def test_half_precision_gives_a_float32_loss_and_keeps_small_gradients(backend):
    """The mean over many rows is taken in float32: scaled up in the end, its gradient is still there in float16."""
    logits, *offers = problem(backend, (2,) * 1000, dtype=torch.float16)
    loss = choice_loss(logits, *offers, backend=backend)
    assert loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(loss * 65536, logits)
    wide = logits.detach().double().requires_grad_()
    expected = torch.autograd.grad(choice_loss(wide, *offers, backend="reference") * 65536, wide)[0]
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 63, 65, 130, 255, 256])
def test_awkward_numbers_of_choices_in_poisoned_memory(backend, count):
    torch.use_deterministic_algorithms(True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        logits, *offers = problem(backend, (count, 0, 1, count), seed=count)
        margin = torch.full_like(logits[:2], float("nan"))
        inside = torch.cat([margin, logits.detach(), margin])[2:-2].requires_grad_()
        loss = choice_loss(inside, *offers, backend=backend)
        (gradient,) = torch.autograd.grad(loss, inside)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(False)
    expected = choice_loss(logits, *offers, backend="reference")
    close(loss, expected, backend)
    close(gradient, torch.autograd.grad(expected, logits)[0], backend)


VALID = {
    "logits": torch.zeros(3, 256),
    "choices": torch.tensor([5, 9, 5], dtype=torch.uint8),
    "choice_offsets": torch.tensor([0, 2, 2, 3]),
    "targets": torch.tensor([0.5, 0.5, 1.0]),
}


@pytest.mark.parametrize(("change", "message"), [
    ({"choices": torch.tensor([9, 9, 5], dtype=torch.uint8)}, "choices offers byte 9 twice in row 0"),
    ({"choices": torch.tensor([5, 9, 5])}, "choices is torch.int64; it must be torch.uint8"),
    ({"choices": torch.tensor([5], dtype=torch.uint8)}, "targets has shape (3,); it must be (1,)"),
    ({"targets": torch.tensor([0.5, 0.5])}, "targets has shape (2,); it must be (3,)"),
    ({"targets": torch.tensor([0.5, 0.1, 1.0])}, "targets of row 0 sum to 0.6; they must sum to 1 within 0.001"),
    ({"targets": torch.tensor([0.5, 0.5, 1.002])}, "targets of row 2 sum to 1.002"),
    ({"targets": torch.tensor([1.5, -0.5, 1.0])}, "targets[1] = -0.5 of row 0"),
    ({"targets": torch.tensor([0.5, 0.5, float("nan")])}, "targets[2] = nan of row 2"),
    ({"targets": torch.tensor([INF, 0.5, 1.0])}, "targets[0] = inf of row 0"),
    ({"targets": torch.tensor([0.5, 0.5, 1.0], requires_grad=True)}, "pass targets.detach()"),
    ({"targets": torch.tensor([1, 0, 1])}, "targets is torch.int64"),
    ({"choice_offsets": torch.tensor([0, 2, 3])}, "choice_offsets has shape (3,); it must be (4,)"),
    ({"choice_offsets": torch.tensor([0, 2, 1, 3])}, "choice_offsets decreases from 2 to 1 at row 1"),
    ({"choice_offsets": torch.tensor([0, 1, 1, 2])}, "choice_offsets ends at 2; it must end at len(choices) = 3"),
    ({"choice_offsets": torch.tensor([1, 2, 2, 3])}, "choice_offsets starts at 1"),
    ({"choice_offsets": torch.tensor([0.0, 2, 2, 3])}, "choice_offsets is torch.float32; it must hold integers"),
    ({"logits": torch.zeros(3, 255)}, "logits has shape (3, 255); it must be (C, 256)"),
    ({"logits": torch.zeros(3, 256, dtype=torch.int64)}, "logits is torch.int64"),
    ({"logits": torch.zeros(3, 256, device="meta")}, "is on cpu and logits on meta"),
    ({"backend": "fast"}, "backend is 'fast'"),
])  # fmt: skip
def test_refusals(change, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        choice_loss(**(VALID | change))
    assert message in str(caught.value)


def test_targets_within_the_tolerance_pass():
    choice_loss(**(VALID | {"targets": torch.tensor([0.5, 0.4995, 1.0005])}))
