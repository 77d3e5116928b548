"""Blocks are copied before a reset, with simulated engine cores and vLLM's real ``EngineCore`` class."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore

from hsx_dist.vllm_patches import resets


class Scheduler:
    """A scheduler whose connector holds ``held`` requests."""

    def __init__(self, held: int):
        self.connector = SimpleNamespace(held=held)
        self.pause_state = PauseState.PAUSED_NEW

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state


class Core:
    """Each step copies one request. Steps in flight before the reset return their outputs first."""

    def __init__(self, held: int, in_flight: int = 0):
        self.scheduler = Scheduler(held)
        self.in_flight = [f"r{i}" for i in range(in_flight)]
        self.states: list[PauseState] = []
        self.step_fn = self.step

    def step(self):
        self.states.append(self.scheduler.pause_state)
        self.scheduler.connector.held -= 1
        if self.in_flight:
            return {0: EngineCoreOutputs(outputs=[EngineCoreOutput(self.in_flight.pop(0), [1])])}, True
        return {0: EngineCoreOutputs()}, False

    def post_step(self, executed: bool) -> None:
        pass


def held(connector) -> int:
    return connector.held


def test_no_token_is_scheduled_while_states_are_copied():
    core = Core(held=3)
    assert resets.copy_held(core, held, 60) == 0
    assert core.states == [PauseState.PAUSED_ALL] * 3
    assert core.scheduler.pause_state == PauseState.PAUSED_NEW
    assert core.step_fn == core.step


def test_outputs_of_steps_in_flight_reach_the_client_in_order():
    core = Core(held=3, in_flight=2)
    resets.copy_held(core, held, 60)
    ids = []
    for _ in range(3):
        outputs, executed = core.step_fn()
        assert not executed
        ids += [o.request_id for o in outputs[0].outputs]
    assert ids == ["r0", "r1"]
    assert core.step_fn == core.step  # later steps cost nothing


def test_an_engine_in_a_child_process_sends_its_outputs_itself():
    core = Core(held=2, in_flight=2)
    sent = []
    core._process_engine_step = lambda: sent.append(core.step())
    assert resets.copy_held(core, held, 60) == 0
    assert len(sent) == 2
    assert core.step_fn == core.step


def test_a_store_that_hangs_delays_a_reset_for_a_limited_time():
    core = Core(held=1)
    core._process_engine_step = lambda: None
    assert resets.copy_held(core, held, 0.05) == 1
    assert core.scheduler.pause_state == PauseState.PAUSED_NEW


def test_an_engine_that_fails_meanwhile_is_not_left_paused():
    core = Core(held=1)

    def fail():
        raise RuntimeError("device lost")

    core._process_engine_step = fail
    with pytest.raises(RuntimeError, match="device lost"):
        resets.copy_held(core, held, 60)
    assert core.scheduler.pause_state == PauseState.PAUSED_NEW


@pytest.fixture
def engine_core(monkeypatch):
    """vLLM's class, with a reset that records the held requests."""
    noted = []

    def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        noted.append((self.scheduler.connector.held, reset_running_requests, reset_connector))
        return True

    monkeypatch.setattr(EngineCore, "reset_prefix_cache", reset_prefix_cache)
    return noted


def test_vllms_engine_copies_before_it_resets(engine_core):
    for _ in range(2):
        resets.install(held)
    assert EngineCore.reset_prefix_cache.__wrapped__.__name__ == "reset_prefix_cache"
    assert not hasattr(EngineCore.reset_prefix_cache.__wrapped__, "hsx")  # patched once
    assert EngineCore.reset_prefix_cache(Core(held=2), True, reset_connector=True)
    assert engine_core == [(0, True, True)]


def test_a_vllm_that_resets_in_another_way_is_left_alone_with_a_warning(monkeypatch, caplog):
    monkeypatch.delattr(EngineCore, "reset_prefix_cache")
    resets.install(held)
    assert not hasattr(EngineCore, "reset_prefix_cache")
    assert "Flush the engine before a reset" in caplog.text
