"""Phase 2, EvoMerge: evolve the three specialists into one model, and prove that it is better.

In: the three models of Phase 1 and their trunk, the base of every merge. Out: the champion, with
its lineage and the verdict on items that the search never saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agent_forge.contract import phase
from agent_forge.contract.phase import ModelRef, PhaseContext, PhaseHeadline, PhaseReport
from agent_forge.errors import ConfigError
from agent_forge.evals.domains import copies_told
from agent_forge.model.locate import TRUNK
from agent_forge.phases.phase2_evomerge import inputs
from agent_forge.phases.phase2_evomerge import report as reporting
from agent_forge.phases.phase2_evomerge.checks import CHAMPION, check_settings
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.phases.phase2_evomerge.planning import decisions, with_decisions
from agent_forge.phases.phase2_evomerge.report import EvolutionReport, summary
from agent_forge.phases.phase2_evomerge.told import champion_lineage
from agent_forge.phases.training import sample_replies

FOLDER = "evolution"
PARENTS = 3  # as the handoff from Phase 1 has it
# Of the summary, those that a run logs and its model carries.
FIGURES = (
    *("initial_fitness", "final_fitness", "best_fitness", "fitness_improvement"),
    *("fitness_improvement_percent", "compression_ratio"),
)
_PART_NAMES = {"perplexity": "perplexity_score"}  # that part is no perplexity


class EvoMergePhase(phase.PhaseController):
    """Evolve, report, hand over."""

    name = "evomerge"
    config: EvoMergeSettings

    def plan(self, models: Sequence[ModelRef]) -> phase.PhasePlan:
        c, weights = self.config, self.shared.model.parameters()
        self._refuse_heal()
        if models:
            splits = self._inputs(models, models[0].path, 0).splits
        else:  # Phase 1 need not end before a wrong name is found
            splits = inputs.split_items(c, always_verdict=True)
            check_settings(c, splits, PARENTS)
        notes = (
            f"{c.generations} generations of {c.population_size} candidates at most",
            f"{c.fitness_subset_size:,} items of each domain a candidate,"
            f" {c.verdict_items:,} unseen ones for the verdict",
            *copies_told(splits["verdict"]),
        )
        disk, memory = c.models_on_disk * 4 * weights + 10**7, 6 * 4 * weights + 3 * 10**8
        return phase.PhasePlan(c.planned(len(models)), weights, disk, memory, notes)

    def run(self, ctx: PhaseContext) -> phase.PhaseResult:
        opened = self._inputs(ctx.inputs, ctx.folder / FOLDER, ctx.seed)
        made = ctx.once("begun", "decisions", partial(decisions, opened, ctx.device))
        opened = with_decisions(opened, made)
        begun = ctx.once("begun", "hashes", partial(inputs.hashes_beside_fingerprint, opened))
        inputs.refuse_changed(opened, begun)
        listen = partial(self._log_generation, ctx)
        how: Any = {"listen": listen, "should_stop": ctx.should_stop, "save": partial(_save, ctx)}
        loop, report, champion, _ = run_evolution(opened, device=ctx.device, **how)
        assert report is not None  # there always are items for it
        return self._result(ctx, loop, report, champion)

    def _inputs(self, refs: Sequence[ModelRef], folder: Path, seed: int) -> inputs.EvolutionInputs:
        base, control = refs[0].artifact(TRUNK), refs[0].artifact(inputs.CONTROL)
        paths, names = [str(ref.path) for ref in refs], [ref.name for ref in refs]
        base_ref = str(base.path) if base else None
        control_ref = str(control.path) if base and control else None
        models = paths, base_ref, folder, seed, names, control_ref
        self._refuse_heal()
        return inputs.open_inputs(self.config, *models, in_run=True)

    def _refuse_heal(self) -> None:
        if self.config.heal:
            problem = "heal: Phase 2 hands over a champion that its lineage can make again"
            hint = "heal in an evolution of its own: forge evo --base-models RUN --heal 0.2"
            raise ConfigError(problem, hint=hint)

    def _log_generation(self, ctx: PhaseContext, record: Mapping[str, Any]) -> None:
        """Metrics and progress of a generation; work is counted in seconds."""
        if record["event"] in ("work", "tokens", "verdict"):
            ctx.tell(**record)
        if record["event"] != "generation":
            return
        n, left = record["generation"], record["eta_s"] or 0.0
        work = {"done": record["elapsed_s"], "left": left, "eta_s": record["eta_s"]}
        ctx.tell("step", stage="generation", step=n, total=record["generations"], **work)
        ctx.log(n, record["metrics"])
        ctx.check_resources()

    def _result(
        self, ctx: PhaseContext, loop: EvolutionLoop, report: EvolutionReport, champion: ModelRef
    ) -> phase.PhaseResult:
        metrics, figures, best = _metrics(loop, report), summary(loop), report.best_parent
        ctx.log(None, {f"phase/{k}": v for k, v in metrics.items() if "/" not in k})
        if (combo := figures["best_combo"]) is not None:
            ctx.log(None, {"phase/champion_combo_id": combo})
        overall = report.baselines[best].comparison.overall
        measure = overall.measures()[0]  # what can tell the two apart on the unseen items
        gain, title = overall.gains[measure], f"{measure}, best parent -> champion"
        verdict = overall.sentence("the best parent")
        headline = PhaseHeadline(title, gain.reference, gain.candidate, verdict)
        columns = list(report.champion.raw)  # on unseen items, and the champion's gain over each
        rows: list[list[Any]] = [["model", *columns, "champion's gain"]]
        for name, score in report.scores().items():
            gained = report.baselines[name].sentence() if name in report.baselines else ""
            rows.append([name, *(score.raw[c] for c in columns), gained])
        details = {
            **reporting.artifacts(loop, report, champion.path),
            "samples": sample_replies(champion.open()),
            "model_id": champion.metadata["model_id"],
            "evolution_log": str(loop.folder),
            "operator_gains": loop.search.operator_gains,
        }
        told = f"against the best parent ({best}): {report.baselines[best].sentence()}"
        found = PhaseReport(headline, told, {**figures, **metrics}, [rows], details)
        return found.result(ctx, [champion], loop.evaluator.model)


def _metrics(loop: EvolutionLoop, report: EvolutionReport) -> dict[str, float]:
    known = summary(loop)
    return {
        **{name: known[name] for name in FIGURES},
        **{f"final_{_PART_NAMES.get(k, k)}": v for k, v in report.champion.parts.items()},
        "final_perplexity": report.perplexity,
        **{
            f"gain/{name.replace(' ', '_')}/{measure}": gain.value
            for name, baseline in report.baselines.items()
            for measure, gain in baseline.comparison.overall.gains.items()
        },
    }


def _save(ctx: PhaseContext, loop: EvolutionLoop, report: EvolutionReport) -> ModelRef:
    """Store the champion in the run, once its file scores what was measured."""
    champion = loop.champion
    weights = loop.weights.weights(champion.key)
    parent = Path(loop.inputs.parent_refs[0])
    own = (path for path in sorted(parent.iterdir()) if path.is_file())
    tokenizer = {p.name: p.read_bytes() for p in own if "token" in p.name or "chat" in p.name}
    beside = reporting.champion_files(loop, report)
    del beside["README.md"]  # the store writes the card of a run's model
    loop.evaluator.fill(champion.key)
    metadata = {
        "fitness": loop.search.scores[champion.key],
        "merge_technique": loop.technique,
        "champion": champion.key,
        "lineage": champion_lineage(loop, champion.key),
        "verdict": report.sentences(),
        "accuracy": report.champion.parts.get("accuracy", 0.0),
        "perplexity": report.perplexity,
    }
    return ctx.save_model(
        CHAMPION,
        dict(weights),
        metadata,
        config=weights.config,
        metrics={k: v for k, v in _metrics(loop, report).items() if "/" not in k},
        tokenizer_files=tokenizer,
        beside=beside,
        card_head=reporting.evolved_head(loop),
        card_text="\n".join(reporting.markdown(loop, report)),
        check=lambda path: reporting.confirm_champion(path, loop, report),
    )
