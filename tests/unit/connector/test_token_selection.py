"""Which tokens of a request are stored, and how the sample describes them."""

from __future__ import annotations

import numpy as np
import pytest

from hsx_dist.connector.request_params import read_request_params
from hsx_dist.connector.token_selection import choose
from hsx_dist.format.identity import identity_hash

TOKENS = np.arange(100, 110)


def chosen(prompt=10, **params):
    options = read_request_params(
        "r",
        params,
        prompt_tokens=prompt,
        captured={"hidden_states": (1,)},
        output="x",
        allow_custom_path=False,
        include_output_tokens=prompt < 10,
    )
    refused = dict(options.refused)
    return choose(options, prompt, TOKENS, refused), refused


@pytest.mark.parametrize("mask", [bytes([0, 1] * 5), [0, 1] * 5, [False, True] * 5])
def test_a_mask_goes_with_all_tokens(mask):
    got, refused = chosen(hidden_states_loss_mask=mask)
    assert not refused
    assert got.positions is None
    assert got.meta == {}
    assert got.attached["loss_mask"].tolist() == [0, 1] * 5


def test_generated_tokens_count():
    got, _ = chosen(prompt=7, hidden_states_loss_mask=bytes(7))
    assert got.attached["loss_mask"].tolist() == [0] * 7 + [1] * 3


def test_a_range_takes_its_piece_of_the_mask():
    got, _ = chosen(hidden_states_loss_mask=bytes([0, 0, 0, 1, 1, 1, 0, 1, 1, 1]), hidden_states_tokens="stride:3")
    assert got.token_ids.tolist() == [100, 103, 106, 109]
    assert got.attached["loss_mask"].tolist() == [0, 1, 0, 1]
    assert got.meta == {"tokens": {"start": 0, "step": 3, "of": 10}}


def test_tokens_of_the_mask_say_where_they_stood():
    got, refused = chosen(
        hidden_states_loss_mask=bytes([0, 1, 1, 0, 0, 0, 0, 0, 1, 0]), hidden_states_tokens="loss_mask"
    )
    assert not refused
    assert got.token_ids.tolist() == [101, 102, 108]
    assert got.attached["positions"].tolist() == got.positions.tolist() == [1, 2, 8]
    assert got.attached["loss_mask"].tolist() == [1, 1, 1]
    assert got.meta == {"tokens": {"loss_mask": True, "of": 10}}


def test_a_mask_that_selects_nothing_stores_nothing():
    assert chosen(hidden_states_loss_mask=bytes(10), hidden_states_tokens="loss_mask")[0] is None


def test_the_mask_is_asked_for_and_missing_or_of_another_length():
    got, refused = chosen(hidden_states_tokens="loss_mask")
    assert got.token_ids.tolist() == TOKENS.tolist()
    assert "expected hidden_states_loss_mask too" in refused["hidden_states_tokens"]
    got, refused = chosen(hidden_states_loss_mask=bytes(9))
    assert got.attached == {}
    assert "expected 10 entries, one for each token of the prompt, got 9" in refused["hidden_states_loss_mask"]


def test_a_mean_says_over_what_it_was_taken():
    got, _ = chosen(hidden_states_tokens="mean")
    assert got.token_ids.tolist() == [-1]
    assert got.mean_of == 10
    assert got.attached["request_token_ids"].tolist() == TOKENS.tolist()
    assert got.meta == {"tokens": {"mean": True, "of": 10}}


def test_other_token_selections_of_one_request_have_other_hashes():
    masks = [bytes([1] + [0] * 9), bytes([0, 1] + [0] * 8)]
    by_mask = [chosen(hidden_states_tokens="loss_mask", hidden_states_loss_mask=m)[0] for m in masks]
    others = [chosen(hidden_states_tokens=t)[0] for t in ("all", "mean", "last", "stride:2", [0, 5], [0, 6])]
    told = {identity_hash(c.meta, len(c.token_ids), sorted(c.attached), *c.attached.values()) for c in by_mask + others}
    assert len(told) == 8
