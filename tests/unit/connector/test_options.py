"""What a request asks for, as clients would write it."""

from __future__ import annotations

import pytest

from hsx_dist.connector.options import ALL, Selection, custom_name, place, read_options
from hsx_dist.page import sample_key

CAPTURED = (2, 15, 30)


def read(params, request_id="r-1", *, allowed=True):
    return read_options(
        request_id,
        params,
        layer_ids=CAPTURED,
        output="s3://bucket/states/",
        allow_custom_path=allowed,
        include_output_tokens=False,
    )


def test_nothing_asked_is_everything_under_the_requests_own_id():
    options = read({})
    assert (options.key, options.layer_ids, options.tokens, options.save) == ("r-1", CAPTURED, ALL, True)
    assert not options.chosen
    assert not options.refused


@pytest.mark.parametrize(
    ("value", "total", "positions"),
    [
        ([0, 4], 10, [0, 1, 2, 3]),
        ([-3, None], 10, [7, 8, 9]),
        ([2, -1], 5, [2, 3]),
        ([0, None, 4], 10, [0, 4, 8]),
        ([8, 100], 10, [8, 9]),
        ("last", 10, [9]),
        ("stride:3", 10, [0, 3, 6, 9]),
        ([4, 4], 10, []),
    ],
)
def test_selections(value, total, positions):
    assert list(Selection.read(value).of(total)) == positions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_states_key", ""),
        ("hidden_states_key", 7),
        ("hidden_states_key", "k" * 1025),
        ("hidden_states_layers", []),
        ("hidden_states_layers", [2, 2]),
        ("hidden_states_layers", [3]),
        ("hidden_states_layers", "all"),
        ("hidden_states_layers", [True]),
        ("hidden_states_tokens", "first"),
        ("hidden_states_tokens", "stride:0"),
        ("hidden_states_tokens", [1]),
        ("hidden_states_tokens", [0, 5, -1]),
        ("hidden_states_tokens", [0.5, 2]),
        ("hidden_states_tokens", [0, 1 << 70]),
        ("hidden_states_save", "no"),
        ("hidden_states_row", -1),
        ("include_output_tokens", 1),
        ("hidden_states_colour", "red"),
        ("hidden_states_path", 5),
        ("hidden_states_loss_mask", [0, 2]),
        ("hidden_states_loss_mask", "01"),
        ("hidden_states_loss_mask", []),
        ("hidden_states_loss_mask", b"\x00\x02"),
        ("hidden_states_metadata", ["a"]),
        ("hidden_states_metadata", {"a": float("nan")}),
        ("hidden_states_metadata", {"a": "x" * 70_000}),
        ("hidden_states_metadata", {"a": object()}),
        ("hidden_states_metadata", {"a": "\ud800"}),
        ("hidden_states_key", "a\ud800"),
    ],
)
def test_a_wrong_value_is_refused_alone(name, value):
    options = read({name: value, "do_remote_prefill": True})
    assert set(options.refused) == {name}
    assert "expected" in options.refused[name]
    assert options == read({}) or options.refused  # all else is as if it had not been given
    assert (options.key, options.layer_ids, options.tokens, options.save) == ("r-1", CAPTURED, ALL, True)


@pytest.mark.parametrize(
    "path",
    [
        "../x.safetensors",
        "a/../../x.safetensors",
        "/etc/passwd",
        "s3://other/x.safetensors",
        "s3://bucket/states-of-others/x.safetensors",
        "file:///etc/x",
        "",
        "a//b.safetensors",
        "./x.safetensors",
        "a\x00b.safetensors",
        "a\nb.safetensors",
        "x.safetensors.lock",
        "x.error.json",
        "*.safetensors",
        "x" * 1025,
        "x.failed.json",
        "a.lock/x.safetensors",
        "a.safetensors/x.safetensors",
        "a.error.json/x",
        ".hsx-unfinished-1/x.safetensors",
        "a/.hsx-unfinished-1",
        "x" * 241,
        "\u00e9" * 121,
        "a\ud800.safetensors",
    ],
)
def test_no_path_leaves_the_prefix_or_hits_a_companion(path):
    options = read({"hidden_states_path": path})
    assert options.path is None
    assert set(options.refused) == {"hidden_states_path"}
    assert options.name == "r-1.safetensors"


def test_paths_under_the_prefix_absolute_or_not():
    for path in ("s3://bucket/states/a/b.safetensors", "a/b.safetensors"):
        options = read({"hidden_states_path": path})
        assert options.name == "a/b.safetensors"
        assert options.key == "a/b"
        assert options.chosen
    long = "x" * 239
    assert read({"hidden_states_path": long}).name == long
    assert "hidden_states_path" in read({"hidden_states_path": long}, "cmpl-x-1-00000000").refused
    assert len(read({"hidden_states_key": "\u00e9" * 1024}, "cmpl-x-1-00000000").name) < 240
    with pytest.raises(ValueError, match="allow_custom_save_path"):
        custom_name("a/b.safetensors", "s3://bucket/states", False)


@pytest.mark.parametrize(
    ("request_id", "expected"),
    [
        ("7-1a2b3c4d", (0, 0)),
        ("cmpl-0123-0-1a2b3c4d", (0, 0)),
        ("cmpl-0123-3-1a2b3c4d", (3, 0)),
        ("2_cmpl-0123-3-1a2b3c4d", (3, 2)),
        ("1_chatcmpl-0123-1a2b3c4d", (0, 1)),
        ("cmpl-my/..id-1-1a2b3c4d", (1, 0)),
        ("r17-1a2b3c4d", (0, 0)),
    ],
)
def test_which_result_of_its_clients_request_an_engines_request_is(request_id, expected):
    assert place(request_id) == expected


def test_keys_and_paths_of_several_results():
    assert sample_key("k") == "k"
    assert sample_key("k", prompt=2, choice=1) == "k-p2-n1"
    assert read({"hidden_states_key": "k"}, "1_cmpl-x-2-00000000").key == "k-p2-n1"
    assert read({"hidden_states_path": "a.b/c.safetensors"}, "cmpl-x-1-00000000").name == "a.b/c-p1.safetensors"
    assert read({"hidden_states_path": "a.b/c"}, "cmpl-x-1-00000000").name == "a.b/c-p1"
