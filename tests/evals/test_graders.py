"""Graders: what counts as right, and what a hostile answer costs."""

from __future__ import annotations

import json
import random
import socket
import time
from fractions import Fraction
from pathlib import Path

import psutil
import pytest

from agent_forge.data.tasks import Task, make
from agent_forge.evals import graders
from agent_forge.evals.graders import final_number, source


def asked(answer: str, *tests: str, family: str = "own", question: str = "?") -> Task:
    return Task(family, 1, "verdict", question, answer, tests=tests)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3 = 5 apples.\n#### 5", "5"),
        ("#### 1\nNo, wait.\n#### 1,234.50 dollars", "1234.5"),
        (r"so $x = \boxed{\frac{3}{4}}$, not 9", "3/4"),
        (r"\boxed{1{,}000}", "1000"),
        ("The answer is $-12. That took 3 steps.", "-12"),
        ("The final answer is: 7/8", "7/8"),
        ("Answer: 3 + 4 = 7", "7"),
        ("It has 1 1/2 cups", "3/2"),
        ("first 4, then 6, so 10.", "10"),
        ("minus \u22125", "-5"),
        ("-$5 and -$6", "-6"),
        ("7-3", "3"),
        ("a 2024-model has 12,345,678 km", "12345678"),
        (".5", "1/2"),
        ("1/0 or 4", "4"),
        ("The answer is not 20, but 18", "18"),
        ("The answer is not $20 but $18.", "18"),
        ("So it is 18, not 9", "18"),
        ("The answer is _18_", "18"),
        ("The answer is __-1_000__.", "-1000"),
        ("The answer is 18, but check 9 = 3 * 3", "18"),
        ("The answer is 0.5 or 1/2", "1/2"),
        ("The answer is 4 x 5 = 20", "20"),
    ],
)
def test_the_final_number_of_a_text(text: str, value: str) -> None:
    assert final_number(text) == (Fraction(value), False)


UNREAD = (
    *("The answer is 4 x 5", "The answer is 18 or 20", "The answer is 18 apples or 20 apples."),
    *("#### 18, or 20", "The answer is not 20.", r"\boxed{4 X 5}"),
)


@pytest.mark.parametrize("text", ["", "none", "####", "x1 and y2", "9" * 100_000, *UNREAD])
def test_texts_without_a_final_number(text: str) -> None:
    assert final_number(text) is None


@pytest.mark.parametrize("text", ["The answer is 5 " + "a" * 40_000, "5 or " * 9000, "not " * 9999])
def test_no_text_takes_long_to_be_read(text: str) -> None:
    began = time.process_time()
    final_number(text)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("18", "#### 18.00", True),
        ("18", "#### 18.01", False),
        ("1000", "1,000", True),
        ("50", "so 50%", True),
        ("0.5", "so 50%", True),
        ("0.5", "so 50 percent", True),
        ("0.5", "The answer is 50 per cent.", True),
        ("0.5", "50 percentiles", False),
        ("0.5", "1/2", True),
        ("50", "5000%", True),
        ("50", "0.5", False),
        ("3", "", False),
        ("0.3333", "1/3", False),
    ],
)
def test_numbers_are_compared_exactly(answer: str, text: str, right: bool) -> None:
    assert graders.math(asked(answer), text) is right


def notations(value: Fraction) -> list[str]:
    """How people and LaTeX write a number."""
    sign, size = "-" if value < 0 else "", abs(value)
    found = [f"{sign}{size.numerator}/{size.denominator}"]
    found.append(rf"{sign}\frac{{{size.numerator}}}{{{size.denominator}}}")
    whole, rest = divmod(size.numerator, size.denominator)
    if whole and rest:
        found += [f"{sign}{whole} {rest}/{size.denominator}"]
        found += [rf"{sign}{whole}\dfrac{{{rest}}}{{{size.denominator}}}"]
    if size.denominator in (1, 2, 4, 5):
        text = f"{float(size):,.2f}" if rest else f"{whole:,}"
        found += [sign + text.replace(",", gap) for gap in ("", ",", "{,}", r"\,", "\u202f", " ")]
        found += [f"{sign}{float(size):.12e}", rf"{sign}{float(size) / 1e3:.8f} \times 10^{{3}}"]
        found += [f"{sign}{float(size) / 1e6:.10f} million", f"{sign}{float(size) * 10:.3f}*10^-1"]
    spelt = [text.replace("-", minus) for text in found for minus in "-\u2212\u2013"]
    return spelt if sign else found


AROUND = [
    *(
        "The answer is {}.",
        r"The answer is \({}\).",
        r"\[ {} \]",
        "#### {}",
        r"#### {}\,",
        "so ${}$",
    ),
    *(r"\boxed{{{}}}", r"\boxed{{{}\text{{ cm}}}}", "Answer: {} dollars", "it is 7 and {} apples"),
    *("**Answer:** {}", "x = {}", r"\boxed{{ {}^\circ }}", "\uff1d {} km/h", "The answer is \\${}"),
]


def test_a_number_is_what_it_is_in_every_notation() -> None:
    draw = random.Random(7)
    for _ in range(400):
        value = Fraction(
            draw.randint(-(10 ** draw.randint(1, 7)), 10**6), draw.choice([1, 1, 2, 4, 3])
        )
        others = {value * 100, value / 100, value * 10, value / 10, -value, value + 1}
        others |= {Fraction(str(abs(value.numerator))[:n]) for n in (1, 2, 3)}
        text = draw.choice(AROUND).format(draw.choice(notations(value)))
        assert graders.math(asked(str(value)), text), (value, text)
        for other in others - {value}:
            assert not graders.math(asked(str(other)), text), (other, text)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        *(("81", r"\boxed{\sqrt{81}}"), ("2", r"\boxed{2\sqrt{3}}"), ("5", r"\boxed{2\pi + 5}")),
        *(
            ("2", r"\boxed{x^2}"),
            ("10", "10\u2075"),
            ("12", "The answer is 12,5"),
            ("1", "1.000,00"),
        ),
        *(("5", "The answer is 5 + 3"), ("1", r"\boxed{\frac{1}{x}}"), ("2", "#### 2^3")),
        *(("1.5", "1.5 million"), ("3", "so 3 sqrt(2)"), ("2", "2k"), ("5", "#### 5*10^400")),
    ],
)
def test_what_is_no_such_number_is_not_right(answer: str, text: str) -> None:
    assert not graders.math(asked(answer), text)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        *(
            ("4", "2^2"),
            ("8", "2**3"),
            ("3.5", "3\u00bd"),
            ("500", "\uff15\uff10\uff10"),
            ("5", "5!"),
        ),
        *(("50", r"\boxed{50\%}"), ("0.5", r"50\%"), ("3", "The answer is **3**."), ("5", "5cm")),
        *(
            ("0.75", r"\dfrac34"),
            ("9", "It is $9."),
            ("100000", "10\u2075"),
            ("6", "2 \u00d7 3 = 6"),
            ("3", "The answer is *3*."),
        ),
    ],
)
def test_usual_notations_are_read(answer: str, text: str) -> None:
    assert graders.math(asked(answer), text)


def test_a_number_of_any_length_takes_no_time() -> None:
    began = time.process_time()
    hostile = ("1" * 200_000, "1," * 100_000, "1/" * 100_000, "1 " * 100_000, "####" * 50_000)
    hostile += ("\\frac{" * 30_000, "{" * 99_999, " " * 99_999, "1 111" * 20_000, "\\a{" * 30_000)
    hostile += ("sqrt(" * 20_000, "10^999*10^999", "9" * 50 + "^999", "\ufdfa" * 99_999)
    for text in hostile:
        graders.math(asked("3"), text)
    assert time.process_time() - began < 20  # quadratic reading takes minutes


RIGHT = "def solve(n):\n    return n + 1"


@pytest.mark.parametrize(
    "text",
    [
        RIGHT,
        f"Here it is:\n```python\n{RIGHT}\n```\nIt adds one.",
        f"```\n{RIGHT}",
        f"Sure!\n{RIGHT}\nThis function adds one.\nassert False",
        f"import math\nK = 1\n\n{RIGHT}\n",
        "K = 1\n# the step\ndef solve(n):\n    return n + K",
    ],
)
def test_a_function_is_found_in_what_surrounds_it(text: str) -> None:
    task = asked("", "assert solve(1) == 2", "assert solve(-1) == 0")
    assert graders.code(task, text)
    assert "It adds" not in source(text) and "This function" not in source(text)


def test_a_function_is_completed() -> None:
    question = 'def double(n: int) -> int:\n    """Twice n."""\n'
    test = "def check(candidate):\n    assert candidate(4) == 8\ncheck(double)"
    task = asked("", test, question=question)
    assert graders.completed(task, "    return 2 * n\n")
    assert graders.completed(task, "def double(n):\n    return n + n\n")
    assert graders.completed(task, "```python\ndef double(n):\n    return n + n\n```")
    assert not graders.completed(task, "    return n\n")
    assert not graders.completed(task, "")


def test_what_a_question_defines_is_not_replaced() -> None:
    question = "import math\n\ndef poly(xs, x):\n    return math.fsum(xs) - x\n\n\ndef zero(xs):\n"
    test = "def check(c):\n    assert abs(poly([1, 2], c([1, 2]))) < 1e-4\ncheck(zero)"
    task = asked("", test, question=question)
    assert graders.completed(task, "    return math.fsum(xs)\n")
    assert graders.completed(task, f"```python\n{question}    return sum(xs)\n```")
    for lie in ("poly = lambda xs, x: 0", "class math:\n    fsum = sum", "check = print"):
        assert not graders.completed(task, f"    return 0.0\n\n{lie}\n")
        assert not graders.completed(task, f"```python\ndef zero(xs): return 0\n{lie}\n```")


HOSTILE = {
    "fork bomb": "import os\ndef solve(n):\n    while True:\n        os.fork()",
    "processes": "import subprocess\ndef solve(n):\n    subprocess.run(['sleep', '60'])",
    "endless": "def solve(n):\n    while True: pass",
    "endless at once": "import os\nwhile True: pass\ndef solve(n): return n + 1",
    "output": "def solve(n):\n    while True: print('x' * 10**6)",
    "memory": "def solve(n):\n    return [0] * 10**11",
    "network": "import socket\ndef solve(n):\n"
    "    socket.create_connection(('127.0.0.1', PORT), 2)\n    return n + 1",
    "disk": "def solve(n):\n    with open('big', 'wb') as f:\n"
    "        while True: f.write(b'x' * 10**7)",
    "writes": "def solve(n):\n    open('TARGET', 'w').write('was here')\n    return n + 1",
    "exits": "import os\ndef solve(n):\n    os._exit(0)",
    "kills": "import os, signal\ndef solve(n):\n    os.kill(os.getppid(), signal.SIGKILL)",
    "lies": "class Any:\n    def __eq__(self, other): return True\ndef solve(n): return Any()",
    "nested": "def solve(n): return " + "(" * 9000,
    "half a surrogate": "def solve(n): return '\ud800'",
    "no code": "I would rather not.",
    "recursive": "def solve(n): return solve(n)",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.slow
def test_a_hostile_answer_costs_only_its_own_score(name: str, tmp_path: Path) -> None:
    target = tmp_path / "written"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = str(server.getsockname()[1])
        text = HOSTILE[name].replace("PORT", port).replace("TARGET", str(target))
        task = asked(RIGHT, "assert solve(1) == 2")
        began = time.monotonic()
        assert not graders.code(task, text)
        assert time.monotonic() - began < graders.LIMITS.wall_seconds + 20
        with pytest.raises(TimeoutError):
            server.accept()
    assert not target.exists()
    mine = psutil.Process().children(recursive=True)
    assert not [child for child in mine if "child.py" in " ".join(child.cmdline())]
    assert graders.code(task, RIGHT), "the next answer is graded as if nothing had been"


@pytest.mark.parametrize("family", ["to_json", "to_yaml", "to_csv", "extract_field"])
def test_documents_are_compared_by_content(family: str) -> None:
    for number in range(5):
        task = make(family, "verdict", number, level=20)
        assert graders.document(task, task.answer)
        assert graders.document(task, f"```{family[3:]}\n{task.answer}\n```\nDone.")
        assert not graders.document(task, "")
        for wrong in task.distractors:
            assert not graders.document(task, wrong)


def test_json_may_stand_among_words() -> None:
    task = make("to_json", "verdict", 1, level=20)
    spread = json.dumps(json.loads(task.answer), indent=2)
    assert graders.document(task, f"Here you are: {spread} Anything else?")
    assert not graders.document(task, f"Here you are: {spread[:-1]}")
    assert graders.document(asked('[{"a": "1"}]'), '[{"a":"1"}]')
    assert not graders.document(asked('[{"a": "1"}]'), '[{"a": 1}]')


@pytest.mark.parametrize("hostile", ["[" * 19_000, "{" * 50_000, "- " * 9000, "&a [*a, *a]"])
def test_hostile_documents_are_wrong(hostile: str) -> None:
    for family in ("to_json", "to_yaml", "to_csv"):
        assert not graders.document(make(family, "verdict", 1, level=5), hostile)


@pytest.mark.parametrize(
    "text",
    [
        "#### 18\nCheck: 3 + 4 = 7",
        "#### 18\nLet x = 5",
        "The answer is 18 (since x = 3).",
        "The answer is 18. Check: 18 - 3 = 15.",
        "The answer is 18 since 6*3 = 18 and 5+5 = 10",
        "The answer is 3 + 15 = 18.",
        "The answer is x = 18, as 20 - 2 = 18 and 1 + 1 = 2",
    ],
)
def test_what_follows_the_answer_is_no_answer(text: str) -> None:
    assert graders.final_number(text) == (18, False)
    assert graders.final_number("#### 19\n\nCheck: 9 + 9 = 18") == (19, False)


def test_the_block_that_defines_something_is_the_program() -> None:
    program = "def f(x):\n    return x + 1"
    before = "Use it so:\n```\nf(1)\n```\n"
    indented = "- so:\n  ```python\n  def f(x):\n      return x + 1\n  ```\n"
    for text in (f"{before}```python\n{program}\n```\n", indented):
        assert graders.source(text).strip() == program


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### Step 1: count\n#### Step 2: Multiply\n9 * 2 = 18\nThe answer is 18.", "18"),
        ("#### 1. Eggs\n9\n#### 2. Money\nso \\boxed{18}", "18"),
        ("It is 20.\n#### 18", "18"),
        ("Answer:\n- 18 dollars", "18"),
        ("So she makes:\n- 18", "18"),
        ("Total money - 18", "18"),
        ("x = - 18", "-18"),
        ("Answer: She sold 48/2 = 24 in May. In total she sold 48+24 = 72 clips.", "72"),
        ("Answer: The total is 18 (9 eggs at $2)", "18"),
        ("The answer is 60 minutes = 1 hour", "60"),
        ("#### 60 = 1 hour", "60"),
        ("The answer is 18 = 9 * 2", "18"),
        ("The answer is 9 * 2 = 18.", "18"),
        ("The answer is the sum of 3 and 4, which is 7.", "7"),
        ("The answer is 48 + 24, which is 72", "72"),
        ("The answer is 12 - 5 = 7, which is 2 less than 9", "7"),
        ("The answer is three (3)", "3"),
        ("The answer is one hundred and five (105) eggs", "105"),
        ("So x = \u2212 3", "-3"),
        ("#### - 5", "-5"),
        ("The answer is 3 times 12, which is 36.", "36"),
        ("The answer is 48 plus 24, which equals 72.", "72"),
        ("The answer is $5 per day for 7 days, which comes to $35.", "35"),
        ("The answer is 25% of 80 = 20.", "20"),
        ("The answer is 40 per week.", "40"),
        ("The answer is 3 of the 5 apples.", "3"),
        ("The answer is - 5.", "-5"),
        ("The answer is:\n- 18 dollars", "18"),
        ("The answer is not 12, it is 15.", "15"),
        ("The answer is 5 less than 12, which is 7.", "7"),
        ("The answer is 5 more than 12 = 17", "17"),
    ],
)
def test_where_a_text_says_its_answer(text: str, number: str) -> None:
    found = graders.final_number(text)
    assert found is not None and str(found[0]) == number


def test_a_number_in_words_is_not_another_number_of_the_text() -> None:
    assert graders.final_number("He had 5 and 7. The answer is twelve.") is None


def test_code_in_several_blocks_or_behind_an_open_fence() -> None:
    task = Task("code_list", 1, "verdict", "q", "a", tests=("assert area(2) == 12",))
    helper = "```python\nimport math\ndef ceil(x):\n    return math.ceil(x)\n```\n"
    area = "Then:\n```python\ndef area(r):\n    return ceil(math.pi * r * r) - 1\n```\n"
    assert graders.code(task, helper + area)
    assert not graders.code(task, helper)
    shown = "```python\ndef area(r):\n    return 12\n```\nUse it:\n```\nprint(area(1) + 1/0)\n```"
    assert graders.code(task, shown)
    begun = Task("humaneval", 1, "verdict", "def area(r):\n", "a", tests=("assert area(2) == 12",))
    for end in ("", "\n```", "\n```\n", "\n```\nThis is it."):
        assert graders.completed(begun, f"    return 12{end}")


def test_what_a_program_does_when_it_is_run_is_not_asked_for() -> None:
    """Tests import an answer: what stands behind its main guard is for people."""
    task = asked("", "assert solve(1) == 2", "assert solve(-1) == 0")
    ends = ["print(solve(int(input())))", "import unittest\n    unittest.main()"]
    ends += ["import sys\n    sys.exit(solve(1))", "print(solve(1))"]
    for end in ends:
        text = f"```python\n{RIGHT}\n\nif __name__ == '__main__':\n    {end}\n```"
        assert graders.code(task, text), end
        assert graders.code_in_part(task, text) == 1.0, end


def test_a_share_of_the_tests_is_of_the_same_program() -> None:
    task = asked("", "assert solve(1) == 2", "assert solve(-1) == 0")
    text = "```python\ndef more(n):\n    return n + 1\n```\nThen:\n"
    text += "```python\ndef solve(n):\n    return more(n)\n```"
    assert graders.code(task, text) and graders.code_in_part(task, text) == 1.0


def test_json_behind_another_bracket() -> None:
    task = Task("jsontestsuite", 1, "verdict", "q", '[{"a": "1"}]')
    assert graders.document(task, 'Here is [the] JSON: [{"a": "1"}]')
    assert not graders.document(task, 'Here is [the] JSON: [{"a": "2"}]')
