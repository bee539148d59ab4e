"""Pair losses over a batch: attraction along edges, repulsion along edges and from every cell that no edge names."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from uform_kernels.backends import choose_backend
from uform_kernels.checks import (
    Describe,
    check_choice,
    check_device,
    check_dtype,
    check_integers,
    check_shape,
    check_weight,
    check_whole,
    first_true,
    row_name,
)
from uform_kernels.edges import Edges, check_disjoint, check_edges
from uform_kernels.ops.pair_loss.chunked import chunked_pair_loss
from uform_kernels.ops.pair_loss.problem import (
    FORMS,
    NEGATIVES,
    STATS,
    Normalizers,
    Problem,
    count_weights,
    number_families,
    pair_normalizers,
    row_weights,
)
from uform_kernels.ops.pair_loss.reference import reference_pair_loss
from uform_kernels.ops.pair_loss.screen import screen

__all__ = ["Normalizers", "PairLoss", "pair_loss", "pair_normalizers"]


@dataclass(frozen=True, eq=False)
class PairLoss:
    """What `pair_loss` answers.

    loss: 0-d, float32 (float64 for float64 embeddings), differentiable in embeddings, inverse_temperature and bias
    stats: 0-d detached tensors. The counts `attract_weight`, `repel_weight` and `anchors` are those of the
        normalizers. `attract_loss` and `repel_loss` add up to the loss (the ranked form, whose terms are pairs of an
        attract and a repel cell, counts as repelling). `attract_cosine` and `repel_cosine` are the weighted means of
        the cosines on the largest of the dimensions. Losses and cosines of a partition's parts add up to the whole's.
    """

    loss: Tensor
    stats: dict[str, Tensor]


def pair_loss(
    embeddings: Tensor,
    attract: Edges,
    repel: Edges | None = None,
    ignore: Edges | None = None,
    *,
    form: str = "balanced",
    negatives: str = "ambient",
    families: Tensor | None = None,
    ambient_weight: float = 1.0,
    inverse_temperature: Tensor,
    bias: Tensor,
    groups: Tensor | None = None,
    dimensions: Sequence[int] | None = None,
    rows: tuple[int, int] | None = None,
    normalizers: Normalizers | None = None,
    backend: str = "auto",
    describe: Describe = row_name,
) -> PairLoss:
    """The loss of the scores s_ij = t_g cos(e_i, e_j) + b_g of anchors i with items j, g the group of i.

    An anchor's cells are its attract edges, its repel edges and, unless `negatives` is "named", ambient cells of
    weight `ambient_weight` that repel: every other item that no edge of the anchor names, with "across" only where
    it is of another family. With softplus(x) = log(1 + e^x) and w the weight of a cell, the forms are

    - balanced: sum_attract w softplus(-s) / sum_attract w + sum_repel w softplus(s) / sum_repel w, over all anchors;
    - sigmoid: the sum of both numerators, divided by the number of anchors with positive total weight. With "across"
      and symmetric one-to-one attract edges this is SigLIP's loss (Zhai et al. 2023, arXiv:2303.15343);
    - ranked: the mean over anchors with both attract and repel weight of
      sum_p sum_n w_p w_n softplus(s_n - s_p) / (sum_p w_p sum_n w_n).

    A half without weight adds 0. A zero vector has cosine 0 with everything, and gradient 0, as has a vector whose
    coordinates are all subnormal. Cosines are computed in float32, or float64 for float64 embeddings. A cell of weight
    0 does not exist, whatever its embeddings; where one that counts meets an embedding, temperature or bias that is
    not finite, the loss and all its gradients are NaN.

    embeddings: (N, d) float64, float32, bfloat16 or float16; the global batch
    attract, repel, ignore: edges from the anchors in `rows` to items of the batch
    families: (N,) integers, read with "across" alone
    inverse_temperature, bias: (G,) float: t_g and b_g
    groups: (N,) integers below G; None: all 0
    dimensions: Matryoshka levels m1 < ... < mk <= d (Kusupati et al. 2022, arXiv:2205.13147): the loss is the mean
        over the levels, each on the first m coordinates with cosines of that prefix; None: d alone
    rows: (start, stop), the anchors; None: all N
    normalizers: the whole batch's counts when `rows` is a part of it (see `pair_normalizers`): the losses and gradients
        of the parts of a partition then add up to the whole's; None: this call's own
    backend: "auto", "reference", "chunked" or "triton"
    describe: turns an item's position into its name in an error

    Returns: a `PairLoss`: `loss`, differentiable in embeddings, inverse_temperature and bias, and `stats`.
    Raises: ValueError for any argument that breaks these rules, naming the argument and the item.
    """
    _check_floats(embeddings, inverse_temperature, bias)
    check_choice("form", form, FORMS)
    check_choice("negatives", negatives, NEGATIVES)
    count, width = embeddings.shape
    rows = (0, count) if rows is None else _check_rows(rows, count)
    named = _check_named(attract, repel, ignore, rows, embeddings, describe)
    _check_per_item(families, groups, negatives, embeddings, inverse_temperature, describe)
    check_weight("ambient_weight", ambient_weight)
    families = number_families(families, negatives)
    if normalizers is None:
        normalizers = count_weights(*row_weights(named, count, rows, negatives, families, ambient_weight), form)
    problem = Problem(
        count=count,
        rows=rows,
        attract=named[0],
        repel=named[1],
        ignore=named[2],
        form=form,
        negatives=negatives,
        families=families,
        ambient_weight=float(ambient_weight),
        groups=torch.zeros(count, dtype=torch.int64, device=embeddings.device) if groups is None else groups.long(),
        dimensions=_check_dimensions(dimensions, width),
        normalizers=_check_normalizers(normalizers, embeddings),
    )
    return _run(embeddings, inverse_temperature, bias, problem, choose_backend(backend, embeddings))


def _run(embeddings: Tensor, inverse_temperature: Tensor, bias: Tensor, problem: Problem, backend: str) -> PairLoss:
    wide = torch.promote_types(embeddings.dtype, torch.float32)
    inverse_temperature, bias = inverse_temperature.to(wide), bias.to(wide)
    # Autocast would turn the products back into half precision.
    with torch.autocast(embeddings.device.type, enabled=False):
        inputs = screen((embeddings, inverse_temperature, bias), problem)
        if inputs is None:
            loss, stats = _undefined(embeddings, inverse_temperature, bias)
        elif backend == "reference":
            loss, stats = reference_pair_loss(inputs[0].to(wide), *inputs[1:], problem)
        elif backend == "chunked":
            loss, stats = chunked_pair_loss(*inputs, problem)
        else:
            from uform_kernels.ops.pair_loss.kernel import triton_pair_loss

            loss, stats = triton_pair_loss(*inputs, problem)
    counts = problem.normalizers
    return PairLoss(
        loss, {"attract_weight": counts.attract, "repel_weight": counts.repel, "anchors": counts.anchors, **stats}
    )


def _undefined(embeddings: Tensor, inverse_temperature: Tensor, bias: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that is NaN, as are all its gradients."""
    loss = torch.nan * (embeddings.sum(dtype=bias.dtype) + inverse_temperature.sum() + bias.sum())
    return loss, dict.fromkeys(STATS, loss.detach())


def _check_floats(embeddings: Tensor, inverse_temperature: Tensor, bias: Tensor) -> None:
    check_shape("embeddings", embeddings, "N", "d")
    check_dtype("embeddings", embeddings)
    check_shape("inverse_temperature", inverse_temperature, "G")
    check_dtype("inverse_temperature", inverse_temperature)
    check_shape("bias", bias, len(inverse_temperature))
    check_dtype("bias", bias)
    check_device(embeddings.device, "embeddings", inverse_temperature=inverse_temperature, bias=bias)
    if embeddings.shape[1] == 0:
        raise ValueError(f"embeddings has shape {tuple(embeddings.shape)}; d must be at least 1.")
    if len(inverse_temperature) == 0:
        raise ValueError("inverse_temperature has no entry; it must have one for each temperature group.")


def _check_rows(rows: tuple[int, int], count: int) -> tuple[int, int]:
    whole = [check_whole("rows", row) for row in rows]
    if not (len(whole) == 2 and 0 <= whole[0] <= whole[1] <= count):
        raise ValueError(f"rows is {rows}; it must be (start, stop) with 0 <= start <= stop <= {count}.")
    return whole[0], whole[1]


def _check_named(
    attract: Edges,
    repel: Edges | None,
    ignore: Edges | None,
    rows: tuple[int, int],
    embeddings: Tensor,
    describe: Describe,
) -> tuple[Edges, Edges, Edges]:
    start, stop = rows
    absent = Edges.empty(stop - start, embeddings.device)
    named = (attract, absent if repel is None else repel, absent if ignore is None else ignore)
    for name, edges in zip(("attract", "repel", "ignore"), named, strict=True):
        check_edges(name, edges, stop - start, len(embeddings), start, describe)
        check_device(embeddings.device, "embeddings", **{f"{name}.ids": edges.ids})
    check_disjoint(*named, first_row=start, describe=describe)
    return named


def _check_per_item(
    families: Tensor | None,
    groups: Tensor | None,
    negatives: str,
    embeddings: Tensor,
    inverse_temperature: Tensor,
    describe: Describe,
) -> None:
    if negatives == "across" and families is None:
        raise ValueError("families is None; negatives='across' needs the family of each item, (N,) integers.")
    for name, numbers in (("families", families), ("groups", groups)):
        if numbers is not None:
            check_shape(name, numbers, len(embeddings))
            check_integers(name, numbers)
            check_device(embeddings.device, "embeddings", **{name: numbers})
    if groups is not None:
        last = len(inverse_temperature) - 1
        row = first_true((groups < 0) | (groups > last))
        if row is not None:
            raise ValueError(f"groups has {int(groups[row])} for {describe(row)}; groups must be in 0..{last}.")


def _check_dimensions(dimensions: Sequence[int] | None, width: int) -> tuple[int, ...]:
    levels = (width,) if dimensions is None else tuple(check_whole("dimensions", level) for level in dimensions)
    rising = all(low < high for low, high in zip((0, *levels), levels, strict=False))
    if not levels or not rising or levels[-1] > width:
        raise ValueError(f"dimensions is {levels}; it must be positive, strictly increasing and at most d = {width}.")
    return levels


def _check_normalizers(normalizers: Normalizers, embeddings: Tensor) -> Normalizers:
    if not isinstance(normalizers, Normalizers):
        raise ValueError(f"normalizers is a {type(normalizers).__name__}; it must be Normalizers.")
    check_shape("normalizers.values", normalizers.values, 3)
    check_device(embeddings.device, "embeddings", **{"normalizers.values": normalizers.values})
    return normalizers
