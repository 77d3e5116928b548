"""speculators' back end compares an answer's identity with the object's identity."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import types
from contextlib import nullcontext
from dataclasses import replace

import pytest
import typer

from hsx_dist.connector.locks import ObjectLocks
from hsx_dist.errors import ConfigError, Denied, NotFound, SampleConflict
from hsx_dist.format.place import start_run
from hsx_dist.reading.object_lock import shared_lock
from hsx_dist.speculators import HsxTransfer, main
from hsx_dist.store import open_store
from hsx_dist.store.local import LocalStore
from hsx_dist.testing.samples import random_sample
from tests.harness.runs import RunWriter, whole
from tests.unit.connector.small_outlet import outlet_on, some, submit
from tests.unit.connector.test_identity import NAME, A, B, store_a


@pytest.mark.parametrize(
    ("meta", "is_its_own"), [({"identity": A}, True), ({"identity": B}, False), ({}, True), (None, True)]
)
def test_another_requests_sample_is_neither_read_nor_removed(tmp_path, meta, is_its_own):
    store_a(tmp_path)
    transfer = HsxTransfer(None, wait=0, delete_generated=True, storage_path=str(tmp_path))
    path = str(tmp_path / NAME)
    answer = {"hidden_states_path": path} | ({} if meta is None else {"hidden_states_meta": meta})
    if is_its_own:
        assert transfer.get_generated(answer) is not None
    else:
        with pytest.raises(SampleConflict, match="expected the sample of request"):
            transfer.get_generated(answer)
    transfer.delete(path)  # speculators calls it after an error, too
    assert (tmp_path / NAME).exists() != is_its_own


@pytest.mark.parametrize("error", ["used before", None])
def test_delete_keeps_objects_that_were_not_loaded(tmp_path, error):
    """The request failed, or ``wait`` was over while its lock was held: the object is an earlier request's."""
    store_a(tmp_path)
    path = str(tmp_path / NAME)
    transfer = HsxTransfer(None, wait=0, delete_generated=True, storage_path=str(tmp_path))
    if error is not None:
        (tmp_path / f"{NAME}.conflict.json").write_text(json.dumps({"error": error, "conflict": True}))
        assert transfer.get_generated({"hidden_states_path": path}) is None
    else:
        locks = ObjectLocks(tmp_path)
        locks.hold(NAME, "r")
        with pytest.raises(NotFound, match="lock"):
            transfer.get_generated({"hidden_states_path": path})
        locks.release_all()
    transfer.delete(path)
    assert (tmp_path / NAME).exists()


@pytest.mark.parametrize("identities", [(A, B), (None, None)])
def test_an_object_that_was_stored_anew_since_it_was_loaded_stays(tmp_path, identities):
    """The new object belongs to another request of the same path."""
    path = str(tmp_path / "q" / NAME)
    transfer = HsxTransfer(None, wait=0, delete_generated=True, storage_path=str(tmp_path))
    for seed, identity in enumerate(identities):
        outlet = outlet_on(tmp_path)
        meta = {"identity": identity} if identity else {}
        submit(outlet, "k", some(), ids=[seed] * 5, name=f"q/{NAME}", meta=meta)
        outlet.close()
        if seed == 0:
            assert transfer.get_generated({"hidden_states_path": path}) is not None
    transfer.delete(path)
    assert transfer.get_generated({"hidden_states_path": path})["token_ids"].tolist() == [1] * 5
    transfer.delete(path)
    assert not (tmp_path / "q" / NAME).exists()


def store_with_lock(tmp_path):
    """Returns the lock file."""
    locks = ObjectLocks(tmp_path)
    locks.hold(NAME, "A")
    store_a(tmp_path)
    locks.release("A", stored=True)
    return tmp_path / f"{NAME}.lock"


def test_delete_removes_the_lock_file_too(tmp_path):
    lock = store_with_lock(tmp_path)
    transfer = HsxTransfer(None, wait=0, delete_generated=True, storage_path=str(tmp_path))
    assert transfer.get_generated({"hidden_states_path": str(tmp_path / NAME)}) is not None
    assert lock.exists()
    transfer.delete(str(tmp_path / NAME))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("use", ["request", "reader"])
def test_delete_keeps_an_object_in_use_and_its_lock(tmp_path, use):
    lock = store_with_lock(tmp_path)
    transfer = HsxTransfer(None, wait=0, delete_generated=True, storage_path=str(tmp_path))
    assert transfer.get_generated({"hidden_states_path": str(tmp_path / NAME)}) is not None
    locks = ObjectLocks(tmp_path)
    if use == "request":
        locks.hold(NAME, "again")
    with shared_lock(str(tmp_path), NAME) if use == "reader" else nullcontext():
        transfer.delete(str(tmp_path / NAME))
    locks.release("again", stored=True)
    assert sorted(tmp_path.iterdir()) == [tmp_path / NAME, lock]


@pytest.mark.parametrize("moment", ["before", "during"])
def test_delete_keeps_the_lock_file_of_an_object_that_stays(tmp_path, monkeypatch, moment):
    lock = store_with_lock(tmp_path)
    transfer = HsxTransfer(None, wait=0, delete_generated=True, storage_path=str(tmp_path))
    assert transfer.get_generated({"hidden_states_path": str(tmp_path / NAME)}) is not None
    delete = LocalStore.delete_version

    def store_anew(*args):
        (tmp_path / NAME).unlink()
        store_a(tmp_path, identity=B)
        return delete(*args) if args else None

    if moment == "during":
        monkeypatch.setattr(LocalStore, "delete_version", store_anew)
    else:
        store_anew()
    transfer.delete(str(tmp_path / NAME))
    assert sorted(tmp_path.iterdir()) == [tmp_path / NAME, lock]


def test_an_object_is_deleted_also_if_this_user_may_not_lock_its_file(tmp_path, monkeypatch):
    """NFS locks exclusively only a file that is open for writing. A user of the server's group may only read it."""
    lock = store_with_lock(tmp_path)
    transfer = HsxTransfer(None, wait=0, delete_generated=True, storage_path=str(tmp_path))
    assert transfer.get_generated({"hidden_states_path": str(tmp_path / NAME)}) is not None
    flock = fcntl.flock

    def nfs(fd, kind):
        if kind & fcntl.LOCK_EX and os.fstat(fd).st_ino == lock.stat().st_ino:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", nfs)
    transfer.delete(str(tmp_path / NAME))
    assert list(tmp_path.iterdir()) == [lock]


def test_delete_removes_no_lock_file_that_a_server_made_in_the_meantime(tmp_path, monkeypatch):
    lock = store_with_lock(tmp_path)
    transfer = HsxTransfer(None, wait=0, delete_generated=True, storage_path=str(tmp_path))
    assert transfer.get_generated({"hidden_states_path": str(tmp_path / NAME)}) is not None
    locks, delete = ObjectLocks(tmp_path), LocalStore.delete_version

    def then_another_client_removes_it(store, name, version):
        deleted = delete(store, name, version)
        lock.unlink()
        locks.hold(NAME, "r")
        return deleted

    monkeypatch.setattr(LocalStore, "delete_version", then_another_client_removes_it)
    transfer.delete(str(tmp_path / NAME))
    assert list(tmp_path.iterdir()) == [lock]
    locks.release_all()


@pytest.mark.parametrize("chosen", [{"loss_mask": True, "of": 90}, {"start": 0, "step": 2, "of": 10}])
def test_a_selection_of_tokens_is_refused(tmp_path, chosen):
    """From a run, and from a server's answer."""
    sample = random_sample("a", 5)
    store = open_store(str(tmp_path / "run"))
    start_run(store, {"meaning": {"layers": [2, 15, 30]}, "settings": {}})
    RunWriter(store).put([(sample, replace(sample.segments()[0], meta={"tokens": chosen}), 0)])
    outlet = outlet_on(tmp_path)
    submit(outlet, "k", some(), ids=[1] * 5, name=NAME, meta={"tokens": chosen})
    outlet.close()
    transfer = HsxTransfer(store.url, wait=0, storage_path=str(tmp_path))
    for get, of in ((transfer.get_cached, 0), (transfer.get_generated, {"hidden_states_path": str(tmp_path / NAME)})):
        with pytest.raises(ConfigError, match="expected a whole sample, got a selection of its tokens"):
            get(of)


def test_samples_of_one_row_number_are_refused(tmp_path):
    """A resume may have the same rows in another order."""
    store = open_store(str(tmp_path))
    start_run(store, {"meaning": {"layers": [2, 15, 30]}, "settings": {}})
    for keys in ("ab", "cd"):
        RunWriter(store).put([whole(random_sample(key, 5), row) for row, key in enumerate(keys)])
    with pytest.raises(ConfigError, match=r"expected one sample of each input row, got 'a' and 'c' of row 0"):
        HsxTransfer(store.url).get_cached(0)


def test_an_object_whose_version_may_not_be_read_is_not_deleted_without_a_condition(tmp_path, monkeypatch):
    """Some services refuse a HEAD, which gives the version, and permit reads and deletes."""

    def refuses(store, name):
        raise Denied("head: Forbidden")

    store_a(tmp_path)
    path = str(tmp_path / NAME)
    transfer = HsxTransfer(None, wait=0, delete_generated=True, storage_path=str(tmp_path))
    assert transfer.get_generated({"hidden_states_path": path}) is not None
    monkeypatch.setattr(LocalStore, "version", refuses)
    with pytest.raises(Denied):
        transfer.delete(path)
    assert (tmp_path / NAME).exists()


SECRET = "hunter2-not-to-be-seen"


@pytest.fixture
def trainers_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments of each call of an app in place of speculators', which ends with an error."""
    app, calls = typer.Typer(pretty_exceptions_show_locals=True), []

    @app.callback()
    def _group() -> None:
        pass

    @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def train(ctx: typer.Context) -> None:
        calls.append(ctx.args)
        options = {"secret": SECRET}
        raise ValueError(f"no answer of https://me:{options['secret']}@host/x")

    monkeypatch.setitem(sys.modules, "speculators.__main__", types.SimpleNamespace(app=app))
    return calls


def test_the_error_that_ends_the_command_shows_no_credential(trainers_calls, monkeypatch, capfd):
    given = [
        "--hsx-run=s3://b/run",
        "--hsx-storage-options",
        '{"secret": "${env:HSX_TEST}", "endpoint_url": "http://h"}',
    ]
    monkeypatch.setenv("HSX_TEST", SECRET)
    monkeypatch.setattr(sys, "argv", ["speculators", "train", *given, "--loss-fn", '{"ce": 0.1, "tv": 0.9}'])
    with pytest.raises(SystemExit) as e:
        main()
    shown = capfd.readouterr()
    assert (e.value.code, shown.out) == (1, "")
    assert "ValueError: no answer of https://host/x" in shown.err
    assert SECRET not in shown.err
    assert [call[: len(given)] for call in trainers_calls] == [given]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--hsx-run", f"https://me:{SECRET}@host/run"], "argument 3: expected no credential on a command line"),
        ([f"--request-endpoint=me:{SECRET}@host"], "argument 2: expected no credential on a command line"),
        ([f"--https://me:{SECRET}@host=x"], "argument 2: expected no credential on a command line"),
        (["--hsx-storage-options", f'{{"token": "{SECRET}"}}'], "argument 3: expected no credential on a command line"),
        ([f"--hsx-storage-options={{key: {SECRET}}}"], "key: expected no credential on a command line"),
        (["--hsx-storage-path", f"s3:/b/x?n={SECRET}"], "expected scheme://place/path"),
    ],
)
def test_an_argument_with_a_credential_is_refused_before_speculators_stores_it(
    trainers_calls, given, said, monkeypatch, capfd
):
    monkeypatch.setattr(sys, "argv", ["speculators", "train", *given])
    with pytest.raises(SystemExit) as e:
        main()
    shown = capfd.readouterr()
    assert (e.value.code, shown.out, trainers_calls) == (2, "", [])
    assert shown.err.startswith("speculators: ")
    assert said in shown.err
    assert SECRET not in shown.err
