"""speculators' back end compares an answer's identity with the object's."""

from __future__ import annotations

import fcntl

import pytest

from hsx_dist.errors import NotFound, SampleConflict
from hsx_dist.speculators import HsxTransfer
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
    transfer.delete(path)  # speculators does so after an error too
    assert (tmp_path / NAME).exists() != is_its_own


@pytest.mark.parametrize("way", ["marked", "locked"])
def test_an_object_that_was_not_loaded_is_not_removed(tmp_path, way):
    store_a(tmp_path)
    transfer = HsxTransfer(None, wait=0, delete_generated=True, storage_path=str(tmp_path))
    answer = {"hidden_states_path": str(tmp_path / NAME)}
    if way == "marked":
        (tmp_path / f"{NAME}.conflict.json").write_text('{"error": "used before", "conflict": true}')
        assert transfer.get_generated(answer) is None
    else:
        with (tmp_path / f"{NAME}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(NotFound):
                transfer.get_generated(answer)
    transfer.delete(str(tmp_path / NAME))
    assert (tmp_path / NAME).exists()
