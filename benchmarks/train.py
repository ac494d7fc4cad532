"""How fast the network learns: optimizer against AdamW, architecture against a plain GPT, speed.

    python benchmarks/train.py --data FOLDER     measure what is missing, write docs/training.md
    python benchmarks/train.py --tables          write it from what is there

FOLDER holds tinystories/, wikitext2/ and tiny_shakespeare/ as their authors publish them. Cells are
compared by CPU seconds of one thread; evaluation is not counted. A cell that was measured is not
measured again. Preset `tiny` unless a cell says otherwise; rows of 128 tokens, 16 of them a step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from results import RESULTS, done, record, write_section
from torch import Tensor, nn
from torch.nn import functional as F

from agent_forge.config.settings import ModelSettings
from agent_forge.data import tasks
from agent_forge.data.loader import IGNORE, BatchLoader, TokenizedDataset
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import Diverged
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.model.attention import ROPE_BASE, RMSNorm, TransformerBlock
from agent_forge.model.loss import LossOutput, language_loss, token_losses
from agent_forge.model.network import BackboneOutput, ForgeNetwork, GenerationCache
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast, split_roles
from agent_forge.pipeline.config import load_config
from agent_forge.train.config import TrainSettings
from agent_forge.train.trainer import Trainer

NAME = "train"
ROWS, LENGTH, STEPS, EVERY = 16, 128, 120, 10
HELD_OUT = 2  # batches of 32 rows
SEEDS = (0, 1, 2)
CORPORA = ("tiny_shakespeare", "tinystories", "wikitext2", "tasks")
ADAMW_RATES = (5e-4, 1e-3, 3e-3)
ABLATION_SECONDS = 35.0
EASY = tuple(name for name, family in tasks.FAMILIES.items() if family.learnable)
DATA = Path()  # set by main


# -- data ------------------------------------------------------------------------------------------


def documents(corpus: str) -> tuple[list[str], list[str]]:
    """Texts to train on and texts held out."""
    if corpus == "tinystories":
        stories = json.loads((DATA / corpus / "tinystories_1000.json").read_text(encoding="utf-8"))
        return stories[:900], stories[900:]
    file = {"tiny_shakespeare": "input.txt", "wikitext2": "valid.txt"}[corpus]
    text = (DATA / corpus / file).read_text(encoding="utf-8")
    cut = int(0.9 * len(text))
    return [text[:cut]], [text[cut:]]


def items(split: str, count: int) -> list[tasks.Task]:
    return [tasks.make(EASY[i % len(EASY)], split, i, level=(1, 20)) for i in range(count)]


@lru_cache(maxsize=1)
def corpus_of(name: str) -> tuple[TokenizedDataset, TokenizedDataset, float]:
    """Training source, held-out source, and bytes of held-out text a learned token."""
    vocab = preset("tiny").vocab_size
    if name == "tasks":
        train, held = items("train", 40_000), items("selection", 600)
        tokenizer = Tokenizer.train((f"{t.question} {t.answer}" for t in train[:5000]), vocab)
        told = [[tokenizer.chat(turns(t)) for t in part] for part in (train, held)]
        sources = [
            TokenizedDataset(name, [ids for ids, _ in part], [said for _, said in part])
            for part in told
        ]
        size = sum(len(t.answer) for t in held)
    else:
        texts, held_out = documents(name)
        tokenizer = Tokenizer.train(texts, vocab)
        sources = [
            TokenizedDataset(name, tokenizer.encode_batch(part)) for part in (texts, held_out)
        ]
        size = sum(len(text.encode()) for text in held_out)
    return sources[0], sources[1], size / int((sources[1].targets != IGNORE).sum())


def turns(task: tasks.Task) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": task.question},
        {"role": "assistant", "content": task.answer},
    ]


def loader(source: TokenizedDataset, seed: int, rows: int = ROWS) -> BatchLoader:
    vocab = preset("tiny").vocab_size
    mix = {source.name: 1.0}
    return BatchLoader([source], mix, batch=rows, length=LENGTH, seed=seed, vocab_size=vocab)


def preset(name: str) -> ModelSettings:
    return load_config(preset=name).model


# -- the rivals ------------------------------------------------------------------------------------


class PlainGPT(nn.Module):
    """The same blocks and nothing else: tied full embedding, no memory, recursion or halting."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        s = self.settings = settings
        self.embedding = nn.Embedding(s.vocab_size, s.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(
            TransformerBlock(s.d_model, s.n_heads, s.ffn_hidden, s.sw_window)
            for _ in range(s.n_layers)
        )
        self.norm = RMSNorm(s.d_model)

    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.weight.t()


def plain_loss(model: Any, batch: Any, generator: torch.Generator) -> LossOutput:
    tokens, targets = batch
    x = F.rms_norm(model.embedding(tokens), (model.settings.d_model,), eps=1e-6)
    for block in model.blocks:
        x = block(x, None, 0)
    kept = targets.flatten() != IGNORE
    losses = token_losses(model, x.flatten(0, 1)[kept], targets.flatten()[kept])
    mean = float(losses.mean().detach())
    return LossOutput(losses.mean(), len(losses), {"loss": mean, "loss_step_1": mean}, x)


class WithoutMemory(ForgeNetwork):
    """Ours, with the memory and its gate left out."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.features_norm = self.gate.norm
        del self.memory, self.gate

    def features(self, tokens_BT: Tensor, cache: GenerationCache | None = None) -> BackboneOutput:
        x = self.projection(self.embedding(tokens_BT))
        x = F.rms_norm(x, x.shape[-1:], eps=1e-6)
        for block in self.blocks:
            x = block(x, None, 0)
        return BackboneOutput(self.features_norm(x), x.new_zeros(x.shape[:-1]))


def of_size(settings: ModelSettings, build: Callable[[ModelSettings], nn.Module]) -> nn.Module:
    """A rival with as many weights as ours, by the width of its SwiGLU."""
    wanted, hidden = settings.parameters(), settings.ffn_hidden

    def at(width: int) -> ModelSettings:
        return settings.model_copy(update={"ffn_hidden": width})

    def count(width: int) -> int:
        return sum(p.numel() for p in build(at(width)).parameters())

    hidden += round((wanted - count(hidden)) / (3 * settings.d_model * settings.n_layers))
    return build(at(hidden))


# -- one run ---------------------------------------------------------------------------------------


def adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    matrices, others = split_roles(model)
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    everything = list(model.parameters())

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(everything, 1.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def muon(model: nn.Module, **changes: Any) -> MuonGrokfast:
    chosen = MuGrokConfig.from_phase(1).model_copy(update=changes)
    return MuonGrokfast(model, chosen)


def held_out(model: nn.Module, loss: Any, source: TokenizedDataset) -> list[float]:
    """Loss of each recursion step on all positions of fixed rows, in nats a token."""
    batches = loader(source, 0, 32)
    sums: list[float] = []
    count = 0
    exact = model.settings
    model.settings = exact.model_copy(update={"supervised_share": 1.0})  # type: ignore[assignment]
    model.eval()
    with torch.no_grad():
        for _ in range(HELD_OUT):
            value = loss(model, batches.next_batch(), torch.Generator().manual_seed(0))
            steps = [v for name, v in value.values.items() if name.startswith("loss_step_")]
            sums = sums or [0.0] * len(steps)
            sums = [a + b * value.count for a, b in zip(sums, steps, strict=True)]
            count += value.count
    model.settings = exact
    return [total / count for total in sums]


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Any,
    corpus: str,
    seed: int,
    *,
    steps: int = 0,
    seconds: float = 0.0,
) -> dict[str, Any]:
    """Train for so many steps, or as many as fit into so many CPU seconds."""
    train, held, bytes_a_token = corpus_of(corpus)
    batches = loader(train, seed)
    generator = torch.Generator().manual_seed(seed)
    settings = TrainSettings(warmup_steps=10)
    total = steps or 10**9
    trainer = Trainer(model, optimizer, loss, settings, total=total, generator=generator)
    curve: list[tuple[float, float]] = []
    spent, step = 0.0, 0
    while step < trainer.total:
        step += 1
        began = time.process_time()
        try:
            trainer.step(step, batches.next_batch())
        except Diverged as error:
            return {"diverged": str(error), "loss": 99.0, "cpu_s": round(spent, 2), "curve": []}
        spent += time.process_time() - began
        if step == 10 and seconds:
            trainer.total = max(20, int(seconds / spent * 10))
        if steps and (step % EVERY == 0 or step == total):
            curve.append((round(spent, 3), round(held_out(model, loss, held)[-1], 5)))
    per_step = held_out(model, loss, held)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": step,
        "cpu_s": round(spent, 2),
        "loss": round(per_step[-1], 5),
        "bits_per_byte": round(per_step[-1] / math.log(2) / bytes_a_token, 4),
        "per_step": [round(value, 5) for value in per_step],
        "curve": curve,
    }


def setup() -> str:
    """Names the network and the optimizer that a cell was measured with."""
    parts = (preset("tiny"), preset("25m"), MuGrokConfig.from_phase(1))
    text = "".join(p.canonical_hash() for p in parts) + str(ROPE_BASE)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def measured() -> list[dict[str, Any]]:
    """The cells of the present network and optimizer; older ones stay in the file."""
    return [r for r in done(NAME) if r["setup"] == setup()]


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return build()


# -- the studies -----------------------------------------------------------------------------------


def optimizer_cells() -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """AdamW's rate is swept on every corpus (first seed); ours is that of `from_phase(1)`."""
    for corpus in CORPORA:
        for rate in ADAMW_RATES:
            yield optimizer_cell(corpus, "adamw", 0, rate)
        while best_rate(corpus) == max(swept(corpus)):  # the best is not at the edge
            yield optimizer_cell(corpus, "adamw", 0, 2 * best_rate(corpus))
        best = best_rate(corpus)
        for seed in SEEDS:
            if seed:
                yield optimizer_cell(corpus, "adamw", seed, best)
            yield optimizer_cell(corpus, "muongrokfast", seed, MuGrokConfig.from_phase(1).muon_lr)


def optimizer_cell(corpus: str, name: str, seed: int, rate: float) -> Any:
    def work() -> dict[str, Any]:
        model = seeded(seed, lambda: ForgeNetwork(preset("tiny")))
        optimizer = adamw(model, rate) if name == "adamw" else muon(model)
        return run(model, optimizer, language_loss, corpus, seed, steps=STEPS)

    cell = {"study": "optimizer", "corpus": corpus, "optimizer": name, "rate": rate, "seed": seed}
    return cell, work


def swept(corpus: str) -> dict[float, float]:
    """AdamW's rates that were tried on a corpus, with the loss of each."""
    rows = [r for r in measured() if r["study"] == "optimizer" and r["corpus"] == corpus]
    return {r["rate"]: r["loss"] for r in rows if r["optimizer"] == "adamw" and not r["seed"]}


def best_rate(corpus: str) -> float:
    losses = swept(corpus)
    return min(losses, key=lambda rate: losses[rate])


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ours": ({}, {}),
    "plain GPT": ({}, {}),
    "embedding of rank 32": ({"embed_rank": 32}, {}),
    "T_max 1": ({"t_max": 1}, {}),
    "without memory": ({}, {}),
    "Newton-Schulz k=5": ({}, {"ns_steps": 5}),
    "Grokfast lambda 0.3": ({}, {"grokfast_lambda": 0.3}),
    "Grokfast lambda 2": ({}, {"grokfast_lambda": 2.0}),
}


def architecture_cells() -> Iterator[Any]:
    """Equal CPU time for all; the SwiGLU makes up for weights that a variant has more or less."""
    for seed in SEEDS[:2]:
        for variant in VARIANTS:
            yield architecture_cell(variant, seed)


def architecture_cell(variant: str, seed: int) -> Any:
    shape, changes = VARIANTS[variant]

    def work() -> dict[str, Any]:
        settings = preset("tiny")
        build: Callable[[ModelSettings], nn.Module] = ForgeNetwork
        loss: Any = language_loss
        if variant == "plain GPT":
            build, loss = PlainGPT, plain_loss
        elif variant == "without memory":
            build = WithoutMemory
        torch.manual_seed(seed)

        def shaped(s: ModelSettings) -> nn.Module:
            return build(s.model_copy(update=shape))

        model = of_size(settings, shaped)
        torch.manual_seed(seed)
        model = type(model)(model.settings)  # type: ignore[arg-type]
        return run(
            model, muon(model, **changes), loss, "tinystories", seed, seconds=ABLATION_SECONDS
        )

    return {"study": "architecture", "variant": variant, "seed": seed}, work


def speed_cells() -> Iterator[Any]:
    for name, rows, steps in (("tiny", 16, 40), ("25m", 4, 20)):
        for threads in (1, 2):
            cell = {"study": "speed", "preset": name, "rows": rows, "threads": threads}
            yield cell, lambda cell=cell, steps=steps: in_child(cell, steps)


def in_child(cell: dict[str, Any], steps: int) -> dict[str, Any]:
    """A process of its own, so that its peak of memory is its own."""
    line = [sys.executable, __file__, "--speed", json.dumps({**cell, "steps": steps})]
    out = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    values: dict[str, Any] = json.loads(out.splitlines()[-1])
    return values


def speed(preset_name: str, rows: int, threads: int, steps: int) -> dict[str, Any]:
    """Tokens a second of training and generation, peak memory, and where a step's time goes."""
    torch.set_num_threads(threads)
    settings = preset(preset_name)
    torch.manual_seed(0)
    model = ForgeNetwork(settings)
    parts = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}

    def timed(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            out = work(*args, **options)
            parts[part] += time.perf_counter() - began
            return out

        return inner

    optimizer = muon(model)
    optimizer.step = timed("optimizer", optimizer.step)  # type: ignore[method-assign]
    torch.Tensor.backward = timed("backward", torch.Tensor.backward)  # type: ignore[method-assign]
    loss = timed("forward", language_loss)
    generator = torch.Generator().manual_seed(0)
    trainer = Trainer(model, optimizer, loss, TrainSettings(), total=steps, generator=generator)
    ids = torch.randint(30, settings.vocab_size, (200, 400), generator=generator).tolist()
    batches = BatchLoader(
        [TokenizedDataset("x", ids)],
        {"x": 1.0},
        batch=rows,
        length=LENGTH,
        seed=0,
        vocab_size=settings.vocab_size,
    )
    trainer.step(1, batches.next_batch())
    parts.update(dict.fromkeys(parts, 0.0))
    began = time.perf_counter()
    for step in range(2, steps + 1):
        trainer.step(step, batches.next_batch())
    took = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    prompt = [list(range(30, 46))]
    sampling = SamplingSettings(max_new_tokens=100)
    generate(model, prompt, sampling)
    began = time.perf_counter()
    made = generate(model, prompt, sampling)
    return {
        "parameters": settings.parameters(),
        "steps": steps,
        "train_tokens_per_s": round(rows * LENGTH * (steps - 1) / took),
        "generate_tokens_per_s": round(len(made[0].tokens) / (time.perf_counter() - began), 1),
        "peak_mb": round(peak),
        **{f"{name}_share": round(value / took, 3) for name, value in parts.items()},
        "outside_share": round(1 - sum(parts.values()) / took, 3),
    }


# -- the tables ------------------------------------------------------------------------------------


def sooner(ours: dict[str, Any], target: float) -> float | None:
    """CPU seconds at which a run's held-out loss first reached the target, interpolated."""
    before: tuple[float, float] | None = None
    for seconds, loss in ours["curve"]:
        if loss <= target:
            if before is None:
                return float(seconds)
            share = (before[1] - target) / (before[1] - loss)
            return float(before[0] + share * (seconds - before[0]))
        before = (seconds, loss)
    return None


def speed_up(rival: dict[str, Any], ours: dict[str, Any]) -> float:
    """How much sooner ours is at the rival's last loss; 0 if it never was."""
    target = rival["loss"]
    mine, its = sooner(ours, target), sooner(rival, target)
    return (its or rival["cpu_s"]) / mine if mine else 0.0


def interval(values: list[float]) -> str:
    """Mean and 95 % interval (Student's t) of a few values."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    t = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(values), 1.96)
    half = t * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.3f} +- {half:.3f}"


def optimizer_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| text | AdamW's best rate | AdamW's last loss | ours, same steps |"
        " sooner at AdamW's last loss, by seed | mean |",
        "|---|---|---|---|---|---|",
    ]
    everything = []
    for corpus in CORPORA:
        mine = [r for r in rows if r["study"] == "optimizer" and r["corpus"] == corpus]
        if not mine:
            continue
        best = best_rate(corpus)
        rival = {r["seed"]: r for r in mine if r["optimizer"] == "adamw" and r["rate"] == best}
        ours = {r["seed"]: r for r in mine if r["optimizer"] == "muongrokfast"}
        seeds = sorted(rival.keys() & ours.keys())
        if not seeds:
            continue
        ratios = [speed_up(rival[s], ours[s]) for s in seeds]
        everything += ratios
        lines.append(
            f"| {corpus} | {best:g} | {interval([rival[s]['loss'] for s in seeds])}"
            f" | {interval([ours[s]['loss'] for s in seeds])}"
            f" | {', '.join(f'{r:.2f}' for r in ratios)}"
            f" | {statistics.mean(ratios):.2f}x |"
        )
    if everything:
        lines += [
            "",
            f"Over all: {statistics.mean(everything):.2f}x sooner, least"
            f" {min(everything):.2f}x (bar: 1.35x), n = {len(everything)}.",
        ]
    return lines


def architecture_table(rows: list[dict[str, Any]]) -> list[str]:
    mine = [r for r in rows if r["study"] == "architecture"]
    base = {r["seed"]: r["loss"] for r in mine if r["variant"] == "ours"}
    lines = [
        "| variant | weights | steps | loss (nats/token) | bits/byte | difference to ours |"
        " loss of each recursion step |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        own = [r for r in mine if r["variant"] == variant]
        if not own:
            continue
        depth = min(len(r["per_step"]) for r in own)
        steps = [statistics.mean(r["per_step"][i] for r in own) for i in range(depth)]
        apart = [r["loss"] - base[r["seed"]] for r in own if r["seed"] in base]
        lines.append(
            f"| {variant} | {own[0]['parameters']:,}"
            f" | {round(statistics.mean(r['steps'] for r in own))}"
            f" | {interval([r['loss'] for r in own])}"
            f" | {statistics.mean(r['bits_per_byte'] for r in own):.3f}"
            f" | {'' if variant == 'ours' else interval(apart)}"
            f" | {' / '.join(f'{s:.3f}' for s in steps)} |"
        )
    return lines


def speed_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| preset | threads | rows | training tokens/s | generated tokens/s | peak MB | forward |"
        " backward | optimizer | outside |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in (r for r in rows if r["study"] == "speed"):
        lines.append(
            f"| {r['preset']} | {r['threads']} | {r['rows']} x {LENGTH}"
            f" | {r['train_tokens_per_s']:,} | {r['generate_tokens_per_s']} | {r['peak_mb']:,}"
            f" | {r['forward_share']:.0%} | {r['backward_share']:.0%}"
            f" | {r['optimizer_share']:.0%} | {r['outside_share']:.1%} |"
        )
    return lines


def write_tables() -> None:
    rows = measured()
    sections = {
        "optimizer": optimizer_table(rows),
        "architecture": architecture_table(rows),
        "speed": speed_table(rows),
    }
    for name, lines in sections.items():
        write_section("training.md", name, lines)
        print("\n".join(["", *lines]))


def main() -> None:
    global DATA
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    folder = Path(os.environ.get("AGENT_FORGE_DATA", "data"))
    parser.add_argument("--data", type=Path, default=folder, help="folder of the public texts")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    parser.add_argument("--study", help="only this study")
    parser.add_argument("--speed", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.speed:
        cell = json.loads(asked.speed)
        print(json.dumps(speed(cell["preset"], cell["rows"], cell["threads"], cell["steps"])))
        return
    torch.set_num_threads(1)
    if not asked.tables:
        if not all((asked.data / corpus).is_dir() for corpus in CORPORA[:-1]):
            parser.error(f"{asked.data} needs the folders {', '.join(CORPORA[:-1])}")
        DATA = asked.data
        studies = (optimizer_cells, architecture_cells, speed_cells)
        for study in studies:
            if asked.study and not study.__name__.startswith(asked.study):
                continue
            for cell, work in study():
                if not any(cell.items() <= r.items() for r in measured()):
                    record(NAME, {**cell, "setup": setup()}, work())
    write_tables()


if __name__ == "__main__":
    assert RESULTS.is_dir()
    main()
