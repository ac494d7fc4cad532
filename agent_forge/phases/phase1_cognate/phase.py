"""Phase 1, Cognate: train one trunk, then three specialists that branch from it.

In: nothing. Out: TinyTitan-reasoning, -memory_integration and -adaptive_computation, of one shape
and with one tokenizer. The specification trains three networks from three seeds; such networks
share no ancestor and cannot be averaged (measured), so ours share a trunk and the seeds drive the
order of the data. Branches keep the trunk's embedding and learn at a low rate: so they merge. What
a merge must beat stands beside: trunk, plain average, and a control that learned everything for as
long. Networks: TRM (arXiv 2510.04871) over a backbone after Titans (arXiv 2501.00663).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from agent_forge import platform
from agent_forge.contract import phase
from agent_forge.contract.phase import ModelRef, PhaseContext, PhaseHeadline, PhaseReport, Table
from agent_forge.errors import PhaseFailed
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.config import MuGrokConfig
from agent_forge.phases.phase1_cognate import specialist_scores as scoring
from agent_forge.phases.phase1_cognate.config import THREE, CognateSettings
from agent_forge.phases.phase1_cognate.specialist_scores import SpecialistScores, average
from agent_forge.phases.training import latency_ms, save_network, train_network
from agent_forge.train.config import DOMAINS, TrainSettings
from agent_forge.train.corpus import Corpus, build_corpus, validate_corpus
from agent_forge.train.fit import EVALUATIONS

FROZEN = ("embedding.", "projection.", "norm.")
ITEM_TOKENS = 25  # of an item, about
Scores = Mapping[str, SpecialistScores]
Models = Mapping[str, ForgeNetwork]
Numbers = Mapping[str, float]


class CognatePhase(phase.PhaseController):
    """Trunk, branches, control, verdict."""

    name = "cognate"
    config: CognateSettings

    def plan(self, models: Sequence[ModelRef]) -> phase.PhasePlan:
        validate_corpus(self.config)
        c, weights = self.config, self.shared.model.parameters()
        steps = c.trunk_steps + 3 * c.branch_steps * (2 if c.control else 1)
        tokens = c.rows * c.row_tokens
        notes = (
            f"trunk {c.trunk_steps} steps, three branches of {c.branch_steps}"
            + (f", a control of {3 * c.branch_steps}" if c.control else ""),
            f"{tokens:,} tokens a step; {c.evaluation_items:,} unseen items of each domain",
        )
        disk = 3 * 5 * weights * 4 * 4 + 3 * weights * 4 + 10**7
        memory = 6 * 4 * weights + 3000 * tokens + 3 * 10**8
        work = steps + (6 if c.control else 5) * self._work_of_a_verdict()
        return phase.PhasePlan(steps, weights, disk, memory, notes, work)

    def run(self, ctx: PhaseContext) -> phase.PhaseResult:
        corpus = build_corpus(self.config, self.shared.model)
        torch.manual_seed(ctx.seed)
        trunk = ForgeNetwork(self.shared.model).to(ctx.device)
        how: dict[str, Any] = {"steps": self.config.trunk_steps, "seed": ctx.seed}
        how["settings"] = self.config.train
        train_network(ctx, corpus, trunk, corpus.curriculum(), stage="trunk", **how)
        models = {name: self._branch(ctx, corpus, trunk, name) for name in THREE}
        three = list(models.values())
        plain = [_like(trunk, model) for model in three]  # as a merge has them
        models |= {"trunk": trunk, "average": average(plain)}
        if self.config.control:
            models["control"] = self._branch(ctx, corpus, trunk, "control")
        scores: dict[str, SpecialistScores] = {}
        for name in ctx.pieces("verdict", list(models), self._work_of_a_verdict()):
            scored = partial(scoring.assess, models[name], corpus.verdict, corpus.selection)
            scores[name] = SpecialistScores(**ctx.once("scores", name, scored))
            ctx.log(None, scores[name].metrics(name))
        distances = self._distances(ctx, corpus, plain, scores)
        guesses = corpus.baselines()
        ctx.log(None, guesses)
        timed = {name: partial(latency_ms, models[name]) for name in THREE}
        latencies = {n: float(ctx.once("latency_ms", n, time)) for n, time in timed.items()}
        report = _report(scores, [_table(scores, guesses), distances])
        handed = _save_specialists(ctx, corpus, models, scores, latencies, report.card())
        named = {}
        for name in ["trunk", "control"] if self.config.control else ["trunk"]:
            about = name, {"specialization": "none"}, scores[name].flat()
            named[name] = save_network(ctx, corpus, models[name], *about)
        report.metrics, targets = self._totals(ctx, handed, scores, max(latencies.values()))
        report.tables = [*report.tables, targets]
        report.details = {
            "all_models": three,
            "model_names": [f"TinyTitan-{s.name}" for s in THREE.values()],
            "model_ids": [ref.metadata["model_id"] for ref in handed],
            "seeds": [s.seed for s in THREE.values()],
            "trunk": named["trunk"].metadata["model_id"],
            "reports": {name: score.flat() for name, score in scores.items()},
        }
        return report.result(ctx, handed, three[0], **named)

    def _branch(
        self, ctx: PhaseContext, corpus: Corpus, trunk: ForgeNetwork, stage: str
    ) -> ForgeNetwork:
        """A copy of the trunk, trained on at a low rate: a specialist, or else the control."""
        c = self.config
        if special := THREE.get(stage):
            steps, mix = c.branch_steps, corpus.mix(special.domain, c.own_share)
            seed, model = ctx.seed * 1_000_003 + special.seed, _like(trunk, trunk, special.shape())
        else:
            steps, mix, seed = 3 * c.branch_steps, corpus.mix(), ctx.seed + 1
            model = _like(trunk, trunk)
        adamw = MuGrokConfig(muon=False, fallback_lr=c.branch_rate, weight_decay=0.0)
        as_trunk = {"accumulate", "precision", "gradient_checkpointing"}
        same = c.train.model_dump(include=as_trunk)
        settings = TrainSettings(optimizer=adamw, warmup_steps=min(10, steps), **same)
        if self.config.freeze_embeddings:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(FROZEN))
        how: dict[str, Any] = {"stage": stage, "steps": steps, "settings": settings, "seed": seed}
        return train_network(ctx, corpus, model, corpus.constant(mix), **how)

    def _work_of_a_verdict(self) -> int:
        """What it costs to measure a model, in training steps: a pass forward is a third of one."""
        items = 4 * self.config.evaluation_items + 6 * min(300, self.config.evaluation_items)
        return 1 + items * ITEM_TOKENS // (3 * self.config.rows * self.config.row_tokens)

    def _distances(
        self, ctx: PhaseContext, corpus: Corpus, plain: Sequence[ForgeNetwork], scores: Scores
    ) -> Table:
        """How far apart the three are, as a table; three that are too much alike are refused."""
        measured = [scores[name] for name in THREE]
        different = scoring.diversity(measured, plain[0].settings.t_max)
        apart = scoring.barriers(plain, corpus.selection)
        ctx.log(None, {f"phase/barrier_{pair}": value for pair, value in apart.items()})
        ctx.log(None, {"phase/diversity": different})
        least = self.config.min_diversity
        if different < least:
            problem = f"diversity {different:.3f}, {least} is required"
            hint = "more branch_steps or a higher branch_rate make them differ more"
            raise PhaseFailed(f"the three models are too much alike: {problem}", hint=hint)
        rows: Table = [["between", "loss barrier (nats/token)"]]
        rows += [[f"model {pair.replace('_', ' and ')}", value] for pair, value in apart.items()]
        return [*rows, [f"diversity (at least {least})", different]]

    def _totals(
        self, ctx: PhaseContext, handed: list[ModelRef], scores: Scores, latency: float
    ) -> tuple[dict[str, Any], Table]:
        """What the specification asks for, logged too, and a table of what it aims at."""
        weights, count = self.shared.model.parameters(), len(handed)
        losses = {name: scores[name].mean_nats for name in THREE}
        sizes = [float(ref.metadata["size_mb"]) for ref in handed]
        totals = {"phase/num_models_created": count, "phase/total_parameters": weights * count}
        ctx.log(None, {**totals, "phase/avg_final_loss": sum(losses.values()) / count})
        for name, size in zip(THREE, sizes, strict=True):
            ctx.log(None, {f"{name}/size_mb": size, f"{name}/parameters": weights})
        metrics = {
            "num_models": count,
            "total_parameters": weights * count,
            "parameters_per_model": weights,
            "total_size_mb": sum(sizes),
            "avg_size_mb": sum(sizes) / count,
            "specializations": [s.name for s in THREE.values()],
            "training_epochs": EVALUATIONS,
            **{f"final_loss_{name}": loss for name, loss in losses.items()},
            "grokfast_enabled": self.config.train.optimizer.grokfast_lambda > 0,
            "act_enabled": True,
            "titans_memory": True,
        }
        return metrics, [
            ["target of the specification", "", "measured"],
            ["parameters of a model", "25M +- 10 %", f"{weights:,}"],
            ["time", "< 30 min on a GPU", f"{ctx.seconds / 60:.1f} min"],
            ["memory", "< 8 GB", f"{platform.peak_memory_bytes() / 1e9:.2f} GB"],
            ["final loss, largest", "< 3.0", max(losses.values())],
            ["latency, 512 tokens", "< 100 ms", f"{latency:.1f} ms"],
        ]


def _like(trunk: ForgeNetwork, model: ForgeNetwork, changes: Any = None) -> ForgeNetwork:
    """The weights of a model in a network with the trunk's settings, but for some changes."""
    copy = ForgeNetwork(trunk.settings.model_copy(update=changes))
    copy.load_state_dict(model.state_dict())
    return copy.to(next(model.parameters()).device)


def _save_specialists(
    ctx: PhaseContext, corpus: Corpus, models: Models, scores: Scores, latencies: Numbers, card: str
) -> list[ModelRef]:
    handed = []
    metrics = {f"{n}/{key}": v for n, s in scores.items() for key, v in s.flat().items()}
    for name, special in THREE.items():
        loss = scores[name].mean_nats
        ctx.log(None, {f"{name}/latency_ms": latencies[name]})
        ctx.log(None, {f"{name}/final_loss": loss})
        metadata = {
            "specialization": special.name,
            "domain": special.domain,
            "final_loss": loss,
            "seed": special.seed,
            "trunk": "trunk",
            "missing_datasets": corpus.missing,
        }
        about = (f"tinytitan-{special.name}", metadata, metrics, card)
        handed.append(save_network(ctx, corpus, models[name], *about))
    return handed


def _report(scores: Scores, tables: list[Table]) -> PhaseReport:
    """Each domain by the trunk against its specialist, and the mean accuracy of other models."""
    best = []
    for name, special in THREE.items():
        others = (scores[other].by_domain[special.domain] for other in THREE if other != name)
        if scores[name].by_domain[special.domain] > max(others):
            best.append(special.name)
    before = [scores["trunk"].by_domain[s.domain] for s in THREE.values()]
    after = [scores[name].by_domain[s.domain] for name, s in THREE.items()]
    verdict = f"{len(best)} of 3 specialists are the best in their own domain"
    measured = "accuracy, each domain by the trunk -> by its specialist"
    references = [n for n in ("trunk", "average", "control") if n in scores]
    means = ", ".join(f"{name} {scores[name].mean_accuracy:.3f}" for name in references)
    summary = f"best in its own domain: {', '.join(best) or 'none'}; mean accuracy: {means}"
    headline = PhaseHeadline(measured, sum(before) / 3, sum(after) / 3, verdict)
    return PhaseReport(headline, summary, tables=tables)


def _table(scores: Scores, guesses: Numbers) -> Table:
    """Accuracy on unseen items, domain by domain, with what guessing reaches below."""
    rows: Table = [["model", *DOMAINS, "adaptive <= 1.3 steps", "mean", "steps", "memory use"]]
    for name, s in scores.items():
        row = [name, *(s.accuracy[d] for d in DOMAINS), s.quick_accuracy, s.mean_accuracy]
        rows.append([*row, s.mean_steps, s.memory_use])
    for kind in ("majority", "ngram"):
        values = [guesses[f"baseline/{kind}/{d}"] for d in DOMAINS]
        rows.append([kind, *values, values[-1], sum(values) / 3, "-", "-"])
    return rows
