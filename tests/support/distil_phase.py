"""A training phase on one screen: distil a model of ours into one of half its layers.

In: one model. Out: the student; beside it, by name, a control of the same start that was trained
for as many steps without a teacher: what the student gains over it is due to distillation.
It uses only what is shared; test_phase_in_120_lines.py counts its lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from agent_forge.config.settings import PhaseSettings
from agent_forge.contract.phase import (
    ModelRef,
    PhaseContext,
    PhaseController,
    PhaseHeadline,
    PhasePlan,
    PhaseReport,
    PhaseResult,
)
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.evals.comparison import ACCURACY
from agent_forge.model.loss import language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import open_model
from agent_forge.phases.training import (
    compare_domains,
    measure_domains,
    save_network,
    train_network,
)
from agent_forge.train.config import DOMAINS, CorpusSettings, TrainSettings
from agent_forge.train.corpus import Corpus, build_corpus, validate_corpus
from agent_forge.train.fit import DistillationLoss
from agent_forge.train.trainer import LossFunction


class DistilSettings(PhaseSettings, CorpusSettings):
    """What the phase can be told."""

    steps: int = Field(12, ge=1, description="steps of the student, and of the control")
    teacher_share: float = Field(0.5, ge=0, le=1, description="weight of the teacher in the loss")
    train: TrainSettings = Field(TrainSettings(warmup_steps=2), description="training of both")


class DistilPhase(PhaseController):
    """Student, control, verdict."""

    name = "baking"  # the place in the pipeline that the test gives it
    config: DistilSettings

    def plan(self, models: Sequence[ModelRef]) -> PhasePlan:
        validate_corpus(self.config)
        return PhasePlan(2 * self.config.steps, work=2 * self.config.steps + 3)

    def run(self, ctx: PhaseContext) -> PhaseResult:
        teacher = open_model(ctx.inputs[0].path).network.to(ctx.device)
        assert isinstance(teacher, ForgeNetwork)
        tokenizer = Tokenizer.load(ctx.inputs[0].path)
        corpus = build_corpus(self.config, teacher.settings, tokenizer)
        taught = DistillationLoss(teacher, share=self.config.teacher_share)
        models = {
            "teacher": teacher,
            "student": self._train(ctx, corpus, teacher, "student", taught),
            "control": self._train(ctx, corpus, teacher, "control", language_loss),
        }
        names = ctx.pieces("verdict", list(models))
        scores = {name: measure_domains(ctx, corpus, models[name], name) for name in names}
        rows = [[name, *(scores[name][d].accuracy for d in DOMAINS)] for name in models]
        before = sum(scores["teacher"][d].accuracy for d in DOMAINS) / len(DOMAINS)
        gain = compare_domains(corpus, scores["control"], scores["student"]).overall
        after, verdict = gain.gains[ACCURACY].candidate, gain.sentence("a control of equal steps")
        report = PhaseReport(
            PhaseHeadline("mean accuracy, teacher -> student", before, after, verdict),
            summary=f"student and control: {verdict}",
            metrics={"accuracy": after, "layers": teacher.settings.n_layers // 2},
            tables=[[["model", *DOMAINS], *rows]],
        )
        saved = {
            name: save_network(ctx, corpus, models[name], name, {}, report.metrics, report.card())
            for name in ("student", "control")
        }
        return report.result(ctx, [saved["student"]], models["student"], **saved)

    def _train(
        self,
        ctx: PhaseContext,
        corpus: Corpus,
        teacher: ForgeNetwork,
        stage: str,
        loss: LossFunction,
    ) -> ForgeNetwork:
        torch.manual_seed(ctx.seed)  # student and control begin alike
        shape = teacher.settings.model_copy(update={"n_layers": teacher.settings.n_layers // 2})
        return train_network(
            ctx,
            corpus,
            ForgeNetwork(shape).to(ctx.device),
            corpus.curriculum(),
            stage=stage,
            steps=self.config.steps,
            settings=self.config.train,
            seed=ctx.seed,
            loss=loss,
        )
