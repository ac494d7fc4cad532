"""Everyday words in six languages: translate them, tell the language, choose the translation.

The same word may be asked in every split, but not the same word between the same two languages
(with the same company or choices), and never in the same wording.
"""

from __future__ import annotations

from random import Random

from agent_forge.data.tasks import checks
from agent_forge.data.tasks.base import Family, Operands, Question, scaled, wrong

LANGUAGES = ("English", "German", "Spanish", "French", "Italian", "Dutch")
LEXICON = tuple(
    tuple(line.split("|"))
    for line in """\
dog|Hund|perro|chien|cane|hond
cat|Katze|gato|chat|gatto|kat
house|Haus|casa|maison|casa|huis
water|Wasser|agua|eau|acqua|water
bread|Brot|pan|pain|pane|brood
milk|Milch|leche|lait|latte|melk
cheese|K\u00e4se|queso|fromage|formaggio|kaas
apple|Apfel|manzana|pomme|mela|appel
egg|Ei|huevo|\u0153uf|uovo|ei
fish|Fisch|pez|poisson|pesce|vis
bird|Vogel|p\u00e1jaro|oiseau|uccello|vogel
horse|Pferd|caballo|cheval|cavallo|paard
cow|Kuh|vaca|vache|mucca|koe
sheep|Schaf|oveja|mouton|pecora|schaap
mouse|Maus|rat\u00f3n|souris|topo|muis
tree|Baum|\u00e1rbol|arbre|albero|boom
flower|Blume|flor|fleur|fiore|bloem
garden|Garten|jard\u00edn|jardin|giardino|tuin
sun|Sonne|sol|soleil|sole|zon
moon|Mond|luna|lune|luna|maan
star|Stern|estrella|\u00e9toile|stella|ster
rain|Regen|lluvia|pluie|pioggia|regen
snow|Schnee|nieve|neige|neve|sneeuw
wind|Wind|viento|vent|vento|wind
fire|Feuer|fuego|feu|fuoco|vuur
sea|Meer|mar|mer|mare|zee
mountain|Berg|monta\u00f1a|montagne|montagna|berg
bridge|Br\u00fccke|puente|pont|ponte|brug
city|Stadt|ciudad|ville|citt\u00e0|stad
school|Schule|escuela|\u00e9cole|scuola|school
book|Buch|libro|livre|libro|boek
table|Tisch|mesa|table|tavolo|tafel
chair|Stuhl|silla|chaise|sedia|stoel
door|T\u00fcr|puerta|porte|porta|deur
window|Fenster|ventana|fen\u00eatre|finestra|raam
bed|Bett|cama|lit|letto|bed
key|Schl\u00fcssel|llave|cl\u00e9|chiave|sleutel
shoe|Schuh|zapato|chaussure|scarpa|schoen
hand|Hand|mano|main|mano|hand
foot|Fu\u00df|pie|pied|piede|voet
eye|Auge|ojo|\u0153il|occhio|oog
ear|Ohr|oreja|oreille|orecchio|oor
nose|Nase|nariz|nez|naso|neus
head|Kopf|cabeza|t\u00eate|testa|hoofd
heart|Herz|coraz\u00f3n|c\u0153ur|cuore|hart
mother|Mutter|madre|m\u00e8re|madre|moeder
father|Vater|padre|p\u00e8re|padre|vader
brother|Bruder|hermano|fr\u00e8re|fratello|broer
sister|Schwester|hermana|s\u0153ur|sorella|zus
child|Kind|ni\u00f1o|enfant|bambino|kind
friend|Freund|amigo|ami|amico|vriend
king|K\u00f6nig|rey|roi|re|koning
day|Tag|d\u00eda|jour|giorno|dag
night|Nacht|noche|nuit|notte|nacht
week|Woche|semana|semaine|settimana|week
month|Monat|mes|mois|mese|maand
red|rot|rojo|rouge|rosso|rood
blue|blau|azul|bleu|blu|blauw
green|gr\u00fcn|verde|vert|verde|groen
white|wei\u00df|blanco|blanc|bianco|wit
yellow|gelb|amarillo|jaune|giallo|geel
two|zwei|dos|deux|due|twee
three|drei|tres|trois|tre|drie
four|vier|cuatro|quatre|quattro|vier
five|f\u00fcnf|cinco|cinq|cinque|vijf
six|sechs|seis|six|sei|zes
seven|sieben|siete|sept|sette|zeven
eight|acht|ocho|huit|otto|acht
ten|zehn|diez|dix|dieci|tien
big|gro\u00df|grande|grand|grande|groot
small|klein|peque\u00f1o|petit|piccolo|klein
salt|Salz|sal|sel|sale|zout
sugar|Zucker|az\u00facar|sucre|zucchero|suiker
wine|Wein|vino|vin|vino|wijn
honey|Honig|miel|miel|miele|honing
""".splitlines()
)
WORDS = {language: tuple(row[i] for row in LEXICON) for i, language in enumerate(LANGUAGES)}
_all = [word.lower() for words in WORDS.values() for word in words]
# Words that mean something else in another of the languages.
SHARED = {
    *("brood", "latte", "porte", "porta", "Stern", "Mutter", "grand", "petit", "rouge", "piccolo"),
    *("stella", "appel", "montagne", "ponte", "tafel", "blanco", "chair", "siete", "honing"),
}
# The words that tell their language: no other has them, and they are not too short for that.
OWN = {
    language: tuple(
        word
        for word in words
        if len(word) > 4 and word not in SHARED and _all.count(word.lower()) == 1
    )
    for language, words in WORDS.items()
}

TRANSLATE_WORDINGS = {
    "train": (
        "Translate from {source} to {target}: {words}",
        "What is the {target} for the {source} {words}?",
        "{source} to {target}: {words} =",
    ),
    "selection": ("Put into {target} what is {source} here: {words}.",),
    "verdict": ("How does one say the {source} {words} in {target}?",),
}
LANGUAGE_WORDINGS = {
    "train": (
        "Which languages are these words from: {words}?",
        "Name the language of each word: {words}",
    ),
    "selection": ("For every word in this list, tell its language: {words}.",),
    "verdict": ("Where are these words at home, in order: {words}? Answer with languages.",),
}
CHOICE_WORDINGS = {
    "train": (
        "Which {target} word means {word} ({source}): {options}?",
        "Choose the {target} translation of the {source} word {word}: {options}.",
    ),
    "selection": ("One of the {target} words {options} is {word} in {source}. Which?",),
    "verdict": ("Pick what the {source} word {word} is called in {target}: {options}.",),
}


def words_and_languages(level: int, rng: Random) -> Operands:
    """Two languages, and rows of the lexicon."""
    source, target = rng.sample(LANGUAGES, 2)
    return source, target, *rng.sample(range(len(LEXICON)), scaled(level, 1, 8))


def translate(operands: Operands, level: int, split: str, rng: Random) -> Question:
    """Some words in another language, in order."""
    source, target, *rows = operands
    text = rng.choice(TRANSLATE_WORDINGS[split]).format(
        source=source, target=target, words=", ".join(WORDS[source][row] for row in rows)
    )
    answer = ", ".join(WORDS[target][row] for row in rows)
    place = int(rng.random() * len(rows))
    spare = rng.sample([row for row in range(len(LEXICON)) if row != rows[place]], 3)
    changed = ([*rows[:place], other, *rows[place + 1 :]] for other in spare)
    return Question(
        text, answer, "", tuple(", ".join(WORDS[target][r] for r in c) for c in changed)
    )


def words_of_languages(level: int, rng: Random) -> Operands:
    """Languages, each with a word that no other language of the lexicon has."""
    languages = rng.choices(LANGUAGES, k=scaled(level, 2, 8))
    return tuple((language, rng.choice(OWN[language])) for language in languages)


def name_languages(operands: Operands, level: int, split: str, rng: Random) -> Question:
    """The language of each word, in order."""
    text = rng.choice(LANGUAGE_WORDINGS[split]).format(words=", ".join(w for _, w in operands))
    names = [language for language, _ in operands]
    place = int(rng.random() * len(names))
    others = rng.sample([language for language in LANGUAGES if language != names[place]], 3)
    changed = (", ".join([*names[:place], other, *names[place + 1 :]]) for other in others)
    return Question(text, ", ".join(names), "", tuple(changed))


def word_and_options(level: int, rng: Random) -> Operands:
    """Two languages, the word asked for, and other words to choose among."""
    source, target = rng.sample(LANGUAGES, 2)
    row, *others = rng.sample(range(len(LEXICON)), scaled(level, 3, 10))
    return source, target, row, *sorted(others)


def choose_translation(operands: Operands, level: int, split: str, rng: Random) -> Question:
    """The one of some words that is the translation."""
    source, target, row, *others = operands
    answer = WORDS[target][row]
    options = [WORDS[target][other] for other in others]
    mixed = rng.sample([answer, *options], len(options) + 1)
    text = rng.choice(CHOICE_WORDINGS[split]).format(
        source=source, target=target, word=WORDS[source][row], options=", ".join(mixed)
    )
    return Question(text, answer, "", wrong(answer, *rng.sample(options, len(options))))


FAMILIES = (
    Family(
        "translate",
        "multilingual",
        "lang",
        "everyday words in another language",
        words_and_languages,
        translate,
        checks.words,
        wordings=TRANSLATE_WORDINGS,
    ),
    Family(
        "name_languages",
        "multilingual",
        "lang",
        "the languages of some words",
        words_of_languages,
        name_languages,
        checks.words,
        wordings=LANGUAGE_WORDINGS,
    ),
    Family(
        "choose_translation",
        "multilingual",
        "lang",
        "the right translation among several words",
        word_and_options,
        choose_translation,
        checks.words,
        wordings=CHOICE_WORDINGS,
    ),
)
