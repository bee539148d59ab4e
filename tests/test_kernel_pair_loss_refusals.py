"""What `pair_loss` refuses before it computes anything, by the name of the argument and the item."""

import pytest
import torch
from uform_kernels import Edges, Normalizers, pair_loss

GOOD = {
    "embeddings": torch.eye(3),
    "attract": Edges.from_lists([[1], [0], []]),
    "inverse_temperature": torch.ones(2),
    "bias": torch.zeros(2),
}


def test_the_good_case_is_accepted():
    assert pair_loss(**GOOD).loss.isfinite()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"embeddings": torch.eye(3)[0]}, r"embeddings has shape \(3,\); it must be \(N, d\)"),
        ({"embeddings": torch.ones(3, 0)}, r"embeddings has shape \(3, 0\); d must be at least 1"),
        ({"embeddings": torch.ones(3, 3, dtype=torch.int64)}, "embeddings is torch.int64"),
        ({"embeddings": [[1.0]]}, "embeddings is a list; it must be a torch.Tensor"),
        ({"embeddings": torch.ones(3, 3, device="meta")}, "inverse_temperature is on cpu and embeddings on meta"),
        ({"inverse_temperature": torch.ones(())}, r"inverse_temperature has shape \(\)"),
        ({"inverse_temperature": torch.ones(0), "bias": torch.ones(0)}, "inverse_temperature has no entry"),
        ({"inverse_temperature": torch.ones(2, dtype=torch.int64)}, "inverse_temperature is torch.int64"),
        ({"bias": torch.zeros(3)}, r"bias has shape \(3,\); it must be \(2,\)"),
        ({"form": "softmax"}, "form is 'softmax'; it must be one of 'balanced', 'ranked', 'sigmoid'"),
        ({"negatives": "all"}, "negatives is 'all'; it must be one of 'ambient', 'named', 'across'"),
        ({"negatives": "across"}, "families is None; negatives='across' needs the family of each item"),
        ({"families": torch.zeros(2, dtype=torch.int64)}, r"families has shape \(2,\); it must be \(3,\)"),
        ({"families": torch.zeros(3)}, "families is torch.float32; it must hold integers"),
        ({"groups": torch.zeros(3)}, "groups is torch.float32; it must hold integers"),
        ({"groups": torch.tensor([0, 1, 2])}, r"groups has 2 for row 2; groups must be in 0\.\.1"),
        ({"groups": torch.tensor([0, -1, 1])}, r"groups has -1 for row 1"),
        ({"ambient_weight": -0.1}, "ambient_weight is -0.1; it must be finite and at least 0"),
        ({"ambient_weight": float("nan")}, "ambient_weight is nan"),
        ({"dimensions": (4,)}, r"dimensions is \(4,\); it must be positive, strictly increasing and at most d = 3"),
        ({"dimensions": (0, 2)}, r"dimensions is \(0, 2\)"),
        ({"dimensions": (2, 2)}, r"dimensions is \(2, 2\)"),
        ({"dimensions": (2, 1)}, r"dimensions is \(2, 1\)"),
        ({"dimensions": ()}, r"dimensions is \(\)"),
        ({"rows": (2, 1)}, r"rows is \(2, 1\); it must be \(start, stop\) with 0 <= start <= stop <= 3"),
        ({"rows": (0, 4)}, r"rows is \(0, 4\)"),
        ({"rows": (1, 3)}, "attract has 3 rows; it must have one for each of the 2 anchors"),
        ({"attract": [[1]]}, "attract is a list; it must be Edges"),
        ({"attract": Edges.from_lists([[3], [], []])}, r"attract.ids\[0\] = 3 of row 0 is out of range"),
        ({"repel": Edges.from_lists([[1], [], []])}, "the pair row 0 -> 1 is in both attract and repel"),
        ({"repel": Edges.from_lists([[2], [], []], [[-1.0], [], []])}, r"repel.weights\[0\] = -1.0 of row 0"),
        ({"ignore": Edges.from_lists([[], [], [2]])}, r"ignore.ids\[0\] = 2 of row 2 is an edge to itself"),
        ({"normalizers": Normalizers(torch.ones(2))}, r"normalizers.values has shape \(2,\); it must be \(3,\)"),
        ({"normalizers": torch.ones(3)}, "normalizers is a Tensor; it must be Normalizers"),
        ({"backend": "cuda"}, "backend is 'cuda'; it must be one of 'auto', 'reference', 'chunked', 'triton'"),
        ({"embeddings": torch.eye(3).double(), "backend": "triton"}, "backend='triton'"),
    ],
)
def test_refusals_name_the_argument(changes, expected):
    with pytest.raises(ValueError, match=expected):
        pair_loss(**GOOD | changes)


def test_refusals_name_the_item_as_the_caller_does():
    attract = Edges.from_lists([[2], [2]])
    with pytest.raises(ValueError, match=r"attract.ids\[1\] = 2 of item b is an edge to itself"):
        pair_loss(**GOOD | {"attract": attract}, rows=(1, 3), describe={1: "item a", 2: "item b"}.__getitem__)


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a CPU's case")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="needs a CUDA or ROCm tensor, this one is on cpu: use 'chunked'"):
        pair_loss(**GOOD, backend="triton")


def test_nothing_to_sum_is_no_error():
    scalars = {"inverse_temperature": torch.ones(1), "bias": torch.zeros(1)}
    for form in ("balanced", "sigmoid", "ranked"):
        empty = torch.zeros(0, 3, requires_grad=True)
        out = pair_loss(empty, Edges.empty(0), form=form, **scalars)
        out.loss.backward()
        assert out.loss == 0
        assert empty.grad.shape == (0, 3)
        part = torch.eye(3).requires_grad_()
        out = pair_loss(part, Edges.empty(0), form=form, rows=(1, 1), **scalars)
        out.loss.backward()
        assert (part.grad == 0).all()
