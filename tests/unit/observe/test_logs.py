"""Log lines: their subject, as text and as JSON, and limits for repeated lines."""

from __future__ import annotations

import io
import json
import logging
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from hsx_dist.logger import _Shown, get_logger
from hsx_dist.observe.logs import OFTEN, WINDOW_S, NotSoOften, Structured, shown_elsewhere


def record(message: str = "part of %d segments", *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("hsx_dist.x", logging.WARNING, __file__, 1, message, args, None)
    made.__dict__.update(extra)
    return made


def test_a_log_line_has_its_fields():
    line = Structured({"run": "s3://b/r", "writer": "n0w0"}).format(record("lost %d", 3, part="data/p 1"))
    assert line.endswith('Z WARNING hsx_dist.x lost 3 run=s3://b/r writer=n0w0 part="data/p 1"')
    line = Structured({"run": "s3://b/r", "replica": "0", "rank": "1"}).format(record("copied", key="k"))
    assert line.endswith("Z WARNING hsx_dist.x copied run=s3://b/r replica=0 rank=1 key=k")


def test_a_clients_key_makes_no_second_line_and_no_other_field():
    line = Structured().format(record("x", key='a" writer=w\n2026 ERROR'))
    assert "\n" not in line
    assert line.endswith('key="a\\" writer=w\\n2026 ERROR"')


def test_json_lines_hold_the_same():
    try:
        raise ValueError("why")
    except ValueError as e:
        made = record("lost %d", 3, key="k")
        made.exc_info = (type(e), e, e.__traceback__)
    line = json.loads(Structured({"replica": "1"}, as_json=True).format(made))
    assert (line["level"], line["message"], line["replica"], line["key"]) == ("WARNING", "lost 3", "1", "k")
    assert "ValueError: why" in line["traceback"]


def test_repeated_lines_are_counted_and_left_out():
    now = 0.0
    often = NotSoOften(lambda: now)
    assert sum(often.filter(record("lost %d", i)) for i in range(1000)) == OFTEN
    assert often.filter(record("another message"))
    now = WINDOW_S
    again = record("lost %d", 1)
    assert often.filter(again)
    assert f"lost 1 (and {1000 - OFTEN} similar lines were left out)" in Structured().format(again)
    assert sum(often.filter(record("lost %d", i)) for i in range(1000)) == OFTEN - 1


def test_lines_that_a_library_prints_are_not_logged_again():
    library, quiet = logging.getLogger("hsx_test_library"), logging.getLogger("hsx_test_quiet")
    own = logging.StreamHandler()
    library.addHandler(own)
    quiet.addHandler(logging.NullHandler())
    try:
        for name, elsewhere in (("hsx_test_library.http", True), ("hsx_test_quiet.http", False), ("hsx_dist.x", False)):
            made = record()
            made.name = name
            assert shown_elsewhere(made) is elsewhere
    finally:
        library.removeHandler(own)


HOSTILE = "\x1b[2J\nfake\x9b\u202e\x7f"


def lines_of(name: str, log_it) -> list[str]:
    """The output of a handler with a plain formatter for one of this package's loggers, as inside vLLM's server."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    log = get_logger(name)
    log.addHandler(handler)
    try:
        log_it(log)
    finally:
        log.removeHandler(handler)
    return out.getvalue().rstrip("\n").split("\n")


def test_a_clients_text_is_escaped_in_every_kind_of_log_line():
    key = f"k{HOSTILE}"
    for log_it in (
        lambda log: log.warning("of %s, %r, %d", key, key, 3),
        lambda log: log.warning("of %(key)s", {"key": key}),
        lambda log: log.error("because %s", ValueError(key)),
        lambda log: log.error("in %s", [key]),
    ):
        (line,) = lines_of("hsx_test_escaped", log_it)
        assert line.isprintable(), ascii(line)
        assert "fake" in line
    (line,) = lines_of("hsx_test_escaped", lambda log: log.warning("of %s", "x" * 1_000_000))
    assert len(line) < 3000


@pytest.mark.parametrize(
    "arguments",
    [
        ("password", "hunter2"),
        ("db/password", "hunter2"),
        (b"password", b"hunter2"),
        ("Authorization", ["hunter2"]),
        ({"password": "hunter2"},),
    ],
)
def test_this_packages_loggers_hide_an_argument_behind_a_secrets_name(arguments: tuple[object, ...]) -> None:
    template = "%(password)s and %(password)r" if len(arguments) == 1 else "%s has %s"
    (line,) = lines_of("hsx_test_escaped", lambda log: log.warning(template, *arguments))
    assert "(not shown)" in line
    assert "hunter2" not in line
    (line,) = lines_of("hsx_test_escaped", lambda log: log.warning("%s has %d rows of %s", "token_ids", 3, "text"))
    assert line == "token_ids has 3 rows of text"
    place, error = "s3://team-secrets/run", OSError("disk full")
    (line,) = lines_of("hsx_test_escaped", lambda log: log.warning("%s: %s", place, error))
    assert line == "s3://team-secrets/run: disk full"


def test_numbers_of_other_libraries_are_numbers_in_a_line():
    for number in (np.int64(7), np.uint8(7), np.float32(7), torch.tensor(7), Decimal(7), Fraction(7)):
        (line,) = lines_of("hsx_test_escaped", lambda log, n=number: log.warning("%d rows, %.1f", n, n))
        assert line == "7 rows, 7.0"
        (line,) = lines_of("hsx_test_escaped", lambda log, n=number: log.warning("%(n)05d", {"n": n}))
        assert line == "00007"
    (line,) = lines_of("hsx_test_escaped", lambda log: log.warning("%x", np.int64(255)))
    assert line == "ff"
    with pytest.raises(TypeError):
        logging.LogRecord("x", 30, "", 1, "%d", (_Shown("12", str),), None).getMessage()


def test_a_traceback_keeps_its_lines_and_nothing_else():
    def raise_it(log: logging.Logger) -> None:
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            log.exception("of %s", HOSTILE)

    lines = lines_of("hsx_test_escaped", raise_it)
    assert len(lines) > 3
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("fake") for line in lines)


def test_lines_of_other_libraries_are_escaped_by_our_format():
    for as_json in (False, True):
        line = Structured({"run": f"r{HOSTILE}"}, as_json=as_json).format(record(f"x{HOSTILE}", key=HOSTILE))
        assert all(part.isprintable() for part in line.split("\n")), ascii(line)
        assert not any(part.startswith("fake") for part in line.split("\n"))
        assert "fake" in line
        if as_json:
            assert line.isascii()
            assert json.loads(line)["key"] == HOSTILE
