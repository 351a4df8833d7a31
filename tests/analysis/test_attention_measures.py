"""Tests of measures of attention weights, against values that are known."""

import math

import pytest
import torch

from interlayer.analysis import Tokens, head_similarity, jacobian_norm, relative_distance, row_entropy


def rows(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)


def test_entropy_of_known_rows():
    weights = torch.tensor([[1.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0]])
    expected = torch.tensor([0, math.log(4), math.log(2), 1.5 * math.log(2)])
    torch.testing.assert_close(row_entropy(weights), expected)
    weights = rows(2, 3, 5, 7)
    expected = torch.distributions.Categorical(probs=weights).entropy()
    torch.testing.assert_close(row_entropy(weights), expected)


def test_nuclear_norm_is_that_of_the_jacobian():
    """Of the matrix that autograd computes for a softmax."""
    scores = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = [
        torch.linalg.matrix_norm(torch.autograd.functional.jacobian(lambda s: s.softmax(-1), row), "nuc")
        for row in scores
    ]
    torch.testing.assert_close(jacobian_norm(scores.softmax(-1)), torch.stack(expected))
    uniform = torch.full((1, 9), 1 / 9, dtype=torch.float64)
    torch.testing.assert_close(jacobian_norm(uniform), torch.tensor([1 - 1 / 9], dtype=torch.float64))
    assert (jacobian_norm(scores.softmax(-1)) < 1 - 1 / 9).all(), "it is largest for equal weights"


def test_the_entropy_bounds_the_nuclear_norm():
    """The bound that the plot draws, which equal weights reach."""
    weights = (3 * torch.randn(200, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).softmax(-1)
    assert (jacobian_norm(weights) <= 1 - (-row_entropy(weights)).exp()).all()
    equal = torch.tensor([[0.25] * 4 + [0.0] * 7])
    torch.testing.assert_close(jacobian_norm(equal), 1 - (-row_entropy(equal)).exp())


def test_distance_is_the_mean_over_pairs():
    """Written out as in the paper: over all i and j that differ."""
    places = Tokens(0, (2, 3)).positions()
    assert places[4].tolist() == [0.75, 0.5], "the center of the patch in row 1, column 1 of 2 x 3"
    weights = rows(2, 4, 6, 6)
    expected = torch.zeros(2, 4, dtype=torch.float64)
    for i in range(6):
        for j in range(6):
            if i != j:
                expected += weights[:, :, i, j] * float((places[i] - places[j]).abs().sum()) / 30
    torch.testing.assert_close(relative_distance(weights, places, places), expected, atol=1e-7, rtol=1e-6)


def test_distance_of_known_attention():
    places = Tokens(0, (4, 4)).positions()
    itself = torch.eye(16)[None]
    assert float(relative_distance(itself, places, places)) == 0
    right = torch.eye(16).roll(1, 1)[None]  # every patch attends to the next one, row by row
    steps = [(0.25 if column < 3 else 0.75 + (0.25 if row < 3 else 0.75)) for row in range(4) for column in range(4)]
    assert float(relative_distance(right, places, places, per_query=True)) == pytest.approx(sum(steps) / 16)
    assert float(relative_distance(right, places, places)) == pytest.approx(sum(steps) / 240)
    coarse = Tokens(0, (2, 2)).positions()  # keys of a smaller map
    uniform = torch.full((1, 16, 4), 0.25)
    axis = sum(abs((i + 0.5) / 4 - (j + 0.5) / 2) for i in range(4) for j in range(2)) / 8
    assert float(relative_distance(uniform, places, coarse, per_query=True)) == pytest.approx(2 * axis)


def test_similarity_of_known_heads():
    one = rows(1, 1, 3, 4)
    other = torch.zeros_like(one)
    other[0, 0, 0, 0] = 1
    maps = torch.cat((one, 2 * one, -one, other), 1)
    similarity = head_similarity(maps)
    torch.testing.assert_close(similarity.diagonal(), torch.ones(4, dtype=torch.float64))
    assert float(similarity[0, 1]) == pytest.approx(1)
    assert float(similarity[0, 2]) == pytest.approx(-1)
    assert float(similarity[0, 3]) == pytest.approx(float(one[0, 0, 0, 0] / one.norm()))
    swapped = head_similarity(torch.cat((maps, maps[:, [3, 1, 2, 0]])))
    assert float(swapped[0, 1]) == pytest.approx(float(similarity[0, 1] + similarity[3, 1]) / 2), "a mean over images"
