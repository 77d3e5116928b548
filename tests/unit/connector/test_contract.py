"""vLLM's requirements for a connector, without requests: groups, counts, limits, and how vLLM finds it."""

from __future__ import annotations

import copy
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA, supports_hma
from vllm.utils.func_utils import supports_kw
from vllm.v1.kv_cache_interface import FullAttentionSpec, HiddenStateCacheSpec, KVCacheConfig, KVCacheGroupSpec

from hsx_dist.connector import connector as module
from hsx_dist.connector.columns import CapturedPoint
from hsx_dist.connector.connector import (
    HiddenStatesConnector,
    hidden_state_group,
)
from hsx_dist.connector.connector_config import read_connector_config
from hsx_dist.connector.engine_checks import warn_of_long_samples, warn_of_short_limits
from hsx_dist.connector.ranks import Ranks
from hsx_dist.errors import ConfigError
from tests.unit.vllm_patches.engine_config import engine_config


def test_a_credential_in_the_storage_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"s3://\(not shown\): expected a URL without credentials") as e:
        read_connector_config({"shared_storage_path": "s3://key:hunter2/y@b/x"})
    assert "hunter2" not in str(e.value)


@pytest.mark.parametrize("options", [{"secret": "hunter2"}, {"client_kwargs": {"aws_session_token": "hunter2"}}])
def test_a_literal_credential_is_refused_and_one_of_the_environment_is_not_shown(options, monkeypatch) -> None:
    """vLLM logs this table, and it is in a server's command line."""
    with pytest.raises(ConfigError, match=r"hsx\.storage_options\..*expected no credential.*\$\{env:NAME\}") as e:
        read_connector_config({"shared_storage_path": "s3://b/x", "hsx": {"storage_options": options}})
    assert "hunter2" not in str(e.value)
    monkeypatch.setenv("OUR_SECRET", "hunter2")
    given = {"storage_options": {"secret": "${env:OUR_SECRET}", "anon": False}}
    settings = read_connector_config({"shared_storage_path": "s3://b/x", "hsx": given})
    assert settings.storage_options == {"secret": "hunter2", "anon": False}
    assert "hunter2" not in repr(settings)
    monkeypatch.delenv("OUR_SECRET")
    with pytest.raises(ConfigError, match="'OUR_SECRET' to be set"):
        read_connector_config({"shared_storage_path": "s3://b/x", "hsx": given})


@pytest.mark.parametrize("name", ["ttl_seconds", "drain_seconds"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e12])
def test_an_impossible_time_is_refused(name, value) -> None:
    """If accepted, the value made each request's end fail, or the engine's."""
    with pytest.raises(ConfigError, match=name):
        read_connector_config({"shared_storage_path": "x", "hsx": {name: value}})


@pytest.mark.parametrize("table", ["abc", 5, [1], {"via": [1]}])
def test_settings_that_are_not_a_table_are_refused(table) -> None:
    with pytest.raises(ConfigError, match="expected"):
        read_connector_config({"shared_storage_path": "x", "hsx": table})


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"writers": "hunter2"}, "expected hsx.transport, got hsx.writers. Set hsx.transport to inline, attach or"),
        ({"via": "store"}, "expected hsx.transport, got hsx.via. Set hsx.transport to spawn"),
        ({"address": "me:hunter2@h:1"}, "or none for 'spawn', got one for 'spawn'. Set hsx.address for attach"),
        ({"transport": "attach"}, "or none for 'spawn', got none for 'attach'. Set hsx.address for attach"),
    ],
)
def test_an_error_of_the_transport_shows_no_value(table, says) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        read_connector_config({"shared_storage_path": "x", "hsx": table})
    assert "hunter2" not in str(refused.value)


def spec(kind, block_size=16):
    return kind(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)


def cache(*specs):
    return KVCacheConfig(8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], s) for s in specs])


def test_the_hidden_state_cache_group_is_found_by_its_spec_at_any_index():
    full, hidden = spec(FullAttentionSpec), spec(HiddenStateCacheSpec)
    assert hidden_state_group(cache(full, hidden), "m") == 1
    assert hidden_state_group(cache(hidden, full, full), "m") == 0
    assert hidden_state_group(cache(full), "m") == 0  # one uniform group (MLA) holds everything
    for groups in ((full, full), (hidden, hidden)):
        with pytest.raises(ConfigError, match="some/model: expected one hidden-state cache group"):
            hidden_state_group(cache(*groups), "some/model")


def test_every_rank_reports_a_request_and_the_hybrid_cache_manager_stays_on():
    assert HiddenStatesConnector.get_finished_count(SimpleNamespace()) is None
    assert issubclass(HiddenStatesConnector, SupportsHMA)
    assert supports_hma(HiddenStatesConnector)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_requests_preempted_at_their_end_are_computed_again_in_any_role(role):
    ours = SimpleNamespace(_kv_transfer_config=KVTransferConfig(kv_connector="HiddenStatesConnector", kv_role=role))
    assert HiddenStatesConnector.requires_kv_delivery.fget(ours)


def test_the_factory_finds_a_constructor_that_takes_the_cache_groups():
    """A connector without ``kv_cache_config`` is refused."""
    found = KVConnectorFactory.get_connector_class(
        KVTransferConfig(
            kv_connector="HiddenStatesConnector",
            kv_connector_module_path="hsx_dist.connector",
            kv_role="kv_producer",
        )
    )
    assert found is HiddenStatesConnector
    assert supports_kw(found, "kv_cache_config")


def engine(*, drafter=256, longest=256, shutdown_timeout=0):
    return SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(max_model_len=drafter)),
        model_config=SimpleNamespace(max_model_len=longest),
        shutdown_timeout=shutdown_timeout,
    )


def test_a_drafter_that_would_skip_states_of_long_sequences_is_refused():
    settings = read_connector_config({"shared_storage_path": "x"})
    warn_of_short_limits(settings, engine())
    with pytest.raises(ConfigError, match=r"256 tokens\), got 128"):
        warn_of_short_limits(settings, engine(drafter=128))


@pytest.mark.parametrize(("seconds", "said"), [(0, True), (60, False)])
def test_an_engine_that_would_end_before_all_is_stored_is_warned_of(caplog, seconds, said):
    with caplog.at_level(logging.WARNING):
        settings = read_connector_config({"shared_storage_path": "x"})
        warn_of_short_limits(settings, engine(shutdown_timeout=seconds))
    assert ("--shutdown-timeout" in caplog.text) is said
    assert ("Flush an LLM" in caplog.text) is said
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        long = copy.copy(read_connector_config({"shared_storage_path": "x", "hsx": {"drain_seconds": 30}}))
        warn_of_short_limits(long, engine(shutdown_timeout=seconds))
    assert "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS" in caplog.text


@pytest.mark.parametrize(
    ("longest", "given", "said"),
    [(32768, {}, True), (2048, {}, False), (32768, {"transport": "attach", "address": "x"}, False)],
)
def test_a_server_whose_longest_sample_exceeds_its_budget_is_warned_of(caplog, longest, given, said):
    settings = read_connector_config({"shared_storage_path": "x", "hsx": given})
    with caplog.at_level(logging.WARNING):
        warn_of_long_samples(settings, longest, 4 * 4096 * 2)
    assert ("max_model_len=32768 tokens has 1073741824 bytes" in caplog.text) is said


def test_rays_executor_copies_credentials_only_with_configured_prefixes(monkeypatch):
    """Ray's executor copies variables with certain prefixes to its workers. ``docs/guides/serving.md`` names them."""
    from vllm.ray.ray_env import get_env_vars_to_copy

    ours = {"AWS_ACCESS_KEY_ID", "GOOGLE_APPLICATION_CREDENTIALS"}
    for name in ours:
        monkeypatch.setenv(name, "x")
    assert not ours & get_env_vars_to_copy()
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "AWS_,GOOGLE_")
    assert ours <= get_env_vars_to_copy()


def test_expandable_segments_are_refused_by_vllm_for_ours_as_for_any_connector(monkeypatch):
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector="HiddenStatesConnector"),
        model_config=SimpleNamespace(enable_cumem_allocator=False, enable_sleep_mode=False),
    )
    VllmConfig._verify_kv_transfer_compat(config)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ValueError, match="HiddenStatesConnector is incompatible"):
        VllmConfig._verify_kv_transfer_compat(config)


@pytest.mark.parametrize("shape", [(8, 3, 16, 8), (8, 2, 32, 8), (8, 2, 16)])
def test_a_cache_of_another_form_than_its_spec_says_is_refused(shape):
    """The hidden-state group's block size and the captured layers, checked against the tensor."""
    half = SimpleNamespace(_vllm_config=None, _block_size=16)
    with pytest.raises(ConfigError, match="hidden-state cache"):
        HiddenStatesConnector._extracted(half, {"l": None}, {"l": torch.zeros(shape)}, (1, 2), [])


# -- checks when vLLM builds the connector and passes the cache -------------------------------------------------------


@pytest.fixture
def built(tiny_model_path, tmp_path):
    """Function that builds the connector as vLLM does."""

    def build(role=KVConnectorRole.WORKER, layers=(0, 4), **parallel):
        connector = {
            "kv_connector": "HiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path), "hsx": {"cache_writes": "direct"}},
        }
        config = engine_config(tiny_model_path, layers, kv_transfer_config=connector)
        for name, value in parallel.items():
            setattr(config.parallel_config, name, value)
        return HiddenStatesConnector(config, role, cache(spec(HiddenStateCacheSpec)))

    return build


def registered_with(ours, monkeypatch, *, ranks, others=()):
    """Pass ``ours`` its cache on rank 0 of ``ranks``, next to ``others``. Returns its calls by name."""
    called = {}
    group = SimpleNamespace(world_size=ranks, rank_in_group=0, cpu_group=None)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: group)
    several = SimpleNamespace(sub_connectors=[*others, ours])
    monkeypatch.setattr("vllm.distributed.kv_transfer.get_kv_transfer_group", lambda: several)
    monkeypatch.setattr(module, "get_layers_from_vllm_config", lambda *_: {"l": SimpleNamespace()})
    monkeypatch.setattr(module, "watch", lambda *_, **kwargs: called.update(watch=kwargs))
    monkeypatch.setattr(module, "ranks_of", lambda *_, **kwargs: called.update(ranks_of=kwargs) or Ranks(0, (1,)))
    ours.register_kv_caches({"l": torch.zeros(8, len(ours._layer_ids), 16, 8)})
    return called


@pytest.mark.parametrize("role", KVConnectorRole)
def test_engines_whose_workers_are_no_tensor_parallel_ranks_are_refused(built, role):
    built(role)
    with pytest.raises(ConfigError, match="prefill_context_parallel_size: expected 1"):
        built(role, prefill_context_parallel_size=2)


def test_layer_zero_is_checked_when_the_cache_is_there(built, monkeypatch):
    with pytest.raises(ConfigError, match=r"layer 0 of .*built after the plugin of hsx_dist was loaded, got none"):
        registered_with(built(), monkeypatch, ranks=1)


def test_a_local_output_is_known_to_be_on_one_node(built, monkeypatch):
    called = registered_with(built(layers=(1, 4)), monkeypatch, ranks=2)
    point = CapturedPoint("hidden_states", (1, 4), 8, "float32")
    assert called["ranks_of"] == {"one_node": True, "limit": None, "points": (point,)}


class Other:
    def __init__(self, role):
        self._kv_transfer_config = KVTransferConfig(kv_connector="Other", kv_role=role)

    def get_finished_count(self):
        return 1


@pytest.mark.parametrize(("role", "said"), [("kv_producer", False), ("kv_both", True), ("kv_consumer", True)])
def test_connectors_next_to_ours_are_known(built, monkeypatch, caplog, role, said):
    """A connector that loads tokens is warned of, a layerwise one gets all layers, and a hanging one is refused."""
    called = registered_with(built(layers=(1, 4)), monkeypatch, ranks=1, others=[Other(role)])
    assert called["watch"] == {"direct": True, "others": ["Other"]}
    assert ("Other: tokens are not loaded in an engine with HiddenStatesConnector" in caplog.text) is said
    with pytest.raises(ConfigError, match="get_finished_count"):
        registered_with(built(layers=(1, 4)), monkeypatch, ranks=2, others=[Other(role)])


def test_a_request_has_its_own_flag_back_when_it_has_blocks_and_when_it_has_none(built):
    """Otherwise the request would be missing from the statistics of prefix hits, or have no hit at its next try."""
    ours = built(KVConnectorRole.SCHEDULER)
    step = SimpleNamespace(total_num_scheduled_tokens=0, scheduled_new_reqs=[])
    for own in (False, True):
        request = SimpleNamespace(skip_reading_prefix_cache=own, prefill_stats=None)
        for end in (lambda r: ours.update_state_after_alloc(r, None, 0), lambda _: ours.build_connector_meta(step)):
            assert ours.get_num_new_matched_tokens(request, 16) == (0, False)
            assert request.skip_reading_prefix_cache
            end(request)
            assert request.skip_reading_prefix_cache is own
