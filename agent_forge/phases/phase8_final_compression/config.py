"""Settings of Phase 8. Torch-free."""

from __future__ import annotations

from itertools import pairwise

from pydantic import model_validator

from agent_forge.config.settings import PhaseSettings
from agent_forge.optim.config import MuGrokConfig
from agent_forge.search.settings import Count, Share, setting
from agent_forge.train.config import SkillSettings, TrainSettings

# Of students before they are rounded: they begin where Phase 1 does.
STUDENT_TRAIN = TrainSettings(optimizer=MuGrokConfig.from_phase(1))
OPTIMIZER = MuGrokConfig.through_rounding(2e-3, 1e-3)


class FinalCompressionSettings(PhaseSettings, SkillSettings):
    """What Phase 8 can be told."""

    ratios: list[float] = setting(
        [16.0, 28.0], "bytes of FP32 over those of the file, point by point"
    )
    student_ratios: list[float] = setting(
        [100.0], "of smaller networks that are taught by the model"
    )
    prune_vocabulary: bool = setting(True, "leave out tokens that nothing which is taught uses")
    allocate: bool = setting(True, "write finer what the loss depends on")
    thaw_steps: int = setting(100, "steps without rounding before", ge=0, le=10_000_000)
    steps: Count = setting(250, "training steps through the rounding, of each point")
    student_steps: Count = setting(1500, "steps that teach a student, before it is rounded")
    parent_share: Share = setting(0.5, "of the loss, that is the divergence from the input")
    control: bool = setting(
        False, "train FP32 weights as long, and each student's shape without the model"
    )
    calibration_items: Count = setting(240, "items that tell what matters")
    first_gate: Share = setting(0.98, "of the accuracy, that the first point must keep")
    coded_gate: Share = setting(0.95, "of the last kept point's, for each one behind it")
    student_gate: Share = setting(0.90, "of the last kept point's, for students")
    least_retention: Share = setting(0.84, "of the input's accuracy, for all points")
    least_of_each: Share = setting(0.80, "of the input's accuracy in every kind of question")
    train: TrainSettings = setting(
        TrainSettings(optimizer=OPTIMIZER, warmup_steps=10, warmdown_share=0.6),
        "training of points",
    )

    @model_validator(mode="after")
    def _ratios_rise(self) -> FinalCompressionSettings:
        for name in ("ratios", "student_ratios"):
            own = getattr(self, name)
            if any(not 1 < ratio <= 10_000 for ratio in own) or any(
                a >= b for a, b in pairwise(own)
            ):
                raise ValueError(f"{name}: numbers above 1, each larger than the one before")
        if not self.ratios and not self.student_ratios:
            raise ValueError("ratios: at least one, or one of student_ratios")
        return self
