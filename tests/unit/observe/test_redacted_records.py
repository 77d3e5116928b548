"""Log lines of other libraries show no credentials, at the levels of replicas, of writers and of the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.http_server import Answers, served

SECRET = "hunter2NotToBeSeen9"

BEGIN = """
import logging, sys
from hsx_dist.observe.logs import configure_logging, redact_records
redact_records()
redact_records()
configure_logging(logging.getLevelName(sys.argv[1]), replica="0")
url = sys.argv[2]
"""


class Hub(Answers):
    """A hub that answers requests of a file with a redirect to a signed URL."""

    def do_GET(self) -> None:
        if self.path.startswith("/cdn"):
            self.answer(200, b"{}")
        else:
            to = f"http://localhost:{self.headers['Host'].rpartition(':')[2]}/cdn/x?X-Amz-Signature={SECRET}"
            facts = {"X_Repo_Commit": "a" * 40, "X_Linked_Etag": f'"{"b" * 64}"', "X_Linked_Size": "2"}
            self.answer(302, Location=to, **facts)

    do_HEAD = do_GET


@pytest.fixture
def port() -> Iterator[int]:
    with served(Hub) as url:
        yield int(url.rpartition(":")[2])


def output(program: str, level: str, url: str = "", **environment: str) -> str:
    """All output of a process of this package with this ``level`` that runs ``program``."""
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + program, level, url],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
@pytest.mark.parametrize("user", ["", f"user:{SECRET}@"])
def test_a_file_of_the_hub_is_loaded_without_its_urls_in_the_log(
    port: int, tmp_path: Path, level: str, user: str
) -> None:
    program = """
from huggingface_hub import hf_hub_download
print(open(hf_hub_download("org/model", "tokenizer.json")).read())
logging.getLogger("huggingface_hub.x").warning("%s thrown while requesting GET %s", ValueError("x"), url)
"""
    hub = f"http://{user}127.0.0.1:{port}"
    shown = output(
        program, level, f"{hub}/x?sig={SECRET}", HF_ENDPOINT=hub, HF_HOME=str(tmp_path), HF_HUB_DISABLE_XET="1",
        HF_HUB_OFFLINE="0", NO_PROXY="*",
    )  # fmt: skip
    assert SECRET not in shown
    assert "{}" in shown
    assert f"thrown while requesting GET http://127.0.0.1:{port}/x?sig=(not shown)" in shown
    assert "HTTP Request" not in shown


def test_a_debugged_command_shows_no_password_of_an_input(port: int) -> None:
    program = """
import fsspec
print(fsspec.open(url).open().read())
logging.getLogger("hsx_dist.x").debug("a line of this package")
logging.getLogger("botocore.parsers").debug("a line of another")
"""
    shown = output(program, "DEBUG", f"http://user:{SECRET}@127.0.0.1:{port}/cdn/x.jsonl")
    assert SECRET not in shown
    assert "b'{}'" in shown
    assert "a line of this package" in shown
    assert "a line of another" not in shown


def test_every_handler_shows_redacted_messages_and_tracebacks() -> None:
    program = """
library = logging.getLogger("library")
library.addHandler(logging.StreamHandler())
for log in (library, logging.getLogger("plain")):
    try:
        raise ValueError(f"no answer of {url}")
    except ValueError:
        log.exception("%s is gone, %d", url, 7)
"""
    shown = output(program, "INFO", f"https://u:{SECRET}@h/x")
    assert SECRET not in shown
    assert shown.count("https://h/x is gone, 7") == 2
    assert shown.count("ValueError: no answer of https://h/x") == 2


def test_records_of_a_librarys_class_and_their_fields_are_redacted() -> None:
    program = """
class Own(logging.LogRecord):
    pass
logging.setLogRecordFactory(Own)
redact_records.cache_clear()
redact_records()
library = logging.getLogger("library")
library.addHandler(logging.StreamHandler())
for log in (library, logging.getLogger("plain")):
    log.error("%s is gone, %d", url, 7)
library.error("sent %s %s", "Bearer", url[10:29])
logging.getLogger("plain").error("a field", extra={"key": url, "row": 3})
record = Own("plain", 40, "f", 1, "built by hand, of %s", (url,), None)
record.exc_text = f"ValueError: {url}"
logging.getLogger("plain").handle(record)
"""
    shown = output(program, "INFO", f"https://u:{SECRET}@h/x")
    assert SECRET not in shown
    assert shown.count("https://h/x is gone, 7") == 2
    assert "sent Bearer (not shown)" in shown
    assert "a field replica=0 key=https://h/x row=3" in shown
    assert "built by hand, of https://h/x" in shown
    assert "ValueError: https://h/x" in shown


#: Makes records of a class whose templates have braces.
BRACES = """
class Braces(logging.LogRecord):
    def getMessage(self):
        return str(self.msg).format(*self.args)
logging.setLogRecordFactory(Braces)
redact_records.cache_clear()
redact_records()
"""
SEEN = """
class Fields(logging.Handler):
    def emit(self, record):
        print(vars(record), type(record).__name__)
        print(logging.Formatter().format(record))
def raised():
    try:
        raise ValueError(f"no answer of {url}")
    except ValueError:
        return sys.exc_info()
from hsx_dist.logger import get_logger
own, library = get_logger("hsx_dist.x"), logging.getLogger("library")
for log in (own, library):
    log.addHandler(Fields())
    log.propagate = False
"""


@pytest.mark.parametrize("log", ["own", "library"])
def test_no_field_of_a_record_has_the_exception_or_a_raw_text(log: str) -> None:
    """Handlers that send records to a service, and JSON formatters, read the fields."""
    program = f"""{SEEN}
{log}.error("%s is gone, %d", url, 7, exc_info=raised())
{log}.error("%(place)s is gone, too", {{"place": url}})
{log}.error(f"no %s in {{url}}")
record = {log}.makeRecord({log}.name, 40, "f", 1, "a stack", (), None, sinfo=f"Stack of {{url}}")
{log}.handle(record)
"""
    shown = output(program, "INFO", f"https://u:{SECRET}@h/x")
    assert SECRET not in shown
    assert shown.count("'exc_info': None") == 3
    assert re.search(
        r"'exc_info': \(<class 'Exception'>, Exception\('Trace.*no answer of https://h/x'\), None\)", shown
    )
    assert "\nhttps://h/x is gone, 7\nTraceback" in shown
    assert "ValueError: no answer of https://h/x" in shown
    assert "\nhttps://h/x is gone, too\n" in shown
    assert "\nno %s in https://h/x\n" in shown
    assert "\nStack of https://h/x" in shown


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        ("sent Bearer %s", "url"),
        ("{'password': '%s'}", "url"),
        ("client(password=%r)", "url"),
        ("sk-%s", "url"),
        ("%(to)s has sk-%(key)s", "{'to': 'h', 'key': url}"),
        ("to %(to)s", "{'to': 'h', 'password': url}"),
        ("headers %s", "{'Authorization': url}"),
        ("hosts %s", "{'https://u:' + url + '@h': 1}"),
        ("%(password)s", "{'password': url}"),
        ("%(to)s with %(apitoken)r", "{'to': 'h', 'apitoken': url}"),
    ],
)
def test_an_argument_that_only_the_record_names_as_a_credential_is_in_no_field(template: str, arguments: str) -> None:
    shown = output(f"{SEEN}\nlibrary.error({template!r}, {arguments})\n", "INFO", SECRET + "AndSome")
    assert "'args': ()" in shown
    assert SECRET not in shown


def test_an_argument_behind_a_secrets_name_is_hidden() -> None:
    program = f"""{SEEN}
library.error("%s: %s", "Authorization", url)
library.error("%s is %r, %d", "password", [url], 7)
library.error("%s to %s", b"password", url)
library.error("%s for %r", "'password'", url.encode())
library.error("sent %s %s", "Bearer", url)
library.error("expected %s, got %s", "key", "another")
"""
    shown = output(program, "INFO", SECRET)
    assert SECRET not in shown
    assert "\nAuthorization: (not shown)\n" in shown
    assert "\npassword is (not shown), 7\n" in shown
    assert "\nb'password' to (not shown)\n" in shown
    assert "\n'password' for (not shown)\n" in shown
    assert "\nsent Bearer (not shown)\n" in shown
    assert "\nexpected key, got another\n" in shown


def test_an_argument_is_redacted_before_its_template_cuts_it() -> None:
    program = f"""{SEEN}
library.error("no answer of %.30s", url)
library.error("no answer of %(url).30s", {{"url": url}})
"""
    shown = output(program, "INFO", f"https://user:{SECRET}@h/x")
    assert SECRET[:4] not in shown
    assert shown.count("\nno answer of https://h/x\n") == 2


def test_an_error_is_redacted_before_its_template_cuts_it() -> None:
    """Its ``repr`` does not show its text."""
    program = f"""{SEEN}
class Odd(Exception):
    def __str__(self):
        return "failed: " + url
library.error("%.30s", Odd())
library.error("%(error).30s", {{"error": Odd()}})
library.error("%.30r of %s", "\\t" + url, Odd())
{BRACES}
library.error("{{!s:.30}}", Odd())
"""
    shown = output(program, "INFO", f"https://{SECRET}{'x' * 30}@h/x")
    assert SECRET[:4] not in shown
    assert shown.count("\nfailed: https://h/x\n") == 3


def test_a_record_with_wrong_arguments_is_shown_redacted() -> None:
    program = f"""{SEEN}
class Broken:
    def __repr__(self):
        raise RuntimeError(url)
for log in (own, library):
    log.handlers = [logging.StreamHandler()]
library.error("status %d", url)
library.error("of %s", Broken())
library.makeRecord("library", 40, "f", 1, "exc_info must be a tuple", (), True)
own.error("status %d", url)
"""
    shown = output(program, "INFO", f"https://u:{SECRET}@h/x")
    assert SECRET not in shown
    assert "'status %d' with wrong arguments ('https://h/x',)" in shown
    assert "a message that cannot be formatted" in shown
    assert shown.count("Arguments: ('https://h/x',)") == 1  # of this package's logger


def test_records_of_a_class_with_its_own_message_are_redacted() -> None:
    program = f"""
{BRACES}
{SEEN}
library.error("{{}} is {{}}", url, "{{gone}}")
library.error("{{}} is {{}}", 1, "2")
"""
    shown = output(program, "INFO", f"https://u:{SECRET}@h/x")
    assert SECRET not in shown
    assert "\nhttps://h/x is {gone}\n" in shown
    assert "\n1 is 2\n" in shown


def test_lines_of_one_template_are_counted_together() -> None:
    program = """
for i in range(1000):
    logging.getLogger("library").warning("try %d of %s", i, url)
    logging.getLogger("library").warning("%d?token=%s of another", i, url)
"""
    shown = output(program, "INFO", f"https://u:{SECRET}@h/x")
    assert shown.count("of https://h/x") == 10
    assert shown.count("?token=(not shown) of another") == 10
    assert SECRET not in shown


def test_processes_of_the_engine_redact_too() -> None:
    program = """
import os, subprocess
child = "import logging, sys; from hsx_dist.observe.logs import *; redact_like_parent(); logging.error(sys.argv[1])"
subprocess.run([sys.executable, "-c", child, url], check=True)
del os.environ["HSX_REDACTS_RECORDS"]
subprocess.run([sys.executable, "-c", child, url.replace("hunter2", "HUNTER3")], check=True)
"""
    shown = output(program, "INFO", f"https://u:{SECRET}@h/x")
    assert SECRET not in shown
    assert SECRET.replace("hunter2", "HUNTER3") in shown  # a user's vLLM server: its logging is the user's


def test_a_redacted_record_goes_to_another_process() -> None:
    program = """
import pickle
record = logging.getLogger("library").makeRecord("library", 30, "f", 1, "of %s", (url,), None)
print(pickle.loads(pickle.dumps(record)).getMessage())
"""
    assert output(program, "INFO", f"https://u:{SECRET}@h/x") == "of https://h/x\n"


def test_vllms_lines_are_shown_from_info_on_without_its_own_configuration() -> None:
    program = """
for name in ("vllm.x", "other", "hsx_dist.x"):
    logging.getLogger(name).info("of %s", name)
"""
    shown = output(program, "INFO")
    assert ("of vllm.x" in shown, "of other" in shown, "of hsx_dist.x" in shown) == (True, False, True)


@pytest.mark.parametrize("error", ["HsxError", "ValueError"])
def test_the_error_that_ends_a_command_is_redacted(error: str) -> None:
    program = f"""
import os, typer
from hsx_dist.cli.exit_codes import run_app
from hsx_dist.errors import HsxError
os.environ["HSX_DEBUG"] = "1"
app = typer.Typer()
@app.command()
def fail() -> None:
    raise {error}(f"no answer of {{url}}")
try:
    run_app(app, [], "hsx")
except SystemExit:
    pass
"""
    shown = output(program, "INFO", f"https://u:{SECRET}@h/x")
    assert SECRET not in shown
    assert f"{error}: no answer of https://h/x" in shown


FORMATTERS = """
import logging.config
from uvicorn.config import LOGGING_CONFIG
for formatter in LOGGING_CONFIG["formatters"].values():
    formatter["use_colors"] = True
logging.config.dictConfig(LOGGING_CONFIG)
access = logging.getLogger("uvicorn.access")
access.addFilter(lambda record: not record.args[2].startswith("/metrics"))
for path in ("/health", "/metrics", url):
    access.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", path, "1.1", 200)
colored = {"color_message": "Uvicorn running on %s://%s:%d"}
logging.getLogger("uvicorn.error").info("Uvicorn running on %s://%s:%d", "http", "0.0.0.0", 8000, extra=colored)
from ray._common.formatters import JSONFormatter
handler = logging.StreamHandler()
handler.setFormatter(JSONFormatter())
library = logging.getLogger("library")
library.addHandler(handler)
try:
    raise ValueError(f"no answer of {url}")
except ValueError:
    library.exception("died")
"""


def test_formatters_of_libraries_find_what_they_read() -> None:
    """uvicorn's unpack the arguments. Ray's writes a traceback only of a record with an exception."""
    said = output(FORMATTERS, "INFO", f"/x?to=https://user:{SECRET}@host/x")
    assert "GET /health HTTP/1.1" in said
    assert "GET /metrics" not in said
    assert "GET /x?to=" in said
    assert "Uvicorn running on http://0.0.0.0:8000" in said
    ray = json.loads(said.splitlines()[-1])
    assert "ValueError: no answer of" in ray["exc_text"]
    assert SECRET not in said
    assert "Logging error" not in said


def test_a_record_without_a_credential_stays_as_it_is() -> None:
    program = f"""{SEEN}
class Atoms(dict):
    def __missing__(self, name):
        return "-"
record = library.makeRecord("library", 40, "f", 1, {{"event": "x"}}, (), None)
assert record.msg == {{"event": "x"}} and record.args == ()
assert library.makeRecord("library", 40, "f", 1, "%(h)s %(u)s", (Atoms(h="h"),), None).getMessage() == "h -"
error = ValueError("x")
assert library.makeRecord("library", 40, "f", 1, "%s", (error,), None).args == (error,)
"""
    assert output(program, "INFO") == ""


def test_an_error_whose_text_cannot_be_made_is_logged() -> None:
    program = f"""{SEEN}
class Bad(Exception):
    def __str__(self):
        raise RuntimeError(url)
for log in (own, library):
    log.error("retry", exc_info=(Bad, Bad(), None))
"""
    shown = output(program, "INFO", f"https://u:{SECRET}@h/x")
    assert SECRET not in shown
    assert shown.count("\nretry\nBad: <exception str() failed>\n") == 2


def test_an_argument_that_logs_itself_ends() -> None:
    """If it is formatted twice at each level, each level doubles the work."""
    program = """
calls = []
class Logs:
    def __str__(self):
        calls.append(1)
        logging.getLogger("library").error("%s", self)
        return "x"
    __repr__ = __str__
sys.setrecursionlimit(200)
logging.raiseExceptions = False
logging.getLogger("library").error("%s", Logs())
print("calls", len(calls))
"""
    calls = int(output(program, "ERROR").rpartition("calls ")[2])
    assert calls < 200
