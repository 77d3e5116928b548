"""No other connector loads tokens, in vLLM's own scheduler and ``MultiConnector``."""

from __future__ import annotations

import pytest

from hsx_dist.vllm_patches.loads import Loads
from tests.unit.connector.test_async_scheduler import LAYERS, OURS, check, config_of, run, state_of


def loading(late: bool):
    return {
        "kv_connector": "LoadingConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "tests.unit.connector.loading_connector",
        "kv_connector_extra_config": {"async": late},
    }


@pytest.fixture
def drive(tiny_model_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")

    def started(prompts, *connectors, **arguments):
        several = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": list(connectors)},
        }
        config = config_of(tiny_model_path, several)
        arguments = {"blocks": 64, "acceptance": None, **arguments}
        return run(config, prompts, requests.append, order="v1", depth=2, **arguments)

    requests: list = []
    yield started
    assert requests
    assert not any(request.skip_reading_prefix_cache for request in requests), "expected the request's own flag"


@pytest.mark.parametrize("late", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("first", [False, True])
def test_what_another_connector_offers_is_computed_here(drive, late, first):
    connectors = [OURS, loading(late)] if first else [loading(late), OURS]
    prompts = [list(range(300 * i, 300 * i + n)) for i, n in enumerate((60, 62, 61, 63))]
    rows, runner = drive(prompts, *connectors, blocks=14, include_output_tokens=True)
    assert runner.preempted  # so tokens were offered again
    for i, prompt in enumerate(prompts):
        check(rows, f"k{i}", prompt, 5)


def test_local_prefixes_are_still_shared(drive):
    rows, _ = drive([list(range(40))] * 2, loading(True), OURS)
    check(rows, "k0", list(range(40)))
    whose = [0] * 32 + [1] * 8  # the first two blocks were computed once
    for position, who in enumerate(whose):
        expected = [state_of(f"r{who}-", layer, position, position) for layer in LAYERS]
        assert rows["k1"][position][1].tolist() == expected


def test_where_tokens_are_loaded_all_the_same_nothing_is_stored(drive, monkeypatch, caplog):
    monkeypatch.setattr(Loads, "refuse", lambda *_: None)
    rows, runner = drive([list(range(40)), [7]], loading(False), OURS, acceptance=0.0)
    assert rows == {}
    reasons = [skip.reason for skip in runner.outlet.skipped]
    assert reasons == ["expected tokens computed by this engine, got 39 that another connector loaded"] * 2
    assert "Remove that connector from MultiConnector" in caplog.text
