"""What all strategies share: the candidates and their scores, ranking, stopping and the record.

A strategy proposes the first generation (`_first_generation`), whatever it still wants once all
proposals have a score (`_more`), and the next generation (`_next_generation`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, ClassVar, NamedTuple

from agent_forge.errors import ConfigError, NotFinite
from agent_forge.search import operators
from agent_forge.search.candidate import SHORT, Candidate
from agent_forge.search.operators import Rows
from agent_forge.search.settings import EvolutionSettings


class CandidateOrigin(NamedTuple):
    """When and how a candidate came about, and what it has to beat to be an improvement."""

    generation: int
    operator: str
    against: tuple[str, ...] = ()
    source: str | None = None  # the candidate that it was moved away from


class SearchStrategy:
    """Ask what to score, tell the scores (-inf: failed), advance, until it is finished. The order
    in which the scores of one `ask` arrive changes nothing. A candidate whose gradient is wanted
    (`gradient_of`) is asked for after all others, and told again with its gradient."""

    mutating: ClassVar[tuple[str, ...]] = ()  # operators whose candidates count as mutations
    look_ahead: ClassVar[int] = 0  # candidates that the next generation need not wait for

    def __init__(
        self,
        settings: EvolutionSettings,
        *,
        parents: int,
        groups: Sequence[str],
        seed: int,
        layers: Sequence[str] = (),
    ) -> None:
        """`groups` have merge weights of their own; FrankenMerge may choose among `layers`."""
        if parents < 2:
            raise ConfigError(f"an evolution needs at least two parents, not {parents}")
        if not groups or len({*groups}) < len(groups) or len({*layers}) < len(layers):
            raise ConfigError("groups of weights need names of their own, and at least one of them")
        self.settings, self.seed, self.generation = settings, seed, 0
        self.candidates: dict[str, Candidate] = {}
        self.scores: dict[str, float] = {}
        self.objectives: dict[str, dict[str, float]] = {}
        self.gradients: list[tuple[str, Rows]] = []  # in the order in which they were wanted
        self.history: list[dict[str, Any]] = []
        self.gradient_of: str | None = None  # the candidate whose gradient is wanted now
        self.finished: str | None = None  # generations, evaluations, converged, or failed
        self._origins: dict[str, CandidateOrigin] = {}
        self._holdouts: dict[str, float] = {}
        self._measured: list[str] = []  # the populations of closed generations
        self._strength = 1.0  # of mutations
        self._gradients_used = 0
        self._tried: list[list[str]]  # candidates of each place; the last one counts
        self._distances: tuple[float, float] | None
        self._duplicates: set[str]  # equal to another, and still so after the last variant
        numbers = range(parents)
        models = [Candidate({"kind": "parent", "index": i}, (), f"parent {i}") for i in numbers]
        keys = tuple(model.key for model in models)
        self.space = operators.SearchSpace(keys, (*groups,), (*layers,), settings)
        models.append(Candidate({"kind": "average"}, keys, "average"))
        self.average = models[-1].key
        for model in models:
            self._add(model, CandidateOrigin(0, model.kind))
        self._open([model.key for model in models])
        self._first_generation()

    def _first_generation(self) -> None:
        """Propose generation 0; the parents and their average are asked for beside it."""
        raise NotImplementedError

    def _more(self) -> None:
        """Propose more, now that all has a score; proposing nothing closes the generation."""

    def _next_generation(self, best: Sequence[str], last: Sequence[str]) -> None:
        """Propose the generation that has just begun; `last` is the population before it."""

    def _strategy_record(self) -> dict[str, Any]:
        """What a strategy adds to the record of a generation."""
        return {}

    def _diversity_below(self, threshold: float) -> bool:
        diversity = self.history[-1]["diversity"] if self.history else None
        return diversity is not None and diversity < threshold

    def _mutation_strength(self) -> float:
        low = self._diversity_below(self.settings.min_diversity)
        return self.settings.mutation_boost if low else 1.0

    def reseed(self, seed: int) -> None:
        """Make all random choices from the next generation on by another seed."""
        self.seed = seed

    def _propose(
        self,
        operator: str,
        candidate: Candidate,
        against: tuple[str, ...] = (),
        source: str | None = None,
    ) -> bool:
        """Add a candidate to the population; False if it was proposed before."""
        if candidate.key in self.candidates:
            return False
        origin = CandidateOrigin(self.generation, operator, against or self.space.parents, source)
        self._add(candidate, origin)
        self._tried.append([candidate.key])
        return True

    def _wanted_gradient(self, key: str) -> Rows | None:
        """The gradient at a candidate; None if it was not told yet: then it is asked for."""
        if self._gradients_used == len(self.gradients):
            self.gradient_of = key
            return None
        self._gradients_used = len(self.gradients)
        return self.gradients[-1][1]

    def ask(self) -> list[Candidate]:
        """What is wanted now: the reference points, then the population; at last a gradient."""
        missing = [key for key in self._competing() if key not in self.scores]
        if self.settings.max_evaluations:
            missing = missing[: max(0, self.settings.max_evaluations - len(self.scores))]
        if not missing and self.gradient_of is not None and not self._budget_spent():
            missing = [self.gradient_of]
        return [self.candidates[key] for key in missing]

    @property
    def pending(self) -> list[Candidate]:
        """What has to be scored before this generation can close; in the last one that is all."""
        asked, most = self.ask(), self.settings.max_evaluations
        last = self.generation >= self.settings.generations
        last |= bool(most) and len(self.scores) + len(asked) >= most
        return asked if len(asked) > (0 if last else self.look_ahead) else []

    def tell(
        self,
        key: str,
        score: float,
        *,
        holdout: float | None = None,
        objectives: Mapping[str, float] | None = None,
        gradient: Rows | None = None,
    ) -> None:
        """Record the score of a candidate of this generation: higher is better, -inf if it failed.
        The champion's `holdout`, its score on what selection never sees, decides when to stop;
        `objectives` are scores by domain, `gradient` is the score's by each parent's coefficient
        in each group ({}: there is none), if `gradient_of` asks for it."""
        if key != self.gradient_of:  # that may be of an earlier generation
            self._position(key)
        numbers = [holdout or 0.0, *(objectives or {}).values()]
        numbers += [value for row in (gradient or {}).values() for value in row]
        if not all(map(math.isfinite, numbers)) or not (math.isfinite(score) or score == -math.inf):
            problem = f"candidate {key[:SHORT]} cannot have the score {score}, holdout {holdout}"
            hint = "a score is a finite number; of a candidate that failed it is -inf"
            raise NotFinite(problem, hint=hint)
        for known, value in ((self.scores, score), (self._holdouts, holdout)):
            if value is not None and known.setdefault(key, float(value)) != value:
                raise ValueError(f"candidate {key[:SHORT]} had the score {known[key]}, not {value}")
        if objectives is not None:
            self.objectives[key] = {name: float(objectives[name]) for name in sorted(objectives)}
        if gradient is not None and key == self.gradient_of:
            self.gradients.append((key, {group: list(row) for group, row in gradient.items()}))
            self.gradient_of = None
        self._refill()

    def _refill(self) -> None:
        """Let the strategy propose more as soon as nothing else is wanted."""
        if self.finished is None and not self._budget_spent() and not self.ask():
            self._more()

    def tell_distances(self, mean_pairwise: float, of_parents: float) -> None:
        """Record the mean distance within the population and that among the parents."""
        if not all(math.isfinite(d) and d >= 0 for d in (mean_pairwise, of_parents)):
            raise NotFinite(f"{mean_pairwise} and {of_parents} are not both distances")
        self._distances = (float(mean_pairwise), float(of_parents))

    def tell_duplicates(self, keys: Sequence[str]) -> None:
        """These have equal weights: all but the first count as one of them."""
        later = sorted(set(keys), key=self._position)[1:]
        self._duplicates |= {*later} & {*self._population()}

    def advance(self) -> None:
        """Close the generation: rank, record, stop or go on to the next one."""
        if self.finished:
            raise ValueError(f"the evolution is finished ({self.finished})")
        if self.pending:
            raise ValueError(f"{len(self.pending)} candidates have no score yet")
        late = [candidate.key for candidate in self.ask()]
        best = self._ranked(self._competing())[: self.settings.elite_count]
        self.history.append({**self._record(), **self._strategy_record(), "elites": best})
        self._measured += [key for key in self._population() if key in self.scores]
        self.finished = self._stop()
        if self.finished is None:
            last = [key for key in self._population() if key not in late]
            self.generation += 1
            self._open(best)
            self._tried = [[key] for key in late]
            self._next_generation(best, last)
            self._refill()

    def _open(self, survivors: Sequence[str]) -> None:
        self._survivors, self._tried = tuple(survivors), []
        self._distances, self._duplicates = None, set()

    @property
    def champion(self) -> Candidate | None:
        """The best of all that was told so far, the open generation included."""
        ranked = self._ranked(self._competing())
        return self.candidates[ranked[0]] if ranked else None

    @property
    def population(self) -> list[Candidate]:
        return [self.candidates[key] for key in self._population()]

    @property
    def survivors(self) -> list[Candidate]:
        """The best of the generations before; in generation 0 the parents and their average."""
        return [self.candidates[key] for key in self._survivors]

    def born(self, key: str) -> int:
        """The generation in which a candidate was asked for first."""
        return self._origins[key].generation

    def way_to(self, key: str) -> tuple[Candidate, list[str]]:
        """The candidate that another one began as, and the operators that moved it since."""
        moves: list[str] = []
        while (source := self._origins[key].source) is not None:
            moves.insert(0, self._origins[key].operator)
            key = source
        return self.candidates[key], moves

    def is_reference(self, key: str) -> bool:
        """True for the parents and their average, which are measured before all others."""
        return key == self.average or key in self.space.parents

    @property
    def combo_usage(self) -> dict[int, int]:
        """How many measured candidates of closed generations each combo made."""
        return {combo: len(scores) for combo, scores in self.combo_scores.items()}

    @property
    def combo_scores(self) -> dict[int, list[float]]:
        """Their scores."""
        found: dict[int, list[float]] = {combo: [] for combo in range(len(operators.COMBOS))}
        for key in self._measured:
            if self.candidates[key].kind == "merge":
                found[self.candidates[key].operation["combo"]].append(self.scores[key])
        return found

    @property
    def operator_gains(self) -> dict[str, dict[str, Any]]:
        """Per operator: how often it was tried, failed and improved on its best input, by what."""
        by_operator: dict[str, list[tuple[float, float]]] = {}
        for key in self._measured:
            origin = self._origins[key]
            before = max(self.scores[other] for other in origin.against)
            by_operator.setdefault(origin.operator, []).append((before, self.scores[key]))
        return {
            name: {
                "tried": len(pairs),
                "failed": sum(after == -math.inf for _, after in pairs),
                "improved": sum(after > before for before, after in pairs),
                "mean_gain": _mean([b - a for a, b in pairs if min(a, b) > -math.inf]),
            }
            for name, pairs in sorted(by_operator.items())
        }

    def _budget_spent(self) -> bool:
        most = self.settings.max_evaluations
        return bool(most) and len(self.scores) >= most

    def _stop(self) -> str | None:
        settings, history = self.settings, self.history
        patience = settings.convergence_patience
        if self._budget_spent():
            return "evaluations"
        if settings.early_stopping and len(history) > patience:
            by = "best" if any(entry["holdout"] is None for entry in history) else "holdout"
            values = [-math.inf if entry[by] is None else entry[by] for entry in history]
            before, now = max(values[:-patience]), max(values[-patience:])
            if now == -math.inf:
                return "failed"
            if now - before < settings.convergence_threshold:
                return "converged"
        return "generations" if self.generation >= settings.generations else None

    def generations_left(self) -> int:
        """How many generations are to come unless the champion improves."""
        settings, history = self.settings, self.history
        left = settings.generations - len(history) + 1
        if self.finished or not settings.early_stopping or not history:
            return 0 if self.finished else left
        values = [entry["holdout"] or entry["best"] or -math.inf for entry in history]
        since = len(values) - 1 - values.index(max(values))
        return max(1, min(left, settings.convergence_patience - since))

    def _record(self) -> dict[str, Any]:
        population = [key for key in self._population() if key in self.scores]
        scores = [self.scores[key] for key in population]
        finite = [score for score in scores if score > -math.inf]
        used = Counter(self._origins[key].operator for key in population)
        champion = self.champion
        best = champion and champion.key
        within, of_parents = self._distances or (None, 0.0)
        return {
            "generation": self.generation,
            "champion": best,
            "best": best and self.scores[best],
            "holdout": best and self._holdouts.get(best),
            "mean": _mean(finite),
            "lowest": min(finite, default=None),
            "highest": max(finite, default=None),
            "fitness_std": pstdev(finite) if finite else None,
            "diversity": within and (within / of_parents if of_parents else 0.0),
            "failed": len(scores) - len(finite),
            "mutations": self._mutations(),
            "strength": self._strength,
            "variants": sum(len(tried) > 1 for tried in self._tried),
            "distinct": len(population) - len(self._duplicates),
            "operators": dict(sorted(used.items())),
            "evaluations": len(self.scores),
        }

    def _mutations(self) -> int:
        return sum(self._origins[key].operator in self.mutating for key in self._population())

    def _add(self, candidate: Candidate, origin: CandidateOrigin) -> None:
        self.candidates[candidate.key], self._origins[candidate.key] = candidate, origin

    def _population(self) -> list[str]:
        return [tried[-1] for tried in self._tried]

    def _competing(self) -> list[str]:
        return [*self._survivors, *self._population()]

    def _ranked(self, keys: Sequence[str]) -> list[str]:
        """Those that have a score and did not fail, best first."""
        scored = [key for key in keys if self.scores.get(key, -math.inf) > -math.inf]
        return sorted(scored, key=lambda k: (-self.scores[k], self._origins[k].generation, k))

    def _position(self, key: str) -> int:
        """The place of a candidate in this generation; one that was replaced keeps its own."""
        tried = [*self._survivors, *(key for tried in self._tried for key in tried)]
        if key not in tried:
            raise ValueError(f"{key[:SHORT]!r} is no candidate of generation {self.generation}")
        return tried.index(key)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
