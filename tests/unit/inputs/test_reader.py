"""Inputs that are read in a child process: its failures are typed errors here, and no process stays behind."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from hsx_dist.config import InputConfig
from hsx_dist.errors import ConfigError, FormatError, Unavailable
from hsx_dist.inputs import reader_child, tables
from hsx_dist.inputs.records import RecordBatch
from hsx_dist.inputs.rows import Row, read_rows, rows_from
from tests.harness.http_server import Answers, served

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc, and a limit of memory")


def packed(folder: Path, rows: int) -> Path:
    path = folder / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"text": "row %d"}\n' % i for i in range(rows))))
    return path


def children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


@linux
def test_a_reader_that_is_killed_is_a_typed_error(tmp_path: Path) -> None:
    before = children()
    rows = read_rows(InputConfig(path=str(packed(tmp_path, 1_000_000))))
    next(rows)
    (child,) = children() - before
    os.kill(child, signal.SIGABRT)
    with pytest.raises(
        FormatError, match=r"in.jsonl.gz, after row \d+: expected .* a reader process that ended by SIGABRT"
    ):
        list(rows)
    assert children() == before


@linux
@pytest.mark.parametrize("started", [True, False])
def test_the_reader_ends_with_its_iterator(tmp_path: Path, started: bool) -> None:
    before = children()
    rows = read_rows(InputConfig(path=str(packed(tmp_path, 1_000_000))))
    if started:
        next(rows)
    assert len(children() - before) == 1
    rows.close()  # type: ignore[attr-defined]
    del rows
    assert children() == before


_FORKS = """
import multiprocessing, os, sys, time
from pathlib import Path
from hsx_dist.config import InputConfig
from hsx_dist.inputs.rows import read_rows
rows = read_rows(InputConfig(path=sys.argv[1]))
next(rows)
(child,) = (pid for t in Path("/proc/self/task").iterdir() for pid in (t / "children").read_text().split())
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
forked.start()
print(child, forked.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@linux
def test_the_reader_ends_with_its_parent_whose_forked_process_lives_on(tmp_path: Path) -> None:
    """The forked process holds the connection open."""
    command = [sys.executable, "-c", _FORKS, str(packed(tmp_path, 1_000_000))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child, forked = map(int, parent.stdout.readline().split())
        try:
            parent.wait(60)
            end = time.monotonic() + 60
            while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < end
                time.sleep(0.1)
            assert psutil.pid_exists(forked)
        finally:
            os.kill(forked, signal.SIGKILL)


def test_a_row_that_no_process_can_send_is_refused_alone(tmp_path: Path) -> None:
    spans = pa.array([None, pa.MonthDayNano([1, 2, 3])])
    with pa.ipc.new_file(tmp_path / "in.arrow", pa.schema({"text": pa.string(), "span": spans.type})) as writer:
        writer.write_table(pa.table({"text": ["a", "b"], "span": spans}))
    first, second = read_rows(InputConfig(path=str(tmp_path / "in.arrow"), metadata=["span"]))
    assert isinstance(first, Row)
    assert "cannot be read" in second.reason  # type: ignore[union-attr]


def test_an_option_that_no_process_can_be_given_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("a.jsonl", "{}")
    config = InputConfig(path=f"zip://a.jsonl::file://{tmp_path}/a.zip", storage_options={"file": lambda: "secret"})
    with pytest.raises(ConfigError, match=r"input\.storage_options\.file: .* got function"):
        read_rows(config)


#: Reads a file in a child process, which inherits a limit of its memory.
_LIMITED = """
import re, resource, sys
from hsx_dist.config import InputConfig
from hsx_dist.errors import FormatError
from hsx_dist.inputs.rows import read_rows
used = re.search(r"VmData:\\s*(\\d+) kB", open("/proc/self/status").read())[1]
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(used) + (256 << 20), hard))
try:
    list(read_rows(InputConfig(path=sys.argv[1], max_row_bytes="2GiB")))
except FormatError as e:
    print(e)
"""


@linux
def test_a_file_that_takes_too_much_memory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(b" " * (400 << 20)))
    command = [sys.executable, "-c", _LIMITED, str(tmp_path / "a.jsonl.zst")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert re.search(r"expected to read it within 68\.0 GiB of memory, got a reader process that ended", done.stdout)


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet"])
def test_a_zip_file_with_a_wrong_bit_is_broken(tmp_path: Path, name: str) -> None:
    lines = b"".join(json.dumps({"text": f"row {i}"}).encode() + b"\n" for i in range(5000))
    pq.write_table(pa.table({"text": ["a", "b"] * 1000}), tmp_path / "x.parquet", compression="none")
    data = lines if name == "in.jsonl" else (tmp_path / "x.parquet").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr(name, data)
    stored = bytearray((tmp_path / "a.zip").read_bytes())
    stored[30 + len(name) + len(data) // 2] ^= 1
    (tmp_path / "a.zip").write_bytes(stored)
    with pytest.raises(FormatError, match=r"broken compressed data .*BadZipFile"):
        list(read_rows(InputConfig(path=f"zip://{name}::{tmp_path}/a.zip")))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("path", ["zip://in.jsonl", "zip://*.jsonl", "zip://"])
def test_a_zip_file_with_two_members_of_one_name_is_refused(tmp_path: Path, path: str) -> None:
    """zipfile reads the last one alone."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("in.jsonl", '{"text": "lost"}\n')
        file.writestr("in.jsonl", '{"text": "read"}\n')
    with pytest.raises(ConfigError, match=r"expected different names in the zip file, got several"):
        list(read_rows(InputConfig(path=f"{path}::{tmp_path}/a.zip")))


def test_a_parquet_footer_that_counts_fewer_rows_is_an_error(tmp_path: Path) -> None:
    """Arrow reads as many rows as the footer says."""
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(100)]}), tmp_path / "in.parquet", row_group_size=100)
    data = (tmp_path / "in.parquet").read_bytes()
    count, fewer = b"\x16\xc8\x01", b"\x16\xc6\x01"  # 100 and 99 in Thrift's compact encoding
    config, ends = InputConfig(path=str(tmp_path / "in.parquet")), data.index(count)
    places = [i for i in range(ends, len(data)) if data.startswith(count, i)]
    for place in places:
        (tmp_path / "in.parquet").write_bytes(data[:place] + fewer + data[place + 3 :])
        with pytest.raises(FormatError, match=r"contradicting numbers of rows"):
            list(read_rows(config))
    assert len(places) == 3  # of the file, of the row group, values of the column


@pytest.fixture
def failing_server() -> Iterator[str]:
    """Serves the first quarter of a file of 20 MB."""
    row = b'{"text":"' + b"a" * 1000 + b'"}\n'
    data = row * (20_000_000 // len(row))

    class Handler(Answers):
        def do_HEAD(self) -> None:
            self.answer(200, data, Accept_Ranges="bytes")

        def do_GET(self) -> None:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-") if "Range" in self.headers else (0, 0)
            first, end = int(first), min(int(last or len(data)) + 1, len(data))
            if first > 5_000_000:
                self.answer(503, Accept_Ranges="bytes")
                return
            part = f"bytes {first}-{end - 1}/{len(data)}"
            self.answer(206, data[first:end], Accept_Ranges="bytes", Content_Range=part)

    with served(Handler) as url:
        yield url


def test_a_server_that_fails_is_unavailable_and_its_signed_url_is_not_shown(failing_server: str) -> None:
    with pytest.raises(Unavailable) as error:
        list(read_rows(InputConfig(path=f"{failing_server}/x.jsonl?X-Amz-Signature=SECRETSIG")))
    assert "ClientResponseError" in str(error.value)
    assert "SECRETSIG" not in str(error.value)
    assert error.value.__suppress_context__


class WithoutMemory:
    """A value for which there is no memory when it is read or sent."""

    def __reduce__(self) -> Any:
        raise MemoryError

    def tolist(self) -> Any:
        raise MemoryError


def test_a_lack_of_memory_ends_the_input_and_refuses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start may have the memory, but does not read a refused row again."""
    batch = RecordBatch("", "jsonl", "a", [(0, WithoutMemory())])
    with pytest.raises(MemoryError):
        reader_child._pickled(batch)
    with pytest.raises(MemoryError):
        reader_child._sendable(WithoutMemory())
    with pytest.raises(MemoryError):
        list(rows_from([WithoutMemory()], InputConfig()))

    def without_memory(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(tables, "rows_of_changed_times", without_memory)
    rows = pa.record_batch({"text": ["a"]})
    with pytest.raises(MemoryError):
        tables._records(rows, tables._Reading.of(rows.schema))
