"""Points of the curve of size and quality: each is written smaller, trained, and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from agent_forge.config.settings import ModelSettings
from agent_forge.contract.phase import PhaseContext
from agent_forge.errors import DamagedFile
from agent_forge.evals.likelihood import padded
from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.allocation import (
    Price,
    divergence_of,
    prices_of,
    steps_for,
)
from agent_forge.phases.phase8_final_compression.config import (
    STUDENT_TRAIN,
    FinalCompressionSettings,
)
from agent_forge.phases.skills import MEAN, Right, Skills, retention
from agent_forge.phases.training import LatentModel
from agent_forge.quant.layers import plan_packing
from agent_forge.quant.packed import KEY, Packing
from agent_forge.store.container import Container, container_of
from agent_forge.store.files import to_json
from agent_forge.store.records import LEARNED
from agent_forge.train.fit import DistillationLoss

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
START, CODED, STUDENT, CONTROL = "input", "coded", "student", "control"
FP32 = "fp32_control"
STUDENT_BITS = 3.2  # of a weight of a student's file, about: finer steps than those of large ones
BATCH = 16  # items of a forward pass for prices
SMALLEST = 300  # tokens of a network
GENTLER = 0.8  # of a ratio, when it is tried again
HEAD_SIZE = 16  # of a student's heads
HEADER_BYTES = 45  # of a matrix in the headers of the file, about
Bytes = Mapping[str, int]


@dataclass(frozen=True)
class Point:
    """A point of the curve, and whether it is kept."""

    name: str
    kind: str  # input; coded: its own weights; student: a smaller network; control
    asked: float  # ratio that it was made for
    weights: int
    bytes: int  # of the file without its tokenizer
    tokenizer_bytes: int
    retention: dict[str, float]  # of the input's accuracy on items for choices
    gate: str  # what it did not keep; empty if it is kept

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights


@dataclass
class Compression:
    """A model that came in, what it must keep, and the points that were tried."""

    ctx: PhaseContext
    settings: FinalCompressionSettings
    skills: Skills  # in the tokens that are left
    start: LatentModel  # the input, with the tokens that are left
    fp32_bytes: int  # of the input as it was, unpacked
    learned: Mapping[str, Any]  # what the record of the input says that it can
    first: Right  # of the input, on items for choices
    points: list[Point] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # students that could not be made, and why
    models: dict[str, LatentModel] = field(default_factory=dict)  # by the names of points

    # -- going down --------------------------------------------------------------------------------

    def go_down(self) -> str:
        """Make the points one by one, each from the last that was kept; the name of the one that is
        handed over."""
        c, names = self.settings, [START]
        right, now = self.skills.right(self._opened(self.start), START), self.first
        self.models[START], thawed = self.start, self._thawed()
        self._note(START, START, 1.0, right, "")
        for number, ratio in enumerate(c.ratios, start=1):
            reached = self._coded_or_gentler(thawed, number, ratio, names, now)
            if reached is None:
                break
            names.append(reached[0])
            now = reached[1]
        steps = (c.thaw_steps + c.steps * (len(names) - 1)) if c.ratios else 0
        for number, ratio in enumerate(c.student_ratios, start=1):
            if (shape := self.student_shape(ratio)) is None:
                self.left_out.append(f"{ratio:g} times smaller: no network like it is so small")
                continue
            name = f"{STUDENT}_{number}"
            self.models[name] = self._student(shape, ratio, name, taught=True)
            right = self.skills.right(self._opened(self.models[name]), name)
            gate = self._missed(now, right, c.student_gate)
            self._note(name, STUDENT, ratio, right, gate)
            if c.control:
                own = f"{CONTROL}_{number}"
                self.models[own] = self._student(shape, ratio, own, taught=False)
                controlled = self.skills.right(self._opened(self.models[own]), own)
                self._note(own, CONTROL, ratio, controlled, "it is a control")
            if not gate:
                names.append(name)
        if steps and c.control:
            self.models[FP32] = self._trained(replace(self.start, packing=None), FP32, steps)
            right = self.skills.right(self._opened(self.models[FP32]), FP32)
            self._note(FP32, CONTROL, 1.0, right, "it is a control")
        sizes = {point.name: point.bytes for point in self.points}
        return min(names[1:] or names, key=lambda name: sizes[name])

    def _coded_or_gentler(
        self, thawed: LatentModel, number: int, ratio: float, names: Sequence[str], now: Right
    ) -> tuple[str, Right] | None:
        """A point at a ratio; if it does not hold, one that is a little larger; None if neither
        does: then the weights before still score what was recorded."""
        c, last = self.settings, self.models[names[-1]] if len(names) > 1 else thawed
        tries = {f"{CODED}_{number}": ratio, f"{CODED}_{number}_again": GENTLER * ratio}
        for name, asked in tries.items():
            self.models[name] = self._coded(last, asked, name, c.steps)
            right = self.skills.right(self._opened(self.models[name]), name)
            missed = self._missed(now, right, c.coded_gate if number > 1 else c.first_gate)
            self._note(name, CODED, asked, right, missed)
            if not missed:
                return name, right
            self._take_back(names[-1], name, missed)
        return None

    def _missed(self, before: Right, after: Right, gate: float) -> str:
        """What a point does not keep, in words: of the last kept one, and of the input."""
        c, step, all_of_it = self.settings, retention(before, after), retention(self.first, after)
        told = []
        if step.get(MEAN, 1.0) < gate:
            told.append(f"{step[MEAN]:.1%} of the last point's accuracy, not {gate:.0%}")
        if all_of_it.get(MEAN, 1.0) < c.least_retention:
            told.append(f"{all_of_it[MEAN]:.1%} of the input's, not {c.least_retention:.0%}")
        kinds = [kind for kind in all_of_it if kind != MEAN and self._counts(kind)]
        low = [kind for kind in kinds if all_of_it[kind] < c.least_of_each]
        told += [f"{kind} {all_of_it[kind]:.1%}, not {c.least_of_each:.0%}" for kind in low]
        return ", ".join(told)

    def _counts(self, kind: str) -> bool:
        """True if the input can do it at all: a share of next to nothing says nothing."""
        right = self.first[kind]
        return sum(right) >= max(5, len(right) // 20)

    def _note(self, name: str, kind: str, ratio: float, right: Right, gate: str) -> None:
        model, sizes = self.models[name], self.file_of(self.models[name]).sizes
        tokenizer, weights = sizes[TOKENIZER], model.settings.parameters()
        own = self.fp32_bytes if name == FP32 else sum(sizes.values()) - tokenizer
        kept = retention(self.first, right)
        self.points.append(Point(name, kind, ratio, weights, own, tokenizer, kept, gate))
        values = {"bytes": own, "ratio": self.fp32_bytes / own}
        values |= {"retention": kept[MEAN]} if MEAN in kept else {}
        self.ctx.log(None, {f"point_{name}/{key}": value for key, value in values.items()})

    def _take_back(self, kept: str, name: str, missed: str) -> None:
        """Drop a point; the one before it still has the score that was recorded."""
        network = self._opened(self.models[kept])
        recorded = self.skills.right(network, kept)
        if self.skills.right(network, f"before {name}, again") != recorded:
            raise DamagedFile(self.ctx.folder, "weights that a point went back to score otherwise")
        event = {"phase": self.ctx.phase, "stage": name, "reason": missed}
        record = partial(self.ctx.tracker.event, "rolled_back", **event)
        self.ctx.once("rolled back", name, record)

    # -- making ------------------------------------------------------------------------------------

    def _thawed(self) -> LatentModel:
        """The input's weights, free of the steps in which they were written."""
        free = replace(self.start, packing=None)
        if not self.settings.thaw_steps or not self.settings.ratios:
            return free
        return self._trained(free, "thaw", self.settings.thaw_steps)

    def _coded(
        self, model: LatentModel, ratio: float, name: str, steps: int, share: float | None = None
    ) -> LatentModel:
        """Weights in steps that make the file so much smaller, trained through the rounding."""
        whole = replace(model, packing=None)
        packing = plan_packing(whole.whole(), "step1.2345", "step1.2345")
        prices: list[Price] = []
        if self.settings.allocate:
            own = partial(self._prices, whole, packing)
            prices = [Price(*p) for p in self.ctx.once("prices", name, own)]
        others = {n: t for n, t in whole.state.items() if n not in packing.matrices}
        sizes = self._file(whole.settings, packing, Packing({}).pack(others).tensors).sizes
        rest = sum(sizes.values()) - sizes[TOKENIZER]
        rest += HEADER_BYTES * len(packing.matrices)
        target = self.fp32_bytes / ratio - rest
        coded = steps_for(whole.state, packing.matrices, prices, target)
        return self._trained(replace(whole, packing=Packing(coded)), name, steps, None, share)

    def _prices(self, model: LatentModel, packing: Packing) -> list[tuple[str, int, float]]:
        """What it costs to round each kind of matrix alone, on items for choices."""
        network = model.whole().to(self.ctx.device)
        items = self.skills.calibration(self.settings.calibration_items)
        rows = (items[i : i + BATCH] for i in range(0, len(items), BATCH))
        batches = [padded(own, torch.device(self.ctx.device)) for own in rows]
        cost = partial(divergence_of, network, batches=batches)
        found = prices_of(cost, network.state_dict(), packing.matrices)
        return [(p.kind, p.weights, p.nats) for p in found]

    def _student(
        self, shape: ModelSettings, ratio: float, name: str, *, taught: bool
    ) -> LatentModel:
        """A smaller network, taught by the input or by right answers alone, then coded."""
        torch.manual_seed(self.ctx.seed)
        fresh = LatentModel(shape, ForgeNetwork(shape).state_dict(), None)
        c, share = self.settings, self.settings.parent_share if taught else 0.0
        stage = f"{name}_whole"
        student = self._trained(fresh, stage, c.student_steps, STUDENT_TRAIN, share)
        return self._coded(student, ratio, name, c.steps, share)

    def student_shape(self, ratio: float) -> ModelSettings | None:
        """The widest network like the input whose file would be so small; None if none is."""
        s, found = self.start.settings, None
        most = 8 * self.fp32_bytes / ratio / STUDENT_BITS
        for width in range(HEAD_SIZE, s.d_model, HEAD_SIZE):
            part = width / s.d_model
            changes = {"d_model": width, "n_heads": width // HEAD_SIZE, "head_size": 0}
            changes |= {"embed_rank": max(8, round(part * s.embed_rank / 2))}
            for name in ("ffn_hidden", "d_mem", "gate_hidden", "trm_hidden"):
                changes[name] = max(8, round(part * getattr(s, name)))
            shape = ModelSettings(**{**s.model_dump(), **changes})
            found = shape if shape.parameters() <= most else found
        return found

    def _trained(
        self,
        model: LatentModel,
        stage: str,
        steps: int,
        settings: Any = None,
        parent_share: float | None = None,
    ) -> LatentModel:
        share = self.settings.parent_share if parent_share is None else parent_share
        return model.trained(
            self.ctx,
            **self.skills.training,
            stage=stage,
            steps=steps,
            settings=settings or self.settings.train,
            seed=(self.ctx.seed + 1_000_003 * model.steps) % 2**62,  # other batches
            loss=DistillationLoss(self._teacher, share=share),
        )

    @cached_property
    def _teacher(self) -> ForgeNetwork:
        return self._opened(self.start)

    def _opened(self, model: LatentModel) -> ForgeNetwork:
        return model.opened().to(self.ctx.device)

    # -- files -------------------------------------------------------------------------------------

    def file_of(self, model: LatentModel) -> Container:
        """The one file of a model."""
        packed = (model.packing or Packing({})).pack(model.state)
        return self._file(model.settings, packed.packing, packed.tensors)

    def _file(
        self, shape: ModelSettings, packing: Packing, tensors: Mapping[str, Tensor]
    ) -> Container:
        return container_of(
            {
                WEIGHTS: save({name: tensor.contiguous() for name, tensor in tensors.items()}),
                CONFIG: to_json({**config_dict(shape), KEY: packing.to_json()}),
                TOKENIZER: self.skills.corpus.tokenizer.files()[TOKENIZER],
                LEARNED: to_json({"learned": dict(self.learned)}),
            }
        )


def pruned(model: LatentModel, kept: Sequence[int]) -> LatentModel:
    """A model that knows these tokens alone, but for some that the smallest vocabulary asks for."""
    name, state, packing = "embedding.weight", dict(model.state), model.packing
    known = {*kept}
    others = [i for i in range(model.settings.vocab_size) if i not in known]
    kept = [*kept, *others[: max(0, SMALLEST - len(kept))]]
    state[name] = state[name][torch.tensor(kept)].clone()
    settings = ModelSettings(**{**model.settings.model_dump(), "vocab_size": len(kept)})
    if packing and (matrix := packing.matrices.get(name)):
        own = replace(matrix, shape=(len(kept), matrix.shape[1]))
        packing = replace(packing, matrices={**packing.matrices, name: own})
    return replace(model, settings=settings, state=state, packing=packing)
