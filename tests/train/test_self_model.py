"""Self-modelling: the head learns what the middle block does, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agent_forge.model.loss import language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.train.self_model import HEAD, SelfModelLoss
from tests.support.networks import settings


def test_the_error_falls_and_the_network_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    network = ForgeNetwork(settings())
    names = set(network.state_dict())
    tokens = torch.randint(0, network.settings.vocab_size, (4, 24))
    batch: Any = (tokens, tokens.roll(-1, 1))
    plain = language_loss(network, batch, torch.Generator().manual_seed(0))
    loss = SelfModelLoss(language_loss, network, 0.5)
    first = loss(network, batch, torch.Generator().manual_seed(0))
    error = first.values["self_model_error"]
    assert first.total.item() == pytest.approx(plain.total.item() + 0.5 * error, rel=1e-5)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for step in range(15):
        optimizer.zero_grad()
        found = loss(network, batch, torch.Generator().manual_seed(step))
        found.total.backward()
        optimizer.step()
    assert found.values["self_model_error"] < 0.7 * error
    assert f"{HEAD}.weight" in network.state_dict()
    loss.take_off(network)
    assert set(network.state_dict()) == names
    assert not network.blocks[len(network.blocks) // 2]._forward_hooks
