"""Faults of writers, with real processes: no proven sample is lost, and no sample is half visible or stored twice.

Real Ray actors receive pages and store parts in SeaweedFS. A relay is in between where a fault must happen at an exact
moment. No engine runs: it would only take time. Where SeaweedFS never gives the needed answer, a scripted server does.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
import ray
from ray.exceptions import RayError

from hsx_dist.errors import Denied, Unavailable
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.container import Part
from hsx_dist.format.manifest import Receipt
from hsx_dist.format.runs import load_manifest, take_attempt
from hsx_dist.jobs.kit.process import child
from hsx_dist.reading.verify import verify_run
from hsx_dist.store import Store, open_store
from hsx_dist.store.fsspec import FsspecStore
from hsx_dist.store.obstore import ObstoreStore
from hsx_dist.testing.samples import RandomSample, random_sample
from hsx_dist.writers.events import Counted, Lost, Unusable
from hsx_dist.writers.ray_pool import PoolWriterSpec, RaySender, start_writer
from hsx_dist.writers.sink import SinkOptions
from tests.harness.discard import Answer, discard_server
from tests.harness.processes import http_status
from tests.harness.runs import write_v1_run
from tests.harness.servers import seaweedfs
from tests.integration.relay import Strike, relay

pytestmark = pytest.mark.integration

SAMPLES = {f"k{i:02d}": random_sample(f"k{i:02d}", tokens=20 + 7 * i, seed=i) for i in range(24)}


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@dataclass
class Pool:
    """Writers and a sender, as in a driver and a replica, and the driver's way to get every row stored."""

    output: str
    options: dict
    attempt: int = 1
    retry_seconds: float = 60.0
    environment: dict = field(default_factory=dict)
    node: str = ""
    writers: list = field(default_factory=list)
    lost: list = field(default_factory=list)
    events: list = field(default_factory=list)

    def start(self, name: str = "w", **sink) -> Pool:
        made = {"part_bytes": 8000, "part_seconds": 60.0, "max_bytes": 1 << 20, **sink}
        options = SinkOptions(resolve_codec("split"), {}, name, self.attempt, **made)
        spec = PoolWriterSpec(
            self.output, self.options, "auto", self.retry_seconds, self.environment, options, credit_bytes=1 << 20
        )
        node = self.node or ray.get_runtime_context().get_node_id()
        actor = start_writer(spec, node_id=node, num_cpus=0, threads=2, name=f"{name}-{time.monotonic_ns()}")
        ray.get(actor.name.remote())
        self.writers.append((node, actor))
        self.sender = RaySender(self.writers, self.lost.append)
        return self

    def pid(self) -> int:
        return ray.get(self.writers[-1][1].__ray_call__.remote(lambda _: os.getpid()))

    def kill(self) -> None:
        os.kill(self.pid(), signal.SIGKILL)

    def send(self, samples: list[RandomSample]) -> None:
        for sample in samples:
            self.sender.send(list(sample.pages()), lambda _: None)

    def flush(self) -> None:
        """Flush like the driver: pages of replicas, then pages of writers, then the writers' events."""
        self.sender.flush()
        for _, actor in self.writers:
            with suppress(RayError):  # the pages that it held are sent again
                ray.get(actor.flush.remote())
                self.events += [e for e in ray.get(actor.events.remote(0.05)) if not isinstance(e, Counted)]

    def until_proven(self, store: Store, seconds: float = 180) -> int:
        """Send samples without receipt until all have one. Returns the number of turns. On busy cores Ray starts an
        actor late.
        """
        end = time.monotonic() + seconds
        for turn in count(1):
            missing = SAMPLES.keys() - load_manifest(store).samples.keys()
            self.send([SAMPLES[key] for key in sorted(missing)])
            self.flush()
            if SAMPLES.keys() == load_manifest(store).samples.keys():
                return turn
            assert time.monotonic() < end, f"expected all samples proven, got {self.lost[-3:]} after {turn} turns"
            time.sleep(0.2)
        raise AssertionError("unreachable")

    def close(self) -> None:
        for _, actor in self.writers:
            ray.kill(actor)


def new_run(store: Store) -> None:
    write_v1_run(store, {})
    assert take_attempt(store, {}) == 1


def check_whole(store: Store) -> None:
    """Every sample is stored once and equals the sent one. Every part equals its receipt."""
    manifest = load_manifest(store)
    assert manifest.samples.keys() == SAMPLES.keys()
    for key, record in manifest.samples.items():
        states = []
        for proof in record.segments:
            part = Part.open(store, proof.part, header_bytes=manifest.parts[proof.part].header_bytes)
            states.append(part.read(proof.slot))
        np.testing.assert_array_equal(np.concatenate(states), SAMPLES[key].states, err_msg=key)
    assert verify_run(store).ok


@pytest.fixture
def pool():
    made: list[Pool] = []

    def make(*args, **kwargs) -> Pool:
        made.append(Pool(*args, **kwargs))
        return made[-1]

    yield make
    for p in made:
        p.close()


@pytest.fixture(scope="module")
def weed(tmp_path_factory):
    """A real S3 server."""
    with seaweedfs(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def gate(weed, request):
    """A relay before the server, options that lead through it, and a url for this test."""
    with relay(weed.endpoint_url) as made:
        name = re.sub(r"\W+", "-", request.node.name)
        yield made, f"{weed.url}/{name}", {**weed.storage_options, "endpoint_url": made.endpoint_url}


@pytest.mark.parametrize(
    ("when", "verb", "prefix"),
    [
        ("halfway", "PUT", "data/"),  # during the upload
        ("after", "PUT", "data/"),  # the part is stored, its receipt not yet sent
        ("before", "GET", "attempts/0001.closed"),  # it is about to check whether its attempt is closed
        ("before", "PUT", "manifest/"),  # between part and receipt
        ("after", "PUT", "manifest/"),  # the receipt is stored, and the writer has not reported it
    ],
)
def test_a_writer_killed_while_it_stores_costs_no_sample(when, verb, prefix, pool, gate, weed):
    """SeaweedFS keeps complete objects and drops the rest."""
    between, url, options = gate
    store = open_store(url, weed.storage_options)
    new_run(store)
    p = pool(url, options).start()
    pid = p.pid()
    line = f"{verb} {url.removeprefix('s3:/')}/{prefix}".encode()
    between.strike = Strike(line, when, lambda: os.kill(pid, signal.SIGKILL), at=3)
    turns = p.until_proven(store)
    assert between.strike.struck.is_set()
    assert turns > 1 or (when, prefix) == ("after", "manifest/")
    check_whole(store)


def test_a_writer_killed_while_it_encodes_costs_no_sample(pool, gate, tmp_path):
    _, url, options = gate
    store = open_store(url, options)
    new_run(store)
    p = pool(url, options).start()
    begun = tmp_path / "begun"

    def halt(_, marker):
        """From now on the second layer of a page is never finished."""
        from hsx_dist.format.codecs import SplitCodec

        real, layers = SplitCodec.encode_into, []

        def encode_into(*args):
            layers.append(args)
            if len(layers) == 2:
                marker.touch()
                threading.Event().wait()
            return real(*args)

        SplitCodec.encode_into = encode_into

    ray.get(p.writers[0][1].__ray_call__.remote(halt, begun))
    half = random_sample("long", tokens=4000, hidden_size=256)
    pages = list(half.pages())
    p.sender.send(pages[: len(pages) // 2], lambda _: None)
    while not begun.exists():  # ends when the writer has the pages
        time.sleep(0.01)
    p.kill()
    p.sender.flush()
    assert [lost.segments[0].key for lost in p.lost] == ["long"]
    p.sender.send(pages[len(pages) // 2 :], lambda _: None)  # the rest of a sample that can no longer become whole
    p.until_proven(store)
    check_whole(store)
    assert "long" not in load_manifest(store).samples


def test_a_writer_that_cannot_open_its_store_says_so(pool):
    """For example a profile that exists on the driver's machine and not on the writer's."""
    p = pool("s3://b/run", {"profile": "only-elsewhere"}).start()
    p.send([SAMPLES["k00"]])
    p.flush()
    (told,) = p.events
    assert isinstance(told, Unusable)
    assert "only-elsewhere" in told.reason
    assert [lost.segments[0].key for lost in p.lost] == ["k00"]


def test_a_second_driver_fences_the_first_off(pool, gate):
    _, url, options = gate
    store = open_store(url, options)
    new_run(store)
    first = pool(url, options).start("first")
    keys = sorted(SAMPLES)
    first.send([SAMPLES[k] for k in keys[:8]])
    first.flush()
    proven = {r.id for r in load_manifest(store).receipts}
    assert proven
    assert take_attempt(store, {}) == 2
    second = pool(url, options, attempt=2).start("second")
    first.send([SAMPLES[k] for k in keys[8:]])
    first.flush()
    assert any(isinstance(e, Lost) and e.fenced for e in first.events)
    assert any("Fenced" in lost.reason for lost in first.lost) or first.events[-1].fenced
    assert {r.id for r in load_manifest(store).receipts if r.attempt == 1} == proven
    second.until_proven(store)
    check_whole(store)
    assert {r.id for r in load_manifest(store).receipts if r.attempt == 1} == proven


def test_a_server_that_says_503_for_long_is_waited_for(pool):
    """Ten minutes, scaled down to a number of refusals. The writer's retry time is scaled alike."""
    refusals = [60]

    def busy(request):
        if request.method == "PUT" and request.path.startswith("b/run/data/") and refusals[0] > 0:
            refusals[0] -= 1
            return Answer(503, b"<Error><Code>SlowDown</Code></Error>")
        return None

    with discard_server(busy) as server:
        store = open_store("s3://b/run", server.storage_options())
        new_run(store)
        p = pool("s3://b/run", server.storage_options()).start()
        assert p.until_proven(store) == 1
        assert refusals == [0]
        assert p.lost == []
        check_whole(store)


def test_a_server_that_stays_away_costs_parts_and_the_rest_goes_on(pool):
    """After the time limit the part fails with a reason. The driver sends it again when the server is back."""
    away = threading.Event()
    away.set()

    def refuse(request):
        if away.is_set() and request.method == "PUT" and request.path.startswith("b/run/data/"):
            return Answer(503, b"<Error><Code>SlowDown</Code></Error>")
        return None

    with discard_server(refuse) as server:
        store = open_store("s3://b/run", server.storage_options())
        new_run(store)
        p = pool("s3://b/run", server.storage_options(), retry_seconds=1.0).start()
        p.send(list(SAMPLES.values()))
        p.flush()
        told = {s.key for e in p.events for s in e.segments}
        assert all(isinstance(e, Lost) and not e.fatal and "SlowDown" in e.reason for e in p.events)
        assert told == SAMPLES.keys()
        assert load_manifest(store).samples == {}
        away.clear()
        p.until_proven(store)
        check_whole(store)


@pytest.mark.parametrize("made", [FsspecStore, ObstoreStore])
def test_a_server_that_answers_a_byte_a_second_is_given_up(made):
    with discard_server(lambda _: Answer(200, b"never whole", slowly=1.0)) as server:
        store = made("s3://b/run", server.storage_options(), patience=2)
        for call in (lambda: store.put("a", [b"1"]), lambda: store.head("a"), lambda: store.get_ranges("a", [(0, 9)])):
            with pytest.raises(Unavailable):
                call()


def test_credentials_that_stop_working_end_the_writer_and_say_so(pool, gate, weed):
    """From a moment on the server refuses every signature: it has another secret for that key."""
    between, url, options = gate
    store = open_store(url, weed.storage_options)
    new_run(store)
    p = pool(url, options).start()
    keys = sorted(SAMPLES)
    p.send([SAMPLES[k] for k in keys[:12]])
    p.flush()
    proven = load_manifest(store).samples.keys()
    assert proven == set(keys[:12])
    between.alter = lambda data: re.sub(rb"Signature=[0-9a-f]{8}", b"Signature=00000000", data)
    p.send([SAMPLES[k] for k in keys[12:]])
    p.flush()
    fatal = [e for e in p.events if isinstance(e, Lost) and e.fatal]
    assert fatal
    assert "SignatureDoesNotMatch" in fatal[0].reason
    assert {s.key for e in [*p.events, *p.lost] if isinstance(e, Lost) for s in e.segments} == set(keys[12:])
    with pytest.raises(Denied):
        open_store(url, options).put("x", [b"1"])
    assert load_manifest(store).samples.keys() == proven
    again = pool(url, weed.storage_options, attempt=take_attempt(store, {})).start("again")
    again.until_proven(store)
    check_whole(store)


def test_credentials_that_expire_are_looked_up_anew_in_the_writer(pool, tmp_path):
    """A profile's file is rewritten, as tools for temporary credentials do. The writer reads it again."""
    profile = tmp_path / "credentials"

    def write(key: str) -> None:
        text = f"[default]\naws_access_key_id={key}\naws_secret_access_key=s\naws_session_token=t\n"
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(profile)

    valid = ["FIRST"]

    def check(request):
        if f"Credential={valid[0]}/" in request.headers.get("authorization", ""):
            return None
        return Answer(400, b"<Error><Code>ExpiredToken</Code></Error>")

    write("FIRST")
    with discard_server(check) as server, pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
        options = {"endpoint_url": server.endpoint_url}
        store = open_store("s3://b/run", options)
        new_run(store)
        p = pool("s3://b/run", options, environment={"AWS_SHARED_CREDENTIALS_FILE": str(profile)}).start()
        keys = sorted(SAMPLES)
        p.send([SAMPLES[k] for k in keys[:12]])
        p.flush()
        valid[0] = "SECOND"
        write("SECOND")
        p.send([SAMPLES[k] for k in keys[12:]])
        p.flush()
        assert p.lost == []
        assert all(isinstance(e, Receipt) for e in p.events)
        check_whole(store)


def test_a_full_disk_ends_the_writer_and_leaves_nothing_behind(pool, tmp_path):
    """The kernel refuses to let the file grow. As with a full disk, the writer fails in the middle of a part."""
    store = open_store(str(tmp_path))
    new_run(store)
    p = pool(str(tmp_path), {}).start(part_bytes=400_000)

    def limit(_, size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    ray.get(p.writers[0][1].__ray_call__.remote(limit, 100_000))
    p.send(list(SAMPLES.values()))
    p.flush()
    (told,) = [e for e in p.events if isinstance(e, Lost)]
    assert told.fatal
    assert "Free some space" in told.reason
    assert load_manifest(store).samples == {}
    assert [f for f in tmp_path.rglob("*") if f.is_file() and f.parent.name == "data"] == []
    again = pool(str(tmp_path), {}, attempt=take_attempt(store, {})).start("again")
    again.until_proven(store)
    check_whole(store)


def test_an_s3_server_that_is_killed_and_started_again(pool, tmp_path):
    with seaweedfs(tmp_path / "weed") as server:
        store = open_store(f"{server.url}/run", server.storage_options)
        new_run(store)
        p = pool(f"{server.url}/run", server.storage_options).start()
        keys = sorted(SAMPLES)
        p.send([SAMPLES[k] for k in keys[:12]])
        p.flush()
        proven = load_manifest(store).samples.keys()
        server.process.kill()
        p.send([SAMPLES[k] for k in keys[12:]])
        argv = [str(a) for a in server.process.process.args]
        with child(argv, log=tmp_path / "again.log") as started:
            started.wait_until(lambda: http_status(f"{server.endpoint_url}/") is not None, 60)
            p.flush()
            p.until_proven(store)
            assert load_manifest(store).samples.keys() >= proven
            check_whole(store)
