"""The arithmetic that the exact-number tests compare with, and the model's registration with vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.harness.exact_model import FIELDS, RANK_STEP, exact_model, expected_states, next_tokens


def test_every_field_says_where_a_number_belongs():
    states = expected_states([7, 5, 400], [0, 2], 12, rank=1)
    assert states.shape == (3, 2, 12)
    for j in range(12):
        expected = {
            "layer": [[0, 2]] * 3,
            "position": [[0, 0], [1, 1], [2, 2]],
            "token": [[7, 7], [5, 5], [400, 400]],
            "context": [[0, 7], [0, 12], [0, 412]],
            "rank": [[RANK_STEP] * 2] * 3,
            "channel": [[j, j]] * 3,
        }[FIELDS[j % len(FIELDS)]]
        assert states[:, :, j].tolist() == expected
    assert (expected_states([3, 4], [6], 8, fields=["layer"]) == 6).all()


def test_a_swap_of_any_two_tokens_layers_or_ranks_shows():
    ids = np.random.default_rng(0).integers(3, 400, 50).tolist()
    states = expected_states(ids, range(4), 64)
    flat = states.reshape(-1, 64)
    assert len(np.unique(flat, axis=0)) == len(flat)
    swapped = [*ids[:10], ids[11], ids[10], *ids[12:]]
    assert not np.array_equal(expected_states(swapped, range(4), 64), states)
    assert not np.array_equal(expected_states(ids, range(4), 64, rank=1), states)


def test_generation_counts_up():
    assert next_tokens(509, 4) == [510, 511, 0, 1]


def test_what_would_be_rounded_is_refused(tmp_path):
    with pytest.raises(ValueError, match="float32"):
        exact_model(tmp_path, dtype="bfloat16")
    with pytest.raises(ValueError, match="fields"):
        exact_model(tmp_path, fields=["layer", "row"])


def test_the_folder_says_what_the_model_needs(tmp_path):
    config = json.loads((exact_model(tmp_path, layers=3, heads=4) / "config.json").read_text())
    assert config["hidden_size"] == 128
    assert config["num_hidden_layers"] == 3
    assert config["vocab_size"] == 512
    assert (tmp_path / "tokenizer.json").exists()


def test_child_processes_find_the_plugin_while_it_is_registered(tmp_path, monkeypatch):
    from tests.harness import exact_model as module

    monkeypatch.setattr(module, "register", lambda: None)  # other tests register it in this process's vLLM
    code = (
        "from importlib.metadata import entry_points as e;"
        "print([p.value for p in e(group='vllm.general_plugins') if p.name == 'hsx_exact_model'])"
    )

    def seen() -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    before = (list(sys.path), os.environ.get("PYTHONPATH"))
    with module.registered(tmp_path):
        assert seen() == "['tests.harness.exact_model:register']"
    assert seen() == "[]"
    assert (sys.path, os.environ.get("PYTHONPATH")) == before
