"""The claims of a case, and their limits. tests/integration/test_gpu_kit.py runs its engines."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch

from hsx_dist.jobs.check import LayerError
from hsx_dist.jobs.kit import engine_states
from hsx_dist.jobs.kit.engine_states import CAPTURED, LAYERS, Case, cannot, cases, greedy_slack, judge


def errors(norm: float) -> list[LayerError]:
    return [LayerError(layer, layer == LAYERS, norm, norm) for layer in CAPTURED]


@pytest.mark.parametrize(
    ("right", "wrong", "slack", "state"),
    [
        (errors(0.01), errors(1.0), 0.1, "passed"),
        (errors(0.2), errors(1.0), 0.1, "failed"),
        (errors(math.nan), errors(1.0), 0.1, "failed"),
        (errors(0.01)[:-1], errors(1.0), 0.1, "failed"),  # a layer is missing
        (errors(0.01), errors(0.01), 0.1, "failed"),  # shifted rows would pass, too
        (errors(0.01), errors(1.0), 3.0, "failed"),  # a repeated token
        (errors(0.01), errors(1.0), math.nan, "failed"),
    ],
)
def test_only_right_states_of_all_layers_and_right_tokens_pass(right, wrong, slack, state):
    assert judge(right, wrong, slack)[0] == state


def test_a_token_that_is_repeated_is_far_from_the_models(tmp_path):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        engine_states.make_model(tmp_path / "m", 1), dtype=torch.float32
    ).eval()
    prompt = list(range(10, 40))
    with torch.inference_mode():
        answer = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert greedy_slack(reference, (prompt, answer)) == 0
        repeated = [*answer[:5], answer[4], *answer[5:-1]]
        assert repeated != answer
        assert greedy_slack(reference, (prompt, repeated)) > 2 * engine_states.GREEDY_SLACK


def test_every_engine_setting_is_planned_with_a_unique_name():
    for gpus in (0, 1, 2, 8):
        planned = cases(gpus)
        assert len({c.name for c in planned}) == len(planned)
        for v2 in (False, True):
            mine = [c for c in planned if c.v2 is v2]
            assert {
                (c.compiled, c.asynchronous)
                for c in mine
                if replace(c, compiled=False, asynchronous=False) == Case(v2=v2)
            } == {(a, b) for a in (False, True) for b in (False, True)}
            assert any(c.ranks == max(gpus, 2) for c in mine)
            assert any(c.preempt for c in mine)
        assert any(c.direct for c in planned)


def test_cases_that_the_machine_does_not_support_are_skipped():
    assert cannot(Case(), 0, 2) == ""
    assert "CPU" in cannot(Case(asynchronous=True), 0, 2)
    assert "GPU" in cannot(Case(v2=True), 0, 2)
    assert "core" in cannot(Case(ranks=2), 0, 1)
    assert "needs 2 GPUs" in cannot(Case(ranks=2), 1, 64)
    assert not any(cannot(c, 2, 8) for c in cases(2))


def test_a_case_that_ran_otherwise_is_not_run(monkeypatch):
    claims = []
    monkeypatch.setattr(engine_states, "claim", lambda *a: claims.append(a))
    monkeypatch.setattr(engine_states, "generate", lambda *_: ([], []))

    class Engine:
        @property
        def llm_engine(self):
            return self

        engine_core = llm_engine

        def shutdown(self):
            claims.append("shut down")

    monkeypatch.setattr(engine_states, "start", lambda *_: Engine())
    wanted = Case(v2=True, asynchronous=True)
    monkeypatch.setattr(engine_states, "facts", lambda _: Case(v2=True))
    engine_states.run("model", wanted)
    shut, (state, message) = claims
    assert (shut, state) == ("shut down", "not run")
    assert "differs in asynchronous" in message


def test_the_checks_say_how_their_engines_run(tmp_path):
    planned = engine_states.checks(tmp_path, 0, [Case(), Case(v2=True), Case(ranks=2)])
    assert [c.env["VLLM_USE_V2_MODEL_RUNNER"] for c in planned] == ["0", "1", "0"]
    assert [bool(c.cannot) for c in planned][:2] == [False, True]
    assert asdict(Case(ranks=2))["ranks"] == 2
    assert "|" in planned[2].env.get("VLLM_CPU_OMP_THREADS_BIND", "|")
