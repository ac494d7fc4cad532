"""The loader: nothing lost in packing, nothing learned across a border, resumed to the byte."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_forge.data.loader import (
    END,
    IGNORE,
    BatchLoader,
    Curriculum,
    CurriculumStage,
    TokenizedDataset,
    shuffled,
)
from agent_forge.errors import ConfigError
from agent_forge.store.pytree import pack, unpack

DOCUMENTS = st.lists(st.lists(st.integers(22, 99), min_size=1, max_size=12), min_size=1, max_size=9)


def source(name: str, documents: int = 7, first: int = 30) -> TokenizedDataset:
    """Documents of different lengths whose tokens all differ."""
    made, token = [], first
    for i in range(documents):
        made.append(list(range(token, token + 2 + i % 5)))
        token += 2 + i % 5
    return TokenizedDataset(name, made)


def loader(
    *sources: TokenizedDataset, mix: dict[str, float] | None = None, **options: Any
) -> BatchLoader:
    given_options = {"batch": 4, "length": 8, "seed": 1, "vocab_size": 1000, **options}
    return BatchLoader(sources, mix or {s.name: 1 for s in sources}, **given_options)


def rows(batches: int, loader: BatchLoader) -> list[tuple[list[int], list[int]]]:
    made = [loader.next_batch() for _ in range(batches)]
    return [
        (row, goal)
        for tokens, targets in made
        for row, goal in zip(tokens.tolist(), targets.tolist(), strict=True)
    ]


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def documents_of(stream: list[int]) -> list[list[int]]:
    """What stands between the ends of text; the rest of a row is filled with such ends."""
    found: list[list[int]] = [[]]
    for token in stream:
        if token == END:
            found.append([])
        else:
            found[-1].append(token)
    return [document for document in found if document]


@given(DOCUMENTS, st.integers(1, 3), st.integers(13, 30), st.integers(0, 2**40))
def test_every_epoch_has_every_document_once_and_whole(
    documents: list[list[int]], batch: int, length: int, seed: int
) -> None:
    made = loader(TokenizedDataset("a", documents), batch=batch, length=length, seed=seed)
    stream: list[int] = []
    while len(documents_of(stream)) <= 2 * len(documents):
        for row, _ in rows(1, made):
            assert all(document in documents for document in documents_of(row))
            stream += row
    found, count = documents_of(stream), len(documents)
    for epoch in (found[:count], found[count : 2 * count]):
        assert sorted(epoch) == sorted(documents)


def test_a_row_is_a_sample_of_all_sources() -> None:
    made = loader(*(source(f"s{i}", 20, 100 + 100 * i) for i in range(3)), batch=1, length=30)
    for row, _ in rows(20, made):
        assert {token // 100 for token in row if token != END} == {1, 2, 3}


@given(DOCUMENTS, st.integers(2, 11), st.randoms())
def test_targets_are_the_next_token_of_the_same_document_where_it_is_learned(
    documents: list[list[int]], length: int, random: Any
) -> None:
    masks = [[random.random() < 0.5 for _ in document] for document in documents]
    masks[0][-1] = True
    made = TokenizedDataset("a", documents, masks)
    expected: list[int] = []
    for document, mask in zip(documents, masks, strict=True):
        following = zip([*document[1:], END], [*mask[1:], mask[-1]], strict=True)
        expected += [token if learned else IGNORE for token, learned in following] + [IGNORE]
    assert made.targets.tolist() == expected
    pairs = Counter(zip(made.tokens.tolist(), made.targets.tolist(), strict=True))
    for row, goal in rows(3, loader(made, length=length)):
        assert any(target != IGNORE for target in goal), "a row that teaches nothing"
        assert set(zip(row, goal, strict=True)) <= {*pairs, (END, IGNORE)}


def test_only_the_completion_is_learned() -> None:
    made = TokenizedDataset("a", [[50, 51, 52, 53]], [[False, False, True, True]])
    assert made.targets.tolist() == [IGNORE, 52, 53, END, IGNORE]


def test_a_document_longer_than_a_row_goes_on_in_the_next() -> None:
    made = loader(TokenizedDataset("a", [list(range(30, 50))]), batch=2, length=8)
    (first, goal), (second, _), (third, _), _ = rows(2, made)
    assert first + second + third == [*range(30, 50), END, 30, 31, 32]
    assert goal == list(range(31, 39))


def test_a_long_prompt_gives_no_rows_without_targets() -> None:
    prompt, answer = list(range(30, 90)), [95, 96]
    made = loader(
        TokenizedDataset("a", [prompt + answer], [[False] * 60 + [True] * 2]), batch=3, length=5
    )
    assert all(set(goal) & {95, 96, END} for _, goal in rows(9, made))


# -- determinism and resuming ---------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(0, 40), st.integers(2, 20), st.integers(1, 5)), max_size=3),
    st.integers(0, 2**62),
)
def test_cut_anywhere_the_next_batch_is_the_same(
    cut: int, changes: list[tuple[int, int, int]], seed: int
) -> None:
    def new() -> BatchLoader:
        return loader(source("a"), source("b", 3, 100), source("c", 1, 200), batch=3, seed=seed)

    def change(loader: BatchLoader, step: int) -> None:
        for at, length, weight in changes:
            if at == step:
                loader.use({"a": weight, "c": 1 / 3}, length)

    straight, made = new(), []
    for step in range(cut + 4):
        change(straight, step)
        if step == cut:
            saved = straight.state_dict()
        made.append(straight.next_batch())
    again = new()
    again.load_state_dict(unpack(*pack(saved)))
    for step in range(cut, cut + 4):
        if step > cut:
            change(again, step)
        assert equal(again.next_batch(), made[step])
    assert again.state_dict() == straight.state_dict()


def test_the_seed_decides_and_nothing_else() -> None:
    one, same, other = (loader(source("a", 30), seed=seed) for seed in (1, 1, 2))
    torch.manual_seed(5)
    first = [one.next_batch() for _ in range(5)]
    torch.manual_seed(6)
    np.random.seed(7)
    assert all(equal(batch, same.next_batch()) for batch in first)
    assert not all(equal(batch, other.next_batch()) for batch in first)


def test_a_shuffle_is_the_same_on_every_machine() -> None:
    assert shuffled(8, 42).tolist() == [5, 2, 7, 3, 4, 0, 1, 6]
    assert sorted(shuffled(1000, 2**64 - 1).tolist()) == list(range(1000))
    places = np.stack([shuffled(10, key * 7919) for key in range(4000)])
    assert abs((places == 0).mean(axis=0) - 0.1).max() < 0.025


def test_epochs_differ_in_their_order() -> None:
    made = loader(source("a", 40), batch=1, length=2)
    size = len(source("a", 40).tokens)
    stream = [token for row, _ in rows(size, made) for token in row if token != END]
    size -= 40
    one, other = stream[:size], stream[size : 2 * size]
    assert sorted(one) == sorted(other) and one != other


def test_a_cursor_of_other_data_is_refused() -> None:
    state = loader(source("a")).state_dict()
    for other in (loader(source("a", 8)), loader(source("b")), loader(source("a"), seed=2)):
        with pytest.raises(ConfigError, match="not what the checkpoint was made with"):
            other.load_state_dict(state)


# -- mixing ---------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=4))
@settings(deadline=None, max_examples=30)
def test_tokens_follow_the_weights(weights: list[float]) -> None:
    sources = [source(f"s{i}", first=100 + 100 * i) for i in range(len(weights))]
    made = loader(*sources, mix={s.name: w for s, w in zip(sources, weights, strict=True)})
    stream = [token for row, _ in rows(50, made) for token in row]
    sizes = Counter(d[0] // 100 - 1 for d in documents_of(stream) for _ in [*d, END])
    for i, weight in enumerate(weights):
        assert abs(sizes[i] - sizes.total() * weight / sum(weights)) <= 7 * len(weights)


def test_a_weight_of_zero_leaves_a_source_where_it_is() -> None:
    made = loader(source("a"), source("b", first=500), mix={"a": 1, "b": 0})
    assert max(max(row) for row, _ in rows(20, made)) < 500
    before = made.state_dict()["at"]["a"]
    made.use({"b": 1}, 5)
    assert min(token for row, _ in rows(20, made) for token in row if token != END) >= 500
    assert made.state_dict()["at"]["a"] == before


@pytest.mark.parametrize(
    ("mix", "problem"),
    [
        ({"a": 0.0}, "add up to 0"),
        ({}, "add up to 0"),
        ({"a": -1.0, "b": 2.0}, "weight of 'a' is -1"),
        ({"a": float("nan")}, "weight of 'a' is nan"),
        ({"a": float("inf")}, "weight of 'a' is inf"),
        ({"a": 1e308, "b": 1e308}, "add up to inf"),
        ({"alpa": 1.0}, "unknown source 'alpa'"),
    ],
)
def test_a_mix_that_is_none_is_refused(mix: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        BatchLoader([source("a"), source("b")], mix, batch=1, length=8, seed=1, vocab_size=1000)


@pytest.mark.parametrize(
    ("documents", "learned", "problem"),
    [
        ([], None, "no documents"),
        ([[30], []], None, "document 2 of source 'a' is empty"),
        ([[30]], [], "1 documents, 0 masks"),
        ([[30, 31]], [[True]], "mask of document 1"),
        ([[30, 31]], [[True, False]], "nothing to learn"),
    ],
)
def test_a_source_that_is_none_is_refused(documents: Any, learned: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TokenizedDataset("a", documents, learned)


def test_what_no_model_could_read_is_refused() -> None:
    for change, problem in (
        ({"vocab_size": 31}, "token 54, the vocabulary of the model ends at 30"),
        ({"batch": 0}, "0 rows"),
        ({"length": 1}, "rows of 1 tokens"),
    ):
        with pytest.raises(ConfigError, match=problem):
            loader(source("a"), **change)
    with pytest.raises(ConfigError, match="the token -1"):
        loader(TokenizedDataset("a", [[30, -1]]))
    with pytest.raises(ConfigError, match="names of their own"):
        loader(source("a"), source("a"))


# -- curriculum -----------------------------------------------------------------------------------


def test_a_step_belongs_to_the_stage_of_its_share() -> None:
    shares = {"text": 0.3, "math": 0.3, "qa": 0.4}
    curriculum = Curriculum([CurriculumStage(s, {n: 1.0}, 64) for n, s in shares.items()])
    seen = [curriculum.at(step, 10) for step in range(10)]
    assert [seen.count(stage) for stage in curriculum.stages] == [3, 3, 4]
    assert curriculum.at(6, 10).mix == {"qa": 1.0}
    assert curriculum.at(99, 10) is curriculum.stages[-1]


@pytest.mark.parametrize("shares", [[], [0.5], [1.5, -0.5], [float("nan")]])
def test_shares_that_do_not_add_up_are_refused(shares: list[float]) -> None:
    with pytest.raises(ConfigError, match="add up to 1"):
        Curriculum([CurriculumStage(share, {"a": 1}, 8) for share in shares])


def test_steps_and_stages_that_do_not_exist_are_refused() -> None:
    curriculum = Curriculum([CurriculumStage(1.0, {"a": 1}, 8)])
    for step, total in ((-1, 5), (0, 0)):
        with pytest.raises(ConfigError, match="in no stage"):
            curriculum.at(step, total)
