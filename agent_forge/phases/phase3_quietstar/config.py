"""Settings of Phase 3. Torch-free."""

from __future__ import annotations

from pydantic import model_validator

from agent_forge.config.settings import PhaseSettings
from agent_forge.data import tasks, traces
from agent_forge.optim.config import MuGrokConfig
from agent_forge.search.settings import Count, Share, SomeShare, setting
from agent_forge.train.config import CorpusSettings, TrainSettings

# Measured: the specification's rates for this phase barely learn (docs/quietstar.md).
BAKING = MuGrokConfig(
    muon_lr=0.006, fallback_lr=0.0036, ns_steps=3, momentum=0.9, grokfast_lambda=0.0
)


STEP = "step"


class QuietStarSettings(PhaseSettings, CorpusSettings):
    """What Phase 3 can be told."""

    strategies: list[str] = setting(["step", "doubt", "bayesian"], "ways to think that are taught")
    levels: dict[str, list[int]] = setting(
        {name: list(levels) for name, levels in traces.LEVELS.items()},
        "families of tasks that are thought about: lowest and highest level taught",
    )
    examples: Count = setting(12_000, "thoughts to learn from, all strategies together")
    traces: list[str] = setting([], "your own files of thoughts (forge data traces)")
    steps: Count = setting(800, "training steps")
    easy_share: float = setting(
        0.4, "of the steps, in which only the easy strategies are taught", ge=0, lt=1
    )
    replay_share: Share = setting(0.3, "of the tokens, that are old tasks")
    direct_share: Share = setting(0.05, "of the new tokens, that answer without a thought")
    step_share: Share = setting(0.75, "of the thoughts, that are of the strategy `step`, if taught")
    confidence_share: Share = setting(
        0.1, "further steps for `uncertain`, once it was measured how sure the model is"
    )
    train: TrainSettings = setting(
        TrainSettings(optimizer=BAKING, warmup_steps=10, warmdown_share=0.6),
        "training of the model and of the controls",
    )
    controls: bool = setting(
        False, "train two more for as long: one answers directly, one after pauses"
    )
    thought_items: Count = setting(300, "unseen items of each family that thoughts are judged on")
    kept_skills: SomeShare = setting(0.03, "accuracy of old tasks that may be lost")

    @model_validator(mode="after")
    def _can_be_taught(self) -> QuietStarSettings:
        if not self.strategies or len(set(self.strategies)) != len(self.strategies):
            raise ValueError("strategies: at least one, and each once")
        traces.known(self.strategies)
        if STEP not in self.strategies:
            raise ValueError("strategies: step is taught in any case: changed steps are judged")
        for name, levels in self.levels.items():
            if name not in tasks.FAMILIES or not tasks.FAMILIES[name].accept:
                raise ValueError(f"levels: there are no tasks {name!r} that can be thought about")
            if len(levels) != 2 or not 1 <= levels[0] <= levels[1] <= 100:
                raise ValueError(f"levels.{name}: two numbers from 1 to 100, the lower first")
        taught = {name: traces.families_of(name, self.levels) for name in self.strategies}
        for strategy, families in taught.items():
            if not families:
                wanted = ", ".join(traces.ABOUT[strategy].families)
                raise ValueError(f"strategies: {strategy} needs one of the families {wanted}")
        for name in self.levels:
            if not any(name in families for families in taught.values()):
                raise ValueError(f"levels: no strategy that is taught is for {name}")
        return self

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The levels of each family, in one order, however they were given."""
        return {
            name: (self.levels[name][0], self.levels[name][1])
            for name in tasks.FAMILIES
            if name in self.levels
        }
