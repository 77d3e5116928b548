"""Which actors are polled, and how often. tests/integration/test_nodes_of_a_run.py has real unreachable actors."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from hsx_dist.fleet import actor_liveness

NEVER = ["no answer comes"]


class Call:
    """Raises ``answers`` in its first calls, then succeeds, or never answers."""

    def __init__(self, answers):
        self.answers = list(answers)
        self.calls = 0

    def remote(self):
        self.calls += 1
        return (self, self.calls)


class Actor:
    def __init__(self, *answers):
        self.__ray_ready__ = Call(answers)
        self.flush = Call(answers)


def get(ref):
    call, number = ref
    if number <= len(call.answers):
        raise call.answers[number - 1]


@pytest.fixture
def now(monkeypatch):
    clock = [0.0]

    def wait(refs, num_returns, timeout):
        assert num_returns == len(refs)
        clock[0] += 2.0
        there = [ref for ref in refs if ref[0].answers != NEVER]
        assert timeout is not None or len(there) == len(refs), "expected a time limit"
        return there, [ref for ref in refs if ref not in there]

    monkeypatch.setattr(actor_liveness.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(actor_liveness.ray, "get", get)
    monkeypatch.setattr(actor_liveness.ray, "wait", wait)
    return clock


def out_of_reach():
    return ActorUnavailableError("socket closed", None)


def ask(actor):
    inquiry = actor_liveness.Inquiry()
    inquiry.begin(7, actor)
    return inquiry


def test_an_actor_is_asked_again_while_ray_does_not_know(now):
    for last in (ActorDiedError(), None):
        inquiry = ask(Actor(out_of_reach(), out_of_reach(), *([last] if last else [])))
        for _ in range(2):
            assert inquiry.heard(inquiry.refs[0]) is None
            assert 7 in inquiry
        assert inquiry.heard(inquiry.refs[0]) == (7, last)
        assert 7 not in inquiry
        assert inquiry.refs == []


def test_an_overdue_actor_is_listed_once_and_its_late_answer_is_ignored(now):
    inquiry = ask(Actor())
    assert inquiry.overdue() == []
    now[0] = actor_liveness.KNOWN_AFTER_S
    assert inquiry.overdue() == [7]
    assert inquiry.overdue() == []
    assert inquiry.heard(inquiry.refs[0]) is None


def test_a_forgotten_actor_is_not_reported(now):
    inquiry = ask(Actor())
    [ref] = inquiry.refs
    inquiry.forget(7)
    assert inquiry.heard(ref) is None


def test_unreachable_actors_are_flushed_until_ray_reports_them_alive_or_dead(now):
    alive, back, dead = Actor(), Actor(out_of_reach(), out_of_reach()), Actor(out_of_reach(), ActorDiedError())
    assert actor_liveness.flush_until_known([alive, back, dead]) == {dead: dead.flush.answers[1]}
    assert [actor.flush.calls for actor in (alive, back, dead)] == [1, 3, 2]


def test_a_flush_times_out_once_for_an_actor_that_never_answers(now):
    gone = Actor(*[out_of_reach()] * 1000)
    assert isinstance(actor_liveness.flush_until_known([gone])[gone], ActorUnavailableError)
    assert now[0] == pytest.approx(actor_liveness.KNOWN_AFTER_S, abs=2.0)
    calls = gone.flush.calls
    assert isinstance(actor_liveness.flush_until_known([gone], {gone})[gone], ActorUnavailableError)
    assert gone.flush.calls == calls + 1


def test_a_hurried_flush_waits_neither_for_answers_nor_for_the_state_of_actors(now):
    silent, gone, dead, alive = Actor(*NEVER), Actor(*[out_of_reach()] * 1000), Actor(ActorDiedError()), Actor()
    hurry = iter([False, False, False, True, True])
    failed = actor_liveness.flush_until_known([silent, gone, dead, alive], (), lambda: next(hurry))
    assert failed == {dead: dead.flush.answers[0]}
    assert [actor.flush.calls for actor in (silent, gone, dead, alive)] == [1, 1, 1, 1]
    assert now[0] == 8.0  # four polls

    hurry = iter([False, False, True])
    assert actor_liveness.flush_until_known([gone, alive], (), lambda: next(hurry)) == {}
    assert gone.flush.calls == 1 + 3


def test_wait_for_all_checks_arrived_answers_once(now):
    assert actor_liveness.wait_for_all([], None, lambda: False) == ([], [])
    refs = [(Call([]), 1), (Call([]), 1)]
    assert actor_liveness.wait_for_all(refs, None, lambda: False) == (refs, [])
    assert now[0] == 2.0
