"""ModelOpt and SpecForge, the real packages, on this project's exports. ``make trainers`` has their environment.

A trainer's step on the files gives the same loss as its step on the activations of a transformers model in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import modelopt.torch.speculative as mtsp
import pytest
import torch
from modelopt.torch.speculative.eagle.default_config import default_eagle_config
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
from specforge.algorithms.builtin import builtin_algorithm_registry
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel, OnlineDominoModel, OnlineDSparkModel
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.modeling.draft.domino import DominoDraftModel
from specforge.modeling.draft.dspark import DSparkDraftModel
from specforge.runtime.contracts import TrainBatch
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from transformers import Qwen3Config

from hsx_dist.exporting import ExportOptions, export_run
from hsx_dist.reading.run import Run
from tests.harness.activations import (
    AFTER,
    HIDDEN,
    NUM_LAYERS,
    SAMPLES,
    TOKENS,
    VOCAB,
    Activations,
    compute,
    load_model,
    store,
    write_model,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def memory(target: Path) -> Activations:
    return compute(target)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, memory: Activations) -> Run:
    return store(memory, tmp_path_factory.mktemp("run") / "run")


def modelopt_model(algorithm: str, target: Path, *, offline: bool) -> tuple[Any, Any]:
    """ModelOpt's model that trains a draft, and the draft. ``offline``: the draft trains on stored states."""
    model = load_model(target)
    model.config.num_orig_hidden_layers = NUM_LAYERS
    sizes = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(1)
    if algorithm == "eagle":
        draft = {**default_eagle_config, **sizes, "use_aux_hidden_state": True, "use_last_layernorm": True}
        settings = {"eagle_offline": offline, "eagle_use_torch_compile": False, "eagle_architecture_config": draft}
        mtsp.convert(model, [("eagle", settings)])
        assert model.eagle_config.eagle_aux_hidden_state_layer_ids == AFTER  # ModelOpt's default
        return model.train(), model.eagle_module
    head: dict[str, Any] = {
        "dflash": {},
        "domino": {"emb_dim": 16, "gru_hidden_dim": 16},
        "dspark": {"markov_rank": 8},
    }[algorithm]
    draft = {**sizes, "num_hidden_layers": 3, "target_layer_ids": AFTER, "projector_type": algorithm, **head}
    settings = {
        "dflash_offline": offline, "dflash_use_torch_compile": False, "dflash_block_size": 4, "dflash_num_anchors": 8,
        "dflash_mask_token_id": 1, "dflash_architecture_config": draft,
    }  # fmt: skip
    mtsp.convert(model, [("dflash", settings)])
    return model.train(), model.dflash_module


@pytest.mark.parametrize("algorithm", ["eagle", "dflash", "domino", "dspark"])
def test_modelopts_step_has_the_loss_on_our_files_that_it_has_with_the_model(
    algorithm: str, run: Run, target: Path, memory: Activations, tmp_path: Path
) -> None:
    assert export_run(run, "modelopt", tmp_path, ExportOptions(model=str(target))).finished
    files = sorted(str(path) for path in tmp_path.glob("*.pt"))
    data = OfflineSupervisedDataset(files, answer_only_loss=True)
    items = [data[i] for i in range(SAMPLES)]
    for i, item in enumerate(items):
        assert torch.equal(item["input_ids"], memory.input_ids[i])
        assert torch.equal(item["loss_mask"], memory.loss_mask[i])
        assert not item["base_hidden_prenorm"]
    batch = EagleOfflineDataCollator(train_len=TOKENS)(items)

    online, its_draft = modelopt_model(algorithm, target, offline=False)
    offline, draft = modelopt_model(algorithm, target, offline=True)
    draft.load_state_dict(its_draft.state_dict())
    tokens = {name: x for name, x in batch.items() if name != "base_model_outputs"}
    losses = []
    for model, given in ((online, tokens), (offline, batch)):
        torch.manual_seed(2)  # seed of the anchors
        losses.append(model(**given).loss)
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
    losses[1].backward()
    assert float(draft.fc.weight.grad.norm()) > 0


def draft_model(algorithm: str, target: Path) -> Any:
    """SpecForge's model that trains a draft of two layers."""
    head: dict[str, Any] = {
        "dflash": {},
        "domino": {"projector_type": "domino", "emb_dim": 16, "gru_hidden_dim": 16},
        "dspark": {"projector_type": "dspark", "markov_rank": 8, "enable_confidence_head": True},
    }[algorithm]
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, block_size=4, num_target_layers=NUM_LAYERS,
        dflash_config={"target_layer_ids": AFTER, "mask_token_id": 1, **head},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    made: dict[str, tuple[Any, Any]] = {
        "dflash": (DFlashDraftModel, OnlineDFlashModel),
        "domino": (DominoDraftModel, OnlineDominoModel),
        "dspark": (DSparkDraftModel, OnlineDSparkModel),
    }
    draft, trained = made[algorithm]
    model = load_model(target)
    torch.manual_seed(1)
    return trained(draft(config), model.lm_head, model.model.embed_tokens, 1, 4, "sdpa", num_anchors=8)


@pytest.mark.parametrize(
    ("algorithm", "to"),
    [("dspark", "specforge-dspark"), ("dflash", "specforge-dflash"), ("domino", "specforge-dflash")],
)
def test_specforges_step_has_the_loss_on_our_files_that_it_has_in_memory(
    algorithm: str, to: str, run: Run, target: Path, memory: Activations, tmp_path: Path
) -> None:
    export_run(run, to, tmp_path, ExportOptions(model=str(target)))
    batch = specforge_batch(algorithm, tmp_path)
    names = {"input_ids": "input_ids", "loss_mask": "loss_mask", "hidden_states": "aux"}
    names |= {"target_last_hidden_states": "after_norm"} if algorithm == "dspark" else {}
    own = TrainBatch(
        batch.sample_ids, batch.strategy, {k: getattr(memory, v) for k, v in names.items()}, batch.metadata
    )
    assert set(batch.tensors) == set(own.tensors)

    provider = builtin_algorithm_registry().resolve(algorithm).providers.step
    losses = []
    for given in (batch, own):
        step = provider.build(draft_model(algorithm, target))
        torch.manual_seed(2)  # seed of the anchors
        out = step.forward_loss(given)
        out.loss.backward()
        losses.append(out.loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] > 0


def specforge_batch(algorithm: str, folder: Path) -> TrainBatch:
    """The first batch, of all samples, from SpecForge's offline reader, loader and collator."""
    data = builtin_algorithm_registry().resolve(algorithm).providers.offline_for("text")
    reader = data.build_reader(str(folder), run_id="test", ttt_length=3, max_len=TOKENS)
    loader = FeatureDataLoader(
        LocalFeatureStore(),
        refs=reader.read(),
        batch_size=SAMPLES,
        collate_fn=data.build_collator(),
        per_sample_transform=data.build_normalizer(TOKENS),
        strategy=algorithm,
    )
    [batch] = loader
    return batch


def test_specforges_eagle3_reads_the_files(run: Run, target: Path, memory: Activations, tmp_path: Path) -> None:
    """The training step is not run: the model needs Triton."""
    export_run(run, "specforge-eagle3", tmp_path, ExportOptions(model=str(target)))
    got = specforge_batch("eagle3", tmp_path).tensors
    assert torch.equal(got["input_ids"], memory.input_ids)
    assert torch.equal(got["loss_mask"][:, :-1], memory.loss_mask[:, :-1])
    assert torch.equal(got["hidden_state"], memory.aux)
    assert torch.allclose(got["target"], memory.after_norm, atol=1e-6)
