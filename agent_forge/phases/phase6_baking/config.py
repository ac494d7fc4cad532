"""Settings of Phase 6. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from agent_forge.config.settings import PhaseSettings
from agent_forge.optim.config import MuGrokConfig
from agent_forge.search.settings import Count, Share, SomeShare, setting
from agent_forge.train.config import CorpusSettings, TrainSettings

OPTIMIZER = MuGrokConfig.through_rounding(4e-3, 2.4e-3)


class BakingSettings(PhaseSettings, CorpusSettings):
    """What Phase 6 can be told."""

    persona: str = setting("zoe", "who it becomes: zoe, otto, nora, or a YAML file of your own")
    tools: list[str] = setting(
        ["calc", "read", "conv", "clock", "find", "python"], "tools that it learns to call"
    )
    method: Literal["gold", "forward", "reverse", "samples"] = setting(
        "gold",
        "how it is baked: from right answers, by the KL to itself with a prompt before it (on the"
        " prompted one's answers, or on its own), or from the prompted one's answers",
    )
    follow_steps: int = setting(0, "steps that teach it to follow prompts before", ge=0)
    rounds: Count = setting(6, "of baking at most; tools and persona in turn")
    round_steps: Count = setting(300, "training steps of a round")
    examples: Count = setting(8_000, "exchanges to learn from, of tools and of the persona each")
    strength: float = setting(1.0, "of what a round changes, that is taken", gt=0, le=1.5)
    prompts: Count = setting(4, "forms of the prompt that compete before a round, if it is by KL")
    plateau_rounds: Count = setting(3, "of a kind without a gain, after which it is baked no more")
    min_gain: SomeShare = setting(0.01, "of the success, that counts as a gain")
    samples: Count = setting(400, "answers of the prompted model to learn from, if it is by KL")
    replay_share: Share = setting(0.45, "of the tokens, that are old tasks and thoughts")
    thoughts_share: Share = setting(0.3, "of these, that are thoughts, if it learned to think")
    cards_share: Share = setting(0.2, "of the new tokens, that follow other prompts, if it can")
    other_share: Share = setting(0.3, "of the others, that are of the kind whose turn it is not")
    most_lost: Share = setting(0.034, "of the accuracy on old tasks, by a round that is kept")
    train: TrainSettings = setting(
        TrainSettings(optimizer=OPTIMIZER, warmup_steps=10, warmdown_share=0.6),
        "training of every round",
    )
    choice_items: Count = setting(240, "tool questions that rounds are chosen by")
    tool_items: Count = setting(2000, "unseen tool questions of the verdict")

    @model_validator(mode="after")
    def _tools_are_known(self) -> BakingSettings:
        from agent_forge.data.exchanges import TOOLS

        if not self.tools or len(set(self.tools)) != len(self.tools):
            raise ValueError("tools: at least one, and each once")
        if unknown := [name for name in self.tools if name not in TOOLS]:
            raise ValueError(f"tools: no tool {unknown[0]!r}; there are {', '.join(TOOLS)}")
        if self.method != "gold" and not self.follow_steps:
            raise ValueError("method: a prompt is baked only once it is followed: follow_steps")
        return self
