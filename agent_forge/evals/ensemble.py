"""The ensemble of several models: the mean of their probabilities, token by token.

Its probability of a token that is asked for is the mean of what each model gives to that token, so
the losses of the models suffice; no two networks are in memory at once. Of an answer among choices
that also tells whether it is the likeliest; of one that has to be written it does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from agent_forge.evals.domains import Domain
from agent_forge.evals.likelihood import TokenLosses
from agent_forge.evals.model_under_test import ItemScores, TokenizedDomain, by_example


@dataclass
class Ensemble:
    """Models are added one by one, each with the losses of its tokens in every domain."""

    prepared: Sequence[TokenizedDomain] = ()
    models: int = 0
    alike: bool = True  # all of them read the same tokens
    _sums: list[TokenLosses] = field(default_factory=list)  # logarithms of summed probabilities

    def add(self, prepared: Sequence[TokenizedDomain], losses: Sequence[TokenLosses]) -> None:
        if not self.models:
            self.prepared = prepared
            self._sums = [{item: -loss for item, loss in of.items()} for of in losses]
        elif self.alike and _tokens(prepared) == _tokens(self.prepared):
            for sums, of_domain in zip(self._sums, losses, strict=True):
                for item, loss in of_domain.items():
                    sums[item] = np.logaddexp(sums[item], -loss)
        else:
            self.alike, self._sums = False, []
        self.models += 1

    def raw(self, domains: Sequence[Domain]) -> dict[str, float]:
        """Bits per byte of every domain, and accuracy where all answers are choices."""
        found: dict[str, float] = {}
        for domain, scores, prepared in zip(domains, self.scores(), self.prepared, strict=True):
            found[f"{domain.name}/bits_per_byte"] = scores.bits_per_byte(sum(domain.sizes))
            chosen = (np.bincount(prepared.example_of) > 1).all() and prepared.domain is None
            if domain.exact and chosen:
                found[f"{domain.name}/accuracy"] = scores.accuracy
        return found

    def scores(self) -> list[ItemScores]:
        """The item scores of every domain; of answers that have to be written none is right."""
        scores = []
        for prepared, sums in zip(self.prepared, self._sums, strict=True):
            of_items = [sums[item] for item in range(len(prepared.items))]
            counts = [len(own) for own in of_items]
            loss = [
                n * math.log(self.models) - float(own.sum())
                for n, own in zip(counts, of_items, strict=True)
            ]
            unknown, steps = [0.0] * len(counts), [1.0] * len(counts)
            scores.append(by_example(prepared, ItemScores(unknown, loss, counts, steps)))
        return scores


def _tokens(prepared: Sequence[TokenizedDomain]) -> list[list[list[int]]]:
    return [[list(item.ids) for item in of_domain.items] for of_domain in prepared]
