"""Written answers in batches, beside `generate` of transformers, one prompt after the other.

    python benchmarks/evaluate.py --model FOLDER     # any folder that transformers opens

Claims: the same answers, in a third of the CPU time, on one thread.

Cells: beginnings of stories, of all lengths; the same behind a beginning that all share; and the
pack `math` as `forge eval` asks it. Both sides have the same prompts, limit and ends, and take
turns; the figure is the median of the rounds. A cell that was measured is not measured again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from results import done, record, write_section

from agent_forge.data.dataset_rows import Example
from agent_forge.data.tasks import make
from agent_forge.evals.benchmarks import from_benchmarks
from agent_forge.evals.model_under_test import ModelUnderTest, open_model_under_test
from agent_forge.infer.generate import GeneratedText, SamplingSettings, generate

BENCHMARK = "evaluate"
PROMPTS, NEW_TOKENS, ROUNDS, GOAL = 100, 64, 3, 3.0
HEADER_WORDS = 80
Prompts = list[tuple[int, ...]]


def beginnings(subject: ModelUnderTest, header: str = "") -> Prompts:
    """Of generated stories, cut after 3 to 40 words."""
    texts = []
    for i in range(PROMPTS):
        task = make("story", "verdict", i, level=(1, 60))
        words = f"{task.question} {task.answer}".split()
        texts.append(header + " ".join(words[: 3 + 7 * i % 38]))
    return [tuple(subject.encode_prompt(Example(text, ""))) for text in texts]


def cells(subject: ModelUnderTest) -> dict[str, Prompts]:
    """What is asked, by name."""
    story = make("story", "train", 0, level=20)
    header = " ".join(f"{story.question} {story.answer}".split()[:HEADER_WORDS]) + "\n"
    (pack,) = from_benchmarks(["math"], count=PROMPTS)
    return {
        "beginnings of stories": beginnings(subject),
        "behind a shared beginning": beginnings(subject, header),
        "pack math": [tuple(subject.encode_prompt(example)) for example in pack.examples],
    }


def one_by_one(subject: ModelUnderTest, prompts: Prompts) -> list[list[int]]:
    """What transformers writes."""
    model: Any = subject.model
    made = []
    with torch.inference_mode():
        for prompt in prompts:
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=sorted(subject.opened.end_tokens) or None,
                pad_token_id=0,
            )
            tokens: list[int] = out[0, len(prompt) :].tolist()
            made.append(tokens[:-1] if tokens[-1] in subject.opened.end_tokens else tokens)
    return made


def measured(subject: ModelUnderTest, prompts: Prompts) -> dict[str, Any]:
    """CPU seconds of both sides, and how many answers are equal."""
    sampling = SamplingSettings(NEW_TOKENS, stop_tokens=subject.opened.end_tokens)
    seconds: dict[str, list[float]] = {"batched": [], "one by one": []}
    answers: list[GeneratedText] = []
    single: list[list[int]] = []
    for _ in range(ROUNDS):
        began = time.process_time()
        answers = generate(subject.model, prompts, sampling, decode=subject.opened.decode)
        seconds["batched"].append(time.process_time() - began)
        began = time.process_time()
        single = one_by_one(subject, prompts)
        seconds["one by one"].append(time.process_time() - began)
    batched, alone = (statistics.median(seconds[side]) for side in seconds)
    return {
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": sum(len(answer.tokens) for answer in answers),
        "equal": sum(a.tokens == b for a, b in zip(answers, single, strict=True)),
        "batched_cpu_s": round(batched, 3),
        "one_by_one_cpu_s": round(alone, 3),
        "times": round(alone / batched, 1),
    }


def table() -> list[str]:
    """The section of docs/evaluation.md."""
    lines = [
        f"One thread, {NEW_TOKENS} new tokens at most, CPU seconds, median of {ROUNDS} rounds:",
        "",
        "| model | prompts | answers | equal | batched | one by one | times |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in done(BENCHMARK):
        lines.append(
            f"| {row['model']} | {row['cell']} | {row['prompts']} | {row['equal']}"
            f" | {row['batched_cpu_s']:.2f} s | {row['one_by_one_cpu_s']:.1f} s"
            f" | {row['times']:.1f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", help="of the model in the table; else its folder's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    subject = open_model_under_test(options.model)
    name = options.name or options.model.name
    known = {(row["model"], row["cell"]) for row in done(BENCHMARK)}
    for cell, prompts in cells(subject).items():
        if (name, cell) not in known:
            record(BENCHMARK, {"model": name, "cell": cell}, measured(subject, prompts))
    write_section("evaluation.md", "generation", table())
    missed = [
        row for row in done(BENCHMARK) if row["times"] < GOAL or row["equal"] < row["prompts"]
    ]
    raise SystemExit(f"missed: {missed}" if missed else 0)


if __name__ == "__main__":
    main()
