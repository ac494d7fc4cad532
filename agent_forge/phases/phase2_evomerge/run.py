"""One evolution in a folder: it can be killed at any moment and goes on to the same bytes.

The journal has a line for everything that was measured: candidates, distances, holdouts, and the
clock's decision to stop. Whatever else there is follows from settings, seed, parents and journal,
so going on means telling the search again what the journal says.

    evolution.json                      what it was begun with (not in a run of the pipeline)
    journal.jsonl                       what was measured, in order
    evolution_checkpoint_gen_N.json     the state after generation N, for people and for --resume
    gen_N_best_model/                   the champion of then; the last few are kept
    weights/                            candidates that others are made from (can be made again)
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent_forge.errors import (
    ConfigError,
    ForgeError,
    Gone,
    Interrupted,
    NotFinite,
    PhaseFailed,
    WorkersLost,
)
from agent_forge.merge.output import write
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.crew import Crew
from agent_forge.phases.phase2_evomerge.evaluator import (
    CACHED,
    CandidateEvaluator,
    Limits,
    Material,
    sample_in,
)
from agent_forge.phases.phase2_evomerge.fitness import Score
from agent_forge.phases.phase2_evomerge.journal import FIRST, read_cache, read_journal
from agent_forge.phases.phase2_evomerge.racing import Incumbent
from agent_forge.search import strategy
from agent_forge.search.candidate import SHORT, Candidate
from agent_forge.store import files
from agent_forge.track.journal import Journal

log = logging.getLogger(__name__)
JOURNAL, WEIGHTS, CACHE = "journal.jsonl", "weights", "fitness_cache.jsonl"
Listener = Callable[[dict[str, Any]], None]


class EvolutionRun:
    """The loop: ask, make, measure, tell, advance."""

    def __init__(
        self,
        settings: EvoMergeSettings,
        material: Material,
        folder: Path,
        *,
        seed: int,
        cache: Path | None = None,
        crew: Crew | None = None,
        listen: Listener = lambda record: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.settings, self.material, self.folder = settings, material, folder
        self.listen, self.should_stop = listen, should_stop
        self.cache_hits = 0
        self.seconds = {"merge": 0.0, "evaluation": 0.0, "all": 0.0}
        known: dict[str, Candidate] = {}
        self.nursery = CandidateWeights(material.parents, material.base, known, folder / WEIGHTS)
        self.search = strategy.begin(
            settings,
            parents=len(material.parents),
            groups=self.nursery.groups.names,
            layers=self.nursery.layers,
            seed=seed,
        )
        self.nursery.known = self.search.candidates
        self.fingerprint = self._named(seed)
        self._records = self._known()
        self._journal = Journal(folder / JOURNAL)
        self._cache_file = cache if settings.enable_caching else None
        self.bench = CandidateEvaluator(material, self.nursery, read_cache(self._cache_file))
        self._crew = crew
        self._outcomes: dict[str, Any] = {}  # of this generation's candidates and the champion
        self._samples: dict[str, np.ndarray] = {}  # of the weights of this generation's candidates
        self._standings: dict[str, Incumbent] = {}  # of the last champions
        self._count = 0  # candidates measured in this attempt
        self._began = time.monotonic()
        self._before = max((r.get("elapsed", 0.0) for r in self._records), default=0.0)

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Evolve until the search is finished or the time is over."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.settings.worker_threads)
        try:
            if not self._records:
                self._write(FIRST, fingerprint=self.fingerprint)
            self._run()
        finally:
            torch.set_num_threads(before)
            if self._crew is not None:
                self._crew.close()

    def _run(self) -> None:
        began = time.monotonic()
        reached = max((r.get("generation", 0) for r in self._records), default=0)
        while self.search.finished is None:
            self._measure_generation()
            self._tell_distances()
            self._tell_holdout()
            generation = self.search.generation
            self.search.advance()
            self.search.history[-1]["tokens"] = self.tokens(generation)
            if generation >= reached - 1:  # of those before it only the journal is needed
                with self._timed("merge"):
                    self.nursery.keep(self._needed())
                self._checkpoint(generation)
            self._samples.clear()
            best = {entry["champion"] for entry in self.search.history[-2:]}
            self._outcomes = {k: v for k, v in self._outcomes.items() if k in best}
            self._standings = {k: v for k, v in self._standings.items() if k in best}
            self.seconds["all"] = time.monotonic() - began
            self.listen(self.summary())
            if generation >= reached and self._time_is_over(generation):
                break

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - began

    @property
    def reason(self) -> str:
        """Why the evolution ended."""
        return self.search.finished or "time budget"

    def summary(self) -> dict[str, Any]:
        """The last generation, for whoever watches."""
        entry = self.search.history[-1]
        champion = self.search.candidates[entry["champion"]] if entry["champion"] else None
        return {
            **entry,
            "event": "generation",
            "generations": self.settings.generations,
            "origin": champion.origin if champion else "none",
            "cache_hits": self.cache_hits,
            "seconds": dict(self.seconds),
        }

    def generation_of(self, key: str) -> int:
        """When a candidate was measured."""
        record = self._find("candidate", key=key)
        return int(record["generation"]) if record else 0

    def score_of(self, key: str) -> Score | None:
        """What was measured of a candidate; None if it failed."""
        record = self._find("candidate", key=key)
        if record is None or record["score"] is None:
            return None
        return Score(**record["score"])

    def _measure_generation(self) -> None:
        """Until nothing is asked for any more: a duplicate brings a variant to be measured."""
        seen: dict[str, str] = {}  # sha256 -> the first candidate that has these weights
        for survivor in self.search.survivors:
            if self.search.generation and (record := self._find("candidate", key=survivor.key)):
                seen.setdefault(record["sha256"], survivor.key)
        while asked := self.search.pending:
            candidate = asked[0]
            record = self._find("candidate", key=candidate.key) or self._measured(asked)
            score = record["score"]
            value = -math.inf if score is None else score["fitness"]
            wanted = candidate.key == self.search.gradient_of
            known = candidate.key in self.search.scores
            self.search.tell(
                candidate.key,
                value,
                objectives=_objectives(score),
                gradient=self._gradient(candidate) if wanted else None,
            )
            if known:  # only its gradient was asked for
                continue
            twin = seen.setdefault(record["sha256"] or candidate.key, candidate.key)
            if twin != candidate.key and candidate.kind != "parent":
                self.search.tell_duplicates([twin, candidate.key])

    def _gradient(self, candidate: Candidate) -> dict[str, list[float]]:
        """By every coefficient, on the items whose turn it is; {} if there is none."""
        turn = len(self.search.gradients)
        record = self._find("gradient", turn=turn, key=candidate.key)
        if record is None:
            self.proceed("before a gradient")
            rows: dict[str, list[float]] = {}
            tokens, began = 0, time.process_time()
            try:
                with self._timed("evaluation"):
                    turns = self.settings.gradient_turns
                    rows, tokens = self.bench.gradient(candidate.key, turns, turn)
            except (NotFinite, RuntimeError, MemoryError) as error:
                log.warning("candidate %s has no gradient: %s", candidate.key[:SHORT], error)
            cpu = round(time.process_time() - began, 4)
            where = {"key": candidate.key, "generation": self.search.generation}
            record = self._write("gradient", turn=turn, **where, rows=rows, tokens=tokens, cpu=cpu)
        return dict(record["rows"])

    def tokens(self, generation: int) -> int:
        """Tokens that were evaluated until the end of a generation."""
        known = (r for r in self._records if r.get("generation", generation + 1) <= generation)
        return sum(r.get("tokens", 0) for r in known)

    def _measured(self, asked: Sequence[Candidate]) -> dict[str, Any]:
        """Have the first of these measured; one that fails costs itself and nothing else."""
        self.proceed("between two candidates")
        candidate = asked[0]
        try:
            found = self._found(asked)
        except (ForgeError, OSError):
            self.require_there()  # if something is not, that is why
            raise
        self.require_there()
        if found["problem"] and candidate.kind == "parent":
            error = WorkersLost if "died" in found else PhaseFailed
            raise error(
                f"{candidate.origin} cannot be measured: {found['problem']}",
                hint="try the fitness on that model alone first",
            )
        if found["problem"]:
            level = logging.INFO if found["dropped"] else logging.WARNING
            log.log(level, "candidate %s is out: %s", candidate.key[:SHORT], found["problem"])
        elif found["hit"]:
            self.cache_hits += 1
        elif self._cache_file is not None:
            line = {"place": found["place"], **{name: found[name] for name in CACHED}}
            files.append(self._cache_file, json.dumps(line).encode() + b"\n")
        self._count += 1
        for part in ("merge", "evaluation"):
            self.seconds[part] += found[part]
        if found["sample"]:
            self._samples[candidate.key] = sample_in(found)
        if found["outcomes"]:
            self._outcomes[candidate.key] = found["outcomes"]
        record = self._write(
            "candidate",
            key=candidate.key,
            generation=self.search.generation,
            origin=candidate.origin,
            **{name: found[name] for name in ("sha256", "score", "problem", "tokens", "cpu")},
            **({"dropped": True} if found["dropped"] else {}),
            elapsed=round(self._elapsed(), 3),
            operation=dict(candidate.operation),
            inputs=list(candidate.inputs),
        )
        seconds = found["merge"] + found["evaluation"]
        self.listen({"event": "candidate", "seconds": seconds, **record})
        return record

    def proceed(self, where: str) -> None:
        """Before each piece of work: stop here if that was asked for, or if it cannot go on."""
        if self.should_stop():
            raise Interrupted(f"stopped {where}")
        self.require_there()

    def require_there(self) -> None:
        """Refuse to go on when the folder or a model is gone: what is mapped would still be read,
        and the result be written without what lies beside it."""
        if not (self.folder / JOURNAL).exists():
            raise Gone(self.folder / JOURNAL, hint="what was in it is lost; begin it again")
        models = (*self.material.parents, *([self.material.base] if self.material.base else []))
        for path in (path for model in models for path in model.sources):
            if not path.exists():
                raise Gone(path, hint="put it back, then resume: what was measured is kept")

    def _found(self, asked: Sequence[Candidate]) -> dict[str, Any]:
        """What came out for the first of these, on this bench or by the crew."""
        settings = self.settings
        new = [c.key for c in asked if not self._find("candidate", key=c.key)]
        hurdles = {key: self._hurdles(key) for key in new}
        if self._crew is not None:
            spent = self.seconds["merge"] + self.seconds["evaluation"]
            left = (settings.generations - self.search.generation) * settings.population_size
            if self._crew.wanted(left * spent / self._count if self._count else 0.0):
                return self._crew.measure(self.search.candidates, hurdles)
        return self.bench.measure(new[0], hurdles[new[0]])

    def _hurdles(self, key: str) -> Limits:
        """What a candidate has to beat: the champion when its generation began, or the average."""
        born = self.search.born(key)
        champion = self.search.history[born - 1]["champion"] if born else None
        gate = None
        if self.search.candidates[key].kind == "path":
            candidates = self.search.candidates.values()
            average = next(c.key for c in candidates if c.kind == "average")
            gate = self.settings.path_gate * self._first_bits(champion or average)
        if not self.settings.racing or champion is None:
            return None, gate
        if champion not in self._standings:
            score, known = self.search.scores[champion], self._outcomes.get(champion)
            self._standings[champion] = self.bench.standing(champion, score, known)
        return self._standings[champion], gate

    def _first_bits(self, key: str) -> float:
        record = self._find("gate", key=key)
        if record is None:
            bits, tokens = self.bench.glance(key)
            where = {"key": key, "generation": self.search.generation}
            record = self._write("gate", **where, bits_per_byte=bits, tokens=tokens)
        return float(record["bits_per_byte"])

    # -- what is told besides ---------------------------------------------------------------------

    def _tell_distances(self) -> None:
        generation = self.search.generation
        scores, shaped = self.search.scores, [c for c in self.search.population if c.kind != "path"]
        alive = [c.key for c in shaped if scores.get(c.key, -math.inf) > -math.inf]
        record = self._find("distances", generation=generation, among=len(alive))
        if record is None:
            parents = [c.key for c in self.search.candidates.values() if c.kind == "parent"]
            matrix = self._distances(alive)
            first = self._find("distances", generation=0)
            record = self._write(
                "distances",
                generation=generation,
                among=len(alive),
                mean=_mean_of(matrix),
                parents=first["parents"] if first else _mean_of(self._distances(parents)),
                matrix=matrix.round(6).tolist() if not generation else [],
                keys=alive if not generation else [],
            )
        self.search.tell_distances(record["mean"], record["parents"])

    def _distances(self, keys: Sequence[str]) -> np.ndarray:
        """Between every two candidates, on a sample of their weights."""
        samples = self._samples
        with self._timed("merge"):
            for key in keys:
                if key not in samples:
                    samples[key] = self.nursery.sample(key)
        matrix = np.zeros((len(keys), len(keys)))
        for i, j in combinations(range(len(keys)), 2):
            apart = float(np.linalg.norm(samples[keys[i]] - samples[keys[j]]))
            matrix[i, j] = matrix[j, i] = apart
        return matrix

    def _tell_holdout(self) -> None:
        """The champion on items that the search does not see: they decide when to stop."""
        champion = self.search.champion
        if self.material.holdout is None or champion is None:
            return
        record = self._find("holdout", key=champion.key)
        if record is None:
            with self._timed("evaluation"):
                self.bench.fill(champion.key)
                score = self.material.holdout.score()
            record = self._write("holdout", key=champion.key, fitness=score.fitness)
        known = self.search.scores[champion.key]
        self.search.tell(champion.key, known, holdout=record["fitness"])

    def _needed(self) -> list[str]:
        """What the open generation is made from and could not be made from that: merges first."""
        if self.search.finished:
            champion = self.search.champion
            return [champion.key] if champion else []
        parents = {c.key for c in self.search.candidates.values() if c.kind == "parent"}
        merged = [
            c
            for c in self.search.population
            if c.kind == "merge" and not parents.issuperset(c.inputs)
        ]
        survivors = [c.inputs[0] if c.kind == "path" else c.key for c in self.search.survivors]
        return [*(c.key for c in merged), *survivors]

    def _time_is_over(self, generation: int) -> bool:
        """Whether the clock ends it here: once written down, that stays so for this budget."""
        budget = self.settings.time_budget_minutes
        decided = {"generation": generation, "budget": budget}
        if self._find("stopped", **decided):
            return True
        if not budget or self.search.finished or self._elapsed() <= 60 * budget:
            return False
        self._write("stopped", **decided)
        return True

    def _elapsed(self) -> float:
        """Seconds that all attempts took until here."""
        return self._before + time.monotonic() - self._began

    # -- files ------------------------------------------------------------------------------------

    def _checkpoint(self, generation: int) -> None:
        """A small readable file after every generation; the older ones are of no more use."""
        self.require_there()
        path = self.folder / f"evolution_checkpoint_gen_{generation}.json"
        champion = self.search.champion
        content = {
            "fingerprint": self.fingerprint,
            "generation": generation,
            "champion": champion and champion.key,
            "history": self.search.history,
            "combo_usage": self.search.combo_usage,
            "state": self.search.state(),
        }
        files.write_bytes(path, files.with_checksum(content))
        if generation % self.settings.checkpoint_every == 0 and champion is not None:
            self._save_best(generation, champion.key)
        for old in self.folder.glob("evolution_checkpoint_gen_*.json"):
            number = int(old.stem.rpartition("_")[2])
            if number < generation and number % self.settings.checkpoint_every:
                files.remove(old)

    def _save_best(self, generation: int, key: str) -> None:
        """The champion of now as a model directory; the last few of them are kept."""
        folder = self.folder / f"gen_{generation}_best_model"
        if not folder.exists():
            write(self.nursery.weights(key), folder)
        there = sorted(self.folder.glob("gen_*_best_model"), key=_generation_in)
        for old in there[: -self.settings.keep_best_models]:
            files.remove_tree(old, self.folder)

    def _named(self, seed: int) -> str:
        """sha256 of all that the result depends on; a setting at its default can be a new one."""
        free = {"enabled", "gate_policy", "gates", "checkpoint_every_steps", "enable_caching"}
        free |= {"checkpoint_every", "keep_best_models", "time_budget_minutes", "generations"}
        free |= {"data", "verdict_items", "max_evaluations", *self.settings.unused}
        free |= {"workers", "executor", "cluster"}  # they change nothing
        free |= {"split_by"}  # the names of the fitness tell the items
        free |= set() if self.settings.layer_paths else {"layer_paths", "path_gate"}
        holdout = self.material.holdout
        content = {
            "settings": self.settings.model_dump(mode="json", exclude=free, exclude_defaults=True),
            "models": self.material.hashes,
            "fitness": [self.material.fitness.name, holdout.name if holdout else ""],
            "seed": seed,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _known(self) -> list[dict[str, Any]]:
        """What the journal says; that of another evolution is refused."""
        records = read_journal(self.folder / JOURNAL)
        if records and records[0]["fingerprint"] != self.fingerprint:
            raise ConfigError(
                f"{self.folder} holds an evolution of other models, data or settings",
                hint="go on with what it was begun with, or choose another folder",
            )
        return records

    def _write(self, record: str, **values: Any) -> dict[str, Any]:
        if record != FIRST:
            self.require_there()
        line = {"record": record, **values}
        self._journal.write(line)
        self._records.append(line)
        return line

    def _find(self, record: str, **wanted: Any) -> dict[str, Any] | None:
        for line in self._records:
            if line["record"] == record and all(line.get(k) == v for k, v in wanted.items()):
                return line
        return None


def _objectives(score: dict[str, Any] | None) -> dict[str, float]:
    """One number a domain, the fewer bits a byte the better."""
    suffix = "/bits_per_byte"
    known = {} if score is None else score["raw"]
    return {k.removesuffix(suffix): -v for k, v in known.items() if k.endswith(suffix)}


def _generation_in(folder: Path) -> int:
    return int(folder.name.split("_")[1])


def _mean_of(matrix: np.ndarray) -> float:
    """The mean over pairs."""
    n = len(matrix)
    return float(matrix.sum() / (n * (n - 1))) if n > 1 else 0.0
