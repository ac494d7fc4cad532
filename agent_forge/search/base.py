"""What all strategies share: the book of candidates and scores, ranking, stopping, and the state.

A strategy says what a generation begins with (`_begin`), what it still wants once all of that has
a score (`_more`), and what the next one begins with (`_next`). Everything else is here.

The state is what was told, generation by generation. Going on from it means telling it again: every
decision is made anew, and a state of another run does not fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, ClassVar, NamedTuple, Self

from agent_forge.errors import ConfigError, NotFinite
from agent_forge.search import operators
from agent_forge.search.candidate import SHORT, Candidate
from agent_forge.search.settings import EvolutionSettings

FORMAT = 1  # of the state
Rows = Mapping[str, Sequence[float]]  # one number a parent for every group


class Origin(NamedTuple):
    """When and how a candidate came about, and what it has to beat to be an improvement."""

    generation: int
    operator: str
    against: tuple[str, ...] = ()


class Proposal(NamedTuple):
    """A candidate that a strategy wants scored."""

    operator: str
    candidate: Candidate
    against: tuple[str, ...] = ()


class Search:
    """Ask what to score, tell the scores (-inf: failed), advance, until it is finished.

    The order in which the scores of one `ask` arrive changes nothing, and a search made from
    `state()`, which is JSON, goes on exactly as this one would. There is no champion before the
    first score. When `gradient_of` is asked for, its gradient is wanted with the score.
    """

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
        if len(settings.parent_weights) not in (0, parents):
            raise ConfigError(f"{len(settings.parent_weights)} parent_weights, {parents} parents")
        if not groups or len({*groups}) < len(groups) or len({*layers}) < len(layers):
            raise ConfigError("groups of weights need names of their own, and at least one of them")
        self.settings, self.seed, self.generation = settings, seed, 0
        self.candidates: dict[str, Candidate] = {}
        self.scores: dict[str, float] = {}
        self.objectives: dict[str, dict[str, float]] = {}
        self.gradients: list[tuple[str, Rows]] = []  # in the order in which they were wanted
        self.history: list[dict[str, Any]] = []
        self.gradient_of: str | None = None  # the candidate whose gradient is wanted now
        self._births: dict[str, Origin] = {}
        self._holdouts: dict[str, float] = {}
        self._finished: str | None = None
        self._closed: list[dict[str, Any]] = []  # what was told in each
        self._measured: list[str] = []  # their populations
        self._strength = 1.0
        self._distances: tuple[float, float] | None = None
        self._alike: set[str] = set()  # equal to another, and still so after the last variant
        self._slots: list[list[str]] = []  # what was tried in each place, the last one counts
        self._gradients_before = 0
        models = [
            Candidate({"kind": "parent", "index": i}, (), f"parent {i}") for i in range(parents)
        ]
        self._space = operators.Space(
            tuple(m.key for m in models), (*groups,), (*layers,), settings
        )
        models.append(Candidate({"kind": "average"}, self._space.parents, "average"))
        for model in models:
            self._add(model, Origin(0, model.kind))
        self._survivors = tuple(model.key for model in models)
        self._begin()

    # -- what a strategy brings -------------------------------------------------------------------

    def _begin(self) -> None:
        """Fill generation 0; the parents and their average are asked for beside it."""
        raise NotImplementedError

    def _more(self) -> list[Proposal]:
        """What else is wanted, now that all has a score: none closes the generation."""
        return []

    def _next(self, best: Sequence[str], last: Sequence[str]) -> None:
        """Fill the generation that has just begun; `last` is the population before it."""
        raise NotImplementedError

    def _extra(self) -> dict[str, Any]:
        """What a strategy reports of a generation beside the rest."""
        return {}

    # -- asking and telling -----------------------------------------------------------------------

    def ask(self) -> list[Candidate]:
        """What is wanted now: the reference points, then the population; at last a gradient."""
        missing = [key for key in self._pool() if key not in self.scores]
        if self.settings.max_evaluations:
            missing = missing[: max(0, self.settings.max_evaluations - len(self.scores))]
        if not missing and self.gradient_of is not None and not self._spent():
            missing = [self.gradient_of]
        return [self.candidates[key] for key in missing]

    @property
    def pending(self) -> list[Candidate]:
        """What is asked for while this generation cannot close; in the last one that is all."""
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
        """The score of a candidate of this generation: higher is better, -inf if it failed.

        `holdout` is its score on what selection never sees; told of every generation's champion
        before `advance`, it decides when to stop. `objectives` are scores by domain. `gradient`
        is that of the score by the coefficient of each parent in each group ({}: there is none);
        it is listened to if it is this candidate's that is wanted.
        """
        if key != self.gradient_of:  # that may be of an earlier generation
            self._order(key)
        numbers = [holdout or 0.0, *(objectives or {}).values()]
        numbers += [value for row in (gradient or {}).values() for value in row]
        if not all(map(math.isfinite, numbers)) or not (math.isfinite(score) or score == -math.inf):
            raise NotFinite(
                f"candidate {key[:SHORT]} cannot have the score {score}, holdout {holdout}",
                hint="a score is a finite number; of a candidate that failed it is -inf",
            )
        for told, value in ((self.scores, score), (self._holdouts, holdout)):
            if value is not None and told.setdefault(key, float(value)) != value:
                raise ValueError(f"candidate {key[:SHORT]} had the score {told[key]}, not {value}")
        if objectives is not None:
            self.objectives[key] = {name: float(objectives[name]) for name in sorted(objectives)}
        if gradient is not None and key == self.gradient_of:
            self.gradients.append((key, {group: list(row) for group, row in gradient.items()}))
            self.gradient_of = None
        self._go_on()

    def _go_on(self) -> None:
        """Ask the strategy for more as soon as nothing else is wanted."""
        if self._finished is None and not self._spent() and not self.ask():
            for wish in self._more():
                self._put(wish)

    def tell_distances(self, mean_pairwise: float, of_parents: float) -> None:
        """The mean distance within the population and among the parents: their ratio counts."""
        if not all(math.isfinite(d) and d >= 0 for d in (mean_pairwise, of_parents)):
            raise NotFinite(f"{mean_pairwise} and {of_parents} are not both distances")
        self._distances = (float(mean_pairwise), float(of_parents))

    def tell_duplicates(self, keys: Sequence[str]) -> None:
        """These have equal weights: all but the first count as one of them."""
        for key in sorted(set(keys), key=self._order)[1:]:
            if key in self._population():
                self._alike.add(key)

    def advance(self) -> None:
        """Close the generation: rank, record, stop or go on to the next one."""
        if self._finished:
            raise ValueError(f"the evolution is finished ({self._finished})")
        if self.pending:
            raise ValueError(f"{len(self.pending)} candidates have no score yet")
        late = [candidate.key for candidate in self.ask()]
        best = self._ranked(self._pool())[: self.settings.elite_count]
        self.history.append({**self._record(), **self._extra(), "elites": best})
        self._closed.append(self._told())
        self._measured += [key for key in self._population() if key in self.scores]
        self._finished = self._stop()
        if self._finished is None:
            last = [key for key in self._population() if key not in late]
            self.generation += 1
            self._open(best)
            self._slots = [[key] for key in late]
            self._next(best, last)
            self._go_on()

    def _open(self, survivors: Sequence[str]) -> None:
        self._survivors, self._slots = tuple(survivors), []
        self._distances, self._alike = None, set()
        self._gradients_before = len(self.gradients)

    # -- what came of it --------------------------------------------------------------------------

    @property
    def finished(self) -> str | None:
        """Why it ended: "generations", "evaluations", "converged", "failed" (no score), or None."""
        return self._finished

    @property
    def champion(self) -> Candidate | None:
        """The best of all that was told so far, the open generation included."""
        ranked = self._ranked(self._pool())
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
        return self._births[key].generation

    @property
    def combo_usage(self) -> dict[int, int]:
        """How many measured candidates of closed generations each combo made."""
        merges = (self.candidates[key] for key in self._measured)
        used = Counter(m.operation["combo"] for m in merges if m.kind == "merge")
        return {combo: used[combo] for combo in range(len(operators.COMBOS))}

    @property
    def operator_gains(self) -> dict[str, dict[str, Any]]:
        """Per operator: how often it was tried, failed and improved on its best input, by what."""
        by_operator: dict[str, list[tuple[float, float]]] = {}
        for key in self._measured:
            birth = self._births[key]
            before = max(self.scores[other] for other in birth.against)
            by_operator.setdefault(birth.operator, []).append((before, self.scores[key]))
        return {
            name: {
                "tried": len(pairs),
                "failed": sum(after == -math.inf for _, after in pairs),
                "improved": sum(after > before for before, after in pairs),
                "mean_gain": _mean([b - a for a, b in pairs if min(a, b) > -math.inf]),
            }
            for name, pairs in sorted(by_operator.items())
        }

    # -- state ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that was told, as JSON."""
        return {
            "format": FORMAT,
            "seed": self.seed,
            "parents": len(self._space.parents),
            "groups": list(self._space.groups),
            "layers": list(self._space.layers),
            "generations": [*self._closed, *([] if self._finished else [self._told()])],
            "closed": len(self._closed),
        }

    @classmethod
    def from_state(cls, settings: EvolutionSettings, state: Mapping[str, Any]) -> Self:
        """The search that had this state. Settings that would have led elsewhere are refused."""
        try:
            if state["format"] != FORMAT:
                raise ValueError(f"format {state['format']} is not known here")
            given = {name: state[name] for name in ("parents", "groups", "seed", "layers")}
            search = cls(settings, **given)
            for number, told in enumerate(state["generations"]):
                search._tell_again(told)
                if number < state["closed"]:
                    search.advance()
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this state of an evolution does not fit: {error}",
                hint="go on with the settings and the version that it was made with",
            ) from error
        return search

    def _told(self) -> dict[str, Any]:
        """What was told of the open generation, in an order that does not depend on the telling."""
        here = [key for key in self._here() if key in self.scores]
        told = {
            "scores": {k: None if self.scores[k] == -math.inf else self.scores[k] for k in here},
            "holdouts": {k: self._holdouts[k] for k in here if k in self._holdouts},
            "distances": self._distances and list(self._distances),
        }
        more = {
            "objectives": {k: self.objectives[k] for k in here if k in self.objectives},
            "gradients": [[k, dict(rows)] for k, rows in self.gradients[self._gradients_before :]],
            "alike": sorted(self._alike),
        }
        return told | {name: value for name, value in more.items() if value}

    def _tell_again(self, told: Mapping[str, Any]) -> None:
        """In the order in which it is asked for: what is asked may depend on what was told."""
        scores, left = told["scores"], list(told.get("gradients", ()))
        while known := [c.key for c in self.ask() if c.key in scores or c.key == self.gradient_of]:
            before = len(self.scores), len(self.gradients)
            for key in known:
                objectives = told.get("objectives", {}).get(key)
                value = scores.get(key)
                score = self.scores.get(key, -math.inf if value is None else value)
                wanted = key == self.gradient_of and bool(left) and left[0][0] == key
                self.tell(
                    key,
                    score,
                    objectives=objectives,
                    gradient=left.pop(0)[1] if wanted else None,
                )
            if (len(self.scores), len(self.gradients)) == before:
                break
        if left or any(key not in self.scores for key in scores):
            raise ValueError("something was told of what was not asked for")
        for key, holdout in told["holdouts"].items():
            self.tell(key, self.scores[key], holdout=holdout)
        if told["distances"]:
            self.tell_distances(*told["distances"])
        self._alike = set(told.get("alike", ()))

    # -- a generation -----------------------------------------------------------------------------

    def _spent(self) -> bool:
        most = self.settings.max_evaluations
        return bool(most) and len(self.scores) >= most

    def _stop(self) -> str | None:
        settings, history = self.settings, self.history
        if self._spent():
            return "evaluations"
        if settings.early_stopping and len(history) > settings.convergence_patience:
            held = [entry["holdout"] for entry in history]
            values = [entry["best"] for entry in history] if None in held else held
            known = [-math.inf if value is None else value for value in values]
            before = max(known[: -settings.convergence_patience])
            now = max(known[-settings.convergence_patience :])
            if now == -math.inf:
                return "failed"
            if now - before < settings.convergence_threshold:
                return "converged"
        return "generations" if self.generation >= settings.generations else None

    def _record(self) -> dict[str, Any]:
        """What a generation came to."""
        population = [key for key in self._population() if key in self.scores]
        scores = [self.scores[key] for key in population]
        finite = [score for score in scores if score > -math.inf]
        used = Counter(self._births[key].operator for key in population)
        champion = self.champion
        best = champion and champion.key
        within, of_parents = self._distances or (None, 0.0)
        return {
            "generation": self.generation,
            "champion": best,
            "best": best and self.scores[best],
            "holdout": best and self._holdouts.get(best),
            "mean": _mean(finite),
            "fitness_std": pstdev(finite) if finite else None,
            "diversity": within and (within / of_parents if of_parents else 0.0),
            "failed": len(scores) - len(finite),
            "mutations": self._mutations(),
            "strength": self._strength,
            "variants": sum(len(tried) > 1 for tried in self._slots),
            "distinct": len(population) - len(self._alike),
            "operators": dict(sorted(used.items())),
            "evaluations": len(self.scores),
        }

    def _mutations(self) -> int:
        return sum(self._births[key].operator in self.mutating for key in self._population())

    # -- keys -------------------------------------------------------------------------------------

    def _add(self, candidate: Candidate, birth: Origin) -> None:
        self.candidates[candidate.key] = candidate
        self._births[candidate.key] = birth

    def _put(self, wish: Proposal) -> None:
        """A place of the open generation for a candidate; one that was there before needs none."""
        if wish.candidate.key not in self.candidates:
            against = wish.against or self._space.parents
            self._add(wish.candidate, Origin(self.generation, wish.operator, against))
            self._slots.append([wish.candidate.key])

    def _population(self) -> list[str]:
        return [tried[-1] for tried in self._slots]

    def _pool(self) -> list[str]:
        """Who competes: the population and what survived until here."""
        return [*self._survivors, *self._population()]

    def _ranked(self, keys: Sequence[str]) -> list[str]:
        """Those that have a score and did not fail, best first."""
        scored = [key for key in keys if self.scores.get(key, -math.inf) > -math.inf]
        return sorted(scored, key=lambda k: (-self.scores[k], self._births[k].generation, k))

    def _order(self, key: str) -> int:
        """Where a candidate stands in this generation; one that was replaced keeps its number."""
        if key not in self._here():
            raise ValueError(f"{key[:SHORT]!r} is no candidate of generation {self.generation}")
        return self._here().index(key)

    def _here(self) -> list[str]:
        return [*self._survivors, *(key for tried in self._slots for key in tried)]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
