"""Pages that are sent in one call to a writer actor: the cost of one bad page. The actors are plain objects here."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from hsx_dist.format.names import attempt_name
from hsx_dist.format.runs import load_manifest, take_attempt
from hsx_dist.format.same_run import attempt_token
from hsx_dist.page import Page
from hsx_dist.store.local import LocalStore
from hsx_dist.writers import ray_pool
from hsx_dist.writers.events import Lost, Unusable
from hsx_dist.writers.ray_pool import Answer, PoolWriterSpec, RaySender, WriterActor
from tests.unit.writers.small_samples import options, pages


class Actor:
    """Answers at once. Pages of the key ``unsendable`` cannot be sent to it; it cannot read those of ``unreadable``."""

    def __init__(self, writer: WriterActor):
        self._writer = writer
        self.add_pages = self

    def remote(self, sender: str, batch: list[Page]) -> Any:
        keys = {page.segment.key for page in batch}
        if "unsendable" in keys:
            raise TypeError("cannot be pickled")
        if "unreadable" in keys:
            return RayTaskError("add_pages", "", ValueError("cannot be read"))
        return self._writer.add_pages(sender, batch)


def get(ref: Any) -> Answer:
    if isinstance(ref, Exception):
        raise ref
    assert isinstance(ref, Answer)
    return ref


class Ref:
    """The result of ``remote``, hashable."""


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch):
    monkeypatch.setattr(ray_pool, "configure_logging", lambda *_, **__: None)
    monkeypatch.setattr(ray_pool, "RayExport", lambda *_: None)


@pytest.fixture
def writer(store):
    return WriterActor(PoolWriterSpec(store.url, {}, "auto", 1.0, {}, options(), token=attempt_token(store, 1)))


def page_of(key: str) -> Page:
    (page,) = pages(key, 4)
    return page


def test_a_page_that_a_writer_refuses_costs_its_own_segment(writer, store):
    bad = replace(page_of("bad"), shape=(1, 4, 7))
    answer = writer.add_pages("s", [page_of("a"), bad, page_of("b")])
    assert set(answer.refused) == {1}
    writer._sink.close()
    assert set(load_manifest(store).samples) == {"a", "b"}


def test_a_page_that_cannot_be_sent_or_read_costs_its_own_segment(writer, store, monkeypatch):
    answers: dict[Ref, Any] = {}

    class Hashable(Actor):
        def remote(self, sender: str, batch: list[Page]) -> Ref:
            ref = Ref()
            answers[ref] = super().remote(sender, batch)
            return ref

    monkeypatch.setattr(ray_pool.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray_pool.ray, "get", lambda ref: get(answers[ref]))
    lost: list[Lost] = []
    released: list[Page] = []
    sender = RaySender([("here", Hashable(writer))], lost.append, node="here")
    for keys in (("a", "unsendable", "b"), ("unreadable",), ("c",)):
        sender.send([page_of(key) for key in keys], released.append)
    sender.flush()
    assert len(released) == 5
    assert [s.key for event in lost for s in event.segments] == ["unsendable", "unreadable"]
    writer._sink.close()
    assert set(load_manifest(store).samples) == {"a", "b", "c"}
    assert not sender._route


def test_of_a_segment_of_which_a_page_could_not_be_sent_nothing_more_is(writer, monkeypatch):
    sent: list[int] = []

    class Once(Actor):
        def remote(self, _: str, batch: list[Page]) -> Ref:
            if len(batch) > 1 or batch[0].start == 0:
                raise TypeError("cannot be pickled")
            sent.append(batch[0].start)
            return Ref()

    monkeypatch.setattr(ray_pool.ray, "wait", lambda refs, **_: ([], refs))
    lost: list[Lost] = []
    sender = RaySender([("here", Once(writer))], lost.append, node="here")
    first, *rest = pages("long", 64)
    sender.send([first], lambda _: None)
    sender.send(rest, lambda _: None)
    assert sent == []
    assert [s.key for event in lost for s in event.segments] == ["long"]


@pytest.mark.parametrize("kind", ["empty disk", "old copy", "copy with another attempt 1", "removed run", "no folder"])
def test_a_writer_stores_nothing_in_a_folder_that_is_not_the_drivers(store, tmp_path, kind):
    """The folder's path is the driver's, and the disk is another one."""
    token, here = attempt_token(store, 1), tmp_path / "disk of another node"
    if kind == "no folder":
        here.write_text("a file")
    elif kind == "removed run":
        here, token = tmp_path, ""
        store.delete(attempt_name(1))
    elif kind != "empty disk":
        here.mkdir()
        (here / "run.json").write_bytes(store.get("run.json"))
        if kind == "copy with another attempt 1":
            take_attempt(LocalStore(here), {})
    before = files(here)
    made = WriterActor(PoolWriterSpec(str(here), {}, "auto", 1.0, {}, options(), token=token))
    [event] = [e for e in made.events(0.0) if isinstance(e, Unusable)]
    assert str(here) in event.reason
    assert event.reason.startswith(f"node {os.uname().nodename}: ")
    answer = made.add_pages("s", [page_of("a")])
    assert answer.refused == {0: event.reason}
    assert files(here) == before


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
