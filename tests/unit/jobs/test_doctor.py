"""The doctor's findings for a machine, a configuration and a store, each with one fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hsx_dist.cli import main
from hsx_dist.config import load_config
from hsx_dist.errors import ConfigError
from hsx_dist.jobs import diagnosis, doctor
from hsx_dist.jobs.diagnosis import Diagnosis, machine_limits, probe_store
from hsx_dist.jobs.doctor import check_input, check_model, check_required, examine
from hsx_dist.jobs.doctor_engine import Agreement, judge
from hsx_dist.store import Store
from hsx_dist.testing.stores import MemoryStore


def config(model: Any = "org/name", **settings: Any) -> Any:
    return load_config(None, **{"output": "memory://doctor/x", "model": str(model), "pool": "threads", **settings})


def state(checks: Any, name: str) -> str:
    return {c.name: c.state for c in checks}[name]


def test_this_machine_is_fit() -> None:
    found = list(examine(None))
    assert not [c for c in found if c.state == "fail"]
    assert {"vllm", "ray", "torch", "safetensors", "transformers", "shared memory"} <= {c.name for c in found}


def test_versions_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm": "0.12.1", "ray": "2.70.0", "torch": "2.1.0", "safetensors": "0.7.0"}
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda p: versions.get(p) or version(p))
    monkeypatch.setattr(doctor.preflight, "installed", lambda p: versions[p])
    found = {c.name: c for c in doctor.check_packages(True)}
    assert {n: found[n].state for n in versions} == {
        "vllm": "fail",
        "ray": "warn",
        "torch": "fail",
        "safetensors": "fail",
    }
    assert f"expected >= {doctor.preflight.LOWEST['vllm']}, got 0.12.1" in found["vllm"].message
    assert "expected >=0.8 for hsx-dist, got 0.7.0" in found["safetensors"].message
    assert check_required("hsx-nothing-of-that-name", ("vllm",)).state == "fail"


def test_memory_that_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "MIN_SHM_BYTES", 1 << 60)
    monkeypatch.setattr(diagnosis, "_available_memory", lambda: 1000)
    monkeypatch.setattr(diagnosis.resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    found = {c.name: c for c in machine_limits(1 << 20, has_gpu=True)}
    assert {n: c.state for n, c in found.items()} == {
        "shared memory": "warn",
        "locked memory": "warn",
        "memory": "fail",
    }
    assert "--shm-size" in found["shared memory"].message
    assert "locked memory" not in {c.name for c in machine_limits(1 << 20, has_gpu=False)}


def test_inputs(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n{"text": ""}\n')
    assert check_input(config(input={"path": str(path)})).state == "warn"
    assert check_input(config(input={"path": str(path), "limit": 1})).state == "ok"
    path.write_text('{"prompt": "a"}\n')
    wrong = check_input(config(input={"path": str(path)}))
    assert wrong.state == "fail"
    assert "expected exactly one of the fields text" in wrong.message
    assert state(examine(config(input={"path": str(tmp_path / "nothing")})), "input") == "fail"


def test_models(tiny_model_path: Path, tmp_path: Path) -> None:
    found = check_model(config(tiny_model_path, layers=[1, "last"]))
    assert [c.state for c in found] == ["ok", "ok"]
    assert "layers [1, 4] of 0…4" in found[0].message
    assert "LlamaForCausalLM supports hidden states" in found[1].message
    assert state(examine(config(tiny_model_path, layers=[9])), "model") == "fail"
    assert state(examine(config(tmp_path)), "model") == "fail"


def test_a_model_whose_class_gives_no_states(tiny_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for file in tiny_model_path.iterdir():
        if file.suffix == ".json" or file.suffix == ".jinja":
            (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    about = json.loads((tmp_path / "m" / "config.json").read_text())
    for architecture, expected in (("MambaForCausalLM", "fail"), ("NobodysForCausalLM", "warn")):
        (tmp_path / "m" / "config.json").write_text(json.dumps({**about, "architectures": [architecture]}))
        support = check_model(config(tmp_path / "m", layers=[1]))[1]
        assert support.state == expected, support
        assert architecture in support.message


class Forgetful(MemoryStore):
    """Overwrites although the put is conditional."""

    def put_if_absent(self, name: str, data: Any) -> None:
        self.put(name, [data])


def test_a_store_that_does_not_keep_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[Store] = [MemoryStore(), Forgetful()]
    monkeypatch.setattr(diagnosis, "open_store", lambda *_, **__: stores[0])
    assert "put-if-absent" in probe_store(config())
    assert list(stores[0].list("")) == []  # no object is left
    stores.pop(0)
    with pytest.raises(ConfigError, match="two drivers could own one run"):
        probe_store(config())
    assert list(stores[0].list("")) == []


def test_a_store_that_cannot_be_reached(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = list(examine(config(output=str(blocked / "run"))))
    assert state(found, "store") == "fail"


@pytest.mark.parametrize(
    ("right", "wrong", "dtype", "expected"),
    [
        (1e-4, 3.0, "float32", "ok"),
        (0.02, 3.0, "bfloat16", "ok"),
        (0.02, 3.0, "float32", "fail"),
        (2.0, 3.0, "bfloat16", "fail"),
        (float("nan"), 3.0, "bfloat16", "fail"),
        (1e-4, 2e-4, "float32", "warn"),
    ],
)
def test_the_engines_word_is_judged(right: float, wrong: float, dtype: str, expected: str) -> None:
    assert judge(Agreement(100, right, 2 * right, wrong), dtype, 30).state == expected


def test_the_command_says_a_line_a_check_and_fails(
    tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    settings = {"model": tiny_model_path, "output": tmp_path / "run", "layers": 1, "pool": "threads"}
    lines = [*(f"{name}: {value}" for name, value in settings.items()), f"input: {{path: {tmp_path}/in.jsonl}}"]
    (tmp_path / "c.yaml").write_text("\n".join(lines))
    for arguments, status in (([], 0), (["layers=[9]"], 1)):
        with pytest.raises(SystemExit) as e:
            main(["doctor", "--config", str(tmp_path / "c.yaml"), *arguments])
        assert e.value.code == status
        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith("ok    store: ") for line in lines)
        assert any(line.startswith("FAIL  model: layers: expected ids") for line in lines) == bool(status)
    with pytest.raises(SystemExit) as e:
        main(["doctor", "--json", "--config", str(tmp_path / "c.yaml")])
    assert json.loads(capsys.readouterr().out)["ok"] is True
    for given in (["--report", str(tmp_path)], ["--engine", "--report", str(tmp_path), "layers=1"]):
        with pytest.raises(SystemExit) as e:
            main(["doctor", *given])
        assert e.value.code == 2


def test_an_engine_is_not_started_after_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hsx_dist.jobs.doctor_engine.measure", lambda _: pytest.fail("an engine was started"))
    found = list(examine(config(tmp_path), engine=True))
    assert found[-1] == Diagnosis(
        "engine", "warn", "was not started, because an earlier check failed. Correct that first"
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_no_check_shows_credentials_of_a_librarys_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    def refuse(_: Any) -> Any:
        raise ConfigError("model: expected an answer, got 401 for https://user:SECRET@hub/x")

    monkeypatch.setattr(doctor.preflight, "examine_model", refuse)
    with pytest.raises(SystemExit):
        main(["doctor", "model=org/x", "output=/nowhere", "pool=threads", *(["--json"] if as_json else [])])
    shown = capsys.readouterr().out
    assert "got 401 for https://hub/x" in shown
    assert "SECRET" not in shown


def test_a_node_with_other_versions(tmp_path: Path) -> None:
    from hsx_dist.jobs.doctor_nodes import examine_node, versions

    made = config(output=str(tmp_path / "run"))
    assert state(examine_node(made, {}, False, versions()), "versions") == "ok"
    (other,) = [c for c in examine_node(made, {}, False, "Python 3.9, hsx 0.0.1") if c.name == "versions"]
    assert other.state == "fail"
    assert "expected the driver's versions, Python 3.9, hsx 0.0.1, got Python" in other.message


def test_a_cuda_build_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: "0.32.0")
    monkeypatch.setattr(doctor.Path, "exists", lambda _: False)
    first = next(iter(doctor.check_machine(config())))
    assert (first.name, first.state) == ("gpu", "warn")
