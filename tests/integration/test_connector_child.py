"""The connector in an engine of child processes: how ``flush`` reaches it, and its memory while the store hangs."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hsx_dist.errors import EngineError
from hsx_dist.jobs.kit.process import child
from tests.harness.http_server import Answers
from tests.harness.processes import free_ports, http_status
from tests.integration.test_connector_bare import engine_arguments


def test_flush_without_the_extension_says_how_to_get_it():
    class LLM:
        class llm_engine:  # noqa: N801
            engine_core = object()

        def collective_rpc(self, method):
            raise AttributeError(method)

    from hsx_dist.connector.flush import flush

    with pytest.raises(EngineError, match="worker_extension_cls"):
        flush(LLM())


class HangingStore(ThreadingHTTPServer):
    """Accepts a connection and a request, and answers only after ``go`` is set: an S3 that hangs.

    It answers for the server's probe of conditional puts, with which the server starts.
    """

    def __init__(self):
        self.go = threading.Event()
        self.puts = 0
        self.probes: dict[str, bytes] = {}
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(Answers):
    def do_PUT(self) -> None:
        assert isinstance(self.server, HangingStore)
        body = self.received()
        if "/probe-" in self.path:
            self._probe(body)
            return
        self.server.go.wait()
        self.server.puts += 1
        self.answer_object(200)

    do_DELETE = do_PUT

    def do_GET(self) -> None:
        assert isinstance(self.server, HangingStore)
        body = self.server.probes[urlsplit(self.path).path]
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = body[first : last + 1]
        self.answer(206, part, ETag='"1"', Content_Range=f"bytes {first}-{first + len(part) - 1}/{len(body)}")

    def _probe(self, body: bytes) -> None:
        assert isinstance(self.server, HangingStore)
        name = urlsplit(self.path).path
        if self.command == "DELETE":
            self.server.probes.pop(name, None)
            self.answer_object(204)
        elif name in self.server.probes:
            self.answer_object(412, b"<Error><Code>PreconditionFailed</Code><Message>it exists</Message></Error>")
        else:
            self.server.probes[name] = body
            self.answer_object(200)


IN_FLIGHT = 160 << 20
#: Wide states of few tokens: the attention over the prompts takes most of the test's time.
REQUESTS, TOKENS, HIDDEN = 200, 500, 256
#: Bytes of all states: three layers, float32.
STATES = REQUESTS * TOKENS * 3 * HIDDEN * 4
#: Growth of the processes' memory. ``IN_FLIGHT`` is the limit of the pages, and the upload client copies some of them.
#: The limit is 240 MiB: an engine without backpressure keeps ``STATES``, 293 MiB, and exceeds it.
LIMIT = IN_FLIGHT * 3 // 2
assert LIMIT < STATES


def test_a_store_that_hangs_holds_the_engine_and_nothing_grows(tmp_path):
    """200 requests of 500 tokens, 293 MiB of states, with 160 MiB of host memory. The server stays healthy."""
    from hsx_dist.models.tiny import tiny_llama

    # The smallest number of layers with three to capture.
    model = tiny_llama(tmp_path / "model", layers=2, hidden=HIDDEN, kv_heads=2, max_positions=768)
    speculative = engine_arguments(model, tmp_path)["speculative_config"]
    speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    store = HangingStore()
    (port,) = free_ports(1)
    arguments = {
        "--model": str(model),
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--block-size": "128",
        "--max-num-batched-tokens": "4096",
        "--num-gpu-blocks-override": "64",
        "--no-enable-prefix-caching": None,
        "--enforce-eager": None,
        "--speculative-config": json.dumps(speculative),
        "--kv-transfer-config": json.dumps(
            {
                "kv_connector": "HiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "shared_storage_path": "s3://bucket/states",
                    "hsx": {
                        "in_flight_bytes": IN_FLIGHT,
                        "segment_bytes": 4 << 20,
                        "page_bytes": 1 << 20,
                        "storage_options": {
                            "key": "${env:STORE_KEY}",
                            "secret": "${env:STORE_SECRET}",
                            "client_kwargs": {"endpoint_url": store.url, "region_name": "us-east-1"},
                            "config_kwargs": {"read_timeout": 600, "retries": {"max_attempts": 0}},
                        },
                    },
                },
            }
        ),
    }
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += [word for pair in arguments.items() for word in pair if word is not None]
    url = f"http://127.0.0.1:{port}"
    with child(
        argv,
        log=tmp_path / "log",
        env={
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_SERVER_DEV_MODE": "1",
            "STORE_KEY": "k",
            "STORE_SECRET": "s",
        },
    ) as server:
        server.wait_until(lambda: http_status(f"{url}/health") == 200, 240)
        import openai

        # One connection per request: uvicorn closes idle connections after 5 s, and may close a reused one.
        once = {"Connection": "close"}
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300, default_headers=once)
        rng = np.random.default_rng(0)
        done: list[str] = []
        failed: list[Exception] = []

        def ask(prompt: list[int], save: bool) -> None:
            params = {"kv_transfer_params": {"hidden_states_save": save}}
            try:
                answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=params)
            except openai.OpenAIError as e:
                failed.append(e)
                return
            if save:
                done.append(answer.kv_transfer_params["hidden_states_path"])

        def all_at_once(save: bool) -> list[threading.Thread]:
            prompts = rng.integers(0, 300, (REQUESTS, TOKENS)).tolist()
            threads = [threading.Thread(target=ask, args=(p, save), daemon=True) for p in prompts]
            for thread in threads:
                thread.start()
            return threads

        # One upload first: the store client's modules and connections must not count as pages' memory.
        store.go.set()
        ask(rng.integers(0, 300, TOKENS).tolist(), save=True)
        wait_until(lambda: store.puts > 0)
        store.go.clear()
        done.clear()
        # The same load without saving: every block of the cache is touched, and the ring stays empty.
        for thread in all_at_once(save=False):
            thread.join(120)
        without_ring = own_memory(server.pid) - IN_FLIGHT // 2  # the ring's pages were touched when it was allocated
        threads = all_at_once(save=True)
        # The store accepts nothing, so the engine must stop.
        resident = settle(lambda: (len(done), own_memory(server.pid)))
        assert resident - without_ring <= LIMIT, resident - without_ring
        standing = len(done)
        assert 0 < standing < REQUESTS
        counted = in_flight(url)
        assert 0 < counted <= IN_FLIGHT, counted
        time.sleep(3)
        grown = own_memory(server.pid) - resident
        assert not failed, failed
        assert len(done) == standing
        assert grown < IN_FLIGHT // 10, grown
        assert http_status(f"{url}/health") == 200
        # A reset waits for the held blocks, and the running requests are recomputed.
        answers: list[dict] = []
        reset = threading.Thread(target=lambda: answers.append(reset_prefix_cache(url)), daemon=True)
        reset.start()
        time.sleep(2)
        assert not answers
        store.go.set()
        reset.join(60)
        assert answers == [{"success": True}]
        for thread in threads:
            thread.join(120)
        assert not failed, failed
        assert len(done) == REQUESTS
        wait_until(lambda: store.puts > REQUESTS)
        grown = own_memory(server.pid) - without_ring
        assert grown <= LIMIT, grown
        # The engine reports counters only in a step.
        wait_until(lambda: ask(rng.integers(0, 300, 20).tolist(), save=False) or in_flight(url) == 0)
    store.shutdown()
    store.server_close()


def in_flight(url: str) -> float:
    """The bytes in the ring and in the writers, from the server's metrics."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    names = ("vllm:hidden_states_ring_bytes", "vllm:hidden_states_held_bytes")
    found = [s.value for family in text_string_to_metric_families(page) for s in family.samples if s.name in names]
    assert found, page
    return sum(found)


def reset_prefix_cache(url: str) -> dict:
    """The server's response."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"{url}/reset_prefix_cache?reset_running_requests=true", method="POST")
    with opener.open(request, timeout=120) as answer:
        return json.load(answer)


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def own_memory(pid: int) -> int:
    """Bytes of anonymous and shared memory of the server's child processes: the engine and the writers.

    Memory that several of them share counts once. Mapped files are excluded: a process outside of the test that maps
    the same libraries changes their share when it ends.
    """
    return sum(_own_memory(process.pid) for process in psutil.Process(pid).children(recursive=True))


def _own_memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return (kib["Pss_Anon"] + kib["Pss_Shmem"]) << 10


def settle(state, seconds: float = 120):
    """The second value of ``state()``, after its first has not changed for 5 seconds."""
    end, since = time.monotonic() + seconds, time.monotonic()
    count, size = state()
    while time.monotonic() < end:
        time.sleep(0.5)
        now, size = state()
        if now != count:
            count, since = now, time.monotonic()
        elif count and time.monotonic() - since > 5:
            return size
    raise AssertionError(f"expected a stable count, got {count}")
