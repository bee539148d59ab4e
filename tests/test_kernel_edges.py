"""What an edge set refuses, and how the refusal names the argument and the item."""

import numpy as np
import pytest
import torch
from uform_kernels import Edges, check_disjoint, check_edges

NAN = float("nan")


def refusal(offsets, ids, weights=None, rows=2, items=4, **options):
    with pytest.raises(ValueError, match="attract") as caught:
        check_edges("attract", Edges(offsets, ids, weights), rows, items, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("offsets", "ids", "weights", "expected"),
    [
        ([0, 1, 2], [1, 4], None, "attract.ids[1] = 4 of row 1 is out of range; ids must be in 0..3"),
        ([0, 1, 2], [-1, 0], None, "attract.ids[0] = -1 of row 0 is out of range"),
        ([0, 2, 2], [3, 2], None, "attract.ids[1] = 2 of row 0 is below the id before it"),
        ([0, 2, 2], [2, 2], None, "attract.ids[1] = 2 of row 0 is repeated"),
        ([0, 0, 1], [1], None, "attract.ids[0] = 1 of row 1 is an edge to itself"),
        ([0, 1, 2], [1, 0], [1.0, NAN], "attract.weights[1] = nan of row 1; weights must be finite and at least 0"),
        ([0, 1, 2], [1, 0], [float("inf"), 1.0], "attract.weights[0] = inf of row 0"),
        ([0, 1, 2], [1, 0], [1.0, -0.5], "attract.weights[1] = -0.5 of row 1"),
        ([0, 1, 2], [1, 0], [1.0], "attract.weights has shape (1,); it must be (2,)"),
        ([1, 1, 2], [1, 0], None, "attract.offsets starts at 1; it must start at 0"),
        ([0, 2, 1], [1], None, "attract.offsets decreases from 2 to 1 at row 1"),
        ([0, 1, 1], [1, 0], None, "attract.offsets ends at 1; it must end at len(ids) = 2"),
        ([0, 1], [1], None, "attract has 1 rows; it must have one for each of the 2 anchors"),
        ([], [], None, "attract.offsets has shape (0,); it must be (rows + 1,)"),
        ([0.0, 1.0, 1.0], [1], None, "attract.offsets is torch.float32; it must hold integers"),
        ([0, 1, 1], [1.5], None, "attract.ids is torch.float32; it must hold integers"),
        ([0, 1, 1], [[1]], None, "attract.ids has shape (1, 1); it must be (E,)"),
    ],
)
def test_refusals_name_argument_and_row(offsets, ids, weights, expected):
    assert expected in refusal(offsets, ids, weights)


def test_weights_of_whole_numbers_are_refused():
    message = refusal(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([1, 2]))
    assert "attract.weights is torch.int64" in message


def test_refusal_names_the_item_by_its_key():
    keys = {10: "item 0xfeed", 11: "item 0xbeef"}
    message = refusal([0, 0, 1], [40], rows=2, items=20, first_row=10, describe=keys.__getitem__)
    assert "attract.ids[0] = 40 of item 0xbeef is out of range" in message


def test_an_edge_to_itself_counts_from_the_first_row():
    check_edges("repel", Edges([0, 1, 2], [0, 1]), rows=2, items=4, first_row=2)
    assert "row 3 is an edge to itself" in refusal([0, 1, 2], [0, 3], rows=2, items=4, first_row=2)


def test_ids_may_fall_between_rows_and_rows_may_be_empty():
    check_edges("attract", Edges([0, 0, 2, 2, 3], [2, 3, 0]), rows=4, items=4)
    check_edges("attract", Edges.empty(0), rows=0, items=0)
    check_edges("attract", Edges.empty(3), rows=3, items=3)


def test_one_pair_in_two_sets_is_refused():
    none = Edges.empty(2)
    check_disjoint(Edges([0, 1, 2], [1, 0]), Edges([0, 1, 2], [2, 2]), Edges([0, 1, 1], [3]))
    with pytest.raises(ValueError, match=r"the pair row 1 -> 2 is in both attract and ignore"):
        check_disjoint(Edges([0, 1, 2], [1, 2]), none, Edges([0, 0, 1], [2]))
    with pytest.raises(ValueError, match=r"the pair row 6 -> 3 is in both repel and ignore"):
        check_disjoint(none, Edges([0, 1, 1], [3]), Edges([0, 1, 1], [3]), first_row=6)


def test_lists_numpy_and_tensors_make_the_same_edges():
    lists = Edges.from_lists([[1, 2], [], [0]], [[0.5, 1.5], [], [2.0]])
    arrays = Edges(np.array([0, 2, 2, 3], np.uint32), np.array([1, 2, 0]), np.array([0.5, 1.5, 2.0]))
    for one, other in zip(
        (lists.offsets, lists.ids, lists.weights), (arrays.offsets, arrays.ids, arrays.weights), strict=True
    ):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert (lists.rows, lists.count) == (3, 3)
    assert lists.anchors().tolist() == [0, 0, 2]
    assert Edges.from_lists([[], []]).ids.dtype == torch.int64


def test_unequal_lists_are_refused():
    with pytest.raises(ValueError, match="as many as ids"):
        Edges.from_lists([[1], [0]], [[1.0], []])


def test_checks_are_not_loops_over_edges():
    rows = 200_000
    ids = torch.arange(rows).roll(1)
    edges = Edges(torch.arange(rows + 1), ids)
    check_edges("attract", edges, rows, rows)
    check_disjoint(edges, Edges.empty(rows), Edges(torch.arange(rows + 1), torch.arange(rows).roll(2)))
