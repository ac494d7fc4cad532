"""What a merge costs, beside mergekit: CPU seconds and memory, command against command.

    python benchmarks/merge.py                       # everything, in a temporary folder
    python benchmarks/merge.py --sizes 27M --work W --mergekit VENV
    python benchmarks/merge.py --sizes 1M            # tries every cell out, records nothing

Claims, before native kernels: no method slower than `mergekit-yaml`, TIES in a third of its time,
the eight combos in half the time of eight single ones, at most 600 MB of anonymous memory for
518M parameters, and a 27M merge in a warm process within 0.15 s.

Both sides merge the same bf16 Llama-shaped models (a random base and three fine-tunes of it) by the
same YAML, in turns. A cell that was measured is not measured again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from results import done, record, write_section
from safetensors.torch import save_file

import agent_forge

SIZES = {
    "1M": {"hidden": 128, "inner": 256, "layers": 4, "vocab": 2048, "heads": 4},  # to try it out
    "27M": {"hidden": 384, "inner": 1024, "layers": 8, "vocab": 16384, "heads": 6},
    "518M": {"hidden": 1280, "inner": 3456, "layers": 22, "vocab": 32000, "heads": 20},
}
ROUNDS = {"1M": 1, "27M": 3, "518M": 1}
METHODS = ("linear", "slerp", "task_arithmetic", "ties", "dare_linear", "dare_ties")
MORE = ("nuslerp", "multislerp", "karcher", "model_stock", "breadcrumbs", "breadcrumbs_ties")
MORE += ("della", "della_linear", "sce", "ram", "ramplus_tl", "nearswap", "arcee_fusion")
MORE += ("passthrough",)  # with METHODS all twenty of mergekit; at one thread
OURS = ("tsv_m", "iso_c", "swudi", "ties_svc")  # that mergekit lacks
DENSE = ("linear", "task_arithmetic", "nuslerp", "multislerp")  # a weight is all they have
MODELS = ("base", "a", "b", "c")
MERGEKIT = "mergekit==0.1.5"
FORGE = "from agent_forge.cli import main; main()"  # `forge` of the package that is measured
PACKAGE = Path(agent_forge.__file__).parent.parent
LIMIT_S = 600.0
SAMPLE_S = 0.02
MB = 1e6
Cell = dict[str, Any]


def shapes(size: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a Llama of this size."""
    wide, inner, layers, vocab = (SIZES[size][k] for k in ("hidden", "inner", "layers", "vocab"))
    yield "model.embed_tokens.weight", (vocab, wide)
    for layer in range(layers):
        start = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{start}.{name}.weight", (wide,)
        for name in "qkvo":
            yield f"{start}.self_attn.{name}_proj.weight", (wide, wide)
        for name, shape in (
            ("gate", (inner, wide)),
            ("up", (inner, wide)),
            ("down", (wide, inner)),
        ):
            yield f"{start}.mlp.{name}_proj.weight", shape
    yield "model.norm.weight", (wide,)
    yield "lm_head.weight", (vocab, wide)


def make_model(folder: Path, size: str, number: int) -> None:
    """Model 0 is the base; another one lies a twentieth of its size away from it."""
    first, own = (torch.Generator().manual_seed(seed) for seed in (0, number))
    tensors = {}
    for name, shape in shapes(size):
        weight = torch.randn(shape, generator=first).mul_(0.02)
        if number:
            weight += torch.randn(shape, generator=own).mul_(0.001)
        tensors[name] = weight.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    given = SIZES[size]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": given["hidden"],
        "intermediate_size": given["inner"],
        "num_hidden_layers": given["layers"],
        "num_attention_heads": given["heads"],
        "vocab_size": given["vocab"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))  # last: the model is complete


def make_models(folder: Path, size: str) -> None:
    for number, name in enumerate(MODELS):
        if not (folder / name / "config.json").exists():
            make_model(folder / name, size, number)


def recipe(method: str, folder: Path) -> dict[str, Any]:
    """As users write them: bf16, density a half."""
    base, *tuned = (str(folder / name) for name in MODELS)
    head = {"merge_method": method, "dtype": "bfloat16"}
    if method == "slerp":
        pair = [{"model": model} for model in tuned[:2]]
        return {**head, "base_model": tuned[0], "models": pair, "parameters": {"t": 0.4}}
    if method in ("nearswap", "arcee_fusion", "passthrough"):
        own = {"base_model": base, "parameters": {"t": 1e-4}} if method == "nearswap" else {}
        own |= {"base_model": base} if method == "arcee_fusion" else {}
        return {**head, "models": [{"model": tuned[0]}], **own}
    if method in ("karcher", "model_stock", "sce", "ram", "ramplus_tl", *OURS):
        own = {} if method == "karcher" else {"base_model": base}
        own |= {"parameters": {"select_topk": 0.5}} if method == "sce" else {}
        if method == "ties_svc":
            own |= {"merge_method": "ties", "post_pass": "svc", "parameters": {"density": 0.5}}
        return {**head, "models": [{"model": model} for model in tuned], **own}
    weights: list[dict[str, Any]] = [{"weight": weight} for weight in (0.5, 0.3, 0.4)]
    if method not in DENSE:
        weights = [{**each, "density": 0.5} for each in weights]
    models = [{"model": m, "parameters": p} for m, p in zip(tuned, weights, strict=True)]
    models = models[:2] if method == "nuslerp" else models
    without = ("linear", "nuslerp", "multislerp")
    return {**head, "models": models} | ({} if method in without else {"base_model": base})


def mergekit_venv(folder: Path) -> Path:
    """A virtual environment with mergekit and the torch that we measure with."""
    if not (folder / "bin" / "mergekit-yaml").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        torch_version = importlib.metadata.version("torch").split("+")[0]
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, MERGEKIT, f"torch=={torch_version}"], check=True)
    return folder


def anonymous_bytes(pid: int) -> int:
    """The memory of a process that no file backs."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has just ended
    return 0


def measure(command: list[str], threads: int, log: Path) -> dict[str, Any]:
    """Run a command to its end: CPU and wall seconds, and its largest anonymous memory."""
    began = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **{**os.environ, "PYTHONPATH": str(PACKAGE), "HF_HUB_OFFLINE": "1"},
                "OMP_NUM_THREADS": str(threads),
            },
        )
        peak = 0
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            wall = time.monotonic() - began
            if pid:
                break
            peak = max(peak, anonymous_bytes(child.pid))
            if wall > LIMIT_S:
                child.kill()
            time.sleep(SAMPLE_S)
    child.returncode = os.waitstatus_to_exitcode(status)
    values = {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "wall_s": round(wall, 2),
        "anonymous_mb": round(peak / MB),
    }
    if wall > LIMIT_S:
        return {**values, "stopped": True}
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}")
    return values


def command(side: str, method: str, folder: Path, venv: Path, threads: int) -> list[str]:
    """The same recipe, the two command lines; each writes a whole model."""
    path = folder / f"{method}.yml"
    path.write_text(yaml.safe_dump(recipe(method, folder), sort_keys=False))
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    if side == "mergekit":
        run = [str(venv / "bin" / "mergekit-yaml"), str(path), str(out), "--quiet"]
        return [*run, "--no-copy-tokenizer", "--random-seed", "0", "--num-threads", str(threads)]
    return [sys.executable, "-c", FORGE, "merge", str(path), str(out), "--threads", str(threads)]


def inside(task: str, folder: Path) -> list[str]:
    """A task of ours in a fresh process of its own."""
    return [sys.executable, __file__, "--inside", task, "--work", str(folder)]


def warm(folder: Path) -> dict[str, Any]:
    """Merges of parents that stay open, as a search makes them.

    `first_s` measures the parents too (thresholds, inner products), `again_s` finds that done:
    both are CPU seconds of one thread. `wall_s` is the clock with two threads.
    """
    from agent_forge.merge.engine import Parents, merge
    from agent_forge.merge.recipe import parse_recipe

    first, again, wall = {}, {}, {}
    for method in METHODS:
        parents, wanted = Parents(), parse_recipe(yaml.safe_dump(recipe(method, folder)))
        seconds = []
        for _ in range(4):
            began = time.process_time()
            for tensor in merge(wanted, parents).values():
                del tensor  # not two of them at a time
            seconds.append(time.process_time() - began)
        first[method] = round(seconds[0], 3)
        again[method] = round(statistics.median(seconds[1:]), 3)
        clock = []
        for _ in range(5):
            began = time.perf_counter()
            for tensor in merge(wanted, parents, threads=2).values():
                del tensor
            clock.append(time.perf_counter() - began)
        wall[method] = round(statistics.median(clock), 3)
    return {"first_s": first, "again_s": again, "wall_s": wall}


def combos(folder: Path) -> dict[str, Any]:
    """CPU seconds of the eight combos, one by one and in one pass; no result is kept."""
    from agent_forge.merge.engine import Parents, merge
    from agent_forge.merge.recipe import parse_recipe

    base, *tuned = (str(folder / name) for name in MODELS)
    models = [{"model": model} for model in tuned]
    body = {"merge_method": "combo", "models": models, "base_model": base, "dtype": "bfloat16"}
    recipes = [parse_recipe(yaml.safe_dump({**body, "combo": number})) for number in range(8)]
    began = time.process_time()
    for each in recipes:
        for name, tensor in merge(each, Parents()).items():
            assert tensor.dtype == torch.bfloat16, name
            del tensor  # not two of them at a time
    single = time.process_time() - began
    began = time.process_time()
    made = 0
    merged = merge(recipes[0], Parents())
    for name in merged:
        versions = merged.combos(name)
        made += len(versions)
        del versions
    shared = time.process_time() - began
    assert made == 8 * sum(1 for _ in shapes(folder.name))
    return {"single_s": round(single, 2), "shared_s": round(shared, 2)}


INSIDE = {"warm": warm, "combos": combos}


def cells(sizes: list[str], sides: list[str]) -> Iterator[Cell]:
    """What is measured, the two sides in turns."""
    for size in sizes:
        for turn in range(ROUNDS[size]):
            for threads in (1, 2):
                for method in (*METHODS, *(() if threads > 1 else (*MORE, *OURS))):
                    for side in sides if method not in OURS else {"forge"} & {*sides}:
                        cell = {"size": size, "method": method, "threads": threads}
                        yield {**cell, "side": side, "round": turn}
        if "forge" in sides:
            for task in INSIDE:
                if task == "combos" or size == "27M":
                    yield {"size": size, "method": task, "threads": 1, "side": "forge", "round": 0}


def run(cell: Cell, work: Path, venv: Path) -> dict[str, Any]:
    """Measure one cell."""
    folder = work / cell["size"]
    log = folder / "log"
    if cell["method"] in INSIDE:
        values = measure(inside(cell["method"], folder), cell["threads"], log)
        return {**values, **json.loads(log.read_text().splitlines()[-1])}
    line = command(cell["side"], cell["method"], folder, venv, cell["threads"])
    return measure(line, cell["threads"], log)


def middle(lines: list[Cell], field: str, **cell: Any) -> float | None:
    """The median of a field over the rounds of a cell; None if it was not measured."""
    values = [
        line[field] for line in lines if all(line[k] == v for k, v in cell.items()) if field in line
    ]
    return statistics.median(values) if values else None


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def pairs(lines: list[Cell], size: str) -> Iterator[tuple[str, int, float | None, float, str]]:
    """Method, threads, CPU seconds of both sides, and their memory, where both were measured; of
    what mergekit lacks, ours alone."""
    for threads in (1, 2):
        for method in (*METHODS, *MORE, *OURS):
            cell = {"size": size, "method": method, "threads": threads}
            theirs, ours = (middle(lines, "cpu_s", **cell, side=s) for s in ("mergekit", "forge"))
            memory = [middle(lines, "anonymous_mb", **cell, side=s) for s in ("mergekit", "forge")]
            if ours is not None and (theirs is not None or method in OURS):
                yield method, threads, theirs, ours, " / ".join(map(shown, memory))


def bar(text: str, value: float | None, most: float) -> str:
    verdict = "not measured" if value is None else "holds" if value <= most else "**missed**"
    return f"| {text} | {shown(value)} | {most:.3g} | {verdict} |"


def report(lines: list[Cell], sizes: list[str]) -> list[str]:
    """The table and the bars, from the cells that were measured."""
    found = [(size, *row) for size in sizes for row in pairs(lines, size)]
    text = [
        "| size | method | threads | mergekit, CPU s | ours, CPU s | ratio | anonymous MB, both |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, method, threads, theirs, ours, memory in found:
        ratio = ours / theirs if theirs else None
        shares = f"{shown(theirs)} | {shown(ours)} | {shown(ratio)}"
        text.append(f"| {size} | {method} | {threads} | {shares} | {memory} |")
    text += ["", "| bar | measured | at most | |", "|---|---|---|---|"]
    ratios = {(size, method, threads): o / t for size, method, threads, t, o, _ in found if t}
    slowest = max(ratios.values(), default=None)
    text.append(bar("slowest method, CPU of `mergekit-yaml` = 1", slowest, 1))
    ties = [ratio for (_, method, _), ratio in ratios.items() if method == "ties"]
    text.append(bar("TIES, CPU of `mergekit-yaml` = 1", max(ties, default=None), 1 / 3))
    for size in sizes:
        own = {"size": size, "side": "forge"}
        single, shared = (
            middle(lines, field, **own, method="combos") for field in ("single_s", "shared_s")
        )
        share = shared / single if shared is not None and single else None
        text.append(bar(f"{size}: eight combos in one pass, one by one = 1", share, 0.5))
    peaks = [
        line["anonymous_mb"] for line in lines if (line["size"], line["side"]) == ("518M", "forge")
    ]
    text.append(bar("518M: peak anonymous memory, MB", max(peaks, default=None), 600))
    warmest = [line for line in lines if line["method"] == "warm"]
    for method in METHODS:
        for field, what in (("again_s", "CPU s of one thread"), ("wall_s", "s with two threads")):
            seconds = warmest[-1][field][method] if warmest else None
            text.append(bar(f"27M {method} in a warm process, {what}", seconds, 0.15))
    return text


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--work", type=Path, help="keep models and the environment here")
    parser.add_argument("--mergekit", type=Path, help="a virtual environment that has mergekit")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES)[1:], choices=list(SIZES))
    parser.add_argument("--sides", nargs="*", default=["mergekit", "forge"])
    parser.add_argument("--inside", choices=list(INSIDE), help=argparse.SUPPRESS)
    return parser.parse_args()


@contextmanager
def work_folder(given: Path | None) -> Iterator[Path]:
    if given:
        yield given.absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def try_out(chosen: argparse.Namespace) -> None:
    """Every cell of the smallest size once; nothing is recorded."""
    lines = []
    with work_folder(chosen.work) as work:
        venv = chosen.mergekit.absolute() if chosen.mergekit else work / "mergekit"
        if "mergekit" in chosen.sides:
            mergekit_venv(venv)
        make_models(work / "1M", "1M")
        for cell in cells(["1M"], chosen.sides):
            if cell["threads"] == 1:
                lines.append({**cell, **run(cell, work, venv)})
                print(json.dumps(lines[-1]), flush=True)
    print("\n".join(report(lines, ["1M"])))


def main() -> None:
    chosen = parse()
    if chosen.sizes == ["1M"]:
        return try_out(chosen)
    if chosen.inside:
        print(json.dumps(INSIDE[chosen.inside](chosen.work)))
        return
    fields = ("size", "method", "threads", "side", "round")
    measured = [tuple(line[k] for k in fields) for line in done("merge")]
    todo = [c for c in cells(chosen.sizes, chosen.sides) if tuple(c.values()) not in measured]
    with work_folder(chosen.work) as work:
        venv = chosen.mergekit.absolute() if chosen.mergekit else work / "mergekit"
        if any(cell["side"] == "mergekit" for cell in todo):
            mergekit_venv(venv)
        for cell in todo:
            make_models(work / cell["size"], cell["size"])
            record("merge", cell, run(cell, work, venv))
    lines = report(done("merge"), chosen.sizes)
    print("\n".join(lines))
    write_section("merging.md", "measured", lines)


if __name__ == "__main__":
    main()
