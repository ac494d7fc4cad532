"""`forge compress`: any causal language model in one small file that every command opens.

Every matrix is written in whole steps with an entropy coder: the more rounding a kind of matrix
costs, the finer its steps. How large the file may be is said by a ratio, or found by bisection as
the smallest file that keeps a share of what the model can do (`retention_of`). Ratios are bytes in
fp32 over bytes of the file without its tokenizer, which is told beside it.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from agent_forge.errors import AlreadyExists, CannotWrite, ConfigError
from agent_forge.evals.comparison import Comparison, compare
from agent_forge.evals.domains import Domain, generated
from agent_forge.evals.likelihood import padded
from agent_forge.evals.model_under_test import (
    ItemScores,
    ModelUnderTest,
    TokenizedDomain,
    confirm,
    model_under_test,
    open_model_under_test,
)
from agent_forge.merge.vocabulary import write_tokenizer
from agent_forge.model.folder import CONFIG, home_of, read_config
from agent_forge.model.opened import open_model
from agent_forge.model.weights import SINGLE, Weights
from agent_forge.phases.allocation import Price, divergence_of, prices_of, steps_for
from agent_forge.phases.quantise import (
    Progress,
    Request,
    parts_of,
    right_items,
    trained,
    with_tied,
)
from agent_forge.phases.training import learned_before
from agent_forge.quant.layers import plan_packing
from agent_forge.quant.packed import KEY, Packing, kinds_of
from agent_forge.store import files
from agent_forge.store.container import MAGIC, SUFFIX, Container, container_of, unpacked
from agent_forge.store.paths import require_short
from agent_forge.store.records import LEARNED, learned_record
from agent_forge.store.tensors import split_tied

RATIO = 8.0  # unless told otherwise
CLOSE = 0.01  # of the size: then it is the one asked for
TRIES = 8  # of a size
MEASUREMENTS = 7  # of rounded models, to find a retention; one more is of the model itself
WIDEST_RATIO = 64.0  # up to which a retention is looked for
LEAST_ACCURACY = 0.05  # below it, accuracy says nothing of what is kept
CALIBRATION = 64  # items that tell what rounding costs
BATCH = 16  # of them in a forward pass
LOOKED_AT = 512  # items of a file that tell what is kept
STORIES = 32  # generated texts, where no data is given
STORY = "story"


@dataclass(frozen=True)
class CompressRequest(Request):
    """Which model is written into which file, and how small: by a ratio, or by what is kept."""

    ratio: float | None = None
    retention: float | None = None

    def __post_init__(self) -> None:
        if self.ratio is not None and self.retention is not None:
            hint = "name the size or the quality; the other one follows"
            raise ConfigError("--ratio and --retention exclude each other", hint=hint)
        if self.ratio is not None and not 1 < self.ratio < math.inf:
            raise ConfigError(f"--ratio {self.ratio:g} is not above 1")
        if self.retention is not None and not 0 < self.retention <= 1:
            raise ConfigError(f"--retention {self.retention:g} is not above 0 and at most 1")
        if self.out.suffix != SUFFIX:
            problem = f"{self.out} does not end in {SUFFIX}, by which every command knows it"
            raise ConfigError(problem, hint=f"name it {self.out.name or 'model'}{SUFFIX}")


@dataclass(frozen=True)
class Compressed:
    """What was written, and how it compares with its parent on items that it did not learn from."""

    file: Path
    weights: int
    file_bytes: int
    tokenizer_bytes: int
    retention: float | None  # of the file, on the part for choices; None: not asked for
    comparison: Comparison

    @property
    def fp32_bytes(self) -> int:
        return 4 * self.weights

    @property
    def ratio(self) -> float:
        return self.fp32_bytes / (self.file_bytes - self.tokenizer_bytes)

    @property
    def sentence(self) -> str:
        return self.comparison.overall.sentence("its parent")

    def numbers(self) -> dict[str, float | None]:
        own = self.file_bytes - self.tokenizer_bytes
        return {
            "fp32_bytes": self.fp32_bytes,
            "file_bytes": self.file_bytes,
            "tokenizer_bytes": self.tokenizer_bytes,
            "ratio": self.ratio,
            "ratio_with_tokenizer": self.fp32_bytes / self.file_bytes,
            "bits_per_weight": 8 * own / self.weights,
            "retention": self.retention,
        }


class _Contents(files.StagedFolder):
    """The files that would be in a folder."""

    def __init__(self) -> None:
        self.found: dict[str, bytes] = {}

    def write_bytes(self, name: str, data: bytes) -> None:
        self.found[name] = data

    def copy(self, source: Path, name: str = "") -> None:
        files.refuse_leaving(source)
        self.found[name or source.name] = source.read_bytes()


class Compression:
    """A model that is to be compressed, checked before any work."""

    def __init__(self, request: CompressRequest, *, force: bool) -> None:
        self.request = request
        weights = request.weights()
        _refuse_place(request.out, weights, force)
        self.learned, self.asked = parts_of(request.data)
        if not request.data:
            parts = ("selection", "verdict")
            both = ([generated(STORY, (STORY,), part, STORIES, (1, 20))] for part in parts)
            self.learned, self.asked = both
        self.tested = model_under_test(open_model(request.model))
        self.kept: dict[str, Tensor] = split_tied(self.tested.model.state_dict())[0]
        planned = plan_packing(self.tested.model, "step1", "step1").matrices
        self.matrices = {name: m for name, m in planned.items() if name in self.kept}
        self.weights = sum(t.numel() for t in self.kept.values() if t.is_floating_point())
        # Without prices: the whole way from the finest to the coarsest steps.
        self.finest, coarsest = (
            Packing(steps_for(self.kept, self.matrices, (), size)) for size in (math.inf, 0)
        )
        self.least, self.greatest = (self.ratio_of(p, self.kept) for p in (self.finest, coarsest))
        ratio = self.least if request.retention else self.asked_ratio
        if not self.least * (1 - CLOSE) <= ratio <= self.greatest * (1 + CLOSE):
            raise self._unreachable(ratio)

    @property
    def asked_ratio(self) -> float:
        return self.request.ratio or RATIO

    def facts(self) -> dict[str, Any]:
        """What a dry run says."""
        r, sizes = self.request, container_of(self.beside).sizes
        goal = {"retention": r.retention} if r.retention else {"ratio": self.asked_ratio}
        size = {} if r.retention else {"target_bytes": round(4 * self.weights / self.asked_ratio)}
        return {
            "model": r.model,
            "weights": self.weights,
            "fp32_bytes": 4 * self.weights,
            **goal,
            **size,
            "tokenizer_bytes": sum(sizes[name] for name in self._tokenizer),
            "least_ratio": self.least,
            "greatest_ratio": self.greatest,
            "steps": r.steps,
            "memory_bytes": self.weights * 4 * (7 if r.steps else 4),
        }

    # -- files -------------------------------------------------------------------------------------

    @cached_property
    def beside(self) -> dict[str, bytes]:
        """What is in the file beside weights and config: the tokenizer, and what is known."""
        home, stage = home_of(self.request.model), _Contents()
        write_tokenizer(stage, home, {})
        if learned := learned_before(learned_record(home)):
            stage.write_bytes(LEARNED, files.to_json({"learned": files.finite(learned)}))
        return stage.found

    @property
    def _tokenizer(self) -> list[str]:
        return [name for name in self.beside if name not in (LEARNED, "generation_config.json")]

    def container(self, packing: Packing, state: Mapping[str, Tensor], *, whole: bool) -> Container:
        """The file; unless it is to be `whole`, without the tokenizer."""
        packed = packing.pack({name: state[name] for name in self.kept})
        config = {**read_config(self.request.model), KEY: packing.to_json()}
        tensors = {name: tensor.contiguous() for name, tensor in packed.tensors.items()}
        contents = {SINGLE[0]: save(tensors), CONFIG: files.to_json(config, sort_keys=False)}
        left_out = () if whole else self._tokenizer
        more = {name: data for name, data in self.beside.items() if name not in left_out}
        return container_of({**contents, **more})

    def ratio_of(self, packing: Packing, state: Mapping[str, Tensor]) -> float:
        """Bytes in fp32 over those of the file without its tokenizer."""
        return 4 * self.weights / len(self.container(packing, state, whole=False).content)

    # -- how small ---------------------------------------------------------------------------------

    def at_ratio(
        self, ratio: float, prices: Sequence[Price], state: Mapping[str, Tensor]
    ) -> Packing:
        """The packing of a ratio; one step for all, where steps by price do not get there."""
        goal = 4 * self.weights / ratio
        for own_prices in (prices, ()):
            aim, last = goal, 0.0
            for _ in range(TRIES):
                packing = Packing(steps_for(state, self.matrices, own_prices, max(0.0, aim)))
                size = 4 * self.weights / self.ratio_of(packing, state)
                if abs(size / goal - 1) <= CLOSE:
                    return packing
                if size == last:  # there are no steps beyond
                    break
                aim, last = aim + goal - size, size
        raise self._unreachable(ratio)

    def _unreachable(self, ratio: float) -> ConfigError:
        reached = f"from {self.least:.2f} to {self.greatest:.2f}"
        problem = f"--ratio {ratio:g} cannot be reached: {self.request.model} can have {reached}"
        return ConfigError(problem, hint="name a ratio between these")

    def prices(self, progress: Progress) -> list[Price]:
        """What it costs to round each kind of matrix alone, on items for choices."""
        items = right_items(self.tested, [_few(d, CALIBRATION) for d in self.learned])
        items = items[:: max(1, len(items) // CALIBRATION)][:CALIBRATION]
        longest = max(len(item.ids) for item in items)
        rows = max(1, min(BATCH, self.tested.batch_tokens // longest))
        starts = range(0, len(items), rows)
        batches = [padded(items[i : i + rows], torch.device("cpu")) for i in starts]
        done = 0

        def cost(rounded: Mapping[str, Tensor]) -> float:
            nonlocal done
            done += 1
            progress("pricing", done, len(kinds_of(self.matrices)))
            return divergence_of(self.tested.model, rounded, batches)

        return prices_of(cost, self.kept, self.matrices)

    def keeping(
        self, share: float, prices: Sequence[Price], progress: Progress
    ) -> tuple[Packing, float]:
        """The smallest packing that keeps this share, by bisection, and what it keeps."""

        def kept_by(packing: Packing, number: int) -> tuple[Packing, float]:
            kept = self.retention(packing, self.kept)
            progress("measuring", number, MEASUREMENTS)
            return packing, kept

        low, high = self.least, max(self.least, min(self.greatest, WIDEST_RATIO))
        best = kept_by(self.finest, 1)
        if best[1] < share:
            problem = f"at the least ratio, {low:.2f}, {best[1]:.1%} are kept, not {share:.1%}"
            raise ConfigError(problem, hint="name a lower --retention")
        for number in range(2, MEASUREMENTS + 1):
            middle, found = math.sqrt(low * high), (best[0], -1.0)
            with suppress(ConfigError):  # no steps make a file of just that size
                found = kept_by(self.at_ratio(middle, prices, self.kept), number)
            if found[1] >= share:
                low, best = middle, found
            else:
                high = middle
        return best

    def retention(self, packing: Packing, state: Mapping[str, Tensor]) -> float:
        """What is kept of the model, on the part for choices."""
        domains, parts, whole = self._choices
        return retention_of(domains, whole, self._rounded(packing, state).measure_all(parts))

    @cached_property
    def _choices(self) -> tuple[list[Domain], list[TokenizedDomain], list[ItemScores]]:
        """What decides how small the file may be, and what the model itself did with it."""
        domains = [_few(domain, LOOKED_AT) for domain in self.learned]
        parts = [self.tested.prepare(domain) for domain in domains]
        return domains, parts, self.tested.measure_all(parts)

    def _rounded(self, packing: Packing, state: Mapping[str, Tensor]) -> ModelUnderTest:
        """The model as it is when it was written and read."""
        network = copy.deepcopy(self.tested.model)
        own = {name: state[name] for name in self.kept}
        network.load_state_dict(packing.rounded(own), strict=False)  # what is tied follows
        return replace(self.tested, model=network)

    # -- all of it ---------------------------------------------------------------------------------

    def run(self, *, force: bool, progress: Progress) -> Compressed:
        """Choose the steps, train through them if asked for, write, open and measure."""
        r, prices = self.request, self.prices(progress)
        retention, state = None, self.kept
        if r.retention is None:
            packing = self.at_ratio(self.asked_ratio, prices, state)
        else:
            packing, retention = self.keeping(r.retention, prices, progress)
        if r.steps:
            aim = self.asked_ratio if r.retention is None else self.ratio_of(packing, state)
            items, tied = (
                right_items(self.tested, self.learned),
                with_tied(packing, self.tested.model),
            )
            state = trained(r, self.tested, tied, items, progress)
            if abs(self.ratio_of(packing, state) / aim - 1) > CLOSE:  # its codes changed with it
                with suppress(ConfigError):  # what was trained is kept, at the size that it has
                    packing = self.at_ratio(aim, prices, state)
            if r.retention is not None:  # the one that was looked for is of weights before that
                retention = self.retention(packing, state)
        recorded = self._rounded(packing, state).first_losses(self.asked)
        container = self.container(packing, state, whole=True)
        with files.building(r.out) as built:
            trial = built / r.out.name
            files.write_bytes(trial, container.content)
            confirm(unpacked(trial), lambda m: m.first_losses(self.asked), recorded)
            compared = self._compared(unpacked(trial), progress)
            _refuse_place(r.out, None, force)
            with files.writing(r.out, replace=force) as writer:
                writer.write(container.content)
        tokenizer = sum(container.sizes[name] for name in self._tokenizer)
        size = len(container.content)
        return Compressed(r.out, self.weights, size, tokenizer, retention, compared)

    def _compared(self, written: Path, progress: Progress) -> Comparison:
        """What was written and its parent on the items of the verdict."""
        scores = []
        for tested in (self.tested, open_model_under_test(written)):
            parts: list[TokenizedDomain] = [tested.prepare(domain) for domain in self.asked]
            scores.append(tested.measure_all(parts, lambda d, n: progress("measuring", d, n)))
        return compare(scores[0], scores[1], self.asked, self.request.seed)


def retention_of(
    domains: Sequence[Domain], before: Sequence[ItemScores], after: Sequence[ItemScores]
) -> float:
    """What is kept: the share of the accuracy on questions if the model answers 5 % of them, else
    e to the minus of what a token costs more, in nats."""
    answers = [
        [right for d, own in zip(domains, scores, strict=True) if d.exact for right in own.right]
        for scores in (before, after)
    ]
    if answers[0] and sum(answers[0]) >= LEAST_ACCURACY * len(answers[0]):
        return sum(answers[1]) / sum(answers[0])
    nats = [
        sum(sum(own.loss) for own in scores) / sum(sum(own.tokens) for own in scores)
        for scores in (before, after)
    ]
    return math.exp(nats[0] - nats[1])


def _few(domain: Domain, count: int) -> Domain:
    return domain.select(range(min(count, len(domain.examples))))


def _refuse_place(out: Path, weights: Weights | None, force: bool) -> None:
    """Refuse to write where a file cannot be, or is that is not to be replaced."""
    require_short(out)
    folder = weights.folder if weights else None
    if folder and folder.resolve() in out.resolve().parents:
        raise ConfigError(f"{out} lies in the model's folder", hint="name another place")
    nearest = files.nearest_folder(out.absolute().parent)
    if not os.access(nearest, os.W_OK):
        raise CannotWrite(out, f"{nearest} cannot be written to")
    if any(parent.is_file() for parent in out.absolute().parents):
        raise ConfigError(f"{out} is below a file", hint="name another place")
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_file():
        raise AlreadyExists(f"{out} is no file, so it is not replaced", hint="name another file")
    if not force:
        raise AlreadyExists(f"{out} exists", hint="name another file, or replace it: --force")
    with out.open("rb") as reader:
        if reader.read(len(MAGIC) - 1) != MAGIC[:-1]:
            problem = f"{out} is not replaced: it is no model in one file"
            raise AlreadyExists(problem, hint="name another file, or move it away")
