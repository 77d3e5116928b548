"""obstore's time limits belong to a client. A client keeps a thread, descriptors and memory, so there are few."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsx_dist.store import open_store
from tests.harness.http_server import Answers, s3_options, served


class Short(Answers):
    """Answers each range as past the object's end."""

    def do_GET(self) -> None:
        self.answer(416, b"<Error><Code>InvalidRange</Code></Error>")


def test_ranges_of_many_claimed_sizes_need_few_descriptors_and_threads() -> None:
    with served(Short) as url:
        store = open_store("s3://b/r", s3_options(url), backend="obstore", retry_seconds=0)
        sizes = [*(k << 26 for k in range(1, 30)), *(1 << k for k in range(20, 62))]
        with pytest.raises(ValueError, match="shorter"):
            store.get_ranges("a", [(1, 5)])
        before = _used()
        for size in sizes:
            with pytest.raises(ValueError, match="shorter"):
                store.get_ranges("a", [(1, size + 2)])
        assert _used() - before < 40


def _used() -> int:
    return sum(1 for what in ("fd", "task") for _ in Path(f"/proc/self/{what}").iterdir())
