"""SAELens and dictionary_learning, the real packages, on a run. ``make trainers`` has their environment."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dictionary_learning.dictionary import AutoEncoder
from sae_lens import StandardTrainingSAE, StandardTrainingSAEConfig
from sae_lens.config import LoggingConfig, SAETrainerConfig
from sae_lens.saes.sae import SAEMetadata
from sae_lens.training.activations_store import ActivationsStore
from sae_lens.training.sae_trainer import SAETrainer

from hsx_dist import HiddenStatesDataset, open_run
from hsx_dist.exporting import ExportOptions, export_run
from hsx_dist.reading.run import Run
from hsx_dist.reading.statistics import compute_statistics, store_statistics
from hsx_dist.saelens import data_provider, sae_config
from hsx_dist.store import open_store
from hsx_dist.testing.samples import RandomSample
from tests.harness.points import point_sample, run_of
from tests.harness.runs import store_run
from tests.harness.snippets import snippets

GUIDE = Path(__file__).parents[2] / "docs/guides/sparse-autoencoders.md"
HOOK, OTHER = "blocks.14.hook_resid_post", "blocks.0.hook_resid_pre"  # layers 15 and 0
WIDTH, DIRECTIONS = 24, 6


def sparse_states(i: int, tokens: int) -> np.ndarray[Any, Any]:
    """``[tokens, 2, WIDTH]`` float32: sums of two of a few directions, which a sparse autoencoder finds."""
    directions = np.random.default_rng(0).standard_normal((DIRECTIONS, WIDTH))
    rng = np.random.default_rng(i + 1)
    picks = rng.integers(DIRECTIONS, size=(tokens, 2))
    states = (directions[picks] * rng.uniform(1, 3, (tokens, 2, 1))).sum(1)
    return np.stack([states, -states], 1).astype(np.float32)


def stored(path: Path, layers: tuple[int, int]) -> Run:
    samples = []
    for i in range(20):
        states, ids = sparse_states(i, 50 + i).view(np.uint32), np.arange(50 + i) + 100 * i
        samples.append(RandomSample(f"s{i:02d}", states, ids, layers, "float32", 64))
    store_run(open_store(str(path)), samples, per_part=5)
    return open_run(str(path))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return stored(tmp_path_factory.mktemp("sae") / "run", (0, 15))


def trainer_config(steps: int) -> SAETrainerConfig:
    logger = LoggingConfig(log_to_wandb=False)
    return SAETrainerConfig(
        total_training_samples=64 * steps, train_batch_size_samples=64, lr=1e-2, lr_end=1e-3, logger=logger,
        n_batches_for_norm_estimate=20,
    )  # fmt: skip


def autoencoder(run: Run, hook: str, normalize: str = "none") -> StandardTrainingSAE:
    own = sae_config(run, hook)
    config = StandardTrainingSAEConfig(
        d_in=own["d_in"], d_sae=48, l1_coefficient=1e-3, normalize_activations=normalize,
        metadata=SAEMetadata(**own["metadata"]),
    )  # fmt: skip
    assert config.metadata.hook_name == hook
    return StandardTrainingSAE(config)


def unexplained(sae: Any, x: torch.Tensor) -> float:
    with torch.no_grad():
        return float(((sae(x) - x) ** 2).sum() / ((x - x.mean(0)) ** 2).sum())


def test_saetrainer_learns_from_the_provider_and_estimates_the_runs_factor(run: Run) -> None:
    def provider() -> Iterator[torch.Tensor]:
        return data_provider(run, HOOK, 64, buffer_tokens=512)

    x = torch.cat(list(islice(provider(), 8)))
    sae = autoencoder(run, HOOK, "expected_average_only_in")
    config, factors = trainer_config(400), []
    config.n_checkpoints = 1  # a checkpoint at half of the steps: after ``fit`` SAELens has no scaling factor any more

    def checkpoint(checkpoint_path: Path | None) -> None:
        factors.append(trainer.activation_scaler.scaling_factor)

    trainer = SAETrainer(config, sae, provider(), save_checkpoint_fn=checkpoint)
    before = unexplained(sae, x)
    trainer.fit()
    factor = compute_statistics(run, [15]).layers[15].norm_factor
    assert sae.cfg.normalize_activations == "none"  # the scale is folded into its weights: it takes states as stored
    assert factors == [pytest.approx(factor, rel=0.02)]
    assert unexplained(sae, x) < 0.2 * before
    assert before > 0.5


def test_several_hooks_have_the_states_of_the_same_tokens(run: Run) -> None:
    batch = next(data_provider(run, [HOOK, OTHER], 64))
    assert {name: tuple(x.shape) for name, x in batch.items()} == {HOOK: (64, WIDTH), OTHER: (64, WIDTH)}
    assert torch.equal(batch[HOOK], -batch[OTHER])


@pytest.mark.parametrize("hook", [HOOK, "blocks.7.hook_mlp_out"])
def test_saelens_store_reads_the_export(run: Run, tmp_path: Path, hook: str) -> None:
    options = ExportOptions(aux_layers=(15,), context=16, samples_per_file=7)
    chosen: dict[str, Any] = {"layers": [15]}
    if hook != HOOK:
        parts = [point_sample(f"p{i}", 70 + i, seed=i, odd=False).segments(i) for i in range(3)]
        run = run_of(*parts, store=open_store(str(tmp_path / "points")))
        options, chosen = ExportOptions(hook=hook, context=16), {"points": ["mlp_out"], "layers": [7]}
    tmp_path /= "export"
    assert export_run(run, "saelens", tmp_path, options).finished
    store = ActivationsStore(
        model=None, dataset=None, streaming=False, hook_name=hook, hook_head_index=None, context_size=16, d_in=WIDTH,
        n_batches_in_buffer=4, total_training_tokens=512, store_batch_size_prompts=4, train_batch_size_tokens=32,
        prepend_bos=False, normalize_activations="none", device=torch.device("cpu"), dtype="float32",
        cached_activations_path=str(tmp_path),
    )  # fmt: skip
    expected, ids = [], []
    for item in HiddenStatesDataset(run, **chosen):
        whole = len(item["input_ids"]) // 16 * 16
        expected.append(item["hidden_states" if hook == HOOK else "mlp_out"][:whole, 0])
        ids.append(item["input_ids"][:whole])
    data = store.cached_activation_dataset
    assert data is not None
    assert torch.equal(data[:][hook].reshape(-1, WIDTH), torch.cat(expected))
    states, tokens = store.get_raw_llm_batch()
    assert torch.equal(states, torch.cat(expected)[:64])
    assert tokens is not None
    assert torch.equal(tokens.long(), torch.cat(ids)[:64])


def test_the_guides_blocks_train_with_both_packages(tmp_path: Path) -> None:
    """All blocks run from first to last, as a user would run them."""
    run = stored(tmp_path / "run", (5, 15))
    store_statistics(run, compute_statistics(run, [15], skip_first=1))
    blocks = [s for s in snippets(GUIDE) if s.language == "python"]
    assert [s.run_by for s in blocks if s.run_by] == ["tests/trainers/test_sae_trainers.py"] * 3
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "RUN": run.url, "LAYER": 15, "DEEPER": 5, "HIDDEN": WIDTH, "FEATURES": 48, "STEPS": 100,
        "FOLDER": str(tmp_path / "dictionary"), "__name__": "guide",
    }  # fmt: skip
    for block in blocks:
        exec(compile(block.text, block.where, "exec"), names)

    def states(layer: int) -> torch.Tensor:
        data = HiddenStatesDataset(run, layers=[layer], tokens=slice(1, None))
        return torch.cat([item["hidden_states"][:, 0] for item in data])

    saes = names["saes"]
    assert set(saes) == {"blocks.14.hook_resid_post", "blocks.4.hook_resid_post"}
    assert unexplained(names["sae"], states(15)) < 0.3
    assert unexplained(saes["blocks.14.hook_resid_post"], states(15)) < 0.3
    assert unexplained(saes["blocks.4.hook_resid_post"], states(5)) < 0.3
    trained = AutoEncoder.from_pretrained(tmp_path / "dictionary/trainer_0/ae.pt")
    factor = compute_statistics(run, [15], skip_first=1).layers[15].norm_factor
    assert unexplained(trained, states(15) * factor) < 0.3
