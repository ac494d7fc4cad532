"""During an evolution: ask, make, measure, tell, advance. Killed, it goes on to the same bytes.

The journal has a line for everything that was measured, and for the clock's decision to stop. All
else follows from settings, seed, parents and journal: going on means telling the search again.

    evolution.json                      what it was begun with (not in a run of the pipeline)
    journal.jsonl                       what was measured, in order
    evolution_checkpoint_gen_N.json     how it stood after generation N, for people; --resume takes
                                        it for its fingerprint, and goes on by the journal
    gen_N_best_model/                   the champion of then; the last few are kept
    weights/                            candidates that others are made from (can be made again)
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from agent_forge import errors
from agent_forge.errors import ConfigError, PhaseFailed
from agent_forge.evals.fitness import DomainFitness, Incumbent
from agent_forge.phases.phase2_evomerge import checkpoints, journal, told
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights, distance_matrix
from agent_forge.phases.phase2_evomerge.config import BEGUN
from agent_forge.phases.phase2_evomerge.evaluator import CandidateEvaluator, Limits
from agent_forge.phases.phase2_evomerge.inputs import EvolutionInputs
from agent_forge.phases.phase2_evomerge.parallel import ParallelEvaluator
from agent_forge.phases.phase2_evomerge.planning import EvolutionPace, computing_threads, decided
from agent_forge.search.candidate import SHORT, Candidate
from agent_forge.search.portfolio import STRATEGIES
from agent_forge.track.tracker import Listener

log = logging.getLogger(__name__)
# Evolutions begun under rule 2 leave out what all parents cannot do, and choose among finalists.
# The strategy `spec` has no such rule, and those that were begun before end as they would have.
RULES = {"rules": 2}
# Settings that change nothing in the result. The names of the fitness tell the items.
WITHOUT_EFFECT = {
    *("enabled", "gate_policy", "gates", "checkpoint_every_steps", "enable_caching", "data"),
    *("checkpoint_every", "keep_best_models", "time_budget_minutes", "generations", "split_by"),
    *("verdict_items", "max_evaluations", "workers", "executor", "cluster", "replicates"),
    *("reading", "gradient_checkpointing"),
    *("heal", "heal_steps", "heal_data", "heal_rate", "heal_rank"),  # after the search
}


class EvolutionLoop:
    """One evolution in the folder of its inputs."""

    def __init__(
        self,
        inputs: EvolutionInputs,
        device: str = "cpu",
        *,
        listen: Listener = lambda record: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.inputs = inputs = decided(inputs, device)
        self._began = time.monotonic()
        self.settings, self.folder = inputs.settings, inputs.folder
        self.pace, self.should_stop = EvolutionPace(inputs, listen), should_stop
        self.listen = self.pace.tell
        inputs.refuse_damaged()
        self.cache_hits = self._count = 0  # the count: candidates measured in this attempt
        self._stopped = False  # by the clock
        self.seconds = {"merge": 0.0, "evaluation": 0.0, "all": 0.0}
        models = inputs.parents, inputs.base
        self.weights = CandidateWeights(*models, {}, self.folder / journal.WEIGHTS)
        n, groups, layers = len(inputs.parents), self.weights.groups.names, self.weights.layers
        how: Any = {"parents": n, "groups": groups, "layers": layers, "seed": inputs.seed}
        self.search = STRATEGIES[self.settings.strategy](self.settings, **how)
        self.weights.known = self.search.candidates
        self._cache = self.folder / journal.CACHE if self.settings.enable_caching else None
        cached = journal.read_cache(self._cache)
        self.evaluator = CandidateEvaluator(inputs, self.weights, cached, device)
        self.fingerprint = self._fingerprint()
        self.journal = journal.EvolutionJournal(self.folder, inputs.models, self.fingerprint)
        self.weights.keep([])  # files of an earlier start prove nothing: they are made again
        self._parallel = ParallelEvaluator.of(inputs, device)
        self._items: dict[str, Any] = {}  # of this generation's candidates and the champion
        self._samples: dict[str, np.ndarray] = {}  # of the weights of this generation's candidates
        self._incumbents: dict[str, Incumbent] = {}  # the last champions
        self.floor: list[str] | None = None  # the domains whose accuracy counts nothing
        self._finalist: str | None = None  # the best on the holdout, at the end
        self._seconds_before = float(self.journal.latest("elapsed"))
        for fitness in (self.evaluator.fitness, self.evaluator.holdout):
            if isinstance(fitness, DomainFitness):
                fitness.progress = self.pace.tokens_done

    def _fingerprint(self) -> str:
        """sha256 of all that the result depends on; a setting at its first default can be a new
        one (see PhaseSettings.BEFORE)."""
        free = WITHOUT_EFFECT | self.settings.unused
        free |= set() if self.settings.layer_paths else {"layer_paths", "path_gate"}
        holdout = self.evaluator.holdout
        content = {
            "settings": self.settings.decisive(free),
            "models": self.inputs.hashes,
            "fitness": [self.evaluator.fitness.name, holdout.name if holdout else ""],
            "seed": self.inputs.seed,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def champion(self) -> Candidate:
        """The best candidate; without any the evolution has failed."""
        if self._finalist is not None:
            return self.search.candidates[self._finalist]
        if self.search.champion is None:
            raise PhaseFailed("no candidate could be measured", hint="the journal says why")
        return self.search.champion

    @property
    def technique(self) -> str:
        """How the champion was made, in words."""
        return told.technique(self.search, self.champion.key, self.inputs.names)

    @property
    def curve(self) -> list[float]:
        return [entry["best"] for entry in self.search.history]

    @property
    def reason(self) -> str:
        """Why the evolution ended."""
        return "time budget" if self._stopped else self.search.finished or "time budget"

    def run(self) -> None:
        """Evolve until the search is finished or the time is over."""
        with computing_threads(self.settings.worker_threads), self._parallel or nullcontext():
            rules = {} if self.settings.strategy == "spec" else RULES
            first, branch = self.journal.begin(**rules), self.inputs.branch
            if first.get("branch") != (list(branch) if branch else None):
                problem = f"{self.folder}: {BEGUN} and the journal are of different branches"
                raise ConfigError(problem, hint="put back what was there, or branch again")
            if first.get("rules") == RULES["rules"]:
                self._settle_floor()
            began, reached = time.monotonic(), self.journal.latest("generation")
            while self.search.finished is None:
                self._measure_generation()
                self._tell_distances()
                self.pace.begin("holdout", "the champion on the items of the holdout")
                self._tell_holdout()
                generation = self.search.generation
                if branch and generation == branch[0]:
                    self.search.reseed(branch[1])
                self.search.advance()
                self.search.history[-1]["tokens"] = self.journal.tokens(generation)
                if generation >= reached - 1:  # of those before it only the journal is needed
                    with self._timed("merge"):
                        self.weights.keep(self._needed(), not self.search.finished)
                    self._checkpoint(generation)
                self._samples.clear()
                best = {entry["champion"] for entry in self.search.history[-2:]}
                self._items = {k: v for k, v in self._items.items() if k in best}
                self._incumbents = {k: v for k, v in self._incumbents.items() if k in best}
                self.seconds["all"] = time.monotonic() - began
                self._warn_of_floors()
                self.listen(told.generation_record(self))
                if self._stopped_before(generation):
                    break
            self._choose_finalist()

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - began

    def _warn_of_floors(self) -> None:
        entry = self.search.history[-1]
        floors = ", ".join(f"{name} {f:g}" for name, f in self.settings.fitness_floors.items())
        if not entry["generation"] and floors and entry["best"] == 0:
            log.warning("no model of generation 0 meets fitness_floors (%s): all have 0", floors)

    def proceed(self, where: str) -> None:
        """Before each piece of work: stop here if that was asked for, or if it cannot go on."""
        if self.should_stop():
            raise errors.Interrupted(f"stopped {where}")
        self.journal.require_files()

    def _measure_generation(self) -> None:
        """Measure until nothing is pending: a duplicate brings a variant to be measured."""
        seen: dict[str, str] = {}  # sha256 -> the first candidate that has these weights
        for elite in self.search.survivors:
            if self.search.generation and (record := self.journal.find("candidate", key=elite.key)):
                seen.setdefault(record["sha256"], elite.key)
        while (pending := self.search.pending) and not self._time_is_over(pending[0]):
            candidate, record = pending[0], self._record_of(pending)
            score = record["score"]
            fitness = -math.inf if score is None else self._fitness(candidate, score)
            raw, suffix = score["raw"] if score else {}, "/bits_per_byte"  # the fewer the better
            objectives = {k.removesuffix(suffix): -v for k, v in raw.items() if k.endswith(suffix)}
            wanted = candidate.key == self.search.gradient_of
            gradient = self._gradient(candidate.key) if wanted else None
            only_gradient = candidate.key in self.search.scores
            self.search.tell(candidate.key, fitness, objectives=objectives, gradient=gradient)
            if only_gradient:
                continue
            twin = seen.setdefault(record["sha256"] or candidate.key, candidate.key)
            if twin != candidate.key and candidate.kind != "parent":
                self.search.tell_duplicates([twin, candidate.key])

    def _record_of(self, pending: Sequence[Candidate]) -> dict[str, Any]:
        """The journal's record of the first of these, measured now if there is none."""
        record = self.journal.find("candidate", key=pending[0].key)
        if record is None:
            try:
                result = self._measure(pending)
            finally:
                self.journal.require_files()  # if something is gone, that is why it failed
            record = self._keep_result(pending[0], result)
        return record

    def _settle_floor(self) -> None:
        """Measure the reference points; where no parent is above chance, accuracy is left out."""
        fitness = self.evaluator.fitness
        if not isinstance(fitness, DomainFitness):
            return
        self.floor = []
        first = [c for c in self.search.pending if self.search.is_reference(c.key)]
        records = [self._record_of(first[i:]) for i in range(len(first))]
        pairs = zip(first, records, strict=True)
        parents = [record["score"]["raw"] for c, record in pairs if c.kind == "parent"]
        found = self.journal.once("floor", lambda: {"domains": fitness.at_floor(parents)})
        self.floor = found["domains"]
        self.evaluator.leave_out(self.floor)

    def _fitness(self, candidate: Candidate, score: Mapping[str, Any]) -> float:
        """The fitness of a measured candidate. The floor was not known when the first were."""
        if not self.floor or not self.search.is_reference(candidate.key):
            return float(score["fitness"])
        assert isinstance(self.evaluator.fitness, DomainFitness)
        return self.evaluator.fitness.score_from(score["raw"], score["parts"]).fitness

    def _keep_result(self, candidate: Candidate, result: Mapping[str, Any]) -> dict[str, Any]:
        """Write down what was measured. Who failed costs itself; a parent, the evolution."""
        if result["problem"] and candidate.kind == "parent":
            error = errors.WorkersLost if "died" in result else PhaseFailed
            problem = f"{candidate.origin} cannot be measured: {result['problem']}"
            raise error(problem, hint="try the fitness on that model alone first")
        if result["problem"]:
            level = logging.INFO if result["dropped"] else logging.WARNING
            log.log(level, "candidate %s is out: %s", candidate.key[:SHORT], result["problem"])
        elif result["hit"]:
            self.cache_hits += 1
        elif self._cache is not None:
            journal.cached(self._cache, result["place"], result)
        self._count += 1
        for part in ("merge", "evaluation"):
            self.seconds[part] += result[part]
        if sample := base64.b64decode(result["sample"]):
            self._samples[candidate.key] = np.frombuffer(sample, np.float32)
        if result["outcomes"]:
            self._items[candidate.key] = result["outcomes"]
        record = self.journal.write(
            "candidate",
            key=candidate.key,
            generation=self.search.generation,
            origin=candidate.origin,
            **{name: result[name] for name in ("sha256", "score", "problem", "tokens", "cpu")},
            **({"dropped": True} if result["dropped"] else {}),
            elapsed=round(self.elapsed(), 3),
            operation=dict(candidate.operation),
            inputs=list(candidate.inputs),
        )
        seconds = result["merge"] + result["evaluation"]
        whole = not result["dropped"] and not result["known"] and not result["problem"]
        tokens = None if result["known"] else result["tokens"]
        self.pace.end("candidate", seconds, tokens, whole)
        self.listen({"event": "candidate", "seconds": seconds, **record})
        return record

    def _measure(self, pending: Sequence[Candidate]) -> dict[str, Any]:
        """The result of the first of these, from this process or from a worker."""
        self.proceed("between two candidates")
        new = [c.key for c in pending if not self.journal.find("candidate", key=c.key)]
        if self._races_first:  # the best of the references is who the combos race against
            new = [key for key in new if self.search.is_reference(key)] or new
        planned = self.settings.planned(len(self.inputs.parents))
        what = f"candidate {len(self.search.scores) + 1} of {planned} at most"
        self.pace.begin("candidate", what)
        limits = {key: self._limits(key) for key in new}
        if self._parallel is not None:
            spent = self.seconds["merge"] + self.seconds["evaluation"]
            left = planned - len(self.search.scores)
            if self._parallel.pays_off(left * spent / self._count if self._count else 0.0):
                return self._parallel.measure(self.search.candidates, limits)
        return self.evaluator.measure(new[0], limits[new[0]])

    def _limits(self, key: str) -> Limits:
        """What a candidate has to beat: the champion when its generation began, or the average."""
        born = self.search.born(key)
        champion = self.search.history[born - 1]["champion"] if born else None
        if not born and self._races_first and not self.search.is_reference(key):
            champion = self._best_reference()
        gate = None
        if self.search.candidates[key].kind == "path":
            gate = self.settings.path_gate * self._first_bits(champion or self.search.average)
        if not self.settings.racing or champion is None:
            return None, gate, self.floor
        if champion not in self._incumbents:
            fitness, items = self.search.scores[champion], self._items.get(champion)
            self._incumbents[champion] = self.evaluator.incumbent(champion, fitness, items)
        return self._incumbents[champion], gate, self.floor

    @property
    def _races_first(self) -> bool:
        """True if the combos of generation 0 race against the best of parents and average."""
        s = self.settings
        return bool(s.racing) and s.strategy == "auto" and s.auto_version > 1

    def _best_reference(self) -> str | None:
        """The best of the parents and their average, all of which have been measured."""
        scores, is_reference = self.search.scores, self.search.is_reference
        known = [key for key in scores if is_reference(key) and scores[key] > -math.inf]
        return max(known, key=lambda key: (scores[key], key), default=None)

    def _first_bits(self, key: str) -> float:
        def measure() -> dict[str, Any]:
            bits, tokens = self.evaluator.first_bits(key)
            return {"generation": self.search.generation, "bits_per_byte": bits, "tokens": tokens}

        return float(self.journal.once("gate", measure, key=key)["bits_per_byte"])

    def _gradient(self, key: str) -> dict[str, list[float]]:
        """By every coefficient, on the items whose turn it is; {} if there is none."""
        turn = len(self.search.gradients)

        def measure() -> dict[str, Any]:
            self.proceed("before a gradient")
            self.pace.begin("gradient", f"gradient {turn + 1}")
            rows: dict[str, list[float]] = {}
            tokens, began, clock = 0, time.process_time(), time.monotonic()
            try:
                with self._timed("evaluation"):
                    turns = self.settings.gradient_turns
                    rows, tokens = self.evaluator.gradient(key, turns, turn)
            except (errors.NotFinite, RuntimeError, MemoryError) as error:
                log.warning("candidate %s has no gradient: %s", key[:SHORT], error)
            self.pace.end("gradient", time.monotonic() - clock, tokens)
            cpu, generation = round(time.process_time() - began, 4), self.search.generation
            return {"generation": generation, "rows": rows, "tokens": tokens, "cpu": cpu}

        return dict(self.journal.once("gradient", measure, turn=turn, key=key)["rows"])

    def _tell_distances(self) -> None:
        generation, scores = self.search.generation, self.search.scores
        shaped = [c for c in self.search.population if c.kind != "path"]
        alive = [c.key for c in shaped if scores.get(c.key, -math.inf) > -math.inf]

        def measure() -> dict[str, Any]:
            parents = self.search.space.parents
            matrix, mean = self._distances(alive)
            first = self.journal.find("distances", generation=0)
            return {
                "mean": mean,
                "parents": first["parents"] if first else self._distances(parents)[1],
                "matrix": matrix.round(6).tolist() if not generation else [],
                "keys": alive if not generation else [],
            }

        record = self.journal.once("distances", measure, generation=generation, among=len(alive))
        self.search.tell_distances(record["mean"], record["parents"])

    def _distances(self, keys: Sequence[str]) -> tuple[np.ndarray, float]:
        """Between every two candidates, on a sample of their weights, and the mean over pairs."""
        samples = self._samples
        with self._timed("merge"):
            samples |= {key: self.weights.sample(key) for key in keys if key not in samples}
        return distance_matrix([samples[key] for key in keys])

    def _tell_holdout(self) -> None:
        """The champion on items that the search does not see: they decide when to stop."""
        champion = self.search.champion
        if self.evaluator.holdout is None or champion is None:
            return
        held_out, fitness = self._on_holdout(champion.key), self.search.scores[champion.key]
        self.search.tell(champion.key, fitness, holdout=held_out)

    def _on_holdout(self, key: str) -> float:
        """The fitness of a candidate on the holdout."""

        def measure() -> dict[str, float]:
            assert self.evaluator.holdout is not None
            with self._timed("evaluation"):
                self.evaluator.fill(key)
                return {"fitness": self.evaluator.holdout.score().fitness}

        return float(self.journal.once("holdout", measure, key=key)["fitness"])

    def _choose_finalist(self) -> None:
        """Let the holdout choose among the best of the search, which knows its items by heart."""
        if self.floor is None or self.evaluator.holdout is None or self.settings.finalists == 1:
            return
        search, best = self.search, dict[str, str]()  # the first key of each weights
        for key in sorted(search.scores, key=lambda k: (-search.scores[k], search.born(k), k)):
            record = self.journal.find("candidate", key=key) or {}
            if record.get("score") and not record.get("dropped"):
                best.setdefault(record["sha256"], key)
        finalists = list(best.values())[: self.settings.finalists]
        scores = {}
        for key in finalists:
            self.proceed("between two finalists")
            scores[key] = self._on_holdout(key)
        self._finalist = max(finalists, key=lambda key: scores[key], default=None)
        if self._finalist is not None:
            self.weights.keep([self._finalist])

    def _needed(self) -> list[str]:
        """The candidates to keep in files: merges of others than parents, then the survivors."""
        if self.search.finished:
            return [self.search.champion.key] if self.search.champion else []
        merges = (c for c in self.search.population if c.kind == "merge")
        merged = [c.key for c in merges if not {*c.inputs} <= {*self.search.space.parents}]
        return merged + [c.inputs[0] if c.kind == "path" else c.key for c in self.search.survivors]

    def _time_is_over(self, candidate: Candidate) -> bool:
        """True if the clock ends it before this candidate. The search then has as many evaluations
        as there are: the count is written down, and stays the end for this budget."""
        budget, plan = self.settings.minutes_each, self.inputs.plan
        scored, gradients = self.search.scores, self.search.gradients
        if not budget or len(scored) <= len(self.inputs.parents):
            return False
        decision = {"evaluations": len(scored), "gradients": len(gradients), "budget": budget}
        if not self.journal.find("stopped", **decision):
            limit = 60 * budget + (plan.search_s - 60 * plan.minutes if plan else 0.0)
            if self.elapsed() <= limit or self._is_measured(candidate.key):
                return False
            self.journal.write("stopped", generation=self.search.generation, **decision)
            again = f"--set max_evaluations={len(scored)} repeats it"
            self.listen({"event": "note", "text": f"the time for the search is over; {again}"})
        self._stopped = True
        ended = self.search.settings.model_copy(update={"max_evaluations": len(scored)})
        self.search.settings = ended
        return True

    def _is_measured(self, key: str) -> bool:
        """True if the journal has what is wanted of a candidate."""
        if key == self.search.gradient_of:
            return bool(self.journal.find("gradient", turn=len(self.search.gradients), key=key))
        return bool(self.journal.find("candidate", key=key))

    def _stopped_before(self, generation: int) -> bool:
        """True if an earlier version, which stopped after whole generations, stopped here."""
        decision = {"evaluations": None, "budget": self.settings.minutes_each}
        return bool(self.journal.find("stopped", generation=generation, **decision))

    def elapsed(self) -> float:
        """Seconds that all attempts took until here."""
        return self._seconds_before + time.monotonic() - self._began

    def _checkpoint(self, generation: int) -> None:
        """Write a small readable file, and the champion now and then; older ones go."""
        self.journal.require_files()
        champion = self.search.champion
        content = {
            "fingerprint": self.fingerprint,
            "generation": generation,
            "champion": champion and champion.key,
            "lineage": champion and told.champion_lineage(self, champion.key),
            "history": self.search.history,
            "combo_usage": self.search.combo_usage,
        }
        every, most = self.settings.checkpoint_every, self.settings.keep_best_models
        new = checkpoints.write_checkpoint(self.folder, content, every)
        if generation % every == 0 and champion is not None:
            weights = partial(self.weights.weights, champion.key)
            checkpoints.write_best(self.folder, generation, weights, most, new)
