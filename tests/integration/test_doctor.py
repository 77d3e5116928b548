"""The doctor on real systems: an engine's states against its own head, and a store checked from every raylet."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from hsx_dist.config import load_config
from hsx_dist.jobs import doctor_engine
from hsx_dist.jobs.doctor_engine import Agreement, check_engine, judge
from hsx_dist.jobs.doctor_nodes import check_cluster

pytestmark = pytest.mark.integration


def config(model: Any, output: str, **settings: Any) -> Any:
    engine = {"max_model_len": 512, "enforce_eager": True, "max_num_batched_tokens": 128, "block_size": 32}
    engine |= settings.pop("engine_kwargs", {})
    return load_config(None, output=output, model=str(model), layers=[1, 2], engine_kwargs=engine, **settings)


@pytest.mark.parametrize("which", ["tiny in float32", pytest.param("smollm2 in bfloat16", marks=pytest.mark.soak)])
def test_the_head_makes_vllms_logprobs_of_the_stored_states_and_of_no_others(which, request, tmp_path, monkeypatch):
    tiny = which.startswith("tiny")
    model = request.getfixturevalue("tiny_model_path" if tiny else "smollm2_path")
    seen: dict[str, Agreement] = {}
    compare = doctor_engine.compare

    def also_wrong(llm: Any, prompts: Any, states: Any, theirs: Any) -> Agreement:
        # The result of a broken cache, an off-by-one or another request's rows.
        seen["shifted"] = compare(llm, prompts, [s.roll(1, 0) for s in states], theirs)
        seen["zero"] = compare(llm, prompts, [s * 0 for s in states], theirs)
        return compare(llm, prompts, states, theirs)

    monkeypatch.setattr(doctor_engine, "compare", also_wrong)
    dtype, layers = ("float32", 4) if tiny else ("bfloat16", 30)
    (check,) = check_engine(
        config(model, str(tmp_path / "run"), pool="threads", engine_kwargs={"dtype": dtype, "enforce_eager": True})
    )
    print(check.message, seen)
    assert check.state == "ok", check
    assert f"on layer {layers}" in check.message
    for wrong in seen.values():
        assert judge(wrong, dtype, layers).state == "fail"


def test_every_node_is_asked_with_the_drivers_credentials(tiny_model_path, s3, monkeypatch):
    """Two raylets that were started without credentials, then a driver with wrong credentials."""
    for name in s3.env:
        monkeypatch.delenv(name, raising=False)
    memory = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**memory, "include_dashboard": False})
    try:
        cluster.add_node(**memory)
        ray.init(address=cluster.address, log_to_driver=False)
        made = config(
            tiny_model_path,
            f"{s3.url}/doctor",
            store={"storage_options": {"client_kwargs": {"endpoint_url": s3.endpoint_url}}, "retry_seconds": 1},
            writers={"num_cpus": 0},
        )
        for name, value in s3.env.items():
            monkeypatch.setenv(name, value)
        found = check_cluster(made)
        stores = [c for c in found if c.name.endswith(": store")]
        assert [c.state for c in stores] == ["ok", "ok"], found
        assert len({c.name for c in stores}) == 2
        assert not [c for c in found if c.state == "fail"]
        assert [c.state for c in found if c.name.endswith(": versions")] == ["ok", "ok"]
        assert any(c.name == "object store" and c.state == "warn" for c in found)  # smaller than writers.credit_bytes
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
        found = check_cluster(made)
        assert [c.state for c in found if c.name.endswith(": store")] == ["fail", "fail"]
        assert "not-the-secret" not in str(found)
        (room,) = [c for c in check_cluster(made.model_copy(update={"min_replicas": 9})) if c.name == "room"]
        assert room.state == "fail"
        assert "room for 2" in room.message
    finally:
        ray.shutdown()
        cluster.shutdown()
