"""Settings of Phase 4. Torch-free."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from pydantic import field_validator

from agent_forge.config.settings import PhaseSettings
from agent_forge.optim.config import MuGrokConfig
from agent_forge.search.settings import Count, Share, SomeShare, setting
from agent_forge.train.config import CorpusSettings, TrainSettings

# The specification has a tenth of this rate, with Grokfast: benchmarks/bitnet.py has it beside it.
OPTIMIZER = MuGrokConfig.through_rounding(2e-3, 1e-3)


class Ladder(NamedTuple):
    """How the way down is taken: in how many stages, and what may be lost."""

    stages: int  # kinds of matrices are rounded in so many, the least sensitive first
    most_lost: float  # of the parent's accuracy, before a kind of matrix is put back


LADDERS = {
    "conservative": Ladder(3, 0.02),
    "standard": Ladder(1, 0.05),
    "aggressive": Ladder(1, 0.10),
}
# Steps are entropy-coded; of Gaussian rows step1.35 takes as many bytes as ternary weights.
CODEC = re.compile(
    r"ternary(_spec|_bitnet)?|int[2-8](g[1-9]\d{0,3})?"
    r"|step(0\.(0[4-9]\d{0,2}|[1-9]\d{0,3})|[1-7](\.\d{1,4})?)"
)
TARGETS = {"tiny": (6, 0.25), "small": (8, 0.35), "medium": (10, 0.40), "large": (12, 0.45)}


class BitNetSettings(PhaseSettings, CorpusSettings):
    """What Phase 4 can be told."""

    codec: str = setting(
        "ternary",
        "rule of the weights: ternary, ternary_spec, ternary_bitnet, or instead of ternary ones "
        "integers (int3g32) or entropy-coded steps of a row's spread (step1.35)",
    )
    embedding_codec: Literal["fp16", "int8", "int4g32"] = setting(
        "int4g32", "of the embedding and the head"
    )
    activation_bits: Literal[0, 8] = setting(8, "of what ternary layers are given; 0: as it is")
    ladder: Literal["conservative", "standard", "aggressive"] = setting(
        "standard", "in how many stages it is rounded, and how much may be lost: 2, 5 or 10 %"
    )
    calibration_dataset: str = setting(
        "tasks", "what sensitivity is measured on: unseen tasks, or a file of your own texts"
    )
    calibration_samples: Count = setting(512, "items of it")
    steps: Count = setting(200, "training steps of the rounded model")
    revert_steps: Count = setting(50, "further steps after a kind of matrix was put back")
    most_reverts: int = setting(3, "kinds of matrices that may be put back", ge=0, le=100)
    parent_share: Share = setting(0.5, "of the loss, that is the divergence from the parent")
    thoughts_share: Share = setting(0.5, "of the tokens, that are thoughts, if it learned to think")
    examples: Count = setting(6_000, "thoughts to learn from")
    train: TrainSettings = setting(
        TrainSettings(optimizer=OPTIMIZER, warmup_steps=10, warmdown_share=0.5),
        "training of the rounded model and of the control",
    )
    control: bool = setting(False, "train the parent, not rounded, for as long")
    thought_items: Count = setting(300, "unseen items of each family that it thinks about")
    least_retention: SomeShare = setting(0.95, "of the accuracy that it should keep")

    @field_validator("codec")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if not CODEC.fullmatch(name):
            steps = "steps from step0.04 to below step8"
            raise ValueError(f"ternary, ternary_spec, ternary_bitnet, int2 to int8, or {steps}")
        return name
