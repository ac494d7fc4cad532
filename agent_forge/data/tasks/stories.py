"""Short stories in simple English, and questions about them.

A story has a hero with a wish, a problem, attempts (more at higher levels), a friend, an ending.
`story` asks for the rest after the opening: text to learn fluent English from, which nobody can
guess word for word. In the templates (stories.json) {he}, {his} and {him} mean the hero, {f_he},
{f_his} and {f_him} the friend; every pair of a template's variants and details fits.
"""

from random import Random
from typing import Any

from agent_forge.data.tasks import verifiers
from agent_forge.data.tasks.base import Operands, TaskContent, family, load, scaled, wording

_data = load("stories")
GIRLS, BOYS, HOMES = _data["girls"], _data["boys"], _data["homes"]
TEMPLATES: dict[str, dict[str, Any]] = _data["templates"]
QUESTIONS = _data["questions"]  # split -> what is asked -> wordings


def cast(level: int, rng: Random) -> Operands:
    """A template, which of its variants and of its details, the hero, the friend, and a home."""
    name = rng.choice(tuple(TEMPLATES))
    hero, friend = rng.sample(GIRLS + BOYS, 2)
    variant, detail = (int(rng.random() * len(TEMPLATES[name][k])) for k in ("variants", "details"))
    return name, variant, detail, hero, friend, int(rng.random() * len(HOMES))


def tell(drawn: Operands, level: int, split: str, rng: Random) -> tuple[str, str, dict[str, str]]:
    """The opening, the rest, and the words that fill both."""
    name, variant, detail, hero, friend, home = drawn
    template, look = TEMPLATES[name], rng.choice(_data["looks"])
    child = "girl" if hero in GIRLS else "boy"
    words = {
        **template["variants"][variant],
        **template["details"][detail],
        **_pronouns(hero, ""),
        **_pronouns(friend, "f_"),
        "hero": hero,
        "friend": friend,
        "home": HOMES[home],
        "who": f"a {look} {child if rng.random() < 0.6 else rng.choice(_data['animals'])}",
        "hobby": rng.choice(_data["hobbies"]),
        "time": rng.choice(_data["times"]),
    }
    words["wish"] = template["wish"].format(**words)
    words["rescue"] = words.get("rescue", "").format(**words)
    opening = wording("story", split, rng, **words)
    attempts = rng.sample(template["attempts"], scaled(level, 1, len(template["attempts"])))
    parts = ("problem", "friend_comes", "solution", "ending")
    problem, *after = (rng.choice(template[part]) for part in parts)
    sentences = [problem, *attempts, *after, rng.choice(_data["closings"])]
    return opening, " ".join(sentence.format(**words) for sentence in sentences), words


def story(operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
    opening, rest, _ = tell(operands, level, split, rng)
    sentences = rest.split(". ")
    return TaskContent(opening, rest, (". ".join(sentences[1:]), ". ".join(sentences[:-1])))


def cast_and_question(level: int, rng: Random) -> Operands:
    """What is asked, and a story."""
    return rng.choice(tuple(QUESTIONS["train"])), *cast(level, rng)


def story_qa(operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
    asked, *rest = operands
    opening, text, words = tell(tuple(rest), level, split, rng)
    question = rng.choice(QUESTIONS[split][asked]).format(hero=words["hero"])
    names = [words["hero"], words["friend"], *rng.sample(GIRLS + BOYS, 3)]
    wishes = []
    for template in TEMPLATES.values():  # in the words of this story where it has them
        fresh = {**rng.choice(template["variants"]), **rng.choice(template["details"])}
        wishes.append(template["wish"].format(**{**fresh, **words}))
    answer, others = {
        "hero": (words["hero"], names[1:]),
        "helper": (words["friend"], names),
        "home": (words["home"], rng.sample(HOMES, 4)),
        "wish": (words["wish"], rng.sample(wishes, len(wishes))),
    }[asked]
    return TaskContent(f"{opening} {text}\n{question}", answer, tuple(others))


def _pronouns(name: str, prefix: str) -> dict[str, str]:
    he, his, him = ("she", "her", "her") if name in GIRLS else ("he", "his", "him")
    words = {"he": he, "his": his, "him": him, "He": he.title(), "His": his.title()}
    return {prefix + key: word for key, word in words.items()}


QUESTION_WORDINGS = {
    split: [f"{{story}}\n{text}" for texts in asked.values() for text in texts]
    for split, asked in QUESTIONS.items()
}
FAMILIES = (
    family("story", cast, story, verifiers.whole_text),
    family("story_qa", cast_and_question, story_qa, verifiers.words, QUESTION_WORDINGS),
)
