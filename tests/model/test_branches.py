"""Branches of texts: each is what the network makes of its text up to a place, and of itself."""

from __future__ import annotations

import pytest
import torch

from agent_forge.model.branches import Branches, Trunk
from tests.support.networks import network, tokens

TEXTS, OWN = tokens(12), tokens(5, rows=6)


@pytest.mark.parametrize("pieces", [(5,), (1, 1, 3), (2, 3)])
def test_a_branch_is_its_text_and_itself(pieces: tuple[int, ...]) -> None:
    model, at = network(), torch.tensor([[0, 4, 11], [7, 7, 2]])
    with torch.no_grad():
        trunk = Trunk.read(model, TEXTS)
        branches = Branches(model, trunk, at)
        found = torch.cat([branches.read(part) for part in OWN.split(list(pieces), 1)], 1)
        assert torch.equal(trunk.x_BTD, model.features(TEXTS).x)
        for row, place in enumerate(at.flatten()):
            text = torch.cat([TEXTS[row // 3, : place + 1], OWN[row]])[None]
            assert torch.allclose(found[row], model.features(text).x[0, -5:], atol=1e-5)


def test_gradients_go_through_text_and_branches() -> None:
    model, plain, at = network(), network(), torch.tensor([[3], [7]])
    Branches(model, Trunk.read(model, TEXTS), at).read(OWN[:2]).square().sum().backward()
    for row, place in enumerate((3, 7)):
        text = torch.cat([TEXTS[row, : place + 1], OWN[row]])[None]
        plain.features(text).x[:, -5:].square().sum().backward()
    pairs = zip(model.named_parameters(), plain.named_parameters(), strict=True)
    learned = [(name, own.grad, other.grad) for (name, own), (_, other) in pairs]
    assert sum(own is not None for _, own, _ in learned) > 20
    for name, own, other in learned:
        assert (own is None) == (other is None), name
        if own is not None and other is not None:
            assert torch.allclose(own, other, atol=1e-4 * float(other.abs().max())), name


def test_more_than_attention_sees_is_refused() -> None:
    model = network(sw_window=16)
    branches = Branches(model, Trunk.read(model, TEXTS), torch.tensor([[3], [4]]))
    branches.read(OWN[:2, :4])
    with pytest.raises(ValueError, match="17 tokens, attention sees 16"):
        branches.read(OWN[:2, :1])
