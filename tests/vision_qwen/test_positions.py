"""Three-axis positions, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from mlxgen_vision.mrope import _axes, chunk_positions
from mlxgen_vision.positions import GridBlock, mrope_positions

from mlxgen.errors import InvalidValueError, PlaceholderError
from mlxgen.inputs import PreparedInput


def test_text_counts_up_on_all_axes():
    positions, delta = mrope_positions(4, [])
    assert positions.tolist() == [[0, 1, 2, 3]] * 3
    assert positions.dtype == np.int32
    assert delta == 0


def test_a_picture_is_a_grid_and_text_goes_on_after_its_longer_side():
    positions, delta = mrope_positions(10, [GridBlock(2, 8, 1, 2, 3)])
    assert positions[:, 2:8].tolist() == [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]]
    assert positions[:, 8:].tolist() == [[5, 6]] * 3
    assert delta == 7 - 10


def test_text_after_a_long_video_goes_on_after_its_last_moment():
    positions, delta = mrope_positions(7, [GridBlock(1, 6, 5, 1, 1, time_scale=2.0)])
    assert positions[0].tolist() == [0, 1, 3, 5, 7, 9, 10]
    assert positions[1].tolist() == [0, 1, 1, 1, 1, 1, 10]
    assert delta == 4


def test_fractional_intervals_are_truncated_after_multiplying():
    positions, _ = mrope_positions(5, [GridBlock(0, 5, 5, 1, 1, time_scale=0.7)])
    assert positions[0].tolist() == [0, 0, 1, 2, 2]


def test_two_blocks_without_text_between():
    positions, delta = mrope_positions(4, [GridBlock(0, 2, 1, 1, 2), GridBlock(2, 4, 1, 2, 1)])
    assert positions.tolist() == [[0, 0, 2, 2], [0, 0, 2, 3], [0, 1, 2, 2]]
    assert delta == 0


@pytest.mark.parametrize("block", [GridBlock(0, 5, 1, 2, 3), GridBlock(0, 6, 1, 2, 3)])
def test_a_block_that_doesnt_fit_is_an_error(block):
    with pytest.raises(PlaceholderError):
        mrope_positions(5, [block])


def test_overlapping_blocks_are_an_error():
    with pytest.raises(PlaceholderError, match=r"\[1, 3\)"):
        mrope_positions(4, [GridBlock(0, 2, 1, 1, 2), GridBlock(1, 3, 1, 1, 2)])


def test_frequencies_follow_their_axes():
    assert _axes([2, 3, 3], 8, interleaved=False).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert _axes([4, 2, 2], 8, interleaved=True).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert _axes([11, 11, 10], 32, interleaved=True).tolist()[-4:] == [1, 2, 0, 1]
    with pytest.raises(InvalidValueError, match="add up to 8"):
        _axes([2, 2, 2], 8, interleaved=False)


def test_a_chunks_positions_are_a_number_where_its_tokens_count_up():
    positions, delta = mrope_positions(10, [GridBlock(2, 8, 1, 2, 3)])
    inputs = PreparedInput(list(range(10)), position_ids=positions, rope_delta=delta)
    assert chunk_positions(None, 7, 3) == 7
    assert chunk_positions(PreparedInput([1, 2]), 1, 1) == 1
    assert chunk_positions(inputs, 0, 2) == 0
    assert chunk_positions(inputs, 8, 2) == 5
    assert chunk_positions(inputs, 9, 1) == 6
    assert chunk_positions(inputs, 10, 1) == 7  # the first token of the reply
    assert chunk_positions(inputs, 8, 5) == 5  # the last two of the prompt and three of the reply
    inside = chunk_positions(inputs, 3, 4)
    assert np.array_equal(inside, positions[:, 3:7])
    across = chunk_positions(inputs, 6, 6)
    assert np.array_equal(across[:, :4], positions[:, 6:])
    assert across[:, 4:].tolist() == [[7, 8]] * 3
