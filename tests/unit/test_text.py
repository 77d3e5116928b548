"""Text of clients on terminals and in logs."""

from __future__ import annotations

import json

from hsx_dist.text import MAX_REASON, ascii_json, printable, printable_lines, reason

HOSTILE = "a\x1b[2J\r\n\x7f\x9b31m\u202e\u2066\u200b\u2028\ufeff\U000e0041\ud800b"


def test_nothing_that_moves_a_cursor_or_turns_text_around_is_left():
    shown = printable(HOSTILE)
    assert shown.isprintable()
    assert shown == "a\\x1b[2J\\r\\n\\x7f\\x9b31m\\u202e\\u2066\\u200b\\u2028\\ufeff\\U000e0041\\ud800b"
    assert printable("Grüße, שלום, 日本 🙂") == "Grüße, שלום, 日本 🙂"


def test_length_has_a_limit():
    assert len(printable("x" * 5000, 80)) == 80
    assert len(reason(ValueError("x" * 5000))) == MAX_REASON


def test_a_line_break_begins_no_line_at_the_margin():
    assert printable_lines("one\ntwo\x1b") == "one\n  two\\x1b"


def test_json_is_ascii():
    text = ascii_json({"key": HOSTILE, HOSTILE: 1})
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text)["key"] == HOSTILE
