"""Evolution by elites and losers: the best are mutated, the worst are merged with one another.

Generation 0 is the eight combos of the parents (fewer: a balanced choice; more: variants are
added). The parents and their plain average are measured beside them and compete, but are not part
of the population. Then, generation by generation:

    each of the best E      ->  3 mutants (of the recipe, or noise on the weights)
    the worst, by threes    ->  one child each, by a combo drawn at random
    too little diversity    ->  stronger mutation; then the last two children are new combos

The best E come from the population and from the best E before them, so the champion stays until it
is beaten. Equal scores: the older one first, then by key. A failed candidate (-inf) is neither
mutated nor merged; a place that cannot be filled for that reason gets a new combo of the parents.
The losers' groups are threes for any number of parents.

The state is what was told, generation by generation. Going on from it means telling it again: every
decision is made anew, and a state of another run does not fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from numpy.random import Generator

from agent_forge.errors import ConfigError, NotFinite
from agent_forge.search import operators
from agent_forge.search.candidate import SHORT, Candidate
from agent_forge.search.settings import MUTANTS, TRIPLE, EvolutionSettings

FORMAT = 1  # of the state
MOST_VARIANTS = 4  # a place whose candidates keep coinciding with others is left alone after these


class Place(NamedTuple):
    """What a place in the population is for: a mutant, the losers' child, or a combo."""

    use: str
    inputs: tuple[str, ...]
    combo: int | None = None


class Birth(NamedTuple):
    """When and how a candidate came about, and what it has to beat to be an improvement."""

    generation: int
    operator: str
    against: tuple[str, ...] = ()


class Evolution:
    """The specification's scheme, for anything that can be scored."""

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
        self.history: list[dict[str, Any]] = []
        self._births: dict[str, Birth] = {}
        self._holdouts: dict[str, float] = {}
        self._finished: str | None = None
        self._closed: list[dict[str, Any]] = []  # what was told in each
        self._measured: list[str] = []  # their populations
        models = [
            Candidate({"kind": "parent", "index": i}, (), f"parent {i}") for i in range(parents)
        ]
        self._space = operators.Space(
            tuple(m.key for m in models), (*groups,), (*layers,), settings
        )
        models.append(Candidate({"kind": "average"}, self._space.parents, "average"))
        for model in models:
            self._add(model, Birth(0, model.kind))
        size = settings.population_size
        combos = [*sorted(operators.COMBOS[:size]), *[None] * (size - len(operators.COMBOS))]
        places = [Place("combo", self._space.parents, combo) for combo in combos]
        self._open([model.key for model in models], places)

    def _open(self, survivors: Sequence[str], places: Sequence[Place]) -> None:
        """Begin a generation: who survived, what each place is for, and what is tried there."""
        self._survivors, self._places = tuple(survivors), tuple(places)
        low = self._diversity_below(self.settings.min_diversity)
        self._strength = self.settings.mutation_boost if low else 1.0
        self._distances: tuple[float, float] | None = None
        self._alike: set[str] = set()  # equal to another, and still so after the last variant
        self._slots: list[list[str]] = [[] for _ in places]
        for slot in range(len(places)):
            self._fill(slot)

    # -- asking and telling -----------------------------------------------------------------------

    def ask(self) -> list[Candidate]:
        """What this generation still wants scored: the reference points, then the population."""
        return [self.candidates[key] for key in self._pool() if key not in self.scores]

    def tell(self, key: str, score: float, *, holdout: float | None = None) -> None:
        """The score of a candidate of this generation: higher is better, -inf if it failed.

        `holdout` is its score on what selection never sees; told of every generation's champion
        before `advance`, it decides when to stop.
        """
        self._order(key)
        if not math.isfinite(holdout or 0.0) or not (math.isfinite(score) or score == -math.inf):
            raise NotFinite(
                f"candidate {key[:SHORT]} cannot have the score {score}, holdout {holdout}",
                hint="a score is a finite number; of a candidate that failed it is -inf",
            )
        for told, value in ((self.scores, score), (self._holdouts, holdout)):
            if value is not None and told.setdefault(key, float(value)) != value:
                raise ValueError(f"candidate {key[:SHORT]} had the score {told[key]}, not {value}")

    def tell_distances(self, mean_pairwise: float, of_parents: float) -> None:
        """The mean distance within the population and among the parents: their ratio counts."""
        if not all(math.isfinite(d) and d >= 0 for d in (mean_pairwise, of_parents)):
            raise NotFinite(f"{mean_pairwise} and {of_parents} are not both distances")
        self._distances = (float(mean_pairwise), float(of_parents))

    def tell_duplicates(self, keys: Sequence[str]) -> None:
        """These have equal weights: the first stays, each other place gets a variant to ask for."""
        for key in sorted(set(keys), key=self._order)[1:]:
            slot = next((n for n, tried in enumerate(self._slots) if tried[-1] == key), None)
            if slot is None or key in self._alike:
                continue  # a reference point, or replaced already
            if len(self._slots[slot]) <= MOST_VARIANTS:
                self._fill(slot)
            else:
                self._alike.add(key)

    def advance(self) -> None:
        """Close the generation: rank, record, stop or breed the next one."""
        if self._finished:
            raise ValueError(f"the evolution is finished ({self._finished})")
        if missing := self.ask():
            raise ValueError(f"{len(missing)} candidates have no score yet")
        elites = self._ranked(self._pool())[: self.settings.elite_count]
        self.history.append({**self._record(), "elites": elites})
        self._closed.append(self._told())
        self._measured += self._population()
        self._finished = self._stop()
        if self._finished is None:
            places = self._next(elites)
            self.generation += 1
            self._open(elites, places)

    # -- what came of it --------------------------------------------------------------------------

    @property
    def finished(self) -> str | None:
        """Why it ended: "generations", "converged", "failed" (nothing had a score), or None."""
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
    def from_state(cls, settings: EvolutionSettings, state: Mapping[str, Any]) -> Evolution:
        """The evolution that had this state. Settings that would have led elsewhere are refused."""
        try:
            if state["format"] != FORMAT:
                raise ValueError(f"format {state['format']} is not known here")
            given = {name: state[name] for name in ("parents", "groups", "seed", "layers")}
            evolution = cls(settings, **given)
            for number, told in enumerate(state["generations"]):
                evolution._tell_again(told)
                if number < state["closed"]:
                    evolution.advance()
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this state of an evolution does not fit: {error}",
                hint="go on with the settings and the version that it was made with",
            ) from error
        return evolution

    def _told(self) -> dict[str, Any]:
        """What was told of the open generation, in an order that does not depend on the telling."""
        scores = {key: self.scores[key] for key in self._here() if key in self.scores}
        return {
            "scores": {k: None if v == -math.inf else v for k, v in scores.items()},
            "holdouts": {k: self._holdouts[k] for k in self._here() if k in self._holdouts},
            "distances": self._distances and list(self._distances),
            "variants": [len(tried) - 1 for tried in self._slots],
            "alike": sorted(self._alike),
        }

    def _tell_again(self, told: Mapping[str, Any]) -> None:
        for slot, variants in enumerate(told["variants"]):
            for _ in range(variants):
                self._fill(slot)
        self._alike = set(told["alike"])
        for key, score in told["scores"].items():
            self.tell(key, -math.inf if score is None else score)
        for key, holdout in told["holdouts"].items():
            self.tell(key, self.scores[key], holdout=holdout)
        if told["distances"]:
            self.tell_distances(*told["distances"])

    # -- a generation -----------------------------------------------------------------------------

    def _diversity_below(self, threshold: float) -> bool:
        diversity = self.history[-1]["diversity"] if self.history else None
        return diversity is not None and diversity < threshold

    def _fill(self, slot: int) -> None:
        """A candidate that was never there before for a place, or another instead of its last."""
        place, tried = self._places[slot], self._slots[slot]
        for attempt in count():
            rng = operators.generator(
                self.seed, self.generation, slot, len(tried), attempt, place.use
            )
            operator, made = self._made(place, rng, again=bool(tried))
            if made.key not in self.candidates:
                break
        self._add(made, Birth(self.generation, operator, place.inputs))
        tried.append(made.key)

    def _made(self, place: Place, rng: Generator, *, again: bool) -> tuple[str, Candidate]:
        if place.use == "mutant":
            elite = self.candidates[place.inputs[0]]
            return operators.mutate(self._space, elite, rng, self._strength, again=again)
        combo, seed = place.combo, operators.draw_seed(rng)
        if combo is None:
            combo = int(rng.integers(len(operators.COMBOS)))
        elif not again:
            seed = operators.draw_seed(
                operators.generator(self.seed, "masks")
            )  # shared, so one pass makes them all
        made = operators.combo_of(self._space, combo, place.inputs, seed, place.use)
        plain = place.use == "losers" or place.combo is not None
        return place.use, made if plain and not again else operators.variant(self._space, made, rng)

    def _next(self, elites: Sequence[str]) -> list[Place]:
        """The places of the next generation."""
        settings, parents = self.settings, self._space.parents
        new = Place("reseed", parents)
        losers = [key for key in self._ranked(self._population()) if key not in elites]
        losers = losers[-TRIPLE * settings.triples :]
        places = [
            Place("mutant", (elites[n // MUTANTS % len(elites)],)) if elites else new
            for n in range(MUTANTS * settings.elite_count)
        ]
        for n in range(settings.triples):
            triple = tuple(losers[TRIPLE * n : TRIPLE * (n + 1)])
            places.append(Place("losers", triple) if len(triple) == TRIPLE else new)
        if self._diversity_below(settings.diversity_reseed_threshold):
            places[-2:] = [new, new]
        return places

    def _stop(self) -> str | None:
        settings, history = self.settings, self.history
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
        population = self._population()
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
            "mutations": sum(place.use == "mutant" for place in self._places),
            "strength": self._strength,
            "variants": sum(len(tried) > 1 for tried in self._slots),
            "distinct": len(population) - len(self._alike),
            "operators": dict(sorted(used.items())),
        }

    # -- keys -------------------------------------------------------------------------------------

    def _add(self, candidate: Candidate, birth: Birth) -> None:
        self.candidates[candidate.key] = candidate
        self._births[candidate.key] = birth

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
