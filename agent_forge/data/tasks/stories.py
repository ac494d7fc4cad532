"""Short stories in simple English, and questions about them.

A story has a hero with a wish, a problem, some attempts (more at higher levels), a friend who
helps, and an ending. Pronouns follow the hero; where two people could be meant, the name is used.
`story` asks for the rest of a story after its opening: text to learn fluent English from. Nobody
can guess the rest word for word, so its check (the same words) only tells the text itself.
"""

from __future__ import annotations

from random import Random

from agent_forge.data.tasks import checks
from agent_forge.data.tasks.base import Family, Operands, Question, scaled, wrong
from agent_forge.data.tasks.plots import PLOTS, Plot

GIRLS = (
    *("Mia", "Lucy", "Ella", "Nora", "Lily", "Ruby", "Alice", "Hanna", "Ida", "Jane", "Kate"),
    *("Molly", "Nina", "Polly", "Sara", "Tina", "Vera", "Zoe", "Amy", "Bella"),
)
BOYS = (
    *("Tom", "Max", "Sam", "Otto", "Finn", "Jonas", "Luke", "Oscar", "Peter", "Robin", "Theo"),
    *("Will", "Adam", "Carl", "Eric", "Fred", "George", "Hugo", "Ivan", "Kurt"),
)
ANIMALS = ("rabbit", "mouse", "fox", "bear", "squirrel", "hedgehog", "badger", "otter")
LOOKS = ("little", "young", "small", "cheerful", "shy", "brave", "clever", "kind")
HOMES = (
    *("in a small house by the sea", "on a quiet farm", "in a village under a hill"),
    *("near a big green forest", "in a tall tower", "beside a wide river", "in an old mill"),
    *("at the edge of a town", "on a little island", "in a cottage with a red roof"),
)
HOBBIES = (
    *(
        "sing",
        "draw pictures",
        "watch the birds",
        "tell jokes",
        "fly paper planes",
        "pick berries",
    ),
    *("play outside", "collect stones", "listen to stories", "run through the grass"),
)
TIMES = ("morning", "day", "summer evening", "spring day", "summer morning", "winter afternoon")
CLOSINGS = (
    "That night {hero} slept very well.",
    "It was the best day of the whole year.",
    "And they stayed good friends for ever.",
    "When evening came, {hero} told everyone at home about it.",
    "{hero} never forgot that day.",
    "And {he} hummed a happy song.",
    "And if they have not grown tired of it, they still laugh about it today.",
)
OPENINGS = {
    "train": (
        "Once upon a time there was {who} named {hero}. {He} lived {home}. {He} liked to {hobby}. "
        "One {time}, {hero} wanted {wish}.",
        "There once was {who} called {hero}, who lived {home} and liked to {hobby}. "
        "One {time} {he} had a wish. {He} wanted {wish}.",
        "{hero} was {who} who lived {home}. Nearly every day {he} found some time to {hobby}. "
        "But one {time} {he} had another plan. {He} wanted {wish}.",
    ),
    "selection": (
        "Long ago {who} lived {home}. {His} name was {hero}, and {he} was glad whenever {he} could "
        "{hobby}. Then came a {time} when {hero} wanted {wish}.",
    ),
    "verdict": (
        "This is a story about {hero}, {who}. The home of {hero} was easy to find: {he} lived "
        "{home}. As a rule {he} would {hobby}, but on this {time} {he} wanted {wish}.",
    ),
}
QUESTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "hero": ("Who is the story about?", "What is the name of the hero?"),
        "helper": ("Who helped {hero}?", "Which friend of {hero} is in the story?"),
        "home": ("Where did {hero} live?", "Where was the home of {hero}?"),
        "wish": ("What did {hero} want?", "What was the wish of {hero}?"),
    },
    "selection": {
        "hero": ("Name the one whom this tale follows.",),
        "helper": ("Somebody gave {hero} a hand. Name that friend.",),
        "home": ("Tell in which place {hero} had a home.",),
        "wish": ("Tell what {hero} had in mind at the beginning.",),
    },
    "verdict": {
        "hero": ("Whose adventure did you just read?",),
        "helper": ("Without whom would {hero} have failed?",),
        "home": ("You want to visit {hero}. Where do you go?",),
        "wish": ("At first, {hero} was longing for something. For what?",),
    },
}


def cast(level: int, rng: Random) -> Operands:
    """A plot, which of its variants and of its details, the hero, the friend, and a home."""
    name = rng.choice(tuple(PLOTS))
    plot = PLOTS[name]
    hero, friend = rng.sample(GIRLS + BOYS, 2)
    variant, detail = int(rng.random() * len(plot.variants)), int(rng.random() * len(plot.details))
    return name, variant, detail, hero, friend, int(rng.random() * len(HOMES))


def tell(
    operands: Operands, level: int, split: str, rng: Random
) -> tuple[str, str, dict[str, str]]:
    """The opening, the rest, and the words that fill both."""
    name, variant, detail, hero, friend, home = operands
    plot = PLOTS[name]
    words = {
        **plot.variants[variant],
        **plot.details[detail],
        **_pronouns(hero, ""),
        **_pronouns(friend, "f_"),
        "hero": hero,
        "friend": friend,
        "home": HOMES[home],
        "who": _who(hero, rng),
        "hobby": rng.choice(HOBBIES),
        "time": rng.choice(TIMES),
    }
    words["wish"] = plot.wish.format(**words)
    words["rescue"] = words.get("rescue", "").format(**words)
    opening = rng.choice(OPENINGS[split]).format(**words)
    rest = " ".join(sentence.format(**words) for sentence in _sentences(plot, level, rng))
    return opening, rest, words


def story(operands: Operands, level: int, split: str, rng: Random) -> Question:
    """The rest of a story, after its opening."""
    opening, rest, _ = tell(operands, level, split, rng)
    sentences = rest.split(". ")
    return Question(
        opening, rest, "", wrong(rest, ". ".join(sentences[1:]), ". ".join(sentences[:-1]))
    )


def cast_and_question(level: int, rng: Random) -> Operands:
    """What is asked, and a story."""
    return rng.choice(tuple(QUESTIONS["train"])), *cast(level, rng)


def story_qa(operands: Operands, level: int, split: str, rng: Random) -> Question:
    """A whole story, and a question whose answer stands in it."""
    asked, *rest = operands
    opening, text, words = tell(tuple(rest), level, split, rng)
    question = rng.choice(QUESTIONS[split][asked]).format(hero=words["hero"])
    names = [words["hero"], words["friend"], *rng.sample(GIRLS + BOYS, 3)]
    wishes = [p.wish.format(**words, **v) for p in PLOTS.values() for v in [_spare(p, words, rng)]]
    answer, others = {
        "hero": (words["hero"], names[1:]),
        "helper": (words["friend"], names),
        "home": (words["home"], rng.sample(HOMES, 4)),
        "wish": (words["wish"], rng.sample(wishes, len(wishes))),
    }[asked]
    return Question(f"{opening} {text}\n{question}", answer, "", wrong(answer, *others))


def _sentences(plot: Plot, level: int, rng: Random) -> list[str]:
    """Templates of the rest: problem, attempts, the friend, the solution, the ending."""
    attempts = rng.sample(plot.attempts, scaled(level, 1, len(plot.attempts)))
    parts = [rng.choice(plot.problem), *attempts]
    parts += [rng.choice(plot.friend_comes), rng.choice(plot.solution), rng.choice(plot.ending)]
    return [*parts, rng.choice(CLOSINGS)]


def _pronouns(name: str, prefix: str) -> dict[str, str]:
    he, his, him = ("she", "her", "her") if name in GIRLS else ("he", "his", "him")
    words = {"he": he, "his": his, "him": him, "He": he.title(), "His": his.title()}
    return {prefix + key: word for key, word in words.items()}


def _who(hero: str, rng: Random) -> str:
    """What the hero is: a child, or an animal."""
    child = "girl" if hero in GIRLS else "boy"
    return f"a {rng.choice(LOOKS)} {child if rng.random() < 0.6 else rng.choice(ANIMALS)}"


def _spare(plot: Plot, words: dict[str, str], rng: Random) -> dict[str, str]:
    """The words of another story of a plot, as far as a wish needs them."""
    fresh = {**rng.choice(plot.variants), **rng.choice(plot.details)}
    return {key: word for key, word in fresh.items() if key not in words}


FAMILIES = (
    Family(
        "story",
        "stories",
        "lang",
        "the rest of a short story",
        cast,
        story,
        checks.whole_text,
        wordings=OPENINGS,
    ),
    Family(
        "story_qa",
        "stories",
        "qa",
        "who, where and what in a short story",
        cast_and_question,
        story_qa,
        checks.words,
        wordings={
            split: tuple(f"{{story}}\n{text}" for texts in asked.values() for text in texts)
            for split, asked in QUESTIONS.items()
        },
    ),
)
