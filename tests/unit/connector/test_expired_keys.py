"""A key is used again for the same sample, whose object cannot be renewed."""

from __future__ import annotations

import asyncio
import time

import pytest

from hsx_dist.connector.connector_config import ConnectorConfig
from hsx_dist.errors import Denied, SampleFailed
from hsx_dist.reading.load import load_object
from hsx_dist.serving.refusals import Refusal
from hsx_dist.serving.sample_source import SampleSource
from hsx_dist.serving.states_file import Range
from hsx_dist.store import open_store
from hsx_dist.testing.faulty_stores import WrappedStore
from tests.unit.connector.small_server import SmallServer

NAME, MARKER = "k.safetensors", "k.error.json"
PROMPT = [1, 2, 3, 4, 5, 6]


class Unconditional(WrappedStore):
    """Ignores the condition of a put, as the probe finds out."""

    def put_version(self, name, buffers, version):  # noqa: ARG002
        self.put(name, buffers)
        return True


class RefusingProbe(WrappedStore):
    def put(self, name, buffers):
        if name.startswith(".hsx-probe-"):
            raise Denied("no probe")
        super().put(name, buffers)


class RefusingRenewal(WrappedStore):
    def put_version(self, name, buffers, version):
        if name == NAME:
            raise Denied("another user's object")
        return super().put_version(name, buffers, version)


KINDS = [Unconditional, RefusingProbe, RefusingRenewal]


def ask(tmp_path, store=None, *, ago: float = 0, computed=None, **settings):
    """Ask for the key, ``ago`` seconds in the past."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hsx_dist.connector.scheduler.time.time", lambda now=time.time: now() - ago)
        server = SmallServer(tmp_path, store, ttl_seconds=3600, **settings)
        server.ask(PROMPT, key="k", computed=computed)
        server.close()


def refusal(tmp_path, wait: float = 30) -> Refusal:
    source = SampleSource(ConnectorConfig(output=str(tmp_path)))
    with pytest.raises(Refusal) as refused:
        asyncio.run(source.find("k", Range(), wait=wait))
    return refused.value


@pytest.mark.parametrize("left_s", [-1, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_expires_and_cannot_be_renewed_fails_the_request(tmp_path, kind, left_s):
    store = open_store(str(tmp_path))
    ask(tmp_path, ago=3600 - left_s)
    content = store.get(NAME)
    ask(tmp_path, kind(store), markers=store)
    assert store.get(NAME) == content
    assert b"has expired and cannot be renewed. Delete it, or use another key" in store.get(MARKER)
    if left_s > 0:  # still readable
        assert load_object(store, NAME)["token_ids"].tolist() == PROMPT
        return
    with pytest.raises(SampleFailed, match="cannot be renewed"):
        load_object(store, NAME, wait=30)
    refused = refusal(tmp_path)
    assert refused.status == 424
    assert "cannot be renewed" in refused.body["error"]["message"]
    # A server that can renew the object makes it readable again.
    ask(tmp_path)
    assert [info.name for info in store.list()] == [NAME]
    assert load_object(store, NAME)["meta"]["expires"] > time.time() + 3000


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_cannot_be_renewed_satisfies_a_request_while_it_exists(tmp_path, kind):
    store = open_store(str(tmp_path))
    ask(tmp_path, ago=3600 - 120)
    content = store.get(NAME)
    ask(tmp_path, kind(store), markers=store)
    assert [info.name for info in store.list()] == [NAME]
    assert store.get(NAME) == content


def test_an_expired_object_without_a_later_request_has_no_failure(tmp_path):
    ask(tmp_path, ago=3601)
    assert refusal(tmp_path, wait=0).status == 410


def test_an_aborted_request_of_an_expired_object_ends_the_wait(tmp_path):
    ask(tmp_path, ago=3601)
    ask(tmp_path, computed=3)
    assert refusal(tmp_path).status == 424


def test_an_object_that_is_renewed_while_it_is_read_hides_its_failure_marker(tmp_path):
    class Renewing(WrappedStore):
        """Another server renews the object before the marker is read."""

        def _call(self, verb, name, call, nbytes):
            if name == MARKER and not renewed:
                marker = store.get(MARKER)
                renewed.append(ask(tmp_path))
                store.put(MARKER, [marker])
            return super()._call(verb, name, call, nbytes)

    store, renewed = open_store(str(tmp_path)), []
    ask(tmp_path, ago=3601)
    ask(tmp_path, computed=3)
    assert load_object(Renewing(store), NAME)["token_ids"].tolist() == PROMPT
    assert renewed
