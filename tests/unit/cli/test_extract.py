from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hsx_dist import __version__
from hsx_dist.cli import extract as extract_command
from hsx_dist.cli import main
from hsx_dist.cli.exit_codes import exit_status
from hsx_dist.config import ExtractConfig
from hsx_dist.errors import ConfigError, EngineError, Fenced, IntegrityError, NotFound, RunError, Unavailable


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main(args)
    return int(e.value.code or 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ExtractConfig]:
    """The configurations that reach the extraction, which is replaced: these tests cover the command line."""
    from hsx_dist.jobs import extract as engine_room
    from hsx_dist.observe.summary import RunSummary

    configs: list[ExtractConfig] = []

    def run_extract(config: ExtractConfig, *, base: Path | None = None) -> RunSummary:
        configs.append(config)
        print("a table")
        return RunSummary("file:///r", 3, 30, 1, 100, 60, refused=0, failed=1, conflicts=0)

    monkeypatch.setattr(engine_room, "run_extract", run_extract)
    return configs


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"hsx {__version__}\n"


@pytest.mark.parametrize("args", [[], ["nope"], ["ls"], ["extract", "--nope"], ["verify", "a", "b"]])
def test_wrong_use(args: list[str]) -> None:
    assert run(*args) == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["extract"], "output: expected a value"),
        (["extract", "--model", "m", "--output", "o"], "give --input"),
        (["extract", "--config", "not/there.yaml"], "expected a readable YAML file"),
        (["extract", "--model", "m", "--output", "o", "part_byte=3"], "did you mean part_bytes?"),
        (["extract", "--model", "m", "--output", "o", "--pool", "thread"], "'thread'"),
        (["extract", "store.storage_options.secret=hunter2"], "no credential on a command line"),
        (["extract", "--input", "https://hunter2@host/x"], "--input: expected no credential on a command line"),
        (["extract", "--output", "s3://k:hunter2/x@b"], "--output: expected no credential on a command line"),
        (["extract", "--model", "https://host/x?sig=hunter2"], "--model: expected no credential on a command line"),
        (["extract", "s3://k:hunter2/x@b"], "expected no credential on a command line"),
        (
            ["extract", "--config", "https://hunter2@host/x.yaml"],
            "--config: expected no credential on a command line",
        ),
        (["plan", "input.path=zip://a::https://u:hunter2@host/x"], "input.path: expected no credential"),
        (["doctor", "output=s3://k:hunter2/x@b"], "output: expected no credential"),
        (["export", "r", "https://u:hunter2@host/x", "--to", "vllm"], "DEST: expected no credential"),
        *(
            ([command, "s3://k:hunter2/x@b", *more], "expected no credential on a command line")
            for command, *more in (
                ("ls",),
                ("show",),
                ("cat", "k", "-o", "x.npz"),
                ("status",),
                ("verify",),
                ("gc",),
                ("rm",),
                ("top",),
                ("report",),
            )
        ),
        (["ls", "s3://b", "--storage-option", "endpoint_url=http://u:hunter2@h"], "no credential on a command line"),
        (["ls", "s3://b", "--storage-option", "endpoint_url=u:hunter2@h:9000"], "no credential on a command line"),
        (
            ["ls", "s3://b", "--storage-option", "client_kwargs.endpoint_url=//u:hunter2@h"],
            "no credential on a command",
        ),
    ],
)
def test_a_wrong_setting_is_one_message(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert "hunter2" not in err
    assert "Traceback" not in err
    assert out == ""


def test_debug_shows_the_traceback_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HSX_DEBUG", "1")
    assert run("extract", "--config", "not/there.yaml") == 2
    assert "Traceback" in capsys.readouterr().err


def test_quick_flags_over_a_file_and_overrides_over_both(asked: list[ExtractConfig], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: a\noutput: b\nlayers: all\ncodec: none\ninput: {path: c, limit: 3}\n")
    flags = ["--model", "M", "--input", "I", "--layers", "-1", "--output", "O", "--pool", "threads"]
    assert run("extract", "--config", str(tmp_path / "c.yaml"), *flags, "output=P", "engine_kwargs.dtype=float32") == 1
    (config,) = asked
    assert (config.model, config.layers, config.output, config.pool) == ("M", "-1", "P", "threads")
    assert (config.input.path, config.input.limit, config.codec) == ("I", 3, "none")
    assert config.engine_kwargs == {"dtype": "float32"}


def test_standard_output_has_only_the_json(asked: list[ExtractConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("extract", "--model", "m", "--output", "o", "--input", "i", "--json") == 1
    out, err = capsys.readouterr()
    facts: dict[str, Any] = json.loads(out)
    assert (facts["samples"], facts["failed"], facts["exit_status"]) == (3, 1, 1)
    assert "a table" in err


def test_the_jobs_entry_point_takes_the_same(
    asked: list[ExtractConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("model: a\noutput: b\ninput: {path: c}\n")
    monkeypatch.setattr("sys.argv", ["extract.py", "--config", str(tmp_path / "c.yaml"), "output=s3://b/x"])
    with pytest.raises(SystemExit) as e:
        extract_command.job_main()
    assert e.value.code == 1
    assert asked[0].output == "s3://b/x"
    monkeypatch.setattr("sys.argv", ["extract.py", "--config", "c", "--model", "m"])
    with pytest.raises(SystemExit) as e:
        extract_command.job_main()
    assert e.value.code == 2
    assert "No such option" in capsys.readouterr().err


def test_the_script_parses_no_arguments() -> None:
    script = Path(__file__).parents[3] / "ray_jobs" / "extract.py"
    assert "job_main()" in script.read_text()
    assert "argparse" not in script.read_text()


def test_the_exit_status_depends_on_the_outcome() -> None:
    assert [exit_status(e("x")) for e in (ConfigError, NotFound, RunError)] == [2, 2, 2]
    assert [exit_status(e("x")) for e in (IntegrityError, EngineError, Fenced, Unavailable)] == [1, 1, 1, 1]


def test_the_last_line_of_an_unexpected_error_names_its_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **direct: object) -> None:
        raise ZeroDivisionError(f"{args} {direct}")

    monkeypatch.setattr(extract_command, "load_config", broken)
    assert run("extract") == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("hsx: this should not happen (ZeroDivisionError)")


@pytest.mark.parametrize(
    ("address", "more", "pool"),
    [(None, [], "threads"), ("auto", [], "ray"), (None, ["--pool", "ray"], "ray"), (None, ["pool=ray"], "ray")],
)
def test_the_quick_case_needs_no_ray(
    asked: list[ExtractConfig], monkeypatch: pytest.MonkeyPatch, address: str | None, more: list[str], pool: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert run("extract", "--model", "M", "--input", "I", "--output", "O", *more) == 1
    assert asked[0].pool == pool
