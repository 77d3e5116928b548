"""The settings of docs/connector.md, read by vLLM's own parser and the connector. No engine is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hsx_dist
from hsx_dist.config import ExtractConfig
from hsx_dist.connector.connector_config import read_connector_config
from hsx_dist.connector.engine_checks import check_engine
from hsx_dist.jobs.capture import captured_rows
from hsx_dist.models.builtin import resolve_model
from hsx_dist.taps.capture_config import TRACE
from tests.harness.snippets import snippets

PAGE = Path(hsx_dist.__file__).parents[1] / "docs" / "connector.md"


def test_an_engine_with_taps_is_configured_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr("vllm.LLM", lambda model, **given: EngineArgs(model, **given).create_engine_config())
    names: dict[str, Any] = {"__name__": "page"}
    for block in (s for s in snippets(PAGE) if s.run_by == "tests/unit/test_connector_page.py"):
        text = block.text.replace("MODEL", resolve_model("builtin:smollm2-135m-instruct"))
        exec(compile(text, block.where, "exec"), names)
    engine, capture = names["llm"], names["capture"]
    assert check_engine(engine) is None, "expected an engine with taps"
    assert engine.additional_config == {"hsx_capture": {"capture": capture, "trace": TRACE}}
    assert read_connector_config(engine.kv_transfer_config.kv_connector_extra_config).output == "/data/states"
    config = ExtractConfig(output="o", model="m", capture=capture)
    rows = captured_rows(config, engine.model_config.hf_text_config, "bfloat16")
    assert {name: of.layers for name, of in rows.items()} == {"hidden_states": (0, 30), "q": (15,)}
