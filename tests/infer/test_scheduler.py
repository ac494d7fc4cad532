"""The scheduler: batches of requests that differ give each what it would get alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

from agent_forge.infer.generate import Row, SamplingSettings, generate
from agent_forge.infer.scheduler import MOST_BATCHES, MOST_TOOLS, QueueFull, Request, Scheduler
from tests.support.networks import network
from tests.support.polling import until


def decode(tokens: Any) -> str:
    return "".join(chr(97 + t % 26) for t in tokens)


class Asked(Request):
    """Rows one after another, and what became of them."""

    def __init__(self, model: nn.Module, *rows: Row | Callable[[], object]) -> None:
        self.rows, self.looks, self.error = rows, 0, None
        self.done = threading.Event()
        super().__init__(model)

    def work(self) -> Iterator[Row | Callable[[], object]]:
        yield from self.rows

    def look(self, row: Row) -> None:
        self.looks += 1

    def end(self, error: Exception | None) -> None:
        assert not self.done.is_set(), "it was ended twice"
        self.error = error  # type: ignore[assignment]
        self.done.set()


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler(places=40)
    yield made
    made.close()


SAMPLINGS = [
    SamplingSettings(9),
    SamplingSettings(12, temperature=1.5, seed=3),
    SamplingSettings(20, temperature=0.7, top_p=0.5, seed=4, stop_strings=("q",)),
    SamplingSettings(7, banned_tokens=frozenset(range(50))),
    SamplingSettings(15, temperature=1.0, seed=5, banned_tokens=frozenset(range(9))),
]


def test_requests_that_differ_get_what_they_would_get_alone(scheduler: Scheduler) -> None:
    model, held = network(), threading.Event()
    first = Asked(model, held.wait, Row([9, 8], SamplingSettings(2)))
    scheduler.submit(first)
    prompts = [[5, 6, 7], [5, 6, 7, 9, 8], [4], list(range(5, 90)), [11]] * 4
    pairs = list(zip(prompts, SAMPLINGS * 4, strict=True))
    asked = [Asked(model, Row(list(p), s, decode)) for p, s in pairs]
    for one in asked:
        scheduler.submit(one)
    held.set()
    for one, (prompt, sampling) in zip(asked, pairs, strict=True):
        assert one.done.wait(60) and one.error is None
        alone = generate(model, [prompt], sampling, decode=decode)[0]
        assert one.row.result == alone
        assert one.looks >= len(alone.steps)
    assert scheduler.load == (0, 0)


def test_work_beside_rows_holds_up_nobody(scheduler: Scheduler) -> None:
    model, tool = network(), threading.Event()
    rows = [Row([5, 6], SamplingSettings(2)), Row([5, 6, 7], SamplingSettings(2))]
    slow, other = Asked(model, rows[0], tool.wait, rows[1]), Asked(model, Row([4], SAMPLINGS[0]))
    scheduler.submit(slow)
    scheduler.submit(other)
    assert other.done.wait(60) and not slow.done.is_set()
    tool.set()
    assert slow.done.wait(60) and all(row.result.stopped_by for row in rows)


def test_places_are_bounded_and_given_free(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, step = Scheduler(places=3, cached_tokens=60), threading.Semaphore(0)
    advance = Scheduler._advance

    def in_step(*given: Any) -> None:
        step.acquire()
        advance(*given)

    monkeypatch.setattr(Scheduler, "_advance", in_step)
    model = network()
    asked = [Asked(model, Row([5], SamplingSettings(50))) for _ in range(4)]
    scheduler.submit(asked[0])
    until(lambda: scheduler.load == (0, 1))
    for one in asked[1:]:
        scheduler.submit(one)
    with pytest.raises(QueueFull):
        scheduler.submit(Asked(model, Row([5], SamplingSettings(2))))
    scheduler.cancel(asked[2])
    assert scheduler.load == (2, 1)
    scheduler.cancel(asked[0])
    step.release(1000)
    assert asked[1].done.wait(60) and asked[3].done.wait(60)
    assert not asked[0].row.result.stopped_by and not asked[2].looks
    scheduler.close()


def test_what_fails_fails_alone_and_what_waits_at_the_end_is_told(scheduler: Scheduler) -> None:
    class Broken(nn.Module):
        def forward(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("broken")

    broken = Broken()
    broken.weight = nn.Parameter()  # type: ignore[assignment]
    bad, good = Asked(broken, Row([5], SAMPLINGS[0])), Asked(network(), Row([5], SAMPLINGS[0]))
    raising = Asked(network(), lambda: 1 / 0)
    for one in (bad, good, raising):
        scheduler.submit(one)
    assert all(one.done.wait(60) for one in (bad, good, raising))
    assert str(bad.error) == "broken" and good.error is None
    assert isinstance(raising.error, ZeroDivisionError)
    late = [Asked(network(), Row([5], SamplingSettings(100_000))) for _ in range(MOST_BATCHES + 2)]
    for one in late:
        scheduler.submit(one)
    scheduler.close()
    assert all(isinstance(one.error, QueueFull) for one in late)


def test_who_waits_for_a_tool_at_the_end_is_told(scheduler: Scheduler) -> None:
    model, held = network(), threading.Event()
    asked = [Asked(model, held.wait, Row([4], SAMPLINGS[0])) for _ in range(MOST_TOOLS + 2)]
    for one in asked:
        scheduler.submit(one)
    scheduler.close()
    held.set()
    assert all(one.done.wait(10) and isinstance(one.error, QueueFull) for one in asked)
