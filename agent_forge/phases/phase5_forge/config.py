"""Settings of Phase 5. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from agent_forge.config.settings import PhaseSettings
from agent_forge.data import tasks
from agent_forge.optim.config import MuGrokConfig
from agent_forge.search.settings import Count, Share, SomeShare, setting
from agent_forge.train.config import CorpusSettings, TrainSettings

# Grokfast is off until benchmarks/forge.py, which has it beside the others, proves that it helps.
OPTIMIZER = MuGrokConfig.through_rounding(5e-3, 3e-3)


class ForgeSettings(PhaseSettings, CorpusSettings):
    """What Phase 5 can be told."""

    weights: Literal["packed", "whole"] = setting(
        "packed",
        "that are trained: those of few bits, through the rounding, or their fp32 copy",
    )
    edge_families: list[str] = setting(
        ["chain", "tot4", "swap4"], "families of tasks that it goes on to learn"
    )
    assessment_items: Count = setting(96, "items of each family that look for its edge")
    edge_sizes: Count = setting(10, "sizes beyond the edge that are taught")
    draw: Literal["uniform", "controller", "easy_to_hard"] = setting(
        "uniform",
        "which of these sizes: all, what is solved now and then, or easy ones first",
    )
    steps: int = setting(200, "training steps at the edge; 0: none", ge=0, le=10_000_000)
    examples: Count = setting(6_000, "worked examples of the sizes at the edge, all together")
    replay_share: Share = setting(0.5, "of the tokens, that are old tasks")
    known_share: Share = setting(0.6, "of the other tokens, that are of sizes known before")
    beyond: Literal["split", "verified", "voted", "none"] = setting(
        "split", "how thoughts about longer items are made and chosen without worked examples"
    )
    rounds: int = setting(2, "of going beyond, at most", ge=0, le=100)
    round_steps: Count = setting(400, "training steps of such a round")
    growth: float = setting(1.4, "of the largest size, in a round", gt=1, le=2)
    own_items: Count = setting(400, "items of each family that a round thinks about")
    samples: int = setting(4, "thoughts or programs of each, if not split", ge=2, le=64)
    least_agreement: SomeShare = setting(0.9, "of both cuts, for a family to be taught by them")
    most_lost: Share = setting(0.02, "of the accuracy on known sizes, by a round that is kept")
    kept_skills: Share = setting(0.03, "of the accuracy on old tasks that may be lost")
    self_model_weight: float = setting(0.0, "of predicting its own activations", ge=0, le=10)
    dream_share: Share = setting(0.0, "of what is left, that is its own verified answers")
    train: TrainSettings = setting(
        TrainSettings(optimizer=OPTIMIZER, warmup_steps=10, warmdown_share=0.7),
        "training at the edge and beyond",
    )
    control: bool = setting(False, "train a copy as long on what it knew before")
    verdict_items: Count = setting(30, "unseen items of each size of each family")

    @model_validator(mode="after")
    def _families_have_sizes(self) -> ForgeSettings:
        if not self.edge_families or len(set(self.edge_families)) != len(self.edge_families):
            raise ValueError("edge_families: at least one, and each once")
        for name in self.edge_families:
            if name not in tasks.FAMILIES or tasks.FAMILIES[name].size is None:
                raise ValueError(f"edge_families: no family {name!r} whose items have a size")
        return self
