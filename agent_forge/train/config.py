"""Settings of training: of the loop, and of the corpus that is learned from. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from agent_forge.config.settings import Settings
from agent_forge.data import tasks, traces
from agent_forge.data.near_copies import SplitBy
from agent_forge.optim.config import MuGrokConfig
from agent_forge.search.settings import Count, Share, setting

STEP = "step"
DOMAINS = ("reasoning", "memory", "adaptive")  # of the generated tasks


class TrainSettings(Settings):
    """How a network is trained, whatever it is trained on."""

    optimizer: MuGrokConfig = Field(MuGrokConfig(), description="settings of MuonGrokfast")
    accumulate: int = Field(1, ge=1, le=4096, description="pieces of a batch; more save memory")
    warmup_steps: int = Field(20, ge=0, description="steps in which the rate rises from 0")
    warmdown_share: float = Field(0.5, ge=0, le=1, description="steps of falling rate, as a share")
    final_rate: float = Field(0.05, ge=0, le=1, description="share of the rate left at the end")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 if faster")
    gradient_checkpointing: bool = Field(False, description="compute blocks twice, to save memory")
    patience: int = Field(0, ge=0, description="evaluations without a gain until it ends; 0: never")
    min_gain: float = Field(0.001, ge=0, description="fall of the loss, in nats, that is a gain")

    def slower(self, share: float) -> TrainSettings:
        """The same at a share of the rate."""
        rates = {"muon_lr": share * self.optimizer.muon_lr}
        rates["fallback_lr"] = share * self.optimizer.fallback_lr
        optimizer = self.optimizer.model_copy(update=rates)
        return self.model_copy(update={"optimizer": optimizer})


class CorpusSettings(Settings):
    """What is learned from, in batches of which size, and what is measured."""

    rows: int = Field(8, ge=1, description="rows of a batch")
    row_tokens: int = Field(128, ge=16, description="tokens of a row")
    items_per_family: int = Field(6000, ge=10, le=1_000_000, description="tasks of each family")
    max_level: int = Field(20, ge=1, le=100, description="difficulty of the generated tasks")
    families: list[str] = Field([], description="generated tasks; none: what small models learn")
    text_share: float = Field(0.1, ge=0, lt=1, description="share of running text in the mixture")
    data_dir: str = Field("data", min_length=1, description="folder of real datasets")
    datasets: list[str] = Field([], description="real datasets to learn from besides")
    texts: list[str] = Field([], description="your own files: text or JSON lines")
    split_by: SplitBy = Field(
        "asked", description="what decides which examples of these are learned: near_copies.py"
    )
    evaluation_items: int = Field(2000, ge=1, le=1_000_000, description="unseen items a domain")

    @model_validator(mode="after")
    def _families_are_named_once(self) -> CorpusSettings:
        if len(set(self.families)) != len(self.families):
            raise ValueError("a family is named twice")
        return self


class LessonSettings(CorpusSettings):
    """What is taught about thinking, beside the old tasks of the corpus."""

    strategies: list[str] = setting(["step", "doubt", "bayesian"], "ways to think that are taught")
    levels: dict[str, list[int]] = setting(
        {name: list(levels) for name, levels in traces.LEVELS.items()},
        "families of tasks that are thought about: lowest and highest level taught",
    )
    turns: dict[str, Count] = setting(
        {}, "families of which there are so many times as many thoughts as of others"
    )
    examples: Count = setting(12_000, "thoughts to learn from, all strategies together")
    traces: list[str] = setting([], "your own files of thoughts (forge data traces)")
    easy_share: float = setting(
        0.4, "of the steps, in which only the easy strategies are taught", ge=0, lt=1
    )
    replay_share: Share = setting(0.3, "of the tokens, that are old tasks")
    direct_share: Share = setting(0.05, "of the new tokens, that answer without a thought")
    step_share: Share = setting(0.75, "of the thoughts, that are of the strategy `step`, if taught")

    @model_validator(mode="after")
    def _can_be_taught(self) -> LessonSettings:
        if not self.strategies or len(set(self.strategies)) != len(self.strategies):
            raise ValueError("strategies: at least one, and each once")
        traces.known(self.strategies)
        if STEP not in self.strategies:
            raise ValueError("strategies: step is taught in any case: changed steps are judged")
        if problem := levels_problem(self.levels):
            raise ValueError(f"levels: {problem}")
        if others := {*self.turns} - {*self.levels}:
            raise ValueError(f"turns: {min(others)} is not among the levels")
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
        return in_order(self.levels)


class SkillSettings(CorpusSettings):
    """What a model is taught on while it gets smaller, and asked before that is kept."""

    exchanges_share: Share = setting(0.4, "of the tokens, that are exchanges, if it has tools")
    persona_share: Share = setting(0.3, "of these, that are about its persona")
    thoughts_share: Share = setting(0.4, "of the others, that are thoughts, if it learned to think")
    examples: Count = setting(6_000, "thoughts to learn from, and exchanges of each kind")
    choice_items: Count = setting(240, "tool questions for choices")
    tool_items: Count = setting(1000, "unseen tool questions of the verdict")
    thought_items: Count = setting(200, "unseen items of each family that it thinks about")


def in_order(levels: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    return {n: (levels[n][0], levels[n][1]) for n in tasks.FAMILIES if n in levels}


def levels_problem(levels: Mapping[str, Sequence[int]]) -> str:
    """What is wrong with levels of families, or nothing."""
    for name, bounds in levels.items():
        if name not in tasks.FAMILIES or not tasks.FAMILIES[name].accept:
            return f"there are no tasks {name!r} that can be thought about"
        if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1] <= 100:
            return f"{name}: two numbers from 1 to 100, the lower first"
    return ""


def rate_factor(step: int, total: int, settings: TrainSettings) -> float:
    """The share of the full rate at a step (from 1): rising, constant, falling in a line."""
    rising = step / settings.warmup_steps if settings.warmup_steps else 1.0
    falling_steps = settings.warmdown_share * total
    left = (total - step) / falling_steps if falling_steps else 1.0
    falling = settings.final_rate + (1 - settings.final_rate) * min(1.0, left)
    return min(1.0, rising, falling)
