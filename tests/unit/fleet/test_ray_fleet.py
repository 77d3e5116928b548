"""The parts of the fleet on Ray that can be tested without Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import hsx_dist.fleet.cpu_binding as cores_module
from hsx_dist.config import load_config
from hsx_dist.config.secrets import credential_environment
from hsx_dist.errors import ConfigError
from hsx_dist.fleet import sizing
from hsx_dist.fleet.capacity import affordable_abroad, affordable_credit, check_output
from hsx_dist.fleet.capacity import check_capacity as room_for
from hsx_dist.fleet.cpu_binding import CoreClaim, omp_binding, prepare_cpu
from hsx_dist.fleet.placement import place, placed_spec
from hsx_dist.fleet.replica import engine_arguments
from hsx_dist.format.place import start_run
from hsx_dist.format.runs import take_attempt
from hsx_dist.format.same_run import require_same_run
from hsx_dist.jobs.capture import CapturedRows
from hsx_dist.jobs.extract import engine_spec, make_fleet
from hsx_dist.jobs.preflight import Model
from hsx_dist.store import open_store


@pytest.mark.parametrize("output", ["runs/x", "/data/x", "file:///data/x", "memory://x"])
def test_a_nodes_own_disk_is_refused_where_there_are_several_nodes(output):
    check_output(output, 1)
    with pytest.raises(ConfigError, match=r"all 2 nodes share.*store\.shared"):
        check_output(output, 2)


def test_an_object_store_is_shared_by_all_nodes():
    check_output("s3://bucket/x", 100)


def test_two_claims_share_no_core():
    first = CoreClaim(1)
    second = CoreClaim(1)
    try:
        assert not set(first.cores) & set(second.cores)
    finally:
        first.release()
        second.release()
    third = CoreClaim(1)
    assert third.cores == first.cores  # the cores are free again
    third.release()


@pytest.mark.parametrize("kind", ["link", "others may enter", "file", "links in it", "no folder can be made"])
def test_a_folder_of_claims_that_another_user_prepared_keeps_no_engine_from_starting(
    tmp_path, monkeypatch, caplog, kind
):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cores_module.warn_once.cache_clear()
    folder, victim = tmp_path / f"hsx-cores-{os.geteuid()}", tmp_path / "victim"
    victim.mkdir(mode=0o700)
    if kind == "link":
        folder.symlink_to(victim)
    elif kind == "others may enter":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "file":
        folder.touch()
    elif kind == "links in it":
        folder.mkdir(mode=0o700)
        last = max(os.sched_getaffinity(0))
        (folder / str(last)).symlink_to(victim / "made")
    else:
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "missing"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        claim = prepare_cpu(1, len(os.sched_getaffinity(0)))
        assert claim is not None
        assert claim.cores == []
        assert os.environ.pop("VLLM_CPU_OMP_THREADS_BIND") == "nobind"
    assert list(victim.iterdir()) == []
    assert kind != "others may enter" or list(folder.iterdir()) == []
    assert caplog.text.count("no cores are reserved for engines of this process") == 1
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


@pytest.mark.parametrize(
    ("cores", "ranks", "wanted", "binding"),
    [
        ([0, 1], 1, 2, "0,1"),
        ([0, 1], 2, 2, "0|1"),
        ([4, 5, 6, 7], 2, 4, "4,5|6,7"),
        ([0], 1, 2, "nobind"),
        ([0], 2, 1, "nobind"),
    ],
)
def test_binding_gives_every_rank_its_share(cores, ranks, wanted, binding):
    assert omp_binding(cores, ranks, wanted) == binding


def test_what_a_store_needs_of_the_environment_travels_and_nothing_else(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "f")
    monkeypatch.setenv("MY_TOKEN", "t")
    found = credential_environment()
    assert {"AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS"} <= set(found)
    assert "MY_TOKEN" not in found


def config(**settings):
    return load_config(None, (), model="m", output="s3://bucket/x", **settings)


def spec(settings):
    model = Model("m", {"hidden_states": CapturedRows((1, 2), 128)}, 2, 64, 320, "bfloat16", 255, "0")
    return engine_spec(settings, model, seed="")


def test_writers_know_the_attempt_that_their_store_must_have(tmp_path, monkeypatch):
    node = {"Alive": True, "Resources": {"CPU": 8.0, "object_store_memory": 4 << 30}}
    monkeypatch.setattr(sizing.ray, "nodes", lambda: [node])
    settings = config().model_copy(update={"output": str(tmp_path)})
    place = start_run(open_store(settings.output), {})
    attempt = take_attempt(place.store, {})
    writer = make_fleet(settings, place, spec(settings), {}, attempt)._writer("w")
    require_same_run(place.store, writer.options.attempt, writer.token)


def check_capacity(settings, gpus, nodes):
    replica = settings.replica.model_copy(update={"num_gpus": gpus})
    room_for(settings, place(replica, spec(settings), nodes), nodes)


def test_replicas_that_no_node_has_room_for_are_refused_instead_of_waited_for():
    two_cores = [{"CPU": 2.0}]
    check_capacity(config(), 0, two_cores)  # a writer and a replica
    with pytest.raises(ConfigError, match=r"room for 0.*Lower replica\.num_cpus, writers\.num_cpus"):
        check_capacity(config(replica={"num_cpus": 2}), 0, two_cores)
    check_capacity(config(replica={"num_cpus": 2}, writers={"num_cpus": 0}), 0, two_cores)
    with pytest.raises(ConfigError, match="expected room for 2 replicas"):
        check_capacity(config(min_replicas=2, max_replicas=4), 0, two_cores)
    check_capacity(config(min_replicas=1, max_replicas=4), 0, two_cores)
    with pytest.raises(ConfigError, match="nosuch"):
        check_capacity(config(replica={"resources": {"nosuch": 1}}), 0, two_cores)
    with pytest.raises(ConfigError, match="GPU"):
        check_capacity(config(), 1, two_cores)
    check_capacity(config(), 1, [{"CPU": 0.0}, {"CPU": 16.0, "GPU": 1.0}])  # a head without CPUs
    with pytest.raises(ConfigError, match="writers"):
        check_capacity(config(), 0, [{"CPU": 0.0}])


def test_a_nodes_object_store_holds_all_that_senders_and_writers_may_have_in_it():
    """All senders that fit on a node share a quarter of the smallest store. Writers share a half."""
    store = 8 << 30
    nodes = [
        {"Resources": {"CPU": 64.0, "GPU": 8.0, "object_store_memory": store}},
        {"Resources": {"CPU": 64.0, "GPU": 4.0, "object_store_memory": 4 * store}},
    ]
    resources = [n["Resources"] for n in nodes]
    settings = config(engine_kwargs={"tensor_parallel_size": 2}, max_replicas=100)
    placement = place(settings.replica, spec(settings), resources)
    placed = placed_spec(spec(settings), placement)
    assert affordable_abroad(settings, placed, placement, nodes) == store // 4 // (4 * 2)
    few = config(engine_kwargs={"tensor_parallel_size": 2}, max_replicas=1)
    assert affordable_abroad(few, placed, placement, nodes) == store // 4 // 2
    assert affordable_credit(settings, nodes) * settings.writers.per_node <= store // 2
    wide = config(engine_kwargs={"tensor_parallel_size": 16}, max_replicas=3)
    placement = place(wide.replica, spec(wide), resources)
    placed = placed_spec(spec(wide), placement)
    assert placement.spans_nodes
    assert affordable_abroad(wide, placed, placement, nodes) == store // 4 // 3  # only rank 0 ships


def tp(size, **more):
    return config(engine_kwargs={"tensor_parallel_size": size, **more})


def test_a_tensor_parallel_group_that_fits_a_node_is_one_bundle_on_it():
    settings = tp(4)
    found = place(settings.replica, spec(settings), [{"CPU": 8.0}, {"CPU": 64.0, "GPU": 8.0}])
    assert found.bundles == ({"CPU": 1, "GPU": 4.0},)
    assert (found.strategy, found.actor_gpus) == ("STRICT_PACK", 4.0)
    assert placed_spec(spec(settings), found).engine_kwargs["distributed_executor_backend"] == "mp"
    assert placed_spec(spec(settings), found).owners is None
    alone = config()
    assert placed_spec(spec(alone), place(alone.replica, spec(alone), [{"CPU": 8.0}])) == spec(alone)


def test_a_group_that_fits_no_node_spans_them_with_a_bundle_a_rank_and_rank_0_ships():
    settings = tp(8)
    nodes = [{"CPU": 64.0, "GPU": 4.0}] * 2
    found = place(settings.replica, spec(settings), nodes)
    assert found.bundles == ({"CPU": 1, "GPU": 1.0}, *[{"GPU": 1.0}] * 7)
    assert (found.strategy, found.actor_gpus, found.spans_nodes) == ("PACK", 0.0, True)
    placed = placed_spec(spec(settings), found)
    arguments = engine_arguments(placed, "attach", "/x")
    assert arguments["distributed_executor_backend"] == "ray"
    assert arguments["kv_transfer_config"]["kv_connector_extra_config"]["hsx"]["owners"] == 1
    room_for(settings, found, nodes)
    with pytest.raises(ConfigError, match="too little GPU"):
        room_for(settings, found, nodes[:1])


def test_the_ray_executor_on_one_node_is_packed_there_and_on_cpus_refused():
    settings = tp(2, distributed_executor_backend="ray")
    found = place(settings.replica, spec(settings), [{"CPU": 64.0, "GPU": 8.0}])
    assert (len(found.bundles), found.strategy) == (2, "STRICT_PACK")
    with pytest.raises(ConfigError, match="does not run on CPUs"):
        place(settings.replica, spec(settings), [{"CPU": 64.0}])


def test_cpus_and_gpus_take_the_same_configuration():
    settings = tp(2)
    assert place(settings.replica, spec(settings), [{"CPU": 4.0}]).bundles == ({"CPU": 1},)
    assert place(settings.replica, spec(settings), [{"CPU": 4.0, "GPU": 2.0}]).bundles == ({"CPU": 1, "GPU": 2.0},)
