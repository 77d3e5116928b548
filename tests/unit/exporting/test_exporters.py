"""Every exporter against its trainer's documented schema, and against the model's own norm and head."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from hsx_dist import open_run
from hsx_dist.errors import ConfigError, FormatError
from hsx_dist.exporting import Exporter, ExportOptions, SampleLeftOut, export_run, register_exporter
from hsx_dist.exporting.export import EXPORTERS, exporter_of
from hsx_dist.exporting.specforge import DFlashExporter
from hsx_dist.exporting.vllm import VllmExporter
from hsx_dist.format.names import part_name
from hsx_dist.format.place import open_place, start_run
from hsx_dist.format.runs import load_manifest
from hsx_dist.jobs.ledger import RowLedger
from hsx_dist.model_parts.model_end import ModelEnd
from hsx_dist.models.tiny import tiny_llama
from hsx_dist.page import Segment, object_name, token_hash
from hsx_dist.reading import Run
from hsx_dist.reading.garbage import remove_run
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample, random_sample
from tests.harness.runs import RunWriter, store_run, whole

LAYERS, N, H = (2, 4, 5, 8), 8, 64


def mask_of(sample: RandomSample) -> dict[str, np.ndarray[Any, Any]]:
    return {"loss_mask": (np.arange(len(sample.token_ids)) >= 3).astype(np.int8)}


SAMPLES = [
    random_sample(f"conv/{i}", 6 + i, layer_ids=LAYERS, hidden_size=H, dtype="float32", seed=i, odd=False)
    for i in range(5)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, the loaded model). The final norm changes its input."""
    from transformers import AutoModelForCausalLM

    folder = tiny_llama(tmp_path_factory.mktemp("m") / "tiny", layers=N, kv_heads=2)
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        made.model.norm.weight.copy_(torch.linspace(0.5, 2, H))
    made.save_pretrained(folder)
    return folder, made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Run:
    store = open_store(str(tmp_path_factory.mktemp("run") / "run"))
    info = {"meaning": {"model": str(model[0]), "layers": list(LAYERS)}}
    store_run(store, SAMPLES, per_part=2, attached=mask_of, info=info, about={"num_hidden_layers": N})
    return open_run(store.url)


def states(sample: RandomSample) -> torch.Tensor:
    return torch.from_numpy(sample.states.view(np.float32))


def statement(dest: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((dest / "export.json").read_text())
    return said


def test_vllm_is_a_plain_file_a_sample(run: Run, tmp_path: Path) -> None:
    assert export_run(run, "vllm", tmp_path).written == 5
    for sample in SAMPLES:
        got = load_file(tmp_path / f"{sample.key.replace('/', '%2F')}.safetensors")
        assert torch.equal(got["hidden_states"], states(sample))
        assert torch.equal(got["token_ids"], torch.from_numpy(sample.token_ids))
        assert got["loss_mask"].tolist() == (mask_of(sample)["loss_mask"] != 0).tolist()


def test_specforge_eagle3_has_the_last_state_after_the_norm(run: Run, model: Any, tmp_path: Path) -> None:
    export_run(run, "specforge-eagle3", tmp_path, ExportOptions(model=str(model[0])))
    for i, sample in enumerate(SAMPLES):
        got = torch.load(tmp_path / "rows_0-2000" / f"data_{i}.ckpt")
        assert set(got) == {"input_ids", "loss_mask", "aux_hidden_state", "hidden_state"}
        assert got["input_ids"].tolist() == sample.token_ids.tolist()
        assert got["loss_mask"].tolist() == mask_of(sample)["loss_mask"].tolist()
        assert got["aux_hidden_state"].shape == (1, len(sample.token_ids), 3 * H)
        assert torch.equal(got["aux_hidden_state"][0], states(sample)[:, :3].flatten(1))
        with torch.no_grad():
            assert torch.equal(got["hidden_state"][0], model[1].model.norm(states(sample)[:, 3]))
    said = statement(tmp_path)
    # SpecForge's default for N = 8: [1, N/2-1, N-4], counted after a layer.
    assert said["aux_layers"] == [2, 4, 5]
    assert said["aux_layers_counted_after"] == [1, N // 2 - 1, N - 4]
    assert "after the final RMSNorm" in said["last_state"]


def test_specforge_dflash_takes_any_layers_and_the_last_if_asked(run: Run, model: Any, tmp_path: Path) -> None:
    export_run(run, "specforge-dflash", tmp_path / "a", ExportOptions(aux_layers=(5, 2)))
    got = torch.load(tmp_path / "a" / "rows_0-2000" / "data_3.ckpt")
    assert set(got) == {"input_ids", "loss_mask", "hidden_states"}
    assert torch.equal(got["hidden_states"][0], states(SAMPLES[3])[:, [2, 0]].flatten(1))
    export_run(run, "specforge-dflash", tmp_path / "b", ExportOptions(with_last=True, model=str(model[0])))
    got = torch.load(tmp_path / "b" / "rows_0-2000" / "data_3.ckpt")
    with torch.no_grad():
        assert torch.equal(got["target_last_hidden_states"][0], model[1].model.norm(states(SAMPLES[3])[:, 3]))


def test_modelopt_has_the_last_state_after_the_norm_in_plain_tensors(run: Run, model: Any, tmp_path: Path) -> None:
    export_run(run, "modelopt", tmp_path, ExportOptions(model=str(model[0])))
    for sample in SAMPLES:
        path = tmp_path / f"{sample.key.replace('/', '%2F')}.pt"
        got = torch.load(path, weights_only=True)
        assert set(got) == {"input_ids", "loss_mask", "aux_hidden_states", "hidden_states"}
        assert got["input_ids"].tolist() == sample.token_ids.tolist()
        assert (got["loss_mask"].dtype, got["loss_mask"].tolist()) == (torch.int64, [*mask_of(sample)["loss_mask"]])
        assert torch.equal(got["aux_hidden_states"], states(sample)[:, :3].flatten(1))
        with torch.no_grad():
            assert torch.equal(got["hidden_states"], model[1].model.norm(states(sample)[:, 3]))
    said = statement(tmp_path)
    assert said["aux_layers_counted_after"] == [1, 3, 4]  # ModelOpt's default for 8 layers
    assert "after the final RMSNorm" in said["last_state"]


def test_a_torch_file_has_its_tensors_and_nothing_else_of_the_memory_that_they_are_part_of(
    run: Run, tmp_path: Path
) -> None:
    export_run(run, "specforge-dflash", tmp_path, ExportOptions(aux_layers=(2,)))
    for i, sample in enumerate(SAMPLES):
        path = tmp_path / "rows_0-2000" / f"data_{i}.ckpt"
        assert path.stat().st_size < len(sample.token_ids) * (4 * H + 16) + 3000
        for tensor in torch.load(path).values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_specforge_dspark_is_dflash_with_the_last_state(run: Run, model: Any, tmp_path: Path) -> None:
    export_run(run, "specforge-dspark", tmp_path / "a", ExportOptions(model=str(model[0])))
    export_run(run, "specforge-dflash", tmp_path / "b", ExportOptions(model=str(model[0]), with_last=True))
    for i in range(len(SAMPLES)):
        one, other = (torch.load(tmp_path / d / "rows_0-2000" / f"data_{i}.ckpt") for d in "ab")
        assert set(one) == {"input_ids", "loss_mask", "hidden_states", "target_last_hidden_states"}
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("to", ["modelopt", "specforge-dflash", "specforge-dspark"])
def test_the_last_layer_and_a_repeated_one_are_no_auxiliary_layers(to: str, run: Run, tmp_path: Path) -> None:
    for aux, why in (
        ((2, N), r"auxiliary layers below 8, got \[2"),
        ((2, 4, 2), r"each auxiliary layer once, got \[2"),
    ):
        with pytest.raises(ConfigError, match=why):
            export_run(run, to, tmp_path, ExportOptions(aux_layers=aux))


def test_a_sample_that_the_trainer_refuses_is_left_out_once_and_counted(tmp_path: Path) -> None:
    masks = [(1, 0, 1, 0, 1, 0), (0, 1, 1, 0, 0, 0, 0), (0,) * 8]

    def mask(sample: RandomSample) -> dict[str, np.ndarray[Any, Any]]:
        return {"loss_mask": np.array(masks[SAMPLES.index(sample)], np.int8)}

    store, dest = open_store(str(tmp_path / "run")), tmp_path / "out"
    store_run(store, SAMPLES[:3], attached=mask, about={"num_hidden_layers": N})
    first = export_run(open_run(store.url), "specforge-dflash", dest, shard=0, shards=3)
    assert (first.written, first.there, first.left_out, first.finished) == (0, 0, 1, False)
    rest = export_run(open_run(store.url), "specforge-dflash", dest)
    assert (rest.written, rest.there, rest.left_out, rest.finished) == (1, 0, 2, True)
    again = export_run(open_run(store.url), "specforge-dflash", dest)
    assert (again.written, again.there, again.left_out, again.finished) == (0, 1, 2, True)
    names = sorted(p.name for p in (dest / "rows_0-2000").iterdir())
    assert names == ["data_0.ckpt.left-out", "data_1.ckpt", "data_2.ckpt.left-out"]
    assert "'conv/0': expected two consecutive tokens" in (dest / "rows_0-2000" / names[0]).read_text()


def test_a_sample_is_not_left_out_with_its_neighbours(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise SampleLeftOut("this sample has no tokens")

    monkeypatch.setattr(DFlashExporter, "per_file", 2)
    monkeypatch.setattr(DFlashExporter, "write", refuse)
    with pytest.raises(SampleLeftOut):
        export_run(run, "specforge-dflash", tmp_path)
    assert not list(tmp_path.rglob("*.left-out")) + list(tmp_path.rglob(".new-*"))


@pytest.mark.parametrize("to", EXPORTERS)
def test_every_statement_names_the_layers_the_norm_and_the_mask(to: str, run: Run, model: Any, tmp_path: Path) -> None:
    options = {"aux_layers": (5,), "context": 1} if to == "saelens" else {}
    exported = routed(tmp_path) if to == "routing" else run
    export_run(exported, to, tmp_path / "out", ExportOptions(model=str(model[0]), **options), shard=0, shards=2)
    said = statement(tmp_path / "out")
    assert said["loss_mask"]
    words = json.dumps(said)
    assert "norm" in words.replace(said["layer_ids"], "").lower()
    assert "layer" in words.replace(said["layer_ids"], "").replace("layer_ids", "")


def test_teacher_logprobs_equal_those_of_the_model(
    run: Run, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("hsx_dist.model_parts.model_end.avoid_amx", lambda: asked.append(True))
    options = ExportOptions(top_k=7, samples_per_file=2, model=str(model[0]))
    assert export_run(run, "topk-logprobs", tmp_path, options).written == 3
    assert asked  # before the first matrix product, which can crash the process in bf16
    assert sorted(p.name for p in tmp_path.glob("*.parquet")) == [f"data-{i:06d}.parquet" for i in range(3)]
    rows = [row for p in sorted(tmp_path.glob("*.parquet")) for row in pq.read_table(p).to_pylist()]
    for row, sample in zip(rows, SAMPLES, strict=True):
        with torch.no_grad():
            logits = model[1].lm_head(model[1].model.norm(states(sample)[:, 3])).float()
        top = torch.log_softmax(logits, -1).topk(7)
        assert row["key"] == sample.key
        assert row["input_ids"] == sample.token_ids.tolist()
        assert row["completion_mask"] == mask_of(sample)["loss_mask"].tolist()
        assert row["teacher_topk_ids"] == top.indices.tolist()
        assert np.allclose(row["teacher_topk_logprobs"], top.values.numpy(), atol=1e-5)


def test_a_key_that_is_no_valid_unicode_is_refused_for_parquet(model: Any, tmp_path: Path) -> None:
    sample = random_sample("k\ud800", 4, layer_ids=LAYERS, hidden_size=H, dtype="float32")
    store = open_store(str(tmp_path / "run"))
    store_run(store, [sample], about={"num_hidden_layers": N})
    with pytest.raises(ConfigError, match=r"key 'k\\ud800': expected valid Unicode"):
        export_run(open_run(store.url), "topk-logprobs", tmp_path / "out", ExportOptions(model=str(model[0])))
    assert export_run(open_run(store.url), "vllm", tmp_path / "vllm").finished


def test_the_loader_of_speculators_reads_the_exported_files(run: Run, tmp_path: Path) -> None:
    from speculators.train.data import ArrowDataset, CollateFn

    export_run(run, "speculators", tmp_path, ExportOptions(aux_layers=(2, 4, 5)))
    dataset = ArrowDataset(64, tmp_path, on_missing="raise", hidden_states_dtype=torch.float32)
    assert dataset.approx_lengths == [len(s.token_ids) for s in SAMPLES]
    items = [dataset[i] for i in range(5)]
    for item, sample in zip(items, SAMPLES, strict=True):
        assert torch.equal(item["hidden_states"], states(sample)[:, :3].flatten(1))
        assert torch.equal(item["verifier_last_hidden_states"], states(sample)[:, 3])
        assert item["input_ids"].tolist() == sample.token_ids.tolist()
        assert item["loss_mask"].tolist() == mask_of(sample)["loss_mask"].tolist()
    batch = CollateFn(64, H, dtype=torch.float32)(items[:3])
    assert batch["hidden_states"].shape == (1, 64, 3 * H)
    assert batch["error_records"] == 0


@pytest.mark.parametrize(
    ("to", "options", "name"),
    [
        ("topk-logprobs", ExportOptions(top_k=7), "data-000000.parquet"),
        ("saelens", ExportOptions(aux_layers=(2,), context=6), "data-00000.arrow"),
        ("speculators", ExportOptions(aux_layers=(2,)), "data-00000-of-00001.arrow"),
    ],
)
def test_rows_that_are_in_memory_together_are_bounded_by_bytes(
    to: str, options: ExportOptions, name: str, run: Run, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample may have few or many bytes. The files have the same rows in other groups."""
    options = replace(options, model=str(model[0]))

    def groups_of(dest: str) -> list[pa.Table]:
        export_run(run, to, tmp_path / dest, options)
        if name.endswith(".parquet"):
            file = pq.ParquetFile(tmp_path / dest / name)
            return [file.read_row_group(i) for i in range(file.num_row_groups)]
        return [pa.table(batch) for batch in pa.ipc.open_stream((tmp_path / dest / name).read_bytes())]

    [whole_file] = groups_of("whole")
    monkeypatch.setattr("hsx_dist.reading.groups.GROUP_BYTES", 100)
    alone = groups_of("alone")
    assert [len(group) for group in alone] == [1] * 5
    assert pa.concat_tables(alone).equals(whole_file)


@pytest.mark.parametrize("to", ["speculators", "saelens"])
def test_a_finished_data_set_is_not_written_again(
    to: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer may have it open, and a killed call would leave it shorter."""
    options = ExportOptions(aux_layers=(2, 4, 5)) if to == "speculators" else ExportOptions(aux_layers=(2,), context=4)

    def state() -> dict[str, tuple[int, int]]:
        return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in tmp_path.iterdir() if p.is_file()}

    exporter = exporter_of(to)
    finish = exporter.finish

    def killed(self: Any, run: Run, new: Path) -> None:
        finish(self, run, new)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(exporter, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            export_run(run, to, tmp_path, options)
    assert not (tmp_path / "state.json").exists()
    (tmp_path / f".finish-{'0' * 32}").mkdir()
    assert export_run(run, to, tmp_path, options).finished
    before = state()
    assert "state.json" in before
    assert not list(tmp_path.glob(".finish-*"))
    monkeypatch.setattr(exporter, "finish", lambda *_: pytest.fail("written again"))
    assert export_run(run, to, tmp_path, options).finished
    assert state() == before


def test_a_run_that_cannot_serve_a_trainer_is_refused_with_the_layers(run: Run, tmp_path: Path) -> None:
    for to, options, named in (
        ("specforge-eagle3", ExportOptions(aux_layers=(1, 4, 6)), r"without \[1, 6\]"),
        ("specforge-eagle3", ExportOptions(aux_layers=(2, 4)), "three auxiliary layers"),
        ("topk-logprobs", ExportOptions(num_layers=9), "expected num_layers 8, as in its parts, got 9"),
        ("specforge-eagle3", ExportOptions(num_layers=7), "expected num_layers 8, as in its parts, got 7"),
        ("nonsense", ExportOptions(), "speculators"),
        ("topk-logprobs", ExportOptions(model=str(tmp_path)), r"config\.json"),
    ):
        with pytest.raises(ConfigError, match=named):
            export_run(run, to, tmp_path / "x", options)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "stored",
    [
        *(
            "a model's folder",
            "/models/secret",
            "./secret",
            "../secret",
            "~/secret",
            "a/b/c",
            "https://127.0.0.1/x",
            "file:///x",
            "a..b",
        ),
        *("org/../x", "-x", "builtin:other", "org/name\n", "", None),
    ],
)
def test_a_run_names_no_file_of_this_machine(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: Any
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **_: pytest.fail(f"loaded {a}"))
    stored = str(model[0]) if stored == "a model's folder" else stored
    store = open_store(str(tmp_path / "run"))
    store_run(store, SAMPLES[:1], info={"meaning": {"model": stored}}, about={"num_hidden_layers": N})
    for to in ("topk-logprobs", "specforge-eagle3"):
        with pytest.raises(ConfigError, match="--model"):
            export_run(open_run(store.url), to, tmp_path / "out")


def test_a_run_of_the_hub_downloads_weights_and_no_code(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(model[0])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    def export(meaning: dict[str, Any], dest: str, **options: Any) -> None:
        store = open_store(str(tmp_path / f"run-{dest}"))
        store_run(store, SAMPLES[:1], info={"meaning": meaning}, about={"num_hidden_layers": N})
        export_run(open_run(store.url), "topk-logprobs", tmp_path / dest, ExportOptions(**options))

    stored = {"model": "org/name", "engine_kwargs": {"trust_remote_code": True, "code_revision": "theirs"}}
    export({**stored, "revision": "v1.0"}, "a")
    export({"model": "gpt2"}, "b")
    # Only safetensors and JSON: neither a pickle nor a module of the model's repository is downloaded.
    both = ("*.json", "*.safetensors")
    assert asked == [(name, at, [of]) for name, at in (("org/name", "v1.0"), ("gpt2", "main")) for of in both]
    for i, revision in enumerate(("../../x", "/x", "-x", 5, "a\nb")):
        with pytest.raises((ConfigError, FormatError), match=r"revision"):
            export({**stored, "revision": revision}, f"c{i}")
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"also a path here.*--model \./org/name"):
        export(stored, "d")
    assert len(asked) == 4


def test_a_model_without_safetensors_is_refused_and_its_pickle_not_read(
    run: Run, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "load", lambda *a, **_: pytest.fail(f"loaded {a}"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((model[0] / "config.json").read_text())
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    options = ExportOptions(model=str(folder))
    with pytest.raises(ConfigError, match="in its safetensors files"):
        export_run(run, "topk-logprobs", tmp_path / "a", options)
    weights = {"model.norm.weight": "../elsewhere.safetensors", "lm_head.weight": "pytorch_model.bin"}
    for name in weights:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: weights[name]}}))
        with pytest.raises(ConfigError, match="expected safetensors files next to it"):
            export_run(run, "topk-logprobs", tmp_path / name, options)


@pytest.mark.parametrize(
    ("file", "changed", "message"),
    [
        pytest.param("config.json", "[" * 100_000, "expected JSON, got an error", id="levels"),
        ("config.json", "[1]", "expected a JSON object"),
        ("config.json", '{"rms_norm_eps": 1e-5, "rms_norm_eps": 1e-5}', "duplicate names"),
        pytest.param("config.json", '{"x": [' + "[]," * 600_000 + "[]]}", "at most 1000000 JSON values", id="values"),
        ("config.json", b"\xff", "expected JSON, got an error"),
        ("config.json", {"text_config": [1]}, "text_config: expected an object"),
        ("config.json", {"text_config": {"rms_norm_eps": "1"}}, "rms_norm_eps: expected a number"),
        ("config.json", {"model_type": 5}, "model_type: expected a string"),
        *(("config.json", {"rms_norm_eps": eps}, "rms_norm_eps: ") for eps in (0, -1e-5, 1e300, float("nan"), True)),
        *(("config.json", {"logits_scaling": x}, "logits_scaling: ") for x in (0, float("inf"), 1e-320, 10**400, "1")),
        ("config.json", {"final_logit_softcapping": 0.0}, "final_logit_softcapping: "),
        ("model.safetensors.index.json", {"weight_map": ["a"]}, "weight_map: expected an object"),
        ("model.safetensors.index.json", {"weight_map": {"a": 5}}, "weight_map: expected an object"),
        ("model.safetensors.index.json", {}, "in its safetensors files"),
        ("model.safetensors.index.json", {"weight_map": {"lm_head.weight": "no.safetensors"}}, "FileNotFoundError"),
        (
            "model.safetensors.index.json",
            {"weight_map": {"lm_head.weight": "\ud800.safetensors"}},
            "UnicodeEncodeError",
        ),
        ("model.safetensors", b"x" * 100, "expected a whole safetensors file"),
        ("lm_head.weight", torch.ones(512, H + 1), r"of shape \[V, 64\] .* got \[512, 65\] F32"),
        ("lm_head.weight", torch.ones(512, 1), r"got \[512, 1\] F32"),
        ("lm_head.weight", torch.ones(0, H), r"got \[0, 64\] F32"),
        ("lm_head.weight", torch.ones(512, H, dtype=torch.int32), "got .* I32"),
        ("model.norm.weight", torch.ones(1), r"of shape \[64\] .* got \[1\] F32"),
        ("model.norm.weight", torch.ones(H, H), r"got \[64, 64\] F32"),
        ("model.norm.weight", torch.ones(H, dtype=torch.float8_e4m3fn), "got .* F8_E4M3"),
    ],
)
def test_a_hostile_models_files_are_typed_errors(
    run: Run, model: Any, tmp_path: Path, file: str, changed: Any, message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model[0], folder)
    if isinstance(changed, torch.Tensor):
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, file: changed}, folder / "model.safetensors")
    elif isinstance(changed, dict):
        before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps({**before, **changed}))
    else:
        (folder / file).write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    with pytest.raises((ConfigError, FormatError), match=message):
        export_run(run, "topk-logprobs", tmp_path / "out", ExportOptions(model=str(folder)))


def test_infinity_in_a_configuration_is_taken_and_logits_are_held_within_a_budget(
    run: Run, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "time_step_limit": [0.0, float("inf")]}))
    monkeypatch.setattr("hsx_dist.model_parts.model_end._LOGITS_BYTES", 3 * 512 * 4)
    parts = list(ModelEnd(run, str(folder)).logits(torch.ones(8, H)))
    assert [tuple(part.shape) for part in parts] == [(3, 512), (3, 512), (2, 512)]


def test_an_export_resumes_and_another_export_in_its_folder_is_refused(run: Run, tmp_path: Path) -> None:
    report = export_run(run, "vllm", tmp_path, shard=0, shards=2)
    assert (report.written, report.there, report.finished) == (3, 0, False)
    assert not list(tmp_path.glob("**/.new-*"))
    report = export_run(run, "vllm", tmp_path)
    assert (report.written, report.there, report.finished) == (2, 3, True)
    assert export_run(run, "vllm", tmp_path).written == 0
    with pytest.raises(ConfigError, match="layers"):
        export_run(run, "vllm", tmp_path, ExportOptions(aux_layers=(2,)))


@pytest.mark.parametrize("suffix", ["", ".left-out"])
def test_files_without_a_statement_are_not_counted_as_done(run: Run, tmp_path: Path, suffix: str) -> None:
    name = f"{object_name(run.keys()[1])}.safetensors"
    foreign = tmp_path / f"{name}{suffix}"
    foreign.write_bytes(b"other")
    with pytest.raises(ConfigError, match=f"got {name}"):
        export_run(run, "vllm", tmp_path)
    assert list(tmp_path.iterdir()) == [foreign]
    foreign.unlink()
    (tmp_path / "notes.txt").touch()  # files of other names are no part of an export
    for shard in range(2):
        assert export_run(run, "vllm", tmp_path, shard=shard, shards=2).finished == (shard == 1)


def test_keys_that_differ_in_case_are_refused_on_a_disk_that_stores_them_as_one_file(tmp_path: Path) -> None:
    store_run(open_store(str(tmp_path / "run")), [random_sample(key, 3, seed=i) for i, key in enumerate("aAb")])
    run = open_run(str(tmp_path / "run"))
    assert export_run(run, "vllm", tmp_path / "dest").written == 3
    other = tmp_path / "other"
    other.mkdir()
    (other / "EXPORT.JSON").touch()  # such a disk has this name too
    with pytest.raises(ConfigError, match=r"distinguishes case, got 'a.safetensors' and 'A.safetensors'"):
        export_run(run, "vllm", other)


@pytest.mark.parametrize("to", ["specforge-eagle3", "specforge-dspark", "modelopt", "topk-logprobs"])
def test_the_last_layer_is_the_models_and_one_export_has_one(to: str, model: Any, tmp_path: Path) -> None:
    """Samples alone, the model's configuration, or an earlier shard contradict a wrong number of layers."""
    stores = [open_store(str(tmp_path / name)) for name in ("told", "untold")]
    for store, about in zip(stores, ({"num_hidden_layers": N}, {}), strict=True):
        store_run(store, SAMPLES, about=about, info={"meaning": {"layers": list(LAYERS)}})
    told, untold = (open_run(store.url) for store in stores)
    layers = (2, 4, 2) if to == "specforge-eagle3" else (2, 4)

    def export(run: Run, num_layers: int, folder: Path, shard: int = 0) -> None:
        options = ExportOptions(num_layers=num_layers, aux_layers=layers, model=str(folder))
        export_run(run, to, tmp_path / "out", options, shard=shard, shards=2)

    with pytest.raises(ConfigError, match=f"expected num_layers {N}, as in its parts, got 5"):
        export(told, 5, model[0])
    with pytest.raises(ConfigError, match=f"expected a model of 5 layers, as the run's, got one of {N}"):
        export(untold, 5, model[0])
    folder = tmp_path / "model"
    shutil.copytree(model[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "num_hidden_layers"}))
    export(untold, N, folder)
    with pytest.raises(ConfigError, match="got an export with other"):
        export(untold, 5, folder, shard=1)


@pytest.mark.parametrize("links", [True, False])
def test_an_export_that_was_stopped_before_its_first_file_goes_on(
    links: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No space is left when ``export.json`` is written."""

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError

    if not links:  # as on some FUSE file systems
        monkeypatch.setattr(os, "link", refused)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, usual[1]))
    try:
        with pytest.raises(ConfigError, match=r"folder that can be written, got: File too large\. Free some space"):
            export_run(run, "vllm", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert not list(tmp_path.iterdir())
    assert export_run(run, "vllm", tmp_path).finished
    assert not list(tmp_path.rglob(".new-*"))
    with pytest.raises(ConfigError, match="layers"):
        export_run(run, "vllm", tmp_path, ExportOptions(aux_layers=(2,)))


@pytest.mark.parametrize("to", ["vllm", "modelopt", "topk-logprobs", "speculators"])
def test_a_disk_that_is_full_after_export_json_is_an_error_with_the_folders_name(
    to: str, run: Run, model: Any, tmp_path: Path
) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, usual[1]))
    try:
        with pytest.raises(ConfigError, match=f"{tmp_path}: expected a folder that can be written, got: .*too large"):
            export_run(run, to, tmp_path, ExportOptions(model=str(model[0])))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["export.json"]


def test_a_destination_that_is_no_folder_is_an_error_with_its_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for dest in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"{dest}: expected a folder that can be written, got: "):
            export_run(run, "vllm", dest)


@pytest.mark.parametrize("to", ["modelopt", "topk-logprobs"])
def test_shards_of_an_export_use_one_version_of_the_model(to: str, run: Run, model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model[0], folder)
    options = ExportOptions(aux_layers=(2, 4), model=str(folder))
    export_run(run, to, tmp_path / "out", options, shard=0, shards=2)
    [weights] = folder.glob("*.safetensors")
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    with pytest.raises(ConfigError, match="got an export with other"):
        export_run(run, to, tmp_path / "out", options, shard=1, shards=2)


def test_a_model_that_differs_from_the_runs_is_logged(model: Any, tmp_path: Path, caplog: Any) -> None:
    store = open_store(str(tmp_path / "run"))
    store_run(store, SAMPLES, info={"meaning": {"weights": "0" * 64}})
    ModelEnd(open_run(store.url), str(model[0]))
    assert "its files differ from those of the model of" in caplog.text


def test_a_finished_export_has_no_half_files_that_a_trainer_would_read(run: Run, tmp_path: Path) -> None:
    half = tmp_path / f".new-{'0' * 32}" / ("0" * 32) / "data_0.ckpt"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    (tmp_path / ".new-chapter.tex").write_bytes(b"not of an export")
    assert not export_run(run, "specforge-dflash", tmp_path, shard=0, shards=2).finished
    assert half.exists()  # another process may be writing it
    assert export_run(run, "specforge-dflash", tmp_path, shard=1, shards=2).finished
    assert [path.name for path in tmp_path.rglob(".new-*")] == [".new-chapter.tex"]
    assert sorted(path.name for path in tmp_path.rglob("*.ckpt")) == [f"data_{i}.ckpt" for i in range(len(SAMPLES))]


def test_an_export_writes_and_deletes_through_no_link(run: Run, tmp_path: Path) -> None:
    victim, dest = tmp_path / "victim", tmp_path / "dest"
    (victim / ("0" * 32)).mkdir(parents=True)
    dest.mkdir()
    subfolder = dest / "rows_0-2000"
    subfolder.symlink_to(victim)
    with pytest.raises(ConfigError, match=r"rows_0-2000: expected a folder, got a link"):
        export_run(run, "specforge-dflash", dest)
    subfolder.unlink()
    unfinished = dest / f".new-{'0' * 32}"
    unfinished.symlink_to(victim)
    assert export_run(run, "specforge-dflash", dest).finished
    assert unfinished.is_symlink()
    assert [path.name for path in victim.iterdir()] == ["0" * 32]


@pytest.mark.parametrize(
    ("to", "method", "samples"),
    [
        ("specforge-dflash", "write", "rows_0-2000/data_{}.ckpt"),
        ("topk-logprobs", "write", "data-{:06d}.parquet"),
        ("speculators", "finish", "hidden_states/hs_{}.safetensors"),
    ],
)
def test_a_neighbour_who_replaces_unfinished_names_redirects_no_write(
    to: str, method: str, samples: str, run: Run, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination is a group's folder, in which neighbours rename and make all names."""
    home, dest = tmp_path / "home", tmp_path / "dest"
    home.mkdir(mode=0o700)
    (home / "id_rsa").write_text("private")
    inner = getattr(exporter_of(to), method)

    def replacing(exporter: Exporter, given: Any, path: Path) -> None:
        for left in [*dest.rglob(".new-*"), *dest.rglob(".finish-*")]:
            if not left.is_symlink():
                link = home if left.is_dir() else home / "id_rsa"
                left.rename(tmp_path / f"moved{left.name}")
                left.symlink_to(link)
        inner(exporter, given, path)

    monkeypatch.setattr(exporter_of(to), method, replacing)
    assert export_run(run, to, dest, ExportOptions(model=str(model[0]), samples_per_file=1)).finished
    assert {path.name: path.read_text() for path in home.iterdir()} == {"id_rsa": "private"}
    assert not [path for path in dest.rglob("[!.]*") if path.is_symlink()]
    assert all((dest / samples.format(i)).stat().st_size > 1000 for i in range(len(SAMPLES)))
    assert method == "write" or (dest / "state.json").exists()


@pytest.mark.parametrize("to", ["vllm", "modelopt", "speculators", "topk-logprobs"])
def test_all_files_of_an_export_have_the_mode_of_the_umask(to: str, run: Run, model: Any, tmp_path: Path) -> None:
    """safetensors makes files that other users of a group could not read."""
    before = os.umask(0o027)
    try:
        export_run(run, to, tmp_path, ExportOptions(model=str(model[0])))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()} == {0o640}


def test_a_finished_export_removes_folders_of_killed_exports_alone(run: Run, tmp_path: Path) -> None:
    for name in (f".finish-{'0' * 32}", ".finish-line"):
        (tmp_path / name).mkdir(mode=0o700)
    assert export_run(run, "saelens", tmp_path, ExportOptions(aux_layers=(5,), context=1)).finished
    assert [path.name for path in tmp_path.glob(".finish-*")] == [".finish-line"]


@pytest.mark.parametrize("written", [True, False])
def test_writing_a_file_that_another_process_finished_does_not_fail(
    written: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = VllmExporter.write

    def finished_meanwhile(exporter: VllmExporter, items: Iterable[dict[str, Any]], path: Path) -> None:
        for left in tmp_path.glob(".new-*"):
            shutil.rmtree(left)
        if written:
            (tmp_path / path.name).write_bytes(b"of the other process")
        write(exporter, items, path)

    monkeypatch.setattr(VllmExporter, "write", finished_meanwhile)
    if written:
        assert export_run(run, "vllm", tmp_path).finished
    else:
        with pytest.raises(ConfigError, match="No such file"):
            export_run(run, "vllm", tmp_path)


def test_an_export_does_not_go_on_with_another_run_at_the_same_place(tmp_path: Path) -> None:
    root, dest = open_store(str(tmp_path / "run")), tmp_path / "dest"
    store_run(root, SAMPLES, version=1)
    export_run(open_run(root.url), "vllm", dest, shard=0, shards=2)
    said = statement(dest)
    later = ("run_id", "samples_hash", "samples_per_file")
    (dest / "export.json").write_text(json.dumps({k: v for k, v in said.items() if k not in later}))
    assert export_run(open_run(root.url), "vllm", dest).there > 0  # started by an earlier version
    (dest / "export.json").write_text(json.dumps(said))
    remove_run(root, open_place(root))
    store_run(root, SAMPLES)
    for there in (said, {k: v for k, v in said.items() if k != "run_id"}):  # an earlier version opens no such run
        (dest / "export.json").write_text(json.dumps(there))
        with pytest.raises(ConfigError, match="run_id"):
            export_run(open_run(root.url), "vllm", dest)


@pytest.mark.parametrize("again", ["other samples", "other tokens", "the same", "a copy"])
def test_an_export_does_not_go_on_when_its_numbers_mean_other_samples(again: str, tmp_path: Path) -> None:
    """A part is lost, and a resume declares it lost. The run has as many samples as before."""
    root, dest = open_store(str(tmp_path / "run")), tmp_path / "dest"
    writer = store_run(root, SAMPLES[:2], per_part=1, about={"num_hidden_layers": N})
    export_run(open_run(root.url), "specforge-dflash", dest, shard=1, shards=2)
    resumed = RunWriter(root, about={"num_hidden_layers": N})
    ledger = RowLedger(writer.store, resumed.attempt, load_manifest(writer.store))
    ledger.declare_lost([] if again == "a copy" else [part_name(writer.attempt, "w", 1)])
    ledger.flush()
    other = replace(SAMPLES[0], token_ids=SAMPLES[0].token_ids + 1)
    sample, row = {"other samples": (SAMPLES[2], 2), "other tokens": (other, 0)}.get(again, (SAMPLES[0], 0))
    resumed.put([whole(sample, row)])
    resumed.complete()
    run = open_run(root.url)
    assert len(run) == 2
    if again in ("the same", "a copy"):
        assert export_run(run, "specforge-dflash", dest).finished
    else:
        with pytest.raises(ConfigError, match=r"an export with other \['samples_hash'\]"):
            export_run(run, "specforge-dflash", dest)


@pytest.mark.parametrize("cut", [(2,), (3,), ()])
def test_an_export_goes_on_when_a_lost_sample_is_stored_again_in_other_segments(
    cut: tuple[int, ...], tmp_path: Path
) -> None:
    """An attempt with another block size cuts the same tokens at other positions."""

    def cuts(place: int, *at: int) -> list[tuple[RandomSample, Segment, int]]:
        sample = SAMPLES[place]
        known = token_hash(sample.token_ids)
        return [(sample, replace(s, sample_hash=known), place) for s in sample.segments(*at)]

    root, dest = open_store(str(tmp_path / "run")), tmp_path / "dest"
    start_run(root, {"meaning": {"layers": list(LAYERS)}})
    first = RunWriter(root)
    lost = first.put(cuts(0, 2))
    first.put(cuts(1, 2))
    first.complete()
    began = open_run(root.url)
    export_run(began, "vllm", dest, shard=1, shards=2)
    said = statement(dest)
    if cut == (2,):  # an earlier version began the export
        assert said["samples_hash"] != began.index.digest(cuts=True)
        (dest / "export.json").write_text(json.dumps({**said, "samples_hash": began.index.digest(cuts=True)}))
    resumed = RunWriter(root)
    ledger = RowLedger(first.store, resumed.attempt, load_manifest(first.store))
    ledger.declare_lost([str(lost.part)])
    ledger.flush()
    resumed.put(cuts(0, *cut))
    resumed.complete()
    assert export_run(open_run(root.url), "vllm", dest).finished


def test_the_digest_of_selected_tokens_covers_the_tokens_of_the_row(tmp_path: Path) -> None:
    """Of a mean no token is stored, and of ``last`` one token, which most rows share."""

    def digests(of: str) -> tuple[str, str]:
        root = open_store(str(tmp_path / of))
        start_run(root, {"meaning": {"layers": list(LAYERS)}})
        writer = RunWriter(root)
        row_hash = token_hash(np.frombuffer(of.encode(), np.uint8).astype(np.int64))
        writer.put([(SAMPLES[0], replace(SAMPLES[0].segments()[0], sample_hash=row_hash), 0)])
        index = open_run(root.url).index
        return index.digest(), index.digest(cuts=True)

    assert digests("a text") != digests("the corrected text")
    assert digests("one more")[1] == ""  # the hash of earlier versions proves nothing


def test_an_export_does_not_go_on_with_another_number_of_samples_in_a_file(
    run: Run, model: Any, tmp_path: Path
) -> None:
    options = ExportOptions(samples_per_file=2, model=str(model[0]))
    export_run(run, "topk-logprobs", tmp_path, options, shard=0, shards=2)
    with pytest.raises(ConfigError, match="samples_per_file"):
        export_run(run, "topk-logprobs", tmp_path, replace(options, samples_per_file=1))


def test_an_export_waits_for_another_one_to_say_what_the_folder_holds(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards begin together: one sees the file that another has created and not yet written."""
    export_run(run, "vllm", tmp_path / "other", shard=0, shards=2)
    statement = tmp_path / "export.json"
    statement.touch()
    monkeypatch.setattr(
        "hsx_dist.exporting.export.time.sleep",
        lambda _: statement.write_text((tmp_path / "other" / "export.json").read_text()),
    )
    assert export_run(run, "vllm", tmp_path, shard=0, shards=2).written == 3
    statement.write_text("")
    monkeypatch.undo()
    monkeypatch.setattr("hsx_dist.exporting.export._STATEMENT_S", 0.1)
    with pytest.raises(ConfigError, match="empty or damaged"):
        export_run(run, "vllm", tmp_path)


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_an_export_reads_no_export_json_that_is_a_link_or_a_fifo(kind: str, run: Run, tmp_path: Path) -> None:
    export_run(run, "vllm", tmp_path / "other")
    (tmp_path / "dest").mkdir()
    statement = tmp_path / "dest" / "export.json"
    if kind == "link":
        statement.symlink_to(tmp_path / "other" / "export.json")
    else:
        os.mkfifo(statement)
    with pytest.raises(ConfigError, match=r"got: (Too many levels|not a regular file)"):
        export_run(run, "vllm", tmp_path / "dest")
    assert [path.name for path in (tmp_path / "dest").iterdir()] == ["export.json"]


def test_samples_that_an_exporter_does_not_read_are_in_no_other_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class First(Exporter):
        per_file, layers = 2, (2,)

        def __init__(self, run: Run, options: ExportOptions) -> None: ...

        def file(self, first: int) -> str:
            return f"{first}.txt"

        def write(self, items: Iterable[dict[str, Any]], path: Path) -> None:
            path.write_text(next(iter(items))["key"])

        def finish(self, run: Run, new: Path) -> None: ...

        def statement(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr("hsx_dist.exporting.export.EXPORTERS", {"first": First})
    export_run(run, "first", tmp_path)
    assert {p.name: p.read_text() for p in tmp_path.glob("*.txt")} == {
        f"{i}.txt": SAMPLES[i].key for i in range(0, len(SAMPLES), 2)
    }


def test_samples_without_a_mask_can_be_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    store_run(store, SAMPLES[:1], about={"num_hidden_layers": N})
    with pytest.raises(ConfigError, match=r"Set loss_mask to 'ones', leave out --require-loss-mask, or store masks$"):
        export_run(open_run(store.url), "vllm", tmp_path / "out", ExportOptions(loss_mask="raise"))


def test_layers_of_another_type_are_refused() -> None:
    for layers in (["last"], "last", 5, [1.5], [None]):
        with pytest.raises(ConfigError, match=r"^aux_layers: expected"):
            ExportOptions(aux_layers=layers)  # type: ignore[arg-type]


def test_the_exporter_that_the_documentation_writes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    known = dict(EXPORTERS)
    monkeypatch.setattr("hsx_dist.exporting.export.EXPORTERS", known)
    exec(compile(code, "extending.md", "exec"), {"__name__": "value_head_exporter"})
    export_run(run, "value-head", tmp_path)
    for sample in SAMPLES:
        got = np.load(tmp_path / f"{sample.key.replace('/', '%2F')}.npz")
        assert np.array_equal(got["states"], states(sample)[:, 3])
        assert got["mask"].tolist() == (mask_of(sample)["loss_mask"] != 0).tolist()
        assert got["input_ids"].tolist() == sample.token_ids.tolist()
    exporter = known.pop("value-head")
    named = SimpleNamespace(load=lambda: exporter)
    monkeypatch.setattr(
        "hsx_dist.exporting.export.entry_points",
        lambda group, name: [named] if (group, name) == ("hsx_dist.exporters", "value-head") else [],
    )
    assert export_run(run, "value-head", tmp_path).there == len(SAMPLES)
    with pytest.raises(ConfigError, match="expected one of"):
        export_run(run, "nobodys", tmp_path)
    with pytest.raises(ConfigError, match="expected a new name"):
        register_exporter("vllm", object)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [["a", 2], [2, "last"], "all"])
@pytest.mark.parametrize("to", ["speculators", "specforge-eagle3"])
def test_a_run_without_samples_whose_layers_are_no_ids_is_a_typed_error(
    tmp_path: Path, layers: object, to: str
) -> None:
    start_run(open_store(str(tmp_path / "run")), {"meaning": {"model": "x", "layers": layers}, "settings": {}})
    run = open_run(str(tmp_path / "run"))
    assert run.layer_ids == ()
    with pytest.raises(ConfigError):
        export_run(run, to, tmp_path / "out", ExportOptions(num_layers=8))


@pytest.mark.parametrize("to", ["modelopt", "topk-logprobs", "specforge-eagle3", "vllm"])
@pytest.mark.parametrize("what", ["width", "ids", "negative"])
def test_samples_of_another_width_or_other_ids_are_refused(tmp_path: Path, model: Any, to: str, what: str) -> None:
    other = random_sample("x", 6, layer_ids=LAYERS, hidden_size=1, dtype="float32", odd=False)
    if what == "ids":
        other = replace(SAMPLES[1], key="x", token_ids=SAMPLES[1].token_ids + 2**40)
    if what == "negative":  # allowed for a mean over tokens only
        other = replace(SAMPLES[1], key="x", states=SAMPLES[1].states[:1], token_ids=np.array([-1]))
    store_run(open_store(str(tmp_path / "run")), [SAMPLES[0], other])
    options = ExportOptions(model=str(model[0]), num_layers=N, aux_layers=(2, 4, 5))
    expected = "rows of 64 elements .*, got 1" if what == "width" else "token ids from 0"
    with pytest.raises(FormatError, match=f"'x': expected {expected}"):
        export_run(open_run(str(tmp_path / "run")), to, tmp_path / "out", options)


def routed(
    folder: Path, key: str = "a", *, ids: str = "int32", weights: str = "float32", width: int = 2, meta: Any = None
) -> Run:
    """A run of experts and weights of these dtypes, with ``width`` weights per token and layer."""
    store = open_store(str(folder / "run"))
    start_run(store, {"meaning": {}, "settings": {}})
    made = [
        random_sample(key, 6, layer_ids=(3,), hidden_size=n, dtype="float32" if of == "int32" else of, odd=False)
        for n, of in ((2, ids), (width, weights))
    ]
    if ids == "int32":
        made[0] = replace(made[0], states=made[0].states % 64, dtype=ids)
    tokens = made[0].token_ids
    meta = meta or {}
    facts = [{"point": point, "column": i, "meta": meta} for i, point in enumerate(("topk_ids", "topk_weights"))]
    RunWriter(store).put(
        [
            (replace(s, token_ids=tokens), replace(s.segments()[0], columns=2, sample_hash=token_hash(tokens), **f), 0)
            for s, f in zip(made, facts, strict=True)
        ]
    )
    return open_run(store.url)


@pytest.mark.parametrize("weights", ["bfloat16", "float16", "float32"])
def test_routing_writes_weights_of_any_float_dtype(tmp_path: Path, weights: str) -> None:
    import pyarrow.parquet as pq

    run = routed(tmp_path, weights=weights)
    export_run(run, "routing", tmp_path / "out")
    table = pq.read_table(tmp_path / "out" / "data-000000.parquet").to_pydict()
    points = run["a"].load(points=["topk_ids", "topk_weights"], framework="numpy")["points"]
    assert np.array_equal(table["routed_experts"][0], points["topk_ids"])
    assert np.array_equal(np.array(table["routed_weights"][0], np.float32), points["topk_weights"].astype(np.float32))


@pytest.mark.parametrize(
    ("facts", "error", "expected"),
    [
        ({"width": 4}, FormatError, "expected a weight for each of 2 experts, got 4"),
        ({"width": 1}, FormatError, "expected a weight for each of 2 experts, got 1"),
        ({"ids": "float32"}, FormatError, "expected topk_ids in the router's dtype, got torch.float32"),
        ({"key": "k\ud800"}, ConfigError, "expected valid Unicode"),
    ],
)
def test_routing_refuses_points_that_are_not_of_routers(
    tmp_path: Path, facts: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        export_run(routed(tmp_path, **facts), "routing", tmp_path / "out")


#: The token selections that ``select`` writes into ``meta``: loss_mask, mean, stride:2, last and a range.
SELECTIONS: list[dict[str, Any]] = [
    {"loss_mask": True, "of": 90},
    {"mean": True, "of": 90},
    {"start": 0, "step": 2, "of": 14},
    {"start": 89, "step": 1, "of": 90},
]


def selected(folder: Path, chosen: object) -> Run:
    """A run whose second sample stores the tokens that ``chosen`` describes."""
    store = open_store(str(folder / "run"))
    start_run(store, {"meaning": {"layers": list(LAYERS)}, "settings": {}})
    second = SAMPLES[1]
    if isinstance(chosen, dict) and "mean" in chosen:
        second = replace(second, states=second.states[:1], token_ids=np.array([-1]))
    of = [{}, {"tokens": chosen}]
    stored = [
        (s, replace(s.segments()[0], meta=meta), i)
        for i, (s, meta) in enumerate(zip((SAMPLES[0], second), of, strict=True))
    ]
    RunWriter(store, about={"num_hidden_layers": N}).put(stored)
    return open_run(store.url)


@pytest.mark.parametrize("to", [name for name in EXPORTERS if name != "routing"])  # its test has a run of experts
def test_a_selection_of_tokens_is_refused_where_the_trainer_needs_whole_samples(
    to: str, model: Any, tmp_path: Path
) -> None:
    layers = {"aux_layers": (5,), "context": 1} if to == "saelens" else {"aux_layers": (2, 4, 5)}
    options = ExportOptions(model=str(model[0]), samples_per_file=1, **layers)  # type: ignore[arg-type]
    for i, chosen in enumerate(SELECTIONS):
        run, dest = selected(tmp_path / f"{i}", chosen), tmp_path / f"out{i}"
        if to in ("vllm", "saelens"):
            assert export_run(run, to, dest, options).finished
            continue
        with pytest.raises(ConfigError, match="'conv/1': expected a whole sample, got a selection of its tokens"):
            export_run(run, to, dest, options)
        assert len([p for p in dest.rglob("*") if p.is_file()]) == 2  # export.json and the first sample's file
    beginning = selected(tmp_path / "first", {"start": 0, "step": 1, "of": 90})
    assert export_run(beginning, to, tmp_path / "out", options).finished


def test_routing_refuses_a_selection_of_tokens_before_it_claims_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a whole sample"):
        export_run(routed(tmp_path, meta={"tokens": SELECTIONS[0]}), "routing", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["top_k", "samples_per_file", "context"])
def test_exporters_refuse_counts_of_zero_and_texts(name: str) -> None:
    for value in (0, "x"):
        with pytest.raises(ConfigError, match=f"{name}: expected an integer of at least 1, got {value!r}"):
            ExportOptions(**{name: value})  # type: ignore[arg-type]


def test_a_run_without_samples_raises_a_typed_error(tmp_path: Path) -> None:
    store_run(open_store(str(tmp_path / "run")), [], info={"meaning": {"layers": [5]}})
    with pytest.raises(ConfigError, match=r"expected layer 5 of hidden_states .* the run has no samples"):
        export_run(open_run(str(tmp_path / "run")), "saelens", tmp_path / "out")
