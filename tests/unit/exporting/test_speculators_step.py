"""speculators' own training step on an export gives the same loss as on the activations in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.models.mtp.config import MTPSpeculatorConfig
from speculators.models.mtp.core import MTPDraftModel
from speculators.models.mtp.data import shift_batch_mtp
from speculators.models.peagle.core import PEagleDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.data import ArrowDataset, CollateFn
from transformers import AutoConfig, Qwen3NextConfig

from hsx_dist.exporting import ExportOptions, export_run
from hsx_dist.reading.run import Run
from tests.harness.activations import (
    HIDDEN,
    LAYERS,
    SAMPLES,
    TOKENS,
    VOCAB,
    Activations,
    compute,
    load_model,
    store,
    write_model,
)

_PREPARE = {"eagle3": shift_batch, "peagle": shift_batch, "mtp": shift_batch_mtp}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "eagle3": {"loss_fn": "kl_div", "loss_implementation": "eager", "ttt_steps": 2, "ttt_step_loss_decay": 1.0},
    "peagle": {"loss_fn": "kl_div", "loss_implementation": "eager", "num_depths": 2},
    "mtp": {"num_speculative_steps": 2},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def memory(target: Path) -> Activations:
    return compute(target)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, memory: Activations) -> Run:
    return store(memory, tmp_path_factory.mktemp("run") / "run")


def draft(algorithm: str, target: Path) -> Any:
    """A new draft with the target's embeddings, norm and head."""
    torch.manual_seed(1)
    if algorithm == "mtp":
        return mtp_draft(target)
    made = {"eagle3": Eagle3DraftModel, "peagle": PEagleDraftModel}[algorithm]
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers = 1
    return made.from_training_args(
        config, verifier_name_or_path=str(target), draft_vocab_size=VOCAB, norm_before_residual=False, ttt_steps=2,
        num_depths=2, mask_token_id=1, target_layer_ids=list(LAYERS[:-1]), draft_attn_impl="sdpa",
    )  # fmt: skip


def mtp_draft(target: Path) -> Any:
    """A draft of a family with MTP, as speculators requires. Its width and vocabulary are the target's."""
    layer = Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, layer_types=["full_attention"],
    )  # fmt: skip
    proposal = GreedyTokenProposalConfig(speculative_tokens=2)
    verifier = VerifierConfig.from_pretrained(str(target))
    speculators = SpeculatorsConfig(
        algorithm="mtp", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    )
    made = MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layer, speculators_config=speculators))
    made.load_verifier_weights()
    with torch.no_grad():
        for weight in made.mtp_layers.parameters():  # the experts' weights are uninitialized memory
            torch.nn.init.normal_(weight, std=0.1)
    return made


def in_memory(memory: Activations, i: int) -> dict[str, Any]:
    """The item that speculators makes of a row, from activations that were never stored."""
    return {
        "hidden_states": memory.aux[i],
        "input_ids": memory.input_ids[i],
        "verifier_last_hidden_states": memory.before_norm[i],
        "loss_mask": memory.loss_mask[i],
        "lengths": torch.tensor([TOKENS]),
        "position_ids": torch.arange(TOKENS),
    }


@pytest.mark.parametrize("algorithm", ["eagle3", "peagle", "mtp"])
def test_a_step_on_the_export_has_the_loss_of_the_step_in_memory(
    algorithm: str, run: Run, target: Path, memory: Activations, tmp_path: Path
) -> None:
    # A run for MTP has only the last layer.
    stored = run if algorithm != "mtp" else store(memory.last_alone(), tmp_path / "run")
    export_run(stored, "speculators", tmp_path / "data", ExportOptions())
    data = ArrowDataset(SAMPLES * TOKENS, tmp_path / "data", on_missing="raise", hidden_states_dtype=torch.float32)
    items = {"file": [data[i] for i in range(SAMPLES)], "memory": [in_memory(memory, i) for i in range(SAMPLES)]}
    losses = {}
    for name, found in items.items():
        batch = CollateFn(SAMPLES * TOKENS, HIDDEN, dtype=torch.float32, preprocess=_PREPARE[algorithm])(found)
        model = draft(algorithm, target).float().train()
        torch.manual_seed(2)  # P-EAGLE samples positions
        arguments, _ = model.get_trainer_kwargs(**_ARGUMENTS[algorithm])
        _, loss, _ = model(**batch, **arguments)
        loss.backward()
        losses[name] = loss.item()
    assert losses["file"] == pytest.approx(losses["memory"], rel=1e-6)
    assert losses["file"] > 0


def test_the_targets_that_speculators_makes_of_the_last_state_are_the_models_logits(
    target: Path, memory: Activations
) -> None:
    model = draft("eagle3", target)
    with torch.no_grad():
        made = model.verifier_lm_head(model.verifier_norm(memory.before_norm))
        assert torch.allclose(made, load_model(target).lm_head(memory.after_norm), atol=1e-5)
