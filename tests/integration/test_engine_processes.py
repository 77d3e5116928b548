"""An engine in child processes (two tensor-parallel ranks). The ring is in shared memory; this process ships pages."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from hsx_dist.errors import EngineError
from hsx_dist.fleet.replica import Replica
from hsx_dist.fleet.tasks import EngineSpec, Task
from hsx_dist.format.codecs import resolve_codec
from hsx_dist.format.runs import load_manifest, take_attempt
from hsx_dist.inputs.rows import Row
from hsx_dist.reading import open_run
from hsx_dist.store import open_store
from hsx_dist.writers.sink import PartSink, SinkOptions
from hsx_dist.writers.threads import ThreadSender
from tests.harness.runs import write_v1_run
from tests.integration.oracle import Oracle


@pytest.fixture
def two_ranks(tiny_model_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # otherwise two ranks on one NUMA node do not start
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    return EngineSpec(
        model=str(tiny_model_path),
        revision=None,
        layers=(0, 2, 4),
        engine_kwargs={
            "dtype": "float32",
            "max_model_len": 256,
            "enforce_eager": True,
            "tensor_parallel_size": 2,
            "max_num_batched_tokens": 64,
            "block_size": 32,
        },
        sampling_params={},
        chat_template_kwargs={},
        vocab_size=len(AutoTokenizer.from_pretrained(tiny_model_path)),
        max_tokens=255,
        output="unused",
        codec="split",
        layout="part",
        segment_bytes=60_000,
        page_bytes=30_000,
        in_flight_bytes=120_000,
    )


def test_every_rank_ships_its_rows_and_a_killed_engine_is_reported(two_ranks, tiny_model_path, tmp_path):
    store = open_store(str(tmp_path))
    write_v1_run(store, {"meaning": {}})
    attempt = take_attempt(store, {})
    senders = []
    events = []
    sink = PartSink(
        store, SinkOptions(codec=resolve_codec("split"), about={}, writer="t", attempt=attempt), events.append
    )

    def make_sender():
        senders.append(ThreadSender(sink, 1))
        return senders[-1]

    rng = np.random.default_rng(5)
    rows = {f"k{i}": rng.integers(0, 300, n).tolist() for i, n in enumerate((1, 5, 16, 17, 64, 100, 200, 255))}
    tasks = [Row(key, i, token_ids=ids) for i, (key, ids) in enumerate(rows.items())]
    replica = Replica(two_ranks, make_sender)
    try:
        first = replica.submit(Task(1, tuple(tasks[:4])))
        second = replica.submit(Task(2, (*tasks[4:], Row("too long", 9, token_ids=[1] * 256))))
        shipped = first.result(120).shipped + second.result(120).shipped
        assert sorted(shipped) == sorted(rows)
        assert [fate.key for fate in second.result().refused] == ["too long"]
        assert len(senders) == 2  # one of each rank
        replica.flush()
        sink.flush()
        assert set(load_manifest(store).samples) == set(rows)

        for process in psutil.Process().children(recursive=True):
            if "VLLM" in " ".join(process.cmdline()) or "multiprocessing" in " ".join(process.cmdline()):
                process.kill()  # child processes of this test, by their ids
        with pytest.raises(EngineError):
            replica.submit(Task(3, (tasks[0],))).result(120)
        with pytest.raises(EngineError):
            replica.submit(Task(4, (tasks[0],))).result(1)
    finally:
        replica.close()
        sink.close()
    run = open_run(str(tmp_path))
    oracle = Oracle(tiny_model_path)
    for key, ids in rows.items():
        data = run[key].load(framework="torch")
        assert data["token_ids"].tolist() == ids
        oracle.assert_equal(ids, data["hidden_states"], (0, 2, 4))
