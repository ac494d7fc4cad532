"""Phase 2, EvoMerge: evolve the three specialists into one model, and prove that it is better.

In: the three models of Phase 1 and their trunk, the base of every merge. Out: the champion, with
its lineage and the verdict on items that the search never saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_forge.contract.phase import (
    ModelRef,
    PhaseContext,
    PhaseController,
    PhasePlan,
    PhaseResult,
)
from agent_forge.errors import PhaseFailed
from agent_forge.evals.domains import copies_told
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evomerge import (
    EvolutionReport,
    Inputs,
    ancestry,
    champion_files,
    confirm_champion,
    figures,
    listening,
    measure_verdict,
    refuse_senseless,
    resolve,
    splits_of,
    story,
)
from agent_forge.phases.phase2_evomerge.prepare import prepare
from agent_forge.phases.phase2_evomerge.run import CACHE, EvolutionRun
from agent_forge.phases.phase2_evomerge.staff import crew_of

FOLDER = "evolution"
BASE = "trunk"
PARENTS = 3  # as the handoff from Phase 1 has it
_NAMES = {"perplexity": "perplexity_score"}  # of the parts: that one is no perplexity


class EvoMergePhase(PhaseController):
    """Evolve, conclude, hand over."""

    name = "evomerge"
    config: EvoMergeSettings

    def plan(self, models: Sequence[ModelRef]) -> PhasePlan:
        c, weights = self.config, self.shared.model.parameters()
        if models:
            splits = self._resolve(models).splits
        else:  # Phase 1 need not end before a wrong name is found
            splits = splits_of(self._measured())
            refuse_senseless(c, splits, PARENTS)
        candidates = c.population_size * (c.generations + 1) + len(models) + 1
        candidates = min(candidates, c.max_evaluations or candidates)
        notes = (
            f"{c.generations} generations of {c.population_size} candidates at most",
            f"{c.fitness_subset_size:,} items of each domain a candidate,"
            f" {c.verdict_items:,} unseen ones for the verdict",
            *copies_told(splits.get("verdict", ())),
        )
        return PhasePlan(
            candidates,
            weights,
            disk_bytes=c.models_on_disk * 4 * weights + 10**7,
            memory_bytes=6 * 4 * weights + 3 * 10**8,
            notes=notes,
        )

    def run(self, ctx: PhaseContext) -> PhaseResult:
        inputs = self._resolve(ctx.inputs)
        material = prepare(self.config, inputs, ctx.device, ctx.folder / FOLDER)
        run = EvolutionRun(
            self.config,
            material,
            ctx.folder / FOLDER,
            seed=ctx.seed,
            cache=ctx.folder / FOLDER / CACHE,
            crew=crew_of(self.config, inputs, ctx.device, ctx.folder / FOLDER),
            listen=listening(self.config, lambda record: self._told(ctx, record)),
            should_stop=ctx.should_stop,
        )
        run.run()
        names = [ref.name for ref in ctx.inputs]
        conclusion = measure_verdict(run, inputs, names)
        if run.search.champion is None or conclusion is None:
            raise PhaseFailed("no candidate could be measured", hint="forge logs has the reasons")
        return self._result(ctx, run, inputs, conclusion)

    def _resolve(self, models: Sequence[ModelRef]) -> Inputs:
        folders = [ref.path for ref in models]
        trunk = folders[0].parent / BASE
        base = str(trunk) if (trunk / "config.json").exists() else None
        place = folders[0].parent / FOLDER
        return resolve(self._measured(), [str(f) for f in folders], base, place)

    def _measured(self) -> EvoMergeSettings:
        """The settings for items: the verdict is on them, also with a fitness of one's own."""
        return self.config.model_copy(update={"fitness": ""})

    def _told(self, ctx: PhaseContext, record: dict[str, Any]) -> None:
        """Metrics and progress of a generation."""
        if record["event"] != "generation":
            return
        n, total = record["generation"], record["generations"]
        ctx.tell("step", stage="generation", step=n, total=total, done=n, left=total - n)
        values = {
            "generation/best_fitness": record["best"],
            "generation/avg_fitness": record["mean"],
            "generation/diversity_score": record["diversity"],
            "generation/fitness_std": record["fitness_std"],
            "generation/failed": record["failed"],
            "generation/mutation_count": record["mutations"],
        }
        ctx.log(n, {name: value for name, value in values.items() if value is not None})
        ctx.check_resources()

    def _result(
        self, ctx: PhaseContext, run: EvolutionRun, inputs: Inputs, conclusion: EvolutionReport
    ) -> PhaseResult:
        search, best = run.search, conclusion.best_parent
        champion = search.champion
        assert champion is not None
        known = figures(run)
        start, end = known["initial_fitness"], known["best_fitness"]
        metrics = {
            **{"initial_fitness": start, "final_fitness": end, "best_fitness": end},
            "fitness_improvement": end - start,
            "fitness_improvement_percent": 100 * known["improvement_pct"],
            "compression_ratio": float(len(inputs.parents)),
            **{f"final_{_NAMES.get(k, k)}": v for k, v in conclusion.champion.parts.items()},
            "final_perplexity": conclusion.perplexity,
        }
        for name, rival in conclusion.rivals.items():
            over = rival.comparison.overall.gains
            for measure, gain in over.items():
                metrics[f"gain/{_key(name)}/{measure}"] = gain.value
        ctx.log(None, {f"phase/{k}": v for k, v in metrics.items() if "/" not in k})
        for combo, count in search.combo_usage.items():
            ctx.log(None, {f"combo/{combo}/usage": count})
        saved = self._save(ctx, run, inputs, conclusion, metrics)
        artifacts = {
            "models": [saved],
            "model_id": saved.metadata["model_id"],
            "evolution_log": str(ctx.folder / FOLDER),
            "fitness_curve": [entry["best"] for entry in search.history],
            "best_generation": known["best_generation"],
            "operator_gains": search.operator_gains,
            "verdict": conclusion.to_json(),
            "summary": f"against the best parent ({best}): "
            + conclusion.rivals[best].comparison.overall.sentence("it"),
            "tables": [_table(conclusion)],
        }
        return PhaseResult(
            True,
            run.bench.model,
            self.name,
            {**known, **metrics},
            artifacts,
            ctx.seconds,
        )

    def _save(
        self,
        ctx: PhaseContext,
        run: EvolutionRun,
        inputs: Inputs,
        conclusion: EvolutionReport,
        metrics: dict[str, float],
    ) -> ModelRef:
        search = run.search
        champion = search.champion
        assert champion is not None
        weights = run.nursery.weights(champion.key)
        folder = Path(inputs.parents[0])
        tokenizer = [p for p in sorted(folder.iterdir()) if "token" in p.name or "chat" in p.name]
        beside = champion_files(run, inputs, conclusion)
        del beside["README.md"]  # the store writes the card of a run's model
        run.bench.fill(champion.key)
        saved = ctx.save_model(
            "champion",
            dict(weights),
            {
                "fitness": search.scores[champion.key],
                "merge_technique": champion.origin,
                "champion": champion.key,
                "lineage": ancestry(run, inputs),
                "verdict": conclusion.sentences(),
                "accuracy": conclusion.champion.parts.get("accuracy", 0.0),
                "perplexity": conclusion.perplexity,
            },
            config=weights.config,
            metrics={k: v for k, v in metrics.items() if "/" not in k},
            tokenizer_files=tokenizer,
            beside=beside,
            card_text="\n".join(story(run, inputs, conclusion)),
        )
        confirm_champion(saved.path, run, inputs, conclusion)
        return saved


def _key(name: str) -> str:
    return name.replace(" ", "_")


def _table(conclusion: EvolutionReport) -> list[list[Any]]:
    """Raw figures on unseen items, and the gain of the champion over each model."""
    columns = list(conclusion.champion.raw)
    rows: list[list[Any]] = [["model", *columns, "champion's gain"]]
    rows.append(["champion", *(conclusion.champion.raw[c] for c in columns), ""])
    for name, rival in conclusion.rivals.items():
        gain = rival.comparison.overall.sentence("it")
        rows.append([name, *(rival.score.raw[c] for c in columns), gain])
    return rows
