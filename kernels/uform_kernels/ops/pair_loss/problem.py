"""What a pair loss is asked to sum: the anchors, their cells, and the counts that normalise them.

N items, R anchors (the items start..stop - 1), E edges.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from uform_kernels.edges import Edges

FORMS = ("balanced", "ranked", "sigmoid")
STATS = ("attract_loss", "repel_loss", "attract_cosine", "repel_cosine")
NEGATIVES = ("ambient", "named", "across")

# Above this, torch's softplus(x) answers x: its default of 20 costs float64 seven digits.
SOFTPLUS_LINEAR = 60.0


def softplus(x: Tensor, out: Tensor | None = None) -> Tensor:
    """log(1 + e^x), without overflow."""
    return F.softplus(x, 1.0, SOFTPLUS_LINEAR, out=out)  # type: ignore[call-arg]


@dataclass(frozen=True, eq=False)
class Normalizers:
    """The counts that a pair loss divides by, of some anchors or, added over a partition of them, of a whole batch.

    `values` is one float64 vector (3,), so that one all-reduce makes it global: the total weight of the attract
    cells, that of the repel cells (ambient ones included), and the number of anchors whose rows count: those with
    positive total weight, in the ranked form those with both attract and repel weight.
    """

    values: Tensor

    def __add__(self, other: "Normalizers") -> "Normalizers":
        return Normalizers(self.values + other.values)

    @property
    def attract(self) -> Tensor:
        """Total weight of the attract cells, 0-d."""
        return self.values[0]

    @property
    def repel(self) -> Tensor:
        """Total weight of the repel and ambient cells, 0-d."""
        return self.values[1]

    @property
    def anchors(self) -> Tensor:
        """Number of anchors whose rows count, 0-d."""
        return self.values[2]


@dataclass(frozen=True, eq=False)
class Problem:
    """A checked call of `pair_loss`, less its three differentiable tensors.

    Edge sets are over the R anchors and lie on the embeddings' device; `families` (N,) is numbered from 0 and only
    there with "across"; `groups` (N,) and `dimensions` are always there.
    """

    count: int
    rows: tuple[int, int]
    attract: Edges
    repel: Edges
    ignore: Edges
    form: str
    negatives: str
    families: Tensor | None
    ambient_weight: float
    groups: Tensor
    dimensions: tuple[int, ...]
    normalizers: Normalizers

    @property
    def ambient(self) -> bool:
        """Whether cells that no edge names repel."""
        return self.negatives != "named" and self.ambient_weight > 0

    @property
    def whole(self) -> bool:
        """Whether every item is an anchor, so that the score matrix is square and its cosines symmetric."""
        return self.rows == (0, self.count)


def number_families(families: Tensor | None, negatives: str) -> Tensor | None:
    """(N,) families numbered 0, 1, ..., or None where no family matters."""
    if negatives != "across" or families is None:
        return None
    return torch.unique(families, return_inverse=True)[1]


def ambient_counts(
    named: tuple[Edges, Edges, Edges],
    count: int,
    rows: tuple[int, int],
    negatives: str,
    families: Tensor | None,
    among: Tensor | None = None,
) -> Tensor:
    """(R,) int64: how many ambient cells each anchor has with the items `among` (N,) bool (None: all), by counting.

    All these items, less those of the anchor's family, less those of other families that an edge of any of the sets
    names. Where no family matters, each item is a family of its own.
    """
    start, stop = rows
    device = named[0].ids.device
    if negatives == "named":
        return torch.zeros(stop - start, dtype=torch.int64, device=device)
    families = torch.arange(count, device=device) if families is None else families
    among = torch.ones(count, dtype=torch.bool, device=device) if among is None else among
    cells = among.sum() - torch.bincount(families[among], minlength=count)[families[start:stop]]
    for edges in named:
        anchors = edges.anchors()
        foreign = (families[start:stop][anchors] != families[edges.ids]) & among[edges.ids]
        cells = cells - torch.bincount(anchors[foreign], minlength=stop - start)
    return cells


def row_weights(
    named: tuple[Edges, Edges, Edges],
    count: int,
    rows: tuple[int, int],
    negatives: str,
    families: Tensor | None,
    ambient_weight: float,
) -> tuple[Tensor, Tensor]:
    """(R,), (R,) float64: the weight of each anchor's attract cells, and of its repel and ambient cells.

    named: attract, repel, ignore
    """
    attract, repel = (
        torch.segment_reduce(edges.weights_as(torch.float64), "sum", offsets=edges.offsets, initial=0)
        for edges in named[:2]
    )
    ambient = ambient_counts(named, count, rows, negatives, families).to(torch.float64)
    return attract, repel + ambient_weight * ambient


def count_weights(attract: Tensor, repel: Tensor, form: str) -> Normalizers:
    """The normalizers of anchors with these row weights (R,), (R,)."""
    active = active_rows(attract, repel, form).sum().to(torch.float64)
    return Normalizers(torch.stack([attract.sum(), repel.sum(), active]))


def active_rows(attract: Tensor, repel: Tensor, form: str) -> Tensor:
    """(R,) bool: which anchors with these row weights (R,), (R,) add to the loss."""
    return (attract > 0) & (repel > 0) if form == "ranked" else attract + repel > 0


def pair_normalizers(
    attract: Edges,
    repel: Edges | None = None,
    ignore: Edges | None = None,
    count: int = 0,
    form: str = "balanced",
    negatives: str = "ambient",
    families: Tensor | None = None,
    ambient_weight: float = 1.0,
    rows: tuple[int, int] | None = None,
) -> Normalizers:
    """The normalizers of the anchors in `rows`, from the edges and families alone: before any forward pass.

    Costs O(N + E) time and memory: the ambient cells are counted, never listed (see `ambient_counts`). Over a
    partition of the rows (ranks, say) the vectors `values` add up to the whole batch's.

    attract, repel, ignore: edge sets over the anchors in `rows`, as for `pair_loss` (checked there, not here)
    count: N, the items of the global batch; the other arguments are those of `pair_loss`
    """
    rows = (0, count) if rows is None else rows
    absent = Edges.empty(rows[1] - rows[0], attract.ids.device)
    named = (attract, absent if repel is None else repel, absent if ignore is None else ignore)
    numbered = number_families(families, negatives)
    return count_weights(*row_weights(named, count, rows, negatives, numbered, ambient_weight), form)
