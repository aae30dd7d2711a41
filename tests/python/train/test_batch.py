"""Windows and shifts, worked out by hand.

The rules are those of verl's co-training document, and of speculators' own `shift_batch` and `CollateFn`
(0.9.0)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.training import sample, states

import llamatap as lt
from llamatap.train import DataBuffer, Sample, trainable, training_batch, window


def masked(n: int, *responses: tuple[int, int]) -> Sample:
    mask = np.zeros(n, int)
    for begin, end in responses:
        mask[begin:end] = 1
    return sample(range(n), mask.tolist())


@pytest.mark.parametrize(
    ("n", "responses", "expected"),
    [
        # The document's example: 1,500 of the prompt, 548 of the response.
        (2048, [(1500, 2048)], (1536, 2048)),
        # The response fits: from its first token on, but not past where the window would be shorter.
        (2048, [(1000, 1200)], (1000, 1512)),
        (2048, [(1536, 2048)], (1536, 2048)),
        (2048, [(1537, 2048)], (1536, 2048)),
        (2048, [(1900, 1950)], (1536, 2048)),
        (2048, [(0, 1)], (0, 512)),
        # Longer by one: its end, not the end of the text.
        (2048, [(100, 613)], (101, 613)),
        (2048, [(100, 612)], (100, 612)),
        # Several turns are one span.
        (2048, [(100, 150), (700, 800)], (288, 800)),
        (2048, [(100, 150), (500, 612)], (100, 612)),
        (2048, [], (1536, 2048)),
        (512, [(400, 512)], (0, 512)),
        (513, [(400, 513)], (1, 513)),
        (100, [(50, 100)], (0, 100)),
        (100, [], (0, 100)),
        (1, [], (0, 1)),
        (0, [], (0, 0)),
    ],
)
def test_windows_keep_the_end_of_the_response(
    n: int, responses: Sequence[tuple[int, int]], expected: tuple[int, int]
) -> None:
    assert window(masked(n, *responses)) == expected


def test_windows_of_another_length() -> None:
    one = masked(20, (5, 12))
    assert [window(one, length) for length in (2, 6, 7, 8, 15, 16, 99)] == [
        (10, 12),
        (6, 12),
        (5, 12),
        (5, 13),
        (5, 20),
        (4, 20),
        (0, 20),
    ]
    for length in (1, 0, -3, True, 2.0):
        with pytest.raises(lt.InvalidInputError, match="max_len"):
            window(one, length)  # type: ignore[arg-type]


#: Two samples: 11, 12, 13, 14 with the response 13, 14; and 21, 22, 23, a response without its prompt.
FIRST, SECOND = ([11, 12, 13, 14], [0, 0, 1, 1]), ([21, 22, 23], [1, 1, 1])
# Common to both pairings. Rows are h[t] = 11, 12, 13 | 14 (which has nothing to predict) | 21, 22.
HIDDEN = [11, 12, 13, 14, 21, 22]
TARGET = [12, 13, 14, 21, 22, 23]
LOSS = [0, 1, 1, 0, 1, 1]
DOCUMENTS = [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("pairing", "tokens", "positions"),
    [
        # (x1, g0) -> y1, l1: speculators' shift_batch, whose positions begin at 1.
        ("eagle", [12, 13, 14, 21, 22, 23], [1, 2, 3, 4, 1, 2]),
        # (x0, h0) -> h1, l1: the document's.
        ("verl", [11, 12, 13, 14, 21, 22], [0, 1, 2, 3, 0, 1]),
    ],
)
def test_shifts(pairing: Any, tokens: list[int], positions: list[int]) -> None:
    found: Any = training_batch([sample(*FIRST), sample(*SECOND)], pairing=pairing)
    assert {name: value[0].tolist() for name, value in found.items() if value.ndim == 2} == {
        "input_ids": tokens,
        "loss_mask": LOSS,
        "attention_mask": [1] * 6,
        "document_ids": DOCUMENTS,
        "position_ids": positions,
    }
    assert found["hidden_states"].tolist() == [states(HIDDEN).tolist()]
    assert found["target"].tolist() == [states(TARGET).tolist()]
    assert [found[name].dtype for name in ("input_ids", "loss_mask", "hidden_states")] == [
        np.int64,
        np.float32,
        np.float32,
    ]
    # Trainers add noise to what a drafter is given.
    assert not np.shares_memory(found["hidden_states"], found["target"])


def test_a_single_sample_in_its_window() -> None:
    """With max_len=3 the window is 12, 13, 14, since the response alone is shorter."""
    found = training_batch([sample(*FIRST)], max_len=3)
    assert found["input_ids"].tolist() == [[13, 14]]
    assert found["hidden_states"].tolist() == [states([12, 13]).tolist()]
    assert found["target"].tolist() == [states([13, 14]).tolist()]
    assert found["loss_mask"].tolist() == [[1, 1]]


N_EMBD, N_TOKENS = 3, 50


def gradient_of_texts(
    texts: Sequence[Sample], table: NDArray[np.float64], back: int, max_len: int
) -> NDArray[np.float64]:
    """By the texts: a drafter that adds a token's row of a table to the state of the token before p is to
    give the state of p, where p counts; the gradient of half the squared error by the table.

    :param back: how far before p the token is that the drafter is given: 0 is p itself (EAGLE).
    """
    found = np.zeros_like(table)
    for one in texts:
        rows = np.asarray(one.hidden_states, np.float64)
        start, stop = window(one, max_len)
        for p in range(start + 1, stop):
            if one.loss_mask[p]:
                token = one.input_ids[p - back]
                found[token] += rows[p - 1] + table[token] - rows[p]
    return found


def texts_of(masks: Sequence[Any]) -> list[Sample]:
    """Texts of tokens that differ, with random states."""
    rng = np.random.default_rng(49)
    found = []
    ids = iter(range(N_TOKENS))
    for mask in masks:
        n = len(mask)
        tokens = [next(ids) for _ in range(n)]
        buffer = DataBuffer()
        rows = rng.standard_normal((n, N_EMBD)).astype(np.float32)
        buffer.add_batch({"input_ids": tokens, "loss_mask": mask}, [rows])
        found += buffer.get_all_data()
    return found


@pytest.mark.parametrize(("pairing", "back"), [("eagle", 0), ("verl", 1)])
@pytest.mark.parametrize(
    "masks",
    [
        # At the ends of texts, beside one another: the first token of a text is predicted by none.
        [[1, 1, 0, 0], [1, 0, 0, 1], [1, 1]],
        [[0, 0, 1, 1], [0, 1]],
        # In several pieces, and beyond the window.
        [[0, 1, 0, 1, 1, 0, 0, 1, 0], [0, 0, 1, 0, 1]],
        # The mask as booleans.
        [np.array([False, True, False, True]), np.array([True, True])],
        # A single token, at every place.
        *([[int(p == k) for p in range(5)]] for k in range(1, 5)),
        [[0, 1], [0, 0, 1], [1, 0, 0, 1]],
    ],
)
@pytest.mark.parametrize("max_len", [3, 512])
def test_the_gradient_is_where_the_unshifted_mask_says(
    masks: list[Any], pairing: Any, back: int, max_len: int
) -> None:
    """Case 49: SpecForge#885. Ids, targets and mask are shifted together; data sets hold them unshifted."""
    texts = texts_of(masks)
    table = np.random.default_rng(0).standard_normal((N_TOKENS, N_EMBD))
    expected = gradient_of_texts(texts, table, back, max_len)
    if not expected.any():
        # The only token that counts is the first one of its window.
        with pytest.raises(lt.InvalidInputError, match="no token in the window counts"):
            training_batch(texts, max_len=max_len, pairing=pairing)
        assert max_len == 3
        return
    batch = training_batch(texts, max_len=max_len, pairing=pairing)
    ids = batch["input_ids"][0]
    wrong = batch["hidden_states"][0] + table[ids] - batch["target"][0]
    found = np.zeros_like(table)
    np.add.at(found, ids, batch["loss_mask"][0, :, None] * wrong)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    counted = np.flatnonzero(np.abs(found).sum(1))
    assert counted.tolist() == np.flatnonzero(np.abs(expected).sum(1)).tolist()


@pytest.mark.parametrize("n_layers", [1, 2, 4, 5])
def test_states_of_several_layers(n_layers: int) -> None:
    """EAGLE-3: all but the last layer side by side, the last one is predicted; of one layer it is both."""
    found = training_batch([sample(*FIRST, layers=n_layers), sample(*SECOND, layers=n_layers)])
    n_given = max(n_layers - 1, 1)
    assert found["hidden_states"].shape == (1, 6, 2 * n_given)
    assert found["target"].shape == (1, 6, 2)
    for row, (given, target) in enumerate(zip(HIDDEN, TARGET, strict=True)):
        expected = [x for k in range(n_given) for x in (given + 100 * k, -given)]
        assert found["hidden_states"][0, row].tolist() == expected
        assert found["target"][0, row].tolist() == [target + 100 * (n_layers - 1), -target]
    assert found["loss_mask"][0].tolist() == LOSS


def test_what_there_is_nothing_to_learn_from_is_counted() -> None:
    spoilt = states([1, 2, 3])
    spoilt[1, 0] = np.nan
    samples = [
        sample([1, 2, 3], hidden_states=None),
        sample([1], [1]),
        sample([1, 2, 3], hidden_states=spoilt),
        sample([1, 2, 3], [0, 0, 0]),
        # Nothing comes before the first token.
        sample([1, 2, 3], [1, 0, 0]),
        sample([4, 5, 6], hidden_states=None),
        replace(sample([1, 2, 3]), hidden_states=states([1, 2, 3, 4])),
        replace(sample([1, 2, 3]), loss_mask=np.ones(2, np.float32)),
    ]
    reasons = {
        "no states": 2,
        "fewer than 2 rows": 1,
        "NaN or infinity in the states": 1,
        "no token in the window counts for the loss": 2,
        "rows, tokens and loss mask of unlike lengths": 2,
    }
    assert trainable(samples) == ([], reasons)
    message = "in 8 samples: " + ", ".join(f"{count} with {reason}" for reason, count in reasons.items())
    with pytest.raises(lt.InvalidInputError, match=message):
        training_batch(samples)
    with pytest.raises(lt.InvalidInputError, match="no sample was added; give on_states="):
        training_batch([])
    good = sample(*FIRST)
    assert trainable([*samples, good]) == ([good], reasons)
    found = training_batch([*samples[:3], good, *samples[3:]])
    assert found["input_ids"].tolist() == training_batch([good])["input_ids"].tolist()


def test_samples_of_one_batch_are_of_one_kind() -> None:
    one = sample([1, 2, 3], layers=2)
    for other in (
        sample([1, 2, 3]),
        sample([1, 2, 3], layers=3),
        sample([1, 2, 3], hidden_states=states([1, 2, 3], 2, np.float16)),
        sample([1, 2, 3], hidden_states=np.zeros((3, 2, 5), np.float32)),
    ):
        with pytest.raises(lt.InvalidInputError, match=r"same layers, shape and dtype; found .*; "):
            training_batch([one, other])
    named = [states([1, 2, 3], 2)]
    both: list[tuple[lt.LayerId, ...]] = [(1, "norm"), (2, "norm")]
    buffers = [DataBuffer() for _ in range(2)]
    for buffer, layers in zip(buffers, both, strict=True):
        buffer.add_batch({"input_ids": [1, 2, 3]}, named, layers=layers)
    with pytest.raises(lt.InvalidInputError, match=r"layers \[1, 'norm'\].*; layers \[2, 'norm'\]"):
        training_batch([*buffers[0].get_all_data(), *buffers[1].get_all_data()])
    with pytest.raises(lt.InvalidInputError, match="pairing must be 'eagle' or 'verl', not 'Eagle'"):
        training_batch([one], pairing="Eagle")  # type: ignore[arg-type]
