"""The plugin that vLLM calls in each of its processes."""

from __future__ import annotations

import pytest

from hsx_dist.connector import plugin


def test_a_process_of_the_engine_redacts_its_log_like_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(plugin, "redact_like_parent", lambda: called.append("redact"))
    monkeypatch.setattr(plugin, "avoid_amx", lambda: None)
    monkeypatch.setattr(plugin.captures, "install", lambda: None)
    monkeypatch.setattr(plugin.model_loads, "install", lambda _: None)
    plugin.register()
    assert called == ["redact"]
