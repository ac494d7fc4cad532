"""Packs by name: what they ask, where it comes from, and what comes out of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_forge.data.dataset_rows import Example
from agent_forge.data.tasks import Task
from agent_forge.errors import ConfigError, DamagedFile, NotFound
from agent_forge.evals import graders
from agent_forge.evals.benchmarks import BENCHMARKS, find, from_benchmarks, from_names
from agent_forge.evals.domains import AnswerFormat, Domain, evaluation_hash
from agent_forge.evals.model_under_test import ModelUnderTest, open_model_under_test
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.store.models import ModelStorage
from tests.support.command_line import Forge
from tests.support.eval_models import llama, own_model
from tests.support.evo_models import job
from tests.support.tokenizers import CHAT

CODES = ("deu", "eng", "fra")


def write(path: Path, lines: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")


def sentences(code: str, count: int = 12) -> list[str]:
    return [f"{code} {'very ' * (i % 4)}sentence number {i}" for i in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of small sets in the shapes of the published ones."""
    place = tmp_path / "sets"
    for part, count in (("train", 400), ("test", 9)):
        questions = [
            {"question": f"{part} {i}+1?", "answer": f"{i}\n#### {i + 1}"} for i in range(count)
        ]
        write(place / "gsm8k" / f"{part}.jsonl", questions)
    write(
        place / "svamp" / "SVAMP.json",
        [json.dumps([{"Body": f"Al has {i}", "Question": "And?", "Answer": i} for i in range(60)])],
    )
    write(
        place / "mbpp" / "mbpp.jsonl",
        [
            {
                "text": f"Add {i}.",
                "code": f"def f(n):\n    return n + {i}",
                "task_id": i,
                "test_setup_code": "k = 1" if i % 2 else "",
                "test_list": [f"assert f(1) == {i + 1}", f"assert f(0) == {i}"],
            }
            for i in range(1, 700, 40)
        ],
    )
    write(
        place / "humaneval" / "HumanEval.jsonl",
        [
            {
                "prompt": f'def add{i}(n):\n    """Add {i}."""\n',
                "entry_point": f"add{i}",
                "canonical_solution": f"    return n + {i}\n",
                "test": f"def check(candidate):\n    assert candidate(1) == {i + 1}\n",
            }
            for i in range(4)
        ],
    )
    for language in ("it", "th"):
        write(
            place / "xcopa" / f"test.{language}.jsonl",
            [
                {"premise": f"{language} {i}", "choice1": "a", "choice2": "b", "label": i % 2}
                | {"question": "cause"}
                for i in range(5)
            ],
        )
    for code in CODES:
        write(place / "flores200_dev" / f"{code}_Latn.dev", list(sentences(code)))
    write(place / "tatoeba" / "tatoeba.deu-eng.deu", list(sentences("deu")))
    write(place / "tatoeba" / "tatoeba.deu-eng.eng", list(sentences("eng")))
    parsing = place / "json_test_suite" / "test_parsing"
    write(parsing / "y_list.json", ["[1]"])
    write(parsing / "n_comma.json", ["[1,]"])
    write(parsing / "n_open.json", ["[1"])
    write(parsing / "i_huge.json", ["[1e9999]"])
    (parsing / "n_bytes.json").write_bytes(b"[\xff]")
    write(place / "csv_spectrum" / "csvs" / "quotes.csv", ["a,b", '"1, ""2""",x'])
    write(
        place / "boolq" / "boolq_validation.jsonl",
        [{"question": f"q{i}", "passage": "p", "answer": i % 3 > 0} for i in range(50)],
    )
    return place


REAL = ["gsm8k", "svamp", "mbpp", "humaneval", "xcopa", "flores", "flores_language", "tatoeba"]
REAL += ["jsontestsuite", "csv_spectrum", "boolq"]


@pytest.mark.parametrize("name", ["math", "code", "multilingual", "structured", *REAL])
def test_right_answers_are_right_and_empty_ones_wrong(name: str, folder: Path) -> None:
    (domain,) = from_benchmarks([name], count=6, folder=folder)
    assert domain.name == name and len(domain.examples) == len(domain.tasks) > 0
    for example, task in zip(domain.examples, domain.tasks, strict=True):
        assert domain.grade(task, example.completion), example
        assert domain.grade(task, "") is False
        assert not example.choices or example.completion in example.choices
        if domain.writing is None:
            assert len(set(example.choices)) > 1
    assert 0 <= domain.baselines()["majority"] <= 1


def test_missing_and_unknown_packs_are_named(folder: Path, tmp_path: Path) -> None:
    for name in ("gsm8k", "humaneval", "flores", "tatoeba", "jsontestsuite", "xcopa"):
        known = {"jsontestsuite": "json_test_suite"}.get(name, name)
        with pytest.raises(NotFound, match=rf"{tmp_path}/none has no .*{known}"):
            from_benchmarks([name], folder=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"'gsm8' \(did you mean 'gsm8k'|'gsm8'.*gsm8k"):
        from_benchmarks(["gsm8"], folder=folder)
    with pytest.raises(ConfigError, match="has no parts"):
        from_benchmarks(["gsm8k:it"], folder=folder)
    with pytest.raises(ConfigError, match="no language 'xxx'"):
        from_benchmarks(["flores:xxx"], folder=folder)
    with pytest.raises(ConfigError, match="twice"):
        from_benchmarks(["math", "math"])


def test_the_folder_is_that_of_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_FORGE_DATA", str(folder))
    assert len(from_benchmarks(["gsm8k"])[0].examples) == 9


def test_the_test_set_is_the_verdict_and_a_search_sees_the_rest(folder: Path) -> None:
    asked = {
        split: {e.prompt.split("Question: ")[-1] for e in domain.examples}
        for split in ("selection", "holdout", "verdict")
        for domain in from_benchmarks(["gsm8k"], split=split, folder=folder)
    }
    assert all(text.startswith("test") for text in asked["verdict"]) and len(asked["verdict"]) == 9
    assert all(text.startswith("train") for text in asked["selection"] | asked["holdout"])
    assert not asked["selection"] & asked["holdout"]


def test_a_set_without_a_test_part_is_measured_whole_or_by_hash(folder: Path) -> None:
    (whole,) = from_benchmarks(["boolq"], folder=folder)
    assert len(whole.examples) == 50 and whole.chance == 0.5
    assert not set(whole.seen) & set(whole.tasks)
    (kept,) = from_benchmarks(["svamp"], folder=folder)
    assert len(kept.examples) == 60 - 4  # the worked examples are not asked


def test_of_a_fetched_set_the_test_part_alone_is_measured(tmp_path: Path) -> None:
    counts = {"train": 30, "valid": 9, "test": 5}
    row = {"completion": " a", "choices": [" a", " b"]}
    rows = [{"prompt": f"{s} {i}?", "split": s, **row} for s, n in counts.items() for i in range(n)]
    write(tmp_path / "arc_easy" / "examples.jsonl", rows)
    (domain,) = from_benchmarks(["arc_easy"], folder=tmp_path)
    assert {e.prompt.split()[0] for e in domain.examples} == {"test"} and len(domain.examples) == 5
    write(tmp_path / "arc_easy" / "examples.jsonl", rows[:30])  # then there are no parts
    assert len(from_benchmarks(["arc_easy"], folder=tmp_path)[0].examples) == 30


def test_files_of_a_set_are_known_in_capitals_too(folder: Path) -> None:
    (folder / "gsm8k" / "test.jsonl").rename(folder / "gsm8k" / "GSM8K-Test.jsonl")
    (domain,) = from_benchmarks(["gsm8k"], folder=folder, shots=0)
    assert len(domain.examples) == 9 and all("test" in e.prompt for e in domain.examples)


def test_one_choice_is_no_choice_to_guess_among() -> None:
    one, two = Example("q", " a", choices=(" a", " a")), Example("q", " a", choices=(" a", " b"))
    assert Domain("d", (one, two)).chance == 0.25


def test_worked_examples_come_first_and_never_from_what_is_asked(folder: Path) -> None:
    (domain,) = from_benchmarks(["gsm8k"], folder=folder)
    headers = {example.prompt.rpartition("Question: ")[0] for example in domain.examples}
    assert len(headers) == 1
    (header,) = headers
    assert header.count("Question: train") == 4 and header.count("####") == 4
    (bare,) = from_benchmarks(["gsm8k"], shots=0, folder=folder)
    assert bare.examples[0].prompt.count("Question:") == 1
    assert [t.answer for t in bare.tasks] == [t.answer for t in domain.tasks]
    (turns,) = from_benchmarks(["math"], count=3, shots=2)
    assert [len(example.messages) for example in turns.examples] == [6, 6, 6]
    with pytest.raises(ConfigError, match=r"9 worked examples .* has 0"):
        from_benchmarks(["humaneval"], shots=9, folder=folder)


def test_a_part_of_a_pack(folder: Path) -> None:
    (thai,) = from_benchmarks(["xcopa:th"], folder=folder)
    assert {e.source for e in thai.examples} == {"th"} and len(thai.examples) == 5
    assert {e.prompt.splitlines()[1] for e in thai.examples} == {"Cause:"}
    (german,) = from_benchmarks(["flores:deu"], folder=folder)
    assert len(german.examples) == 12
    for example in german.examples:
        number = example.prompt.splitlines()[0].split()[-1]
        assert example.completion.split()[-1] == number and len(example.choices) == 4


def test_a_language_in_two_scripts_is_two(folder: Path) -> None:
    for script in ("Hans", "Hant"):
        write(folder / "flores200_dev" / f"zho_{script}.dev", list(sentences(script)))
    (domain,) = from_benchmarks(["flores"], folder=folder)
    assert {"zho_Hans", "zho_Hant"} < {e.source for e in domain.examples}
    (part,) = from_benchmarks(["flores:zho_Hans"], folder=folder)
    assert len(part.examples) == 12 and "Hans" in part.examples[0].completion


def test_lines_that_do_not_pair_are_refused(folder: Path) -> None:
    write(folder / "tatoeba" / "tatoeba.deu-eng.eng", ["one"])
    with pytest.raises(DamagedFile, match="1 lines, the other language has 12"):
        from_benchmarks(["tatoeba"], folder=folder)
    write(folder / "flores200_dev" / "fra_Latn.dev", ["un"])
    with pytest.raises(DamagedFile, match="not the same lines"):
        from_benchmarks(["flores"], folder=folder)


def test_only_texts_that_are_decided_and_readable_are_asked_for_json(folder: Path) -> None:
    (domain,) = from_benchmarks(["jsontestsuite"], folder=folder)
    found = {e.source: e.completion for e in domain.examples}
    assert found == {"y_list": " yes", "n_comma": " no", "n_open": " no"}
    assert domain.baselines() == {"majority": 2 / 3}


def test_names_of_an_evolution_may_be_packs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_FORGE_DATA", str(folder))
    found = from_names(["copy", "pack:math"], split="selection", count=5, levels=(1, 9))
    assert [d.name for d in found] == ["copy", "math"]
    assert [d.writing is None for d in found] == [True, False]
    assert len(from_names([], split="verdict", count=2, levels=(1, 2))) > 1
    with pytest.raises(ConfigError, match="same name"):
        from_names(["code", "pack:code"], split="selection", count=5, levels=(1, 9))


def test_how_answers_are_written_is_part_of_what_is_asked() -> None:
    example, task = Example("1+1=", "2"), Task("own", 1, "verdict", "1+1=", "2")
    plain = Domain("d", (example,), tasks=(task,))
    variants = [
        plain,
        Domain("d", (example,), tasks=(task,), writing=AnswerFormat(9), grade=graders.math),
        Domain("d", (example,), tasks=(task,), writing=AnswerFormat(8), grade=graders.math),
        Domain("d", (example,), tasks=(task,), writing=AnswerFormat(8), grade=graders.code),
    ]
    assert len({evaluation_hash([domain]) for domain in variants}) == len(variants)


# -- measuring ------------------------------------------------------------------------------------


def arithmetic(grade: Callable[[Task, str], bool], *prompts: str) -> Domain:
    examples = tuple(Example(prompt, " 7") for prompt in prompts)
    tasks = tuple(Task("own", 1, "verdict", prompt, "7") for prompt in prompts)
    return Domain("d", examples, tasks=tasks, writing=AnswerFormat(6, ("\n",)), grade=grade)


def test_written_answers_are_graded_and_the_rest_is_as_it_was(tmp_path: Path) -> None:
    subject = open_model_under_test(llama(tmp_path / "llama"))
    said: list[str] = []

    def grade(task: Task, text: str) -> bool:
        said.append(text)
        return len(said) % 2 == 1

    long = "x" * 200
    domain = arithmetic(grade, "1+6=", "2+5=", long)
    outcome = subject.measure(subject.prepare(domain))
    assert outcome.right == [True, False, True] and outcome.cut == [False, False, True]
    assert outcome.empty == [not text.strip() for text in said]
    assert len(outcome.truncated) == 3
    by_likelihood = subject.measure(subject.prepare(Domain("d", domain.examples)))
    assert outcome.loss == by_likelihood.loss and by_likelihood.truncated == []


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    subject = open_model_under_test(llama(tmp_path / "llama"))
    prepared = subject.prepare(arithmetic(graders.math, "1+6=", "2+50="))
    seen: list[tuple[int, int]] = []
    subject.measure(prepared, progress=lambda *step: seen.append(step))
    assert seen[-1] == (prepared.tokens, prepared.tokens)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def with_template(tmp_path: Path, template: str | None) -> ModelUnderTest:
    return open_model_under_test(llama(tmp_path / f"llama-{bool(template)}", template=template))


def test_stop_strings_are_for_models_that_do_not_chat(tmp_path: Path) -> None:
    (domain,) = from_benchmarks(["math"], count=4)
    chatting, going_on = (with_template(tmp_path, t) for t in (CHAT, None))
    text = chatting.opened.decode(chatting.encode_prompt(domain.examples[0]))
    assert text.endswith("[end]\n[assistant]")
    assert going_on.opened.decode(going_on.encode_prompt(domain.examples[0])).endswith("\n")
    free = {s: s.write(domain, s.prepare(domain).prompts)[0][0].text for s in (chatting, going_on)}
    for subject, said in free.items():
        stops = AnswerFormat(128, (said[3:5],))
        changed = Domain(domain.name, domain.examples, True, domain.tasks, stops)
        again = subject.write(changed, subject.prepare(changed).prompts)[0][0].text
        assert (again == said) == subject.opened.chats


def test_choices_of_a_conversation_are_compared(storage: ModelStorage) -> None:
    subject = open_model_under_test(own_model(storage, "m1", 0))
    (domain,) = from_benchmarks(["multilingual"], count=5)
    prepared = subject.prepare(domain)
    assert len({tuple(item.ids) for item in prepared.items}) == len(prepared.items) > 5
    assert 0.2 < domain.chance < 0.6


@pytest.mark.slow
def test_an_evolution_on_a_pack(tmp_path: Path) -> None:
    few = {"generations": 1, "fitness_subset_size": 4, "verdict_items": 4, "max_level": 2}
    done = run_evolution(job(tmp_path / "x", tasks=["pack:math", "pack:multilingual"], **few))
    verdict = json.loads((done.loop.folder / "champion" / "verdict.json").read_text())
    assert {"math/accuracy", "multilingual/accuracy"} <= set(verdict["champion"]["raw"])
    with pytest.raises(ConfigError, match="no pack is called 'maths'"):
        job(tmp_path / "y", tasks=["pack:maths"])


# -- the command line -----------------------------------------------------------------------------


@pytest.mark.slow
def test_eval_of_packs(storage: ModelStorage, folder: Path, forge: Forge) -> None:
    model = own_model(storage, "m1", 0)
    packs = "--pack math --pack gsm8k --pack multilingual --pack humaneval"
    where = f"--data-dir {folder} --items 4"
    found = forge(f"eval {model} {packs} {where} --json")
    rows = {row["domain"]: row for row in found.document["domains"]}
    assert list(rows) == ["math", "gsm8k", "multilingual", "humaneval"]
    for name in ("math", "gsm8k", "humaneval"):
        assert 0 <= rows[name]["truncated"] <= 1 and 0 <= rows[name]["empty"] <= 1
    assert rows["multilingual"]["truncated"] is None and rows["multilingual"]["chance"] > 0
    assert rows["gsm8k"]["majority"] is not None and rows["gsm8k"]["ngram"] is not None
    table = forge(f"eval {model} {packs} {where}").out
    assert "truncated" in table and "empty" in table
    assert "truncated" not in forge(f"eval {model} --tasks copy --items 3").out


@pytest.mark.slow
def test_compare_on_a_pack(storage: ModelStorage, forge: Forge) -> None:
    a, b = (own_model(storage, name, seed) for seed, name in enumerate(("m1", "m2")))
    found = forge(f"compare {a} {b} --pack structured --items 5 --json")
    assert set(found.document["domains"]) == {"structured"}


def test_a_pack_that_is_not_there_is_named_before_the_model_is_read(
    storage: ModelStorage, tmp_path: Path, forge: Forge
) -> None:
    model = own_model(storage, "m1", 0)
    found = forge(f"eval {model} --pack mbpp --data-dir {tmp_path}")
    assert found.code == 2 and "no dataset 'mbpp'" in found.err
    found = forge(f"eval {model} --pack maths")
    assert found.code == 2 and "no pack is called 'maths'" in found.err and "math" in found.err


def test_tasks_of_lm_eval_without_the_library_name_the_extra(
    storage: ModelStorage, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    model = own_model(storage, "m1", 0)
    found = forge(f"eval {model} --pack lm-eval:piqa")
    assert (
        found.code == 2
        and "need the library lm-eval" in found.err
        and "agent-forge[eval]" in found.err
    )


def test_every_pack_is_found_by_its_name_and_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    for name in BENCHMARKS:
        assert find(name) == (BENCHMARKS[name], "")
        assert f"| `{name}` |" in text
