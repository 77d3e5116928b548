"""How long actors are asked for. Real ones are out of reach in tests/integration/test_nodes_of_a_run.py."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from hsx_dist.jobs import reach


class Actor:
    """Fails its first calls with ``answers``."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = 0
        self.__ray_ready__ = self

    def remote(self):
        self.calls += 1
        return (self, self.calls)


def get(ref):
    actor, call = ref
    if call <= len(actor.answers):
        raise actor.answers[call - 1]


@pytest.fixture
def now(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(reach.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(reach.ray, "get", get)
    monkeypatch.setattr(reach.ray, "wait", lambda refs, **_: (refs[:1], refs[1:]))
    return clock


def out_of_reach():
    return ActorUnavailableError("socket closed", None)


def ask(actor):
    inquiry = reach.Inquiry()
    inquiry.begin(7, actor)
    return inquiry


def test_an_actor_is_asked_again_while_ray_does_not_know(now):
    died = ActorDiedError()
    for last in (died, None):
        inquiry = ask(Actor(out_of_reach(), out_of_reach(), *([last] if last else [])))
        for _ in range(2):
            assert inquiry.heard(inquiry.refs[0]) is None
            assert 7 in inquiry
        assert inquiry.heard(inquiry.refs[0]) == (7, last)
        assert 7 not in inquiry
        assert inquiry.refs == []


def test_an_actor_that_stays_out_of_reach_is_given_up(now):
    inquiry = ask(Actor(*[out_of_reach()] * 9))
    assert inquiry.heard(inquiry.refs[0]) is None
    now[0] = reach.KNOWN_AFTER_S
    name, error = inquiry.heard(inquiry.refs[0])
    assert name == 7
    assert isinstance(error, ActorUnavailableError)
    assert inquiry.refs == []


def test_nobody_is_told_of_an_actor_that_was_forgotten(now):
    inquiry = ask(Actor())
    [ref] = inquiry.refs
    inquiry.forget(7)
    assert inquiry.heard(ref) is None


def test_waiting_ends_when_all_are_known(now):
    actors = [Actor(), Actor(out_of_reach(), ActorDiedError()), Actor(out_of_reach())]
    reach.wait_until_known(actors)
    assert [actor.calls for actor in actors] == [1, 2, 2]
