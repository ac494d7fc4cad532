"""Settings of Phase 3. Torch-free."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from agent_forge.config.settings import PhaseSettings, Settings
from agent_forge.optim.config import MuGrokConfig
from agent_forge.search.settings import Count, Share, SomeShare, setting
from agent_forge.train.config import LessonSettings, TrainSettings, levels_problem

# Measured: the specification's rates for this phase barely learn (docs/quietstar.md).
BAKING = MuGrokConfig(
    muon_lr=0.006, fallback_lr=0.0036, ns_steps=3, momentum=0.9, grokfast_lambda=0.0
)


class RewardSettings(Settings):
    """The second step: what is rewarded, how often, and what is watched meanwhile."""

    kind: Literal["none", "verified", "likelihood"] = setting(
        "none", "right answers, or by how much thoughts help to predict; none leaves the step out"
    )
    answers_only: dict[str, list[int]] = setting(
        {}, "further families, of which answers are known but no thoughts: lowest, highest level"
    )
    steps: Count = setting(60, "training steps")
    questions: Count = setting(24, "verified: questions of a step")
    samples: int = setting(8, "verified: tries at each question", ge=2, le=1024)
    places: Count = setting(2, "likelihood: difficult tokens of a row that are thought about")
    ahead: Count = setting(4, "likelihood: true tokens that a thought is judged by")
    optimizer: MuGrokConfig = setting(
        MuGrokConfig.from_phase(3), "its training; kl_coefficient holds it near the baked model"
    )
    warmup_steps: int = setting(5, "steps in which the rate rises from 0", ge=0)
    check_every: Count = setting(20, "steps between two checks that it still thinks")
    check_items: Count = setting(60, "unseen items of each family for a check")
    most_lost: SomeShare = setting(0.03, "accuracy that a check may lose before it goes back")
    kept_skills: SomeShare = setting(0.02, "accuracy of old tasks that may be lost")
    control: bool = setting(False, "train a copy by the lessons for about as long")
    control_steps: Count = setting(400, "steps of that copy")

    @property
    def train(self) -> TrainSettings:
        return TrainSettings(optimizer=self.optimizer, warmup_steps=self.warmup_steps)


class QuietStarSettings(PhaseSettings, LessonSettings):
    """What Phase 3 can be told."""

    BEFORE: ClassVar = {"confidence_rate": 1.0}

    steps: int = setting(800, "training steps; 0: a model that thinks already goes on", ge=0)
    confidence_share: Share = setting(
        0.1, "further steps for `uncertain`, once it was measured how sure the model is"
    )
    confidence_rate: Share = setting(0.25, "of the rate, in these steps: at all of it much is lost")
    train: TrainSettings = setting(
        TrainSettings(optimizer=BAKING, warmup_steps=10, warmdown_share=0.6),
        "training of the model and of the controls",
    )
    controls: bool = setting(
        False, "train two more for as long: one answers directly, one after pauses"
    )
    thought_items: Count = setting(300, "unseen items of each family that thoughts are judged on")
    kept_skills: SomeShare = setting(0.03, "accuracy of old tasks that may be lost")
    reward: RewardSettings = setting(RewardSettings(), "the second step, by rewards")

    @model_validator(mode="after")
    def _rewarded_levels_are_others(self) -> QuietStarSettings:
        if problem := levels_problem(self.reward.answers_only):
            raise ValueError(f"answers_only: {problem}")
        if both := {*self.levels} & {*self.reward.answers_only}:
            raise ValueError(f"answers_only: {min(both)} has thoughts, by levels")
        return self
