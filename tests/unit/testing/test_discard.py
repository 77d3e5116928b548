from __future__ import annotations

import time

from hsx_dist.store import open_store
from tests.harness.discard import discard_server


def test_a_server_takes_no_more_than_its_rate():
    with discard_server() as server:
        server.rate = 10e6
        store = open_store("s3://b/x", server.storage_options())
        before = time.monotonic()
        store.put("a", [bytes(4_000_000)])
        assert time.monotonic() - before >= 0.35  # load on the machine makes it only longer
        assert server.received_bytes >= 4_000_000
