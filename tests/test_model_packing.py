"""Packing: which token lies where."""

import numpy as np
import pytest
import torch

from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.model.packing import pack


def text(*values: int) -> Segment:
    return Segment(Modality.TEXT, np.array(values, np.int16), (1, 1, len(values)))


def image(rows: int, columns: int, first: float = 0.0) -> Segment:
    values = first + np.arange(rows * columns * 2, dtype=np.float32).reshape(-1, 2)
    return Segment(Modality.IMAGE, values, (1, rows, columns))


def test_texts_are_arranged_by_length_and_found_again():
    packed = pack([text(1, 2, 3), text(4), text(5, 6, 7), text(8)])
    assert packed.byte_ids.tolist() == [4, 8, 1, 2, 3, 5, 6, 7]
    assert packed.blocks == ((2, 1), (2, 3))
    assert packed.lengths.tolist() == [3, 1, 3, 1]
    assert packed.sources is None, "bytes alone are in packed order already"
    assert packed.byte_ids[packed.places].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (packed.items, packed.tokens) == (4, 8)


def test_sorted_items_need_no_rearrangement():
    packed = pack([text(1), text(2), text(3, 4)])
    assert packed.places is None
    assert packed.sources is None


def test_mixed_modalities():
    segments = [image(2, 1, 100), text(1, 2, 3), text(4, 5), image(1, 3, 200)]
    packed = pack(segments)
    assert packed.blocks == ((2, 2), (2, 3))
    assert packed.modalities.tolist() == [1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    # Packed order: the 2-patch image, the 2-byte text, the 3-byte text, the 3-patch image.
    rows = torch.cat([packed.byte_ids.float(), packed.patches[Modality.IMAGE][:, 0]])
    assert rows[packed.sources].tolist() == [100, 102, 4, 5, 1, 2, 3, 200, 202, 204]
    assert rows[packed.sources][packed.places].tolist() == [100, 102, 1, 2, 3, 4, 5, 200, 202, 204]


def test_positions_follow_the_grid():
    video = Segment(Modality.VIDEO, np.zeros((12, 1), np.float32), (2, 2, 3))
    packed = pack([text(7, 7), image(2, 3), video])
    expected = [[0, 0, 0], [0, 0, 1]]
    expected += [[0, row, column] for row in range(2) for column in range(3)]
    expected += [[frame, row, column] for frame in range(2) for row in range(2) for column in range(3)]
    assert packed.positions.tolist() == expected


def test_nothing_packs_to_nothing():
    packed = pack([])
    assert (packed.items, packed.tokens, packed.blocks, packed.patches) == (0, 0, (), {})


@pytest.mark.parametrize(
    "segment",
    [Segment(Modality.TEXT, np.zeros(0, np.int16), (1, 1, 0)), Segment(Modality.TEXT, np.zeros(3), (1, 2, 2))],
)
def test_a_segment_that_is_no_grid_of_tokens_is_refused(segment):
    with pytest.raises(ValueError, match=r"segment 1 has . tokens"):
        pack([text(1), segment])


def test_to_keeps_types():
    packed = pack([image(1, 2), text(1)])
    moved = packed.to("meta")
    assert moved.positions.device.type == moved.patches[Modality.IMAGE].device.type == "meta"
    assert moved.positions.dtype == packed.positions.dtype
    assert moved.blocks == packed.blocks
