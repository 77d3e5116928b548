"""How a sender distributes pages over writers, without Ray: no page is sent."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from hsx_dist.page import Page, Segment
from hsx_dist.writers.base import CALL_BYTES
from hsx_dist.writers.credits import Credits
from hsx_dist.writers.ray_pool import RaySender


def pages(count: int, nbytes: int) -> list[Page]:
    tokens = nbytes // 4
    data = np.zeros((1, tokens, 1), np.uint32)
    ids = np.zeros(tokens, np.int64)
    return [
        Page(Segment(f"k{i}", 0, 0, tokens, tokens), 0, tokens, tokens, (0,), "float32", data.shape, "LTH", ids, data)
        for i in range(count)
    ]


def calls(count: int, nbytes: int, **segment: Any) -> list[int]:
    """Bytes of states for each of four writers with room for all. ``segment``: changes of each page's segment."""
    sender = RaySender([("here", f"writer {i}") for i in range(4)], print, node="here")
    for writer in sender._writers:
        writer.credit, writer.asked, writer.answered = 1 << 30, True, time.monotonic()
    sent = [replace(page, segment=replace(page.segment, **segment)) for page in pages(count, nbytes)]
    return [sum(p.nbytes for p in batch) for _, batch in sender._routed(sent)]


def test_small_pages_fill_a_call_before_the_next_writer_gets_one():
    assert calls(8, CALL_BYTES // 4) == [CALL_BYTES] * 2


def test_a_local_writer_without_an_answer_is_preferred_to_remote_writers():
    sender = RaySender([("here", "mine"), *(("there", f"writer {i}") for i in range(3))], print, node="here")
    routed = sender._routed(pages(8, CALL_BYTES // 4))
    assert [(writer.actor, len(batch)) for writer, batch in routed] == [("mine", 8)]


def test_old_credit_is_ignored(monkeypatch):
    sender = RaySender([("here", "mine")], print, node="here")
    (writer,) = sender._writers
    writer.credit, writer.asked, writer.answered = 1 << 30, True, time.monotonic()
    assert sender._limit(writer) == 1 << 30
    writer.answered -= Credits.LATELY
    assert sender._limit(writer) == RaySender.FIRST_CALL
    writer.credit = 1000
    assert sender._limit(writer) == 1000


def test_large_pages_are_spread():
    assert calls(8, CALL_BYTES) == [2 * CALL_BYTES] * 4


def test_metadata_and_attached_arrays_count_as_sent():
    assert calls(8, 4096) == [8 * 4096]
    assert calls(8, 4096, metadata="x" * CALL_BYTES) == [2 * 4096] * 4
    assert calls(8, 4096, attached={"label": np.zeros(CALL_BYTES, np.uint8)}) == [2 * 4096] * 4


def test_pages_for_other_nodes_stay_within_their_bound_in_the_object_store():
    """Two writers on other nodes have room, the local one is full. The two together get no more than the bound."""
    sender = RaySender(
        [("here", "mine"), ("there", "a"), ("elsewhere", "b")], print, node="here", abroad_bytes=2 * CALL_BYTES
    )
    for writer in sender._writers:
        credit = CALL_BYTES if writer.node == "here" else 1 << 30
        writer.credit, writer.asked, writer.answered = credit, True, time.monotonic()
    routed = {w.actor: sum(p.nbytes for p in batch) for w, batch in sender._routed(pages(16, CALL_BYTES // 4))}
    assert routed["a"] + routed["b"] == 2 * CALL_BYTES
    assert routed["mine"] == 2 * CALL_BYTES  # the rest waits for the local writer


def test_a_page_larger_than_the_bound_goes_alone():
    sender = RaySender([("there", "a"), ("elsewhere", "b")], print, node="here", abroad_bytes=CALL_BYTES)
    for writer in sender._writers:
        writer.credit, writer.asked, writer.answered = 1 << 30, True, time.monotonic()
    (page,) = pages(1, 2 * CALL_BYTES)
    assert [len(batch) for _, batch in sender._routed([page])] == [1]


def test_a_column_stays_at_its_writer():
    """A segment with pages at two writers is never whole."""
    sender = RaySender([("here", "a"), ("here", "b")], print, node="here")
    for writer in sender._writers:
        writer.credit, writer.asked, writer.answered = 1 << 30, True, time.monotonic()
    (page,) = pages(1, 2 * CALL_BYTES)
    n = page.num_tokens
    columns = [replace(page.segment, column=i, columns=2, source="s") for i in range(2)]
    half = {"chunk_tokens": n // 2, "data": page.data[:, : n // 2], "shape": (1, n // 2, 1)}
    first = replace(page, segment=columns[0], stop=n // 2, **half)
    rest = replace(page, segment=columns[0], start=n // 2, **half)
    at = {}
    for batch in ([first, replace(page, segment=columns[1])], [rest]):
        for writer, its in sender._routed(batch):
            at.update({(p.segment.column, p.start): writer.actor for p in its})
    assert len(at) == 3
    assert at[0, 0] == at[0, n // 2] != at[1, 0]
    assert sender._route == {}
