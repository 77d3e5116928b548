"""What a model captures stays as it was captured."""

import torch
from vllm.model_executor.models.interfaces import EagleModelMixin

from hsx_dist.connector.captures import keep_captures


class Model(EagleModelMixin):
    aux_hidden_state_layers = (0, 1)


def test_embeddings_are_copied_and_sums_are_not(monkeypatch):
    monkeypatch.setattr(EagleModelMixin, "_maybe_add_hidden_state", EagleModelMixin._maybe_add_hidden_state)
    keep_captures()
    keep_captures()
    embeddings = torch.ones(3, 4)
    captured = Model()._maybe_add_hidden_state([], 0, embeddings, None)
    captured = Model()._maybe_add_hidden_state(captured, 1, torch.ones(3, 4), embeddings)
    assert Model()._maybe_add_hidden_state(captured, 2, embeddings, embeddings) is captured  # nobody asked for it
    embeddings.add_(10)  # what a norm in place does to its residual
    assert [float(c[0, 0]) for c in captured] == [1, 2]
