"""Run by test_durability in a mount namespace: a disk accepts no more bytes, and the file system's syncs fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hsx_dist.errors import StoreError
from hsx_dist.store import local
from hsx_dist.store.local import LocalStore

#: Exit status if the machine has no loop devices.
NO_LOOP = 77


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def put_until_refused(store: LocalStore, content: bytes) -> str:
    """Name of the first object that the store refused."""
    for i in range(100):
        try:
            store.put(f"data/{i}", [content])
        except StoreError:
            return f"data/{i}"
    raise AssertionError("expected a sync to fail, got success from all")


def main(place: Path) -> int:
    run("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place))
    disk, mounted, fill = place / "disk", place / "mounted", place / "fill"
    run("truncate", "-s", "200M", str(disk))
    run("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", str(disk))
    mounted.mkdir()
    try:
        run("mount", "-o", "loop", str(disk), str(mounted))
    except subprocess.CalledProcessError:
        return NO_LOOP
    try:
        store = LocalStore(mounted / "run")
        store.put("data/before", [b"1"])
        with fill.open("wb", buffering=0) as f:
            while f.write(bytes(1 << 20)) == 1 << 20:
                pass
    except OSError:
        pass  # the disk is full
    content = bytes(range(256)) * 2048  # too small to be written past the page cache
    failed = put_until_refused(store, content)
    assert failed not in [info.name for info in store.list()]
    assert list(store.unfinished()) == []
    fill.unlink()
    store.put(failed, [content])
    local._synced.close()
    run("umount", str(mounted))
    run("mount", "-o", "loop", str(disk), str(mounted))
    try:
        assert store.get("data/before") == b"1"
        names = [info.name for info in store.list()]
        assert failed in names
        assert all(store.get(name) == content for name in names if name != "data/before")
    finally:
        run("umount", str(mounted))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
