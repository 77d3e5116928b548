"""Clients' text on terminals and in logs."""

from __future__ import annotations

import ast
import json
import math
import re
import socket
import ssl
import time
import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import hsx_dist
from hsx_dist.format import json_objects
from hsx_dist.format.receipt import RowFate
from hsx_dist.inputs import row_values
from hsx_dist.page import Segment
from hsx_dist.reading import Problem
from hsx_dist.text import MAX_REASON, MAX_SHOWN, ascii_json, bounded, head, os_reason, printable, printable_lines
from tests.harness.traced_memory import trace_memory

HOSTILE = "a\x1b[2J\r\n\x7f\x9b31m\u202e\u2066\u200b\u2028\ufeff\U000e0041\ud800b"


def test_cursor_and_bidirectional_characters_are_escaped():
    shown = printable(HOSTILE)
    assert shown.isprintable()
    assert shown == "a\\x1b[2J\\r\\n\\x7f\\x9b31m\\u202e\\u2066\\u200b\\u2028\\ufeff\\U000e0041\\ud800b"
    assert printable("Grüße, שלום, 日本 🙂") == "Grüße, שלום, 日本 🙂"


def test_length_has_a_limit():
    assert len(printable("x" * 5000, 80)) == 80
    assert len(bounded(ValueError("x" * 5000))) == MAX_REASON


@pytest.mark.traced
@pytest.mark.parametrize("show", [printable, printable_lines, lambda text: Problem("p", text).message])
def test_a_stored_text_of_any_size_takes_little_memory(show):
    text = "\n\x7f" * (1 << 20)
    trace_memory()
    shown = show(text)
    peak = tracemalloc.get_traced_memory()[1]
    assert len(shown) < 8 * MAX_SHOWN
    assert peak < 32 << 20


@pytest.mark.parametrize("text", ["\U000e0001" * 5000, "a\n" * 5000, "\U000e0001" * 100, "a" * 995 + "\x1b" * 5])
def test_the_limit_counts_printed_characters(text):
    shown = bounded(text)
    assert MAX_REASON - 10 < len(shown) <= MAX_REASON
    assert printable(text).startswith(shown.removesuffix("…"))
    assert shown.endswith("…") == (len(printable(text)) > MAX_REASON)
    assert shown.removesuffix("…").encode().decode("unicode_escape") in text  # no escape is cut


@pytest.mark.parametrize("show", [lambda text: head(text, 40), row_values.shown, json_objects.shown])
def test_a_credential_is_not_shown_in_part_where_a_quoted_text_is_cut(show):
    for text in (f"admin:{'Passw0rd' * 10}@db.example.com", f"https://me:{'Passw0rd' * 10}@host/x"):
        assert "Passw0rd" not in show(text)
        assert len(show(text + "x" * (1 << 26))) <= 80  # in little time


def test_quoting_a_long_text_very_often_costs_little() -> None:
    """Redacting this text takes 0.1 s. A header may give one key to thousands of segments."""
    key = "a://b@ " * 10_000
    before = time.process_time()
    for i in range(1000):
        assert str(Segment(key, i, 0, 1, 1)).count("a://") > 3
    assert time.process_time() - before < 2


@pytest.mark.parametrize("length", [100, 1000])
def test_no_credential_is_shown_in_part_because_others_before_it_are_hidden(length: int) -> None:
    hidden = "https://me:you@h " * 200
    for before in range(80):
        text = f"{hidden[: (2 << 10) + 80 - length // 2 + before]} https://me:{'Passw0rd' * (length // 8)}@host/x"
        assert "Passw0rd" not in head(text, 80)
    assert head(f"token='{'a' * 4000}", 200)


def test_a_line_break_begins_no_line_at_the_margin():
    assert printable_lines("one\ntwo\x1b") == "one\n  two\\x1b"


@pytest.mark.parametrize("before", range(MAX_REASON - 60, MAX_REASON, 3))
def test_a_credential_is_not_shown_in_part_where_a_reason_is_cut(before):
    for secret in ("https://hunter2secret@host/x", "me:hunter2secret@host", "hf_hunter2secretAbCdEfGhIjKlMn"):
        reason = f"{'x' * before} {secret} failed"
        assert "hunter" not in bounded(reason)
        assert "hunter" not in RowFate("k", 0, "failed", reason, 1).reason


def test_json_is_ascii():
    text = ascii_json({"key": HOSTILE, HOSTILE: 1})
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text)["key"] == HOSTILE


def test_numbers_of_other_libraries_are_numbers_in_json():
    values = {"i": np.int64(3), "f": np.float32(0.5), "d": Fraction(1, 4), "n": np.float32("nan"), "x": math.inf}
    assert json.loads(ascii_json(values)) == {"i": 3, "f": 0.5, "d": 0.25, "n": None, "x": None}


PACKAGE = Path(hsx_dist.__file__).parent
#: Only these modules write to a terminal or make a logger.
MAY_PRINT, MAY_LOG = {"observe/console.py"}, {"logger.py"}
SHOWN = [p for p in sorted(PACKAGE.rglob("*.py")) if "testing" not in p.parts]


@pytest.mark.parametrize("path", SHOWN, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_all_printed_and_logged_text_is_escaped(path):
    name = path.relative_to(PACKAGE).as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "rich.console":
            assert {alias.name for alias in node.names} <= {"Group"}, f"{path}: use observe.console.Console"
        if not isinstance(node, ast.Call):
            continue
        call = ast.unparse(node.func)
        if name not in MAY_PRINT:
            banned = call in ("print", "typer.echo", "click.echo", "traceback.print_exc", "rich.print")
            assert not banned, f"{path}:{node.lineno}: use observe.console.say"
            assert not call.startswith(("sys.stdout.write", "sys.stderr.write")), f"{path}:{node.lineno}"
        if call == "logging.getLogger" and name not in MAY_LOG:
            assert ast.unparse(node) != "logging.getLogger(__name__)", f"{path}:{node.lineno}: use logger.get_logger"


#: The text of an error or a value, and of a process, before redaction.
RAW = re.compile(r"^(str|repr)\(|\bstderr\b|\bread_text\(")
#: The log compares the beginnings of messages.
MAY_CUT = {"observe/logs.py"}


@pytest.mark.parametrize("path", SHOWN, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_a_text_is_redacted_before_it_is_cut(path):
    if path.relative_to(PACKAGE).as_posix() in MAY_CUT:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Slice):
            continue
        if "len(" not in ast.unparse(node.slice) and ast.unparse(node.slice) != "1:-1":  # without quotes
            cut = ast.unparse(node.value)
            assert not RAW.search(cut) or re.search(r"\b(head|redacted|redact_text)\(", cut), f"{path}:{node.lineno}"


def test_a_segment_in_a_message_is_redacted_before_it_is_cut() -> None:
    """A token that is cut in the middle is not recognized."""
    secret = "hf_" + "AbCdEfGh1jKlMnOpQrStUvWxYz012345"
    assert secret[:10] not in str(Segment("s" * 58 + " " + secret, 0, 0, 1, 1))


def test_no_module_cuts_a_text_that_it_quotes() -> None:
    """``head`` redacts first."""
    cuts = re.compile(r"\{[^{}]*\[:\d+\]!")
    lines = [
        (path.name, line)
        for path in Path(hsx_dist.__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if cuts.search(line) and "redact_text(" not in line and "data[:24]" not in line  # bytes of an object
    ]
    assert lines == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(22, "a server's text"), "Invalid argument"),
        (OSError(404, "a server's text"), "OSError"),
        (OSError("a server's text"), "OSError"),
        (ConnectionRefusedError(111, "Connect call failed ('h', 1)"), "Connection refused"),
        (ssl.SSLError(1, "a server's text"), "SSLError"),
        (socket.gaierror(-2, "a name"), "gaierror"),
        (ValueError("a server's text"), "ValueError"),
    ],
)
def test_the_reason_of_an_error_is_not_its_own_text(error: Exception, reason: str) -> None:
    assert os_reason(error) == reason


def test_only_errors_of_local_files_show_their_text() -> None:
    """``strerror`` of an error of fsspec may be megabytes of a server's answer."""
    folder = Path(hsx_dist.__file__).parent
    own = re.compile(r"\.strerror\b(?!\()")
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if own.search(path.read_text())} == {
        "config/loading.py",
        "connector/locks.py",
        "exporting/export.py",
        "model_parts/model_files.py",
        "models/builtin.py",
        "models/weights.py",
        "reading/object_lock.py",
        "store/folder_listing.py",
        "store/folders.py",
        "store/local.py",
        "store/output_file.py",
    }
