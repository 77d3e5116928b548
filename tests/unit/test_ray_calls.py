"""Errors that leave a Ray task or actor: Ray writes them into its logs, and sends them to the driver."""

from __future__ import annotations

import ast
import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import RayTaskError

import hsx_dist
from hsx_dist.errors import ConfigError, EngineError, HsxError, InputError, Unavailable
from hsx_dist.fleet.ray_errors import reason_of
from hsx_dist.fleet.replica_actor import ReplicaActor
from hsx_dist.inputs.encode import TooLong
from hsx_dist.jobs.doctor_nodes import examine_node
from hsx_dist.observe.logs import redact_records
from hsx_dist.ray_calls import guarded
from hsx_dist.writers.ray_pool import WriterActor

PACKAGE = Path(hsx_dist.__file__).parent
SECRET = "hunter2NotToBeSeen9"
URL = f"https://user:{SECRET}@h/x"


class PanicException(BaseException):
    """The class of a panic in a library's Rust code."""


class Silent(Exception):
    """An error without a text, as aiohttp's ``ClientResponseError`` of no request."""

    def __str__(self) -> str:
        raise AttributeError(URL)


class Unpicklable(HsxError):
    """An error of another package. Its constructor takes two arguments."""

    def __init__(self, url: str, code: int):
        super().__init__(url, code)
        self.url = url


@pytest.fixture(autouse=True)
def restored_factory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HSX_REDACTS_RECORDS", "")
    before = logging.getLogRecordFactory()
    redact_records.cache_clear()
    yield
    redact_records.cache_clear()
    logging.setLogRecordFactory(before)


def fail(error: BaseException) -> None:
    try:
        raise OSError(f"401 for {URL}")
    except OSError as e:
        raise error from e


class Actor:
    def __init__(self, error: BaseException):
        fail(error)

    def run(self, error: BaseException) -> None:
        fail(error)

    def _help(self) -> None: ...


CALLS: list[Callable[[BaseException], None]] = [
    guarded(fail),
    guarded(Actor),
    lambda error: guarded(Actor).run(None, error),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (EngineError(f"no answer of {URL}"), EngineError, "no answer of https://h/x"),
        (Unavailable(f"get {URL}"), Unavailable, "get https://h/x"),
        (ConfigError("layers: expected an id"), ConfigError, "layers: expected an id"),
        (TooLong(f"row of {URL}"), InputError, "row of https://h/x"),
        (Unpicklable(URL, 5), HsxError, "('https://h/x', 5)"),
        (KeyError(URL), HsxError, "KeyError: 'https://h/x'"),
        (PanicException(URL), HsxError, "PanicException: https://h/x"),
        (OSError(5, f"no {URL}"), HsxError, "OSError: [Errno 5] no https://h/x"),
        (Silent(URL), HsxError, "Silent: (Silent that cannot be shown)"),
    ],
)
def test_an_error_reaches_ray_without_credentials_and_causes(
    call: Callable[[BaseException], None], error: BaseException, kind: type[Exception], text: str
) -> None:
    with pytest.raises(HsxError) as caught:
        call(error)
    there = pickle.loads(pickle.dumps(caught.value))
    assert (type(there), str(there)) == (kind, text)
    seen = "".join(traceback.format_exception(caught.value))  # what Ray logs
    assert SECRET not in seen
    assert "in fail" in seen
    assert reason_of(RayTaskError("f", seen, there, "p", 1, "ip")) == text


def test_the_log_has_the_causes_without_credentials(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(HsxError):
        guarded(fail)(ValueError(URL))
    assert "ValueError: https://h/x" in caplog.text
    assert "OSError: 401 for https://h/x" in caplog.text
    assert SECRET not in caplog.text


def test_a_task_redacts_its_records_before_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    guarded(lambda: logging.getLogger("library").warning("of %s", URL))()
    assert "of https://h/x" in caplog.text


def test_ray_gets_what_it_needs_of_a_guarded_class() -> None:
    for actor in (WriterActor, ReplicaActor):
        made: Any = guarded(actor)
        assert (made.__module__, made.__qualname__, made.__name__) == (actor.__module__, *2 * (actor.__name__,))
    assert guarded(WriterActor).flush.__ray_concurrency_group__ == "control"
    assert guarded(Actor)._help is Actor._help
    for entry in (guarded(WriterActor), guarded(ReplicaActor), guarded(examine_node)):
        assert cloudpickle.loads(cloudpickle.dumps(entry)).__name__ == entry.__name__


def test_each_task_and_actor_of_this_package_is_guarded() -> None:
    """A use of ``ray.remote``, also as a decorator, or of a name imported from Ray."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="ray"), attr="remote"):
                    found.add(path.relative_to(PACKAGE).as_posix())
                case ast.ImportFrom(module="ray", names=names):
                    assert "remote" not in {name.name for name in names}, path
    assert found == {"ray_calls.py"}
    assert callable(ray.remote)
