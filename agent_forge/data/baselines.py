"""Accuracies that need no understanding; the accuracy of a model is read beside them, never alone.

They face the checks of models, but code is never run: a guess is right if it is the reference.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from agent_forge.data.tasks import Task, is_right

Grade = Callable[[Task, str], float]  # 1: right, 0: wrong; a partial grader has shares between


def majority(train: Sequence[Task], test: Sequence[Task], grade: Grade = is_right) -> float:
    """The share of `test` that the most frequent answer of `train` gets right."""
    return ngram(train, test, order=0, grade=grade)


def ngram(
    train: Sequence[Task], test: Sequence[Task], order: int = 12, grade: Grade = is_right
) -> float:
    """The share of `test` that is right with the likeliest answer after the end of the question."""
    # That is the most frequent answer to the training questions that end in the same `order`
    # characters; where there is none, in one character less, and so on down to none.
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for task in train:
        for end in _ends(task.question, order):
            answers[end][task.answer] += 1
    guesses = {
        end: min(counts, key=lambda answer: (-counts[answer], answer))
        for end, counts in answers.items()
    }
    hits = 0
    for task in test:
        guess = next((guesses[e] for e in _ends(task.question, order) if e in guesses), "")
        hits += guess == task.answer if task.tests else grade(task, guess) == 1
    return hits / len(test) if test else 0.0


def _ends(question: str, order: int) -> Iterator[str]:
    """The ends of a question, the longest first, the last one empty."""
    return (question[len(question) - n :] for n in range(min(order, len(question)), -1, -1))
