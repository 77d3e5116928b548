"""No accepted setting deadlocks: the smallest rings, credits and parts, with requests longer than all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import ray

from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.container import Part
from hsx_dist.format.runs import load_manifest, take_attempt
from hsx_dist.page import Page, Segment
from hsx_dist.store import open_store
from hsx_dist.transport.local_end import LocalEnd
from hsx_dist.writers.credits import Credits
from hsx_dist.writers.ray_pool import PoolWriterSpec, RaySender, start_writer
from hsx_dist.writers.sink import SinkOptions
from tests.harness.runs import write_v1_run

pytestmark = pytest.mark.integration

LAYERS, HIDDEN, CHUNK = (0, 1), 64, 32
TOKEN = len(LAYERS) * HIDDEN * 2
PAGE = CHUNK * TOKEN
#: (ring, segment, part, credit, sink) in pages.
CORNERS = [
    (2, 1, 1, 2, 3),  # the smallest values that the settings' checks accept
    (4, 2, 64, 2, 2),  # a ring of two segments; a part larger than all credits, which never fills
    (4, 2, 1, 64, 2),  # unlimited credits, with a sink that always waits for memory
    (8, 4, 4, 2, 1),  # the sink holds less than a page
    (3, 1, 64, 2, 64),  # nothing is sealed before the end
]


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False)
    yield
    ray.shutdown()


def states(key: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(key).integers(0, 1 << 16, (len(LAYERS), tokens, HIDDEN)).astype(np.uint16)


def page_refs(outlet: LocalEnd, key: int, tokens: int, segment_tokens: int):
    """Copies a sample into the ring page by page and waits while the ring is full, like the gather."""
    data = states(key, tokens)
    ids = np.arange(tokens, dtype=np.int64)
    for index, start in enumerate(range(0, tokens, segment_tokens)):
        segment = Segment(f"k{key}", index, start, min(start + segment_tokens, tokens), tokens)
        for at in range(segment.start, segment.stop, CHUNK):
            stop = min(at + CHUNK, segment.stop)
            nbytes = (stop - at) * TOKEN
            while (offset := outlet.ring.allocate(nbytes)) is None:
                outlet.ring.wait(1.0)
            shape = (len(LAYERS), stop - at, HIDDEN)
            outlet.memory[offset : offset + nbytes] = np.ascontiguousarray(data[:, at:stop]).reshape(-1).view(np.uint8)
            yield Page(segment, at, stop, CHUNK, LAYERS, "bfloat16", shape, "LTH", ids[at:stop], offset=offset)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("corner", CORNERS, ids=lambda c: "-".join(map(str, c)))
def test_requests_longer_than_everything_go_through(corner, tmp_path):
    ring, segment, part, credit, sink = corner
    store = open_store(str(tmp_path))
    write_v1_run(store, {})
    take_attempt(store, {})
    options = SinkOptions(
        resolve_codec("split"), {}, "w", 1, part_bytes=part * PAGE, max_bytes=sink * PAGE, part_seconds=3600
    )
    spec = PoolWriterSpec(str(tmp_path), {}, "auto", 5.0, {}, options, credit * PAGE)
    node = ray.get_runtime_context().get_node_id()
    actor = start_writer(spec, node_id=node, num_cpus=0, threads=2, name=f"corner-{'-'.join(map(str, corner))}")
    senders = [RaySender([(node, actor)], lambda lost: pytest.fail(str(lost))) for _ in range(2)]
    outlets = [LocalEnd(sender, ring * PAGE) for sender in senders]
    lengths = {0: 100 * CHUNK + 5, 1: 1, 2: 77 * CHUNK, 3: 3}  # the longest is a hundred times the ring
    for first in (0, 1):  # two replicas in turns, so that each waits for the other's credits
        pairs = [page_refs(outlets[i], 2 * first + i, lengths[2 * first + i], segment * CHUNK) for i in (0, 1)]
        for refs in itertools.zip_longest(*pairs):
            for outlet, ref in zip(outlets, refs, strict=True):
                if ref is not None:
                    outlet.submit((ref, None))
    for outlet in outlets:
        outlet.close()
    ray.get(actor.flush.remote())
    manifest = load_manifest(store)
    assert manifest.samples.keys() == {f"k{k}" for k in lengths}
    for key, tokens in lengths.items():
        found = [
            Part.open(store, proof.part, header_bytes=manifest.parts[proof.part].header_bytes).read(proof.slot)
            for proof in manifest.samples[f"k{key}"].segments
        ]
        np.testing.assert_array_equal(np.concatenate(found), states(key, tokens).transpose(1, 0, 2))
    ray.kill(actor)


def test_shares_of_a_writers_credit():
    now = [0.0]
    credit = Credits(100, lambda: now[0])
    assert credit.share("a") == 100
    assert credit.share("b") == 0  # "a" may have sent up to its whole share until it reports again
    assert credit.share("a") == 50
    assert credit.share("b") == 50
    assert credit.share("c") == 0
    assert [credit.share(s) for s in "abc"] == [33, 33, 33]
    now[0] = Credits.LATELY
    assert credit.share("b") == 100
