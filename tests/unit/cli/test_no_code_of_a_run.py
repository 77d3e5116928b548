"""Names in a run load nothing: ``hsx report`` and ``hsx show`` decode tokens by the viewer's ``--tokenizer``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsx_dist.cli import main
from hsx_dist.jobs import decode
from hsx_dist.models.builtin import SMOLLM2
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample, random_sample
from tests.harness.runs import store_run

LARGE = (1 << 40) + 7


def hsx(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main(args)
    return int(e.value.code or 0)


def stored(path: Path, meaning: Any, ids: tuple[int, ...] = (0, 1)) -> str:
    """A run with one sample and this ``meaning`` in its ``run.json``."""
    sample = random_sample("a", len(ids), odd=False)
    made = RandomSample("a", sample.states, np.array(ids), sample.layer_ids, sample.dtype, 16)
    store_run(open_store(str(path)), [made], info={"meaning": meaning})
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder whose tokenizer has code. The code makes the file ``ran`` on import."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "world": 1}, unk_token="hello"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class Tok(PreTrainedTokenizerFast): pass\n"
    )
    mapped = {"AutoTokenizer": ["code.Tok", "code.Tok"], "AutoConfig": "code.Tok"}
    for name in ("config.json", "tokenizer_config.json"):
        about = {"tokenizer_class": "Tok", "auto_map": mapped, "model_type": "theirs"}
        (folder / name).write_text(json.dumps(about))
    return folder


def meaning_of(model: Path) -> dict[str, Any]:
    asked = {"trust_remote_code": True, "tokenizer": str(model), "code_revision": "main", "hf_overrides": {"a": 1}}
    return {"model": str(model), "layers": [2, 15, 30], "engine_kwargs": asked}


def test_a_run_whose_model_has_code_is_shown_as_ids(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(tmp_path / "run", meaning_of(model))
    page = tmp_path / "page.html"
    assert hsx("report", run, "-o", str(page)) == 0
    assert not (tmp_path / "ran").exists()
    assert "hello" not in page.read_text()
    assert "hsx report --tokenizer FOLDER_OR_ID" in page.read_text()
    capsys.readouterr()
    assert hsx("show", run, "a", "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] is None
    assert not (tmp_path / "ran").exists()


def test_the_viewers_tokenizer_is_data_and_runs_no_code(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored(tmp_path / "run", meaning_of(model), (0, 1, LARGE, -1))
    page = tmp_path / "page.html"
    assert hsx("report", run, "-o", str(page), "--tokenizer", str(model)) == 0
    assert ">hello</span>" in page.read_text()
    assert "FOLDER_OR_ID" not in page.read_text()
    capsys.readouterr()
    assert hsx("show", run, "a", "--json", "--tokenizer", str(model)) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "hello world"
    assert not (tmp_path / "ran").exists()
    for command in (["report", run, "-o", str(page)], ["show", run, "a"]):
        assert hsx(*command, "--tokenizer", str(tmp_path)) == 2
        assert "tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "meaning",
    [
        *({"model": name} for name in ("org/name", "gpt2", "../x", "/models/x", "https://127.0.0.1/x", "", None, 5)),
        {"model": SMOLLM2, "engine_kwargs": {"tokenizer": "org/name"}},
        {"model": SMOLLM2, "engine_kwargs": "tokenizer"},
        *(None, [], "model", 5),
    ],
)
def test_no_run_chooses_a_tokenizer(meaning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "load_decoder", lambda source: pytest.fail(f"loaded {source}"))
    assert decode.choose_decoder(None, {"meaning": meaning}) is None


@pytest.mark.parametrize("kwargs", [{}, {"engine_kwargs": {"trust_remote_code": True, "dtype": "float32"}}])
def test_a_run_of_the_builtin_model_is_shown_as_text(
    model: Path, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "resolve_model", lambda name: {SMOLLM2: str(model)}[name])
    found = decode.choose_decoder(None, {"meaning": {"model": SMOLLM2, **kwargs}})
    assert found is not None
    assert found([1, 0]) == "world hello"


def test_a_tokenizer_that_panics_is_a_wrong_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({"a" * 60 + "b": 0, "a": 1}))
    tokenizer.decoder = decoders.Replace(Regex("(a|aa)+$"), "x")  # too many ways to match the first word
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = decode.load_decoder(str(tmp_path))
    assert found([1]) == "x"
    with pytest.raises(decode.ConfigError, match="a tokenizer that decodes the stored ids, got PanicException"):
        found([0])


def test_a_tokenizer_of_the_hub_is_asked_for_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    import tokenizers

    asked: list[str] = []

    class Hub:
        @staticmethod
        def from_pretrained(source: str) -> None:
            asked.append(source)
            raise OSError("no network")

    monkeypatch.setattr(tokenizers, "Tokenizer", Hub)
    with pytest.raises(decode.ConfigError, match="no network"):
        decode.choose_decoder("org/name", {"meaning": {"model": "theirs"}})
    assert asked == ["org/name"]
