"""A small ontology of everyday things: kinds, sizes, and what belongs with what.

Only what nobody would dispute: kinds share no word, sizes are compared when they are far apart,
and a partner in a relation fits its own subject and no other of the same table.
"""

from __future__ import annotations

from typing import NamedTuple

KINDS = {
    "animals": ("dog", "cat", "horse", "cow", "sheep", "lion", "tiger", "bear", "wolf", "rabbit"),
    "fruits": (
        "apple",
        "banana",
        "pear",
        "grape",
        "melon",
        "mango",
        "kiwi",
        "pineapple",
        "strawberry",
    ),
    "clothes": ("shirt", "coat", "sock", "glove", "scarf", "dress", "jacket", "skirt", "hat"),
    "vehicles": ("car", "bus", "train", "truck", "bicycle", "tram", "tractor", "van", "taxi"),
    "furniture": ("table", "chair", "bed", "sofa", "shelf", "desk", "wardrobe", "bench", "stool"),
    "tools": ("hammer", "saw", "drill", "wrench", "pliers", "screwdriver", "axe", "rake", "shovel"),
    "colours": ("red", "blue", "green", "yellow", "purple", "brown", "black", "white", "grey"),
    "instruments": ("piano", "violin", "drum", "flute", "guitar", "trumpet", "harp", "cello"),
    "weather": ("rain", "snow", "fog", "wind", "storm", "hail", "sunshine", "drizzle"),
    "jobs": ("doctor", "teacher", "baker", "farmer", "nurse", "lawyer", "painter", "plumber"),
    "body parts": ("arm", "leg", "nose", "ear", "knee", "elbow", "finger", "shoulder", "toe"),
    "numbers": ("two", "three", "five", "seven", "eight", "nine", "eleven", "twelve", "twenty"),
}

# The longest side of a usual one, in centimetres.
SIZES = {
    **{"grain of sand": 0.1, "flea": 0.25, "ant": 0.6, "ladybird": 0.8, "pea": 0.9, "bee": 1.4},
    **{"button": 1.8, "coin": 2.3, "walnut": 4, "hen's egg": 5.7, "mouse": 9, "sparrow": 15},
    **{"pencil": 18, "brick": 24, "football": 22, "cat": 46, "goose": 85, "sheep": 130},
    **{"sofa": 210, "horse": 240, "car": 440, "elephant": 600, "bus": 1200, "blue whale": 2500},
    **{"jumbo jet": 7000, "football pitch": 10_500, "moon": 3.5e8, "planet Earth": 1.3e9},
    **{"sun": 1.4e11},
}


class Relation(NamedTuple):
    """Pairs that belong together, and how the question is put in each split."""

    pairs: dict[str, str]  # subject -> the one partner that fits
    train: tuple[str, ...]
    selection: tuple[str, ...]
    verdict: tuple[str, ...]


RELATIONS = {
    "use": Relation(
        {
            "cut paper": "scissors",
            "hit a nail": "a hammer",
            "sweep the floor": "a broom",
            "dig a hole": "a shovel",
            "tell the time": "a clock",
            "unlock a door": "a key",
            "eat soup": "a spoon",
            "write a letter": "a pen",
            "brush your teeth": "a toothbrush",
            "stay dry in the rain": "an umbrella",
            "sew on a button": "a needle",
            "see stars closely": "a telescope",
            "take a photo": "a camera",
            "weigh flour": "a scale",
            "measure a fever": "a thermometer",
            "dry yourself after a bath": "a towel",
            "catch a fish": "a fishing rod",
            "light a dark room": "a lamp",
            "saw a plank": "a saw",
            "comb your hair": "a comb",
        },
        ("What do you use to {subject}?", "Which thing helps you to {subject}?"),
        ("You want to {subject}. What do you need?",),
        ("To {subject}, people reach for which of these?",),
    ),
    "young": Relation(
        {
            "cat": "a kitten",
            "dog": "a puppy",
            "cow": "a calf",
            "horse": "a foal",
            "sheep": "a lamb",
            "hen": "a chick",
            "duck": "a duckling",
            "goose": "a gosling",
            "lion": "a cub",
            "goat": "a kid",
            "frog": "a tadpole",
            "butterfly": "a caterpillar",
            "pig": "a piglet",
            "kangaroo": "a joey",
        },
        ("What is a young {subject} called?", "What do we call the child of a {subject}?"),
        ("Name the young of the {subject}.",),
        ("When a {subject} was little, what was it?",),
    ),
    "home": Relation(
        {
            "bee": "a hive",
            "bird": "a nest",
            "spider": "a web",
            "dog": "a kennel",
            "horse": "a stable",
            "fish": "water",
            "bear": "a den",
            "rabbit": "a burrow",
            "king": "a palace",
            "monk": "a monastery",
            "snail": "its own shell",
        },
        ("Where does a {subject} live?", "What is the home of a {subject}?"),
        ("In what would you look for a {subject} at rest?",),
        ("A {subject} goes home. Where to?",),
    ),
    "workplace": Relation(
        {
            "teacher": "a school",
            "nurse": "a hospital",
            "farmer": "a farm",
            "baker": "a bakery",
            "pilot": "an aeroplane",
            "sailor": "a ship",
            "judge": "a court",
            "waiter": "a restaurant",
            "librarian": "a library",
            "ballet dancer": "a theatre",
            "miner": "a mine",
            "goalkeeper": "a football pitch",
        },
        ("Where does a {subject} work?", "At which place do you meet a {subject} at work?"),
        ("A {subject} is at work. Where is that?",),
        ("Which place of work fits a {subject}?",),
    ),
    "material": Relation(
        {
            "window pane": "glass",
            "plank": "wood",
            "newspaper": "paper",
            "coin": "metal",
            "sweater": "wool",
            "leather shoe": "animal skin",
            "snowman": "snow",
            "brick": "clay",
            "candle": "wax",
            "car tyre": "rubber",
            "loaf of bread": "flour",
            "piece of cheese": "milk",
        },
        ("What is a {subject} made of?", "From which stuff do we get a {subject}?"),
        ("Out of what do people make a {subject}?",),
        ("A {subject} consists mainly of what?",),
    ),
    "opposite": Relation(
        {
            "hot": "cold",
            "big": "small",
            "fast": "slow",
            "wet": "dry",
            "full": "empty",
            "early": "late",
            "loud": "quiet",
            "open": "closed",
            "heavy": "light",
            "old": "young",
            "rich": "poor",
            "sweet": "sour",
            "thick": "thin",
            "strong": "weak",
            "happy": "sad",
        },
        ("What is the opposite of {subject}?", "Which word means the reverse of {subject}?"),
        ("Something is not {subject} at all, but just the contrary. What is it?",),
        ("Complete the pair of contraries: {subject} and ...",),
    ),
    "result": Relation(
        {
            "ice lies in the hot sun": "it melts",
            "water boils for a long time": "it turns into steam",
            "a glass falls on stone": "it breaks",
            "paper is held into a fire": "it burns",
            "a plant gets no water": "it withers",
            "water stays in strong frost": "it freezes",
            "milk stands in a warm kitchen for a week": "it turns sour",
            "iron lies outside in the rain for years": "it rusts",
            "a ball is thrown straight up": "it comes down again",
            "a seed is planted and watered": "it sprouts",
            "wet clothes hang in the wind": "they dry",
        },
        ("What happens when {subject}?", "If {subject}, what follows?"),
        ("Suppose {subject}. What will happen?",),
        ("Think ahead: {subject}. The result?",),
    ),
}

FLOATS = (
    *("a cork", "a wooden stick", "an empty bottle with a lid", "a beach ball", "a rubber duck"),
    *("a dry leaf", "a feather", "a wooden raft", "a candle", "an apple", "a piece of ice"),
)
SINKS = (
    *("a stone", "a coin", "an iron nail", "a brick", "a steel spoon", "a gold ring", "a marble"),
    *("an anchor", "a hammer head", "a key", "a lead weight", "a concrete block", "a pebble"),
)
