"""Phase 1, Cognate: train one trunk, then three specialists that branch from it.

In: nothing. Out: TinyTitan-reasoning, -memory_integration and -adaptive_computation, of one shape
and with one tokenizer. The specification trains three networks from three seeds; such networks
share no ancestor and cannot be averaged (measured), so ours share a trunk and the seeds drive the
order of the data. The branches keep the trunk's embedding and learn at a low rate with AdamW, which
is what makes them merge. Beside them stand what a merge must beat: the trunk, the plain average,
and a control that was trained on everything for as long as the three together.

Networks: TRM (arXiv 2510.04871) over a backbone after Titans (arXiv 2501.00663).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from agent_forge import platform
from agent_forge.config.settings import ModelSettings
from agent_forge.contract.phase import (
    ModelRef,
    PhaseContext,
    PhaseController,
    PhasePlan,
    PhaseResult,
)
from agent_forge.data import baselines
from agent_forge.data.loader import Curriculum, CurriculumStage, Loader
from agent_forge.errors import PhaseFailed
from agent_forge.evals.likelihood import measure
from agent_forge.evals.model_under_test import confirm
from agent_forge.infer.generate import Sampling, generate
from agent_forge.model.hf import config_dict
from agent_forge.model.loss import language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast
from agent_forge.phases.phase1_cognate.assess import (
    SpecialistScores,
    assess,
    average,
    barriers,
    diversity,
)
from agent_forge.phases.phase1_cognate.config import (
    DOMAINS,
    SPECIALISTS,
    CognateSettings,
    Specialist,
)
from agent_forge.phases.phase1_cognate.corpus import Corpus, build_corpus, validate_corpus
from agent_forge.train.config import TrainSettings
from agent_forge.train.loop import Evaluations, fit
from agent_forge.train.trainer import Trainer

FROZEN = ("embedding.", "projection.", "norm.")
EPOCHS = 10
CONFIRMED = 8  # items of each domain that a written model is measured on again
SAMPLE_PROMPTS = ("copy k m a t", "sort 52814", "max 4718:2905")


class CognatePhase(PhaseController):
    """Trunk, branches, control, verdict."""

    name = "cognate"
    config: CognateSettings

    def plan(self, models: Sequence[ModelRef]) -> PhasePlan:
        validate_corpus(self.config)
        c, weights = self.config, self.shared.model.parameters()
        branches = 3 * c.branch_steps * (2 if c.control else 1)
        tokens = c.rows * c.row_tokens
        notes = (
            f"trunk {c.trunk_steps} steps, three branches of {c.branch_steps}"
            + (f", a control of {3 * c.branch_steps}" if c.control else ""),
            f"{tokens:,} tokens a step; {c.evaluation_items:,} unseen items of each domain",
        )
        return PhasePlan(
            c.trunk_steps + branches,
            weights,
            disk_bytes=3 * 5 * weights * 4 * 4 + 3 * weights * 4 + 10**7,
            memory_bytes=6 * 4 * weights + 3000 * tokens + 3 * 10**8,
            notes=notes,
        )

    def run(self, ctx: PhaseContext) -> PhaseResult:
        corpus = build_corpus(self.config, self.shared.model)
        trunk = self._trunk(ctx, corpus)
        three = [self._branch(ctx, corpus, trunk, i) for i in range(3)]
        control = self._control(ctx, corpus, trunk) if self.config.control else None
        reports = self._judge(ctx, corpus, trunk, three, control)
        guesses = _baselines(corpus)
        ctx.log(None, guesses)
        self._latencies: list[float] = []
        refs = [
            self._save(ctx, corpus, model, number, reports)
            for number, model in enumerate(three, start=1)
        ]
        trunk_ref = self._save_beside(ctx, corpus, "trunk", trunk, reports)
        if control is not None:
            self._save_beside(ctx, corpus, "control", control, reports)
        return self._result(ctx, refs, trunk_ref, three, reports, guesses)

    # -- training ----------------------------------------------------------------------------------

    def _trunk(self, ctx: PhaseContext, corpus: Corpus) -> ForgeNetwork:
        torch.manual_seed(ctx.seed)
        model = ForgeNetwork(self.shared.model).to(ctx.device)
        optimizer = MuonGrokfast(model, self.config.train.optimizer)
        curriculum = corpus.curriculum(self.config.text_share, self.config.row_tokens)
        steps = self.config.trunk_steps
        self._fit(
            ctx, corpus, model, optimizer, self.config.train, curriculum, ctx.seed, "trunk", steps
        )
        return model

    def _branch(
        self, ctx: PhaseContext, corpus: Corpus, trunk: ForgeNetwork, index: int
    ) -> ForgeNetwork:
        special = SPECIALISTS[index]
        mix = corpus.mix(special.domain, self.config.own_share, self.config.text_share)
        model = self._grown(trunk, special)
        seed = ctx.seed * 1_000_003 + special.seed
        self._go_on(ctx, corpus, model, mix, seed, f"model_{index + 1}", self.config.branch_steps)
        return model

    def _control(self, ctx: PhaseContext, corpus: Corpus, trunk: ForgeNetwork) -> ForgeNetwork:
        """The trunk, trained on all domains for as long as the three branches together."""
        model = self._grown(trunk, None)
        mix = corpus.curriculum(self.config.text_share, self.config.row_tokens).stages[-1].mix
        steps = 3 * self.config.branch_steps
        self._go_on(ctx, corpus, model, dict(mix), ctx.seed + 1, "control", steps)
        return model

    def _grown(self, trunk: ForgeNetwork, special: Specialist | None) -> ForgeNetwork:
        """A copy of the trunk with the settings of a specialist."""
        settings: ModelSettings = self.shared.model
        model = ForgeNetwork(settings.model_copy(update=special.shape() if special else {}))
        model.load_state_dict(trunk.state_dict())
        model.to(next(trunk.parameters()).device)
        if self.config.freeze_embeddings:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(FROZEN))
        return model

    def _go_on(
        self,
        ctx: PhaseContext,
        corpus: Corpus,
        model: ForgeNetwork,
        mix: dict[str, float],
        seed: int,
        stage: str,
        steps: int,
    ) -> None:
        """Train a branch: AdamW for everything, at a low rate."""
        config = MuGrokConfig(muon=False, fallback_lr=self.config.branch_rate, weight_decay=0.0)
        settings = TrainSettings(
            optimizer=config,
            warmup_steps=min(10, steps),
            accumulate=self.config.train.accumulate,
            precision=self.config.train.precision,
            gradient_checkpointing=self.config.train.gradient_checkpointing,
        )
        optimizer = MuonGrokfast(model, config)
        always = Curriculum([CurriculumStage(1.0, mix, self.config.row_tokens)])
        self._fit(ctx, corpus, model, optimizer, settings, always, seed, stage, steps)

    def _fit(
        self,
        ctx: PhaseContext,
        corpus: Corpus,
        model: ForgeNetwork,
        optimizer: MuonGrokfast,
        settings: TrainSettings,
        curriculum: Curriculum,
        seed: int,
        stage: str,
        steps: int,
    ) -> None:
        loader = self._loader(corpus, curriculum.stages[0].mix, seed)

        def batch(step: int) -> tuple[Tensor, Tensor]:
            now = curriculum.at(step - 1, steps)
            if step > 1 and now is not curriculum.at(step - 2, steps):
                trainer.expect_other_losses()
            loader.use(now.mix, now.length)
            return loader.next_batch()

        trainer = Trainer(
            model,
            optimizer,
            language_loss,
            settings,
            total=steps,
            generator=ctx.generator(f"loss_{stage}"),
            device=ctx.device,
            decisions=ctx.decisions.of(stage),
        )
        looks = Evaluations(
            lambda: _held_out(model, corpus),
            every_steps=max(1, steps // EPOCHS),
            patience=settings.patience,
            min_gain=settings.min_gain,
        )
        fit(ctx, trainer, batch, stage=stage, parts={"loader": loader}, evaluations=looks)

    def _loader(self, corpus: Corpus, mix: Any, seed: int) -> Loader:
        return Loader(
            corpus.sources,
            mix,
            batch=self.config.rows,
            length=self.config.row_tokens,
            seed=seed,
            vocab_size=self.shared.model.vocab_size,
        )

    # -- the verdict -------------------------------------------------------------------------------

    def _judge(
        self,
        ctx: PhaseContext,
        corpus: Corpus,
        trunk: ForgeNetwork,
        three: list[ForgeNetwork],
        control: ForgeNetwork | None,
    ) -> dict[str, SpecialistScores]:
        """Measure all models on unseen items; refuse three that are too much alike."""
        models = {f"model_{n}": model for n, model in enumerate(three, start=1)}
        models |= {"trunk": trunk, "average": average([_with(trunk, m) for m in three])}
        if control is not None:
            models["control"] = control
        reports = {}
        for number, (name, model) in enumerate(models.items(), start=1):
            ctx.pause_if_asked()
            ctx.tell("measuring", model=name, number=f"{number} of {len(models)}")
            reports[name] = assess(model, corpus.verdict, corpus.selection)
            ctx.log(None, _measured(name, reports[name]))
        different = diversity([reports[f"model_{n}"] for n in (1, 2, 3)], trunk.settings.t_max)
        apart = barriers([_with(trunk, m) for m in three], corpus.selection)
        ctx.log(None, {f"phase/barrier_{pair}": value for pair, value in apart.items()})
        ctx.log(None, {"phase/diversity": different})
        self._apart, self._different = apart, different
        if different < self.config.min_diversity:
            raise PhaseFailed(
                f"the three models are too much alike: diversity {different:.3f},"
                f" {self.config.min_diversity} is required",
                hint="more branch_steps or a higher branch_rate make them differ more",
            )
        return reports

    def _targets(self, ctx: PhaseContext, losses: Sequence[float]) -> list[list[Any]]:
        """What the specification aims at, beside what was measured here."""
        return [
            ["target of the specification", "", "measured"],
            ["parameters of a model", "25M +- 10 %", f"{self.shared.model.parameters():,}"],
            ["time", "< 30 min on a GPU", f"{ctx.seconds / 60:.1f} min"],
            ["memory", "< 8 GB", f"{platform.peak_memory_bytes() / 1e9:.2f} GB"],
            ["final loss, largest", "< 3.0", max(losses)],
            ["latency, 512 tokens", "< 100 ms", f"{max(self._latencies):.1f} ms"],
        ]

    # -- what is handed over -----------------------------------------------------------------------

    def _save(
        self,
        ctx: PhaseContext,
        corpus: Corpus,
        model: ForgeNetwork,
        number: int,
        reports: dict[str, SpecialistScores],
    ) -> ModelRef:
        special, own = SPECIALISTS[number - 1], reports[f"model_{number}"]
        model.requires_grad_(True)
        loss = sum(own.nats.values()) / len(own.nats)
        metadata = {
            "specialization": special.name,
            "domain": special.domain,
            "final_loss": loss,
            "seed": special.seed,
            "trunk": "trunk",
            "missing_datasets": corpus.missing,
            "samples": samples(model, corpus),
        }
        latency = _latency(model)
        self._latencies.append(latency)
        ctx.log(None, {f"model_{number}/latency_ms": latency})
        ctx.log(None, {f"model_{number}/final_loss": loss})
        table = {name: _flat(report) for name, report in reports.items()}
        saved = ctx.save_model(
            f"tinytitan-{special.name}",
            model,
            metadata,
            config=config_dict(model.settings),
            metrics={f"{name}/{key}": v for name, row in table.items() for key, v in row.items()},
            tokenizer_files=corpus.tokenizer.files(),
        )
        _confirm(saved, model, corpus)
        return saved

    def _save_beside(
        self,
        ctx: PhaseContext,
        corpus: Corpus,
        name: str,
        model: ForgeNetwork,
        reports: dict[str, SpecialistScores],
    ) -> ModelRef:
        """The base of every merge of the three, and what such a merge is compared with."""
        model.requires_grad_(True)
        saved = ctx.save_model(
            name,
            model,
            {"specialization": "none", "samples": samples(model, corpus)},
            config=config_dict(model.settings),
            metrics=_flat(reports[name]),
            tokenizer_files=corpus.tokenizer.files(),
        )
        _confirm(saved, model, corpus)
        return saved

    def _result(
        self,
        ctx: PhaseContext,
        refs: list[ModelRef],
        trunk: ModelRef,
        three: list[ForgeNetwork],
        reports: dict[str, SpecialistScores],
        guesses: dict[str, float],
    ) -> PhaseResult:
        weights = self.shared.model.parameters()
        losses = [float(ref.metadata["final_loss"]) for ref in refs]
        sizes = [float(ref.metadata["size_mb"]) for ref in refs]
        totals = {
            "phase/num_models_created": len(refs),
            "phase/total_parameters": weights * len(refs),
            "phase/avg_final_loss": sum(losses) / len(losses),
        }
        ctx.log(None, totals)
        for number, size in enumerate(sizes, start=1):
            ctx.log(None, {f"model_{number}/size_mb": size, f"model_{number}/parameters": weights})
        metrics: dict[str, Any] = {
            "num_models": len(refs),
            "total_parameters": weights * len(refs),
            "parameters_per_model": weights,
            "total_size_mb": sum(sizes),
            "avg_size_mb": sum(sizes) / len(sizes),
            "specializations": [s.name for s in SPECIALISTS],
            "training_epochs": EPOCHS,
            **{f"final_loss_model_{n}": loss for n, loss in enumerate(losses, start=1)},
            "grokfast_enabled": self.config.train.optimizer.grokfast_lambda > 0,
            "act_enabled": True,
            "titans_memory": True,
        }
        artifacts = {
            "models": refs,
            "all_models": three,
            "model_names": [f"TinyTitan-{s.name}" for s in SPECIALISTS],
            "model_ids": [ref.metadata["model_id"] for ref in refs],
            "seeds": [s.seed for s in SPECIALISTS],
            "trunk": trunk.metadata["model_id"],
            "reports": {name: _flat(report) for name, report in reports.items()},
            "summary": _summary(reports),
            "tables": [
                _table(reports, guesses),
                _pairs(self._apart, self._different, self.config.min_diversity),
                self._targets(ctx, losses),
            ],
        }
        return PhaseResult(True, three[0], self.name, metrics, artifacts, ctx.seconds)


def _pairs(apart: dict[str, float], different: float, least: float) -> list[list[Any]]:
    """How far apart the three are: the loss between each two, and their diversity."""
    rows: list[list[Any]] = [["between", "loss barrier (nats/token)"]]
    rows += [[f"model {pair.replace('_', ' and ')}", value] for pair, value in apart.items()]
    return [*rows, [f"diversity (at least {least})", different]]


def _with(trunk: ForgeNetwork, model: ForgeNetwork) -> ForgeNetwork:
    """The weights of a specialist in a network with the trunk's settings, as a merge has them."""
    plain = ForgeNetwork(trunk.settings)
    plain.load_state_dict(model.state_dict())
    return plain.to(next(model.parameters()).device)


def _confirm(saved: ModelRef, model: ForgeNetwork, corpus: Corpus) -> None:
    """The file has to score what the network does that was measured."""
    items = [item for domain in DOMAINS for item in corpus.verdict[domain][:CONFIRMED]]
    confirm(
        saved.path, lambda subject: measure(subject.model, items).loss, measure(model, items).loss
    )


def _held_out(model: ForgeNetwork, corpus: Corpus) -> float:
    items = [item for domain in DOMAINS for item in corpus.selection[domain][:100]]
    value = measure(model, items, threshold=1.0).nats_per_token
    model.train()
    return value


def _flat(report: SpecialistScores) -> dict[str, float]:
    """A report as one level of names."""
    flat: dict[str, float] = {}
    for name, value in asdict(report).items():
        if isinstance(value, dict):
            flat |= {f"{name}_{key}": v for key, v in value.items()}
        else:
            flat[name] = value
    return flat


def _summary(reports: dict[str, SpecialistScores]) -> str:
    """Whether each specialist is the best in its own domain, and what the others reach."""
    three = [reports[f"model_{n}"] for n in (1, 2, 3)]
    best = [
        special.name
        for special, own in zip(SPECIALISTS, three, strict=True)
        if all(own.judged[special.domain] > r.judged[special.domain] for r in three if r is not own)
    ]
    others = ", ".join(
        f"{name} {reports[name].mean_accuracy:.3f}"
        for name in ("trunk", "average", "control")
        if name in reports
    )
    return f"best in its own domain: {', '.join(best) or 'none'}; mean accuracy: {others}"


def _table(reports: dict[str, SpecialistScores], guesses: dict[str, float]) -> list[list[Any]]:
    """Accuracy on unseen items, domain by domain, with what guessing reaches below."""
    head = ["model", *DOMAINS, "adaptive <= 1.3 steps", "mean", "steps", "memory use"]
    rows: list[list[Any]] = [head]
    for name, r in reports.items():
        row = [name, *(r.accuracy[d] for d in DOMAINS), r.quick_accuracy, r.mean_accuracy]
        rows.append([*row, r.mean_steps, r.memory_use])
    for kind in ("majority", "ngram"):
        values = [guesses[f"baseline/{kind}/{d}"] for d in DOMAINS]
        rows.append([kind, *values, values[-1], sum(values) / 3, "-", "-"])
    return rows


def _measured(name: str, report: SpecialistScores) -> dict[str, float]:
    values = {f"{name}/accuracy/{d}": v for d, v in report.accuracy.items()}
    values |= {f"{name}/nats/{d}": v for d, v in report.nats.items()}
    return values | {
        f"{name}/accuracy/adaptive_quick": report.quick_accuracy,
        f"{name}/act/quick_steps": report.quick_steps,
        f"{name}/act/mean_steps": report.mean_steps,
        f"{name}/gate/memory_use": report.memory_use,
    }


def _baselines(corpus: Corpus) -> dict[str, float]:
    """What guessing would reach on the same items."""
    values = {}
    for domain in DOMAINS:
        seen, unseen = corpus.seen[domain], corpus.unseen[domain]
        values[f"baseline/majority/{domain}"] = baselines.majority(seen, unseen)
        values[f"baseline/ngram/{domain}"] = baselines.ngram(seen, unseen)
    return values


def samples(model: ForgeNetwork, corpus: Corpus) -> list[dict[str, str]]:
    """What the model says to a few prompts, greedily, and how it goes on with a story."""
    chats = [
        corpus.tokenizer.encode_chat([{"role": "user", "content": p}], reply=True)
        for p in SAMPLE_PROMPTS
    ]
    opening = next(p.examples[0].completion for p in corpus.parts if p.domain == "text")
    start = " ".join(opening.split()[:8])
    prompts = [*chats, corpus.tokenizer.encode(start)]
    ends = frozenset((0, 5))
    made = generate(model, prompts, Sampling(max_new_tokens=60, stop_tokens=ends))
    texts = [corpus.tokenizer.decode(result.tokens) for result in made]
    shown = (*SAMPLE_PROMPTS, start)
    return [{"prompt": p, "text": text} for p, text in zip(shown, texts, strict=True)]


def _latency(model: ForgeNetwork) -> float:
    """Milliseconds for the next token of 512, without a cache; the best of three."""
    device = next(model.parameters()).device
    tokens = torch.zeros(1, 512, dtype=torch.long, device=device)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        model.predict(tokens)
        took.append(time.perf_counter() - began)
    return min(took) * 1000
