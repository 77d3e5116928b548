"""Values that cannot be sent to Ray's actors and tasks. Ray's own error would print credentials."""

from __future__ import annotations

import ssl
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from hsx_dist.config import ExtractConfig, load_config
from hsx_dist.errors import ConfigError
from hsx_dist.fleet.placement import Placement
from hsx_dist.fleet.replica_actor import start_replica
from hsx_dist.jobs.capture import CapturedRows
from hsx_dist.jobs.doctor_nodes import ask_nodes
from hsx_dist.jobs.extract import engine_spec
from hsx_dist.jobs.preflight import Model
from hsx_dist.ray_arguments import sendable
from hsx_dist.writers.ray_pool import PoolWriterSpec, start_writer
from tests.unit.writers.small_samples import options

NODE = {"NodeManagerAddress": "n", "NodeID": "0" * 56, "Resources": {}}


def config() -> ExtractConfig:
    unsendable = {"secret": "OPTSECRET", "session_kwargs": {"ssl": ssl.create_default_context()}}
    return load_config(
        None,
        (),
        model="m",
        output="s3://b/p",
        pool="ray",
        input={"path": "x.jsonl"},
        engine_kwargs={"hf_token": "OPTSECRET", "hf_overrides": {"x": ssl.create_default_context()}},
        store={"storage_options": unsendable},
    )


def writer() -> Any:
    c = config()
    spec = PoolWriterSpec(c.output, c.store.storage_options, "auto", 1.0, {"AWS_SECRET": "ENVSECRET"}, options())
    return start_writer(spec, node_id="0" * 56, num_cpus=1, threads=1, name="x")


def replica() -> Any:
    spec = engine_spec(config(), Model("m", {"hidden_states": CapturedRows((0,), 1)}, 1, 1, 1, "bfloat16", 1, ""))
    placement = Placement((), "STRICT_PACK", 0.0)
    sizes: dict[str, Any] = {"num_cpus": 1, "resources": {}, "environment": {}, "name": "x", "namespace": "x"}
    return start_replica(spec, [], 0, placement=placement, **sizes)


@pytest.mark.parametrize(
    ("send", "name"),
    [
        (writer, "storage_options.session_kwargs.ssl"),
        (replica, "engine_kwargs.hf_overrides.x"),
        (lambda: list(ask_nodes(config(), [NODE])), "engine_kwargs.hf_overrides.x"),
        (lambda: sendable(config().store), "storage_options.session_kwargs.ssl"),
        (lambda: sendable({"ssl": ssl.create_default_context()}, "storage_options"), "storage_options.ssl"),
        (lambda: sendable(ssl.create_default_context()), "an argument of a Ray task"),
    ],
)
def test_what_cannot_be_pickled_is_named_and_not_shown(send: Callable[[], Any], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        send()
    shown = "".join(traceback.format_exception(caught.value))
    assert f"{name}: expected a value that can be pickled for other processes, got one of type SSLContext. " in shown
    assert "SECRET" not in shown


@pytest.mark.parametrize("name", ["hf_AbCdEfGhIjKlMnOpQrStUvWx", "https://user:hunter2@proxy:3128"])
def test_a_name_that_looks_like_a_credential_is_hidden(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^headers\..+: expected a value that can be pickled") as caught:
        sendable({"headers": {name: ssl.create_default_context()}})
    assert "AbCdEf" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_mapping_that_holds_itself_is_named_up_to_a_depth() -> None:
    endless: dict[str, Any] = {}
    endless |= {"a": endless, "b": ssl.create_default_context()}
    with pytest.raises(ConfigError, match=r"^a\.a\.a\.a\.a\.a: expected a value that can be pickled"):
        sendable(endless)
