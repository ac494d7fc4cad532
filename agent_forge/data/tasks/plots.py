"""The plots of the stories: sentences with gaps for people, things and places.

{he}, {his} and {him} mean the hero, {f_he}, {f_his} and {f_him} the friend. A plot has variants
(what the wish is about) and details (something that turns up later); every pair of them fits.
"""

from __future__ import annotations

from dataclasses import dataclass

Words = dict[str, str]


@dataclass(frozen=True)
class Plot:
    """What happens after the wish. Each part lists sentences of which one or some are told."""

    wish: str
    variants: tuple[Words, ...]
    details: tuple[Words, ...]
    problem: tuple[str, ...]
    attempts: tuple[str, ...]
    friend_comes: tuple[str, ...]
    solution: tuple[str, ...]
    ending: tuple[str, ...]


LOST = Plot(
    "to play with {his} {thing}",
    tuple(
        {"thing": thing}
        for thing in (
            *("red ball", "blue kite", "teddy bear", "wooden train", "toy boat", "yellow drum"),
            *("music box", "rag doll", "paper crown", "tin whistle"),
        )
    ),
    tuple(
        {"spot": spot}
        for spot in (
            *("under the old apple tree", "behind the curtain", "inside a big basket"),
            *("under the stairs", "beside the well", "between two flower pots", "on the roof"),
        )
    ),
    (
        "But the {thing} was gone.",
        "But {he} could not find the {thing} anywhere.",
        "But when {he} opened the toy chest, there was no {thing} in it.",
    ),
    (
        "{He} looked under the bed, but it was not there.",
        "{He} looked behind the door and found only dust.",
        "{He} searched the kitchen and saw only pots and pans.",
        "{He} opened every box in the house, but found nothing but old socks.",
        "{He} climbed up to the highest shelf, but there were only books.",
        "{He} asked the cat, but the cat just yawned.",
        "{He} turned all the pillows over, one after the other, but it did not help.",
    ),
    (
        'Then {friend} came to visit. "Why are you sad?" asked {friend}. '
        '"My {thing} is lost," said {hero}.',
        'So {hero} went to see {friend} and asked for help. "Let us look together," said {friend}.',
        "{friend} saw the sad face of {hero} through the window and came in at once. "
        '"Four eyes see more than two," said {friend}.',
    ),
    (
        "They looked {spot}, and there was the {thing}!",
        '"Did you look {spot}?" asked {friend}. They ran there, and there it was!',
        "They searched for a long time. At last they found the {thing} {spot}.",
    ),
    (
        "{hero} was very happy and thanked {friend}. They played with the {thing} until it was "
        "dark.",
        "{hero} jumped for joy. From that day on {he} always put the {thing} back in its place.",
        '"Thank you," said {hero}. "Now we can both play with it." And so they did.',
    ),
)

MAKE = Plot(
    "to {make}",
    (
        {
            "make": "bake an apple cake",
            "need": "apples",
            "done": "They baked the cake, and soon the whole house smelled sweet.",
        },
        {
            "make": "build a kite",
            "need": "string",
            "done": "They built the kite, and it flew high above the roofs.",
        },
        {
            "make": "cook a warm soup",
            "need": "carrots",
            "done": "They cooked the soup, and it was hot and good.",
        },
        {
            "make": "paint a big picture",
            "need": "paint",
            "done": "They painted the picture, and it was full of bright colours.",
        },
        {
            "make": "build a little boat",
            "need": "nails",
            "done": "They built the boat, and it sailed across the pond.",
        },
        {
            "make": "plant a flower bed",
            "need": "seeds",
            "done": "They put the seeds into the earth in long rows and watered them well.",
        },
        {
            "make": "sew a flag",
            "need": "thread",
            "done": "They sewed the flag, and it danced in the wind.",
        },
        {
            "make": "build a bird house",
            "need": "wood",
            "done": "They built the bird house, and soon a small bird moved in.",
        },
    ),
    tuple(
        {"carrier": carrier}
        for carrier in ("a heavy bag", "a wooden cart", "a round basket", "an old suitcase")
    ),
    (
        "But there was one problem: {he} had no {need}.",
        "But when {he} wanted to begin, {he} saw that {he} had no {need} left.",
        "But {he} needed {need}, and {he} had none.",
    ),
    (
        "{He} asked the baker, but the baker had no {need}.",
        "{He} went to the shop, but the shop was closed.",
        "{He} looked in the cellar and found only empty jars.",
        "{He} asked the farmer, but the farmer needed all the {need} for himself.",
        "{He} knocked at the house next door, but nobody was at home.",
        "{He} walked all the way to the market, but it was already over.",
        "{He} wrote a letter to {his} uncle, but no answer came.",
    ),
    (
        'Just then {friend} came along with {carrier}. "I have {need} in here," said {friend}. '
        '"Take what you need."',
        "When {friend} heard about it, {f_he} came at once and brought {need} in {carrier}.",
        '{friend} was pulling {carrier} down the road. "What is in there?" asked {hero}. '
        '"Only {need}," said {friend}. "I will gladly share."',
    ),
    (
        "They began right away. {done}",
        '{hero} could hardly believe such luck. "Then let us start," said {friend}. {done}',
    ),
    (
        '"We did it!" cried {hero}. {friend} laughed and was just as proud.',
        "{hero} and {friend} sat down side by side and looked at what they had made.",
        "{hero} thanked {friend}. Alone it would never have worked.",
    ),
)

LEARN = Plot(
    "to learn to {skill}",
    (
        {"skill": "swim", "success": "swam all the way across the pond"},
        {"skill": "whistle", "success": "whistled a whole song"},
        {"skill": "ride a bicycle", "success": "rode down the lane without falling"},
        {"skill": "juggle", "success": "kept three balls in the air"},
        {"skill": "dance", "success": "danced without one wrong step"},
        {"skill": "skate", "success": "skated around the whole lake"},
        {"skill": "read", "success": "read a whole page aloud"},
        {"skill": "climb", "success": "climbed to the top of the tall tree"},
    ),
    tuple(
        {"advice": advice}
        for advice in (
            *("Go slowly", "Keep calm", "Begin with something small", "Do not be in a hurry"),
            *("Count to three and then begin", "Think of nothing else", "Start once again"),
        )
    ),
    (
        "But it was not easy.",
        "But it was much harder than {he} had thought.",
        "But the first time everything went wrong.",
    ),
    (
        "{He} tried it once more, but it did not work.",
        "{He} tried it a little faster and nearly cried.",
        "{He} watched the big children, but they were too quick.",
        "{He} tried it in another way, and that was even worse.",
        "{He} tried and tried until {he} was tired, but nothing changed.",
        "{He} made a careful plan, but the plan was no good.",
        "{He} asked {his} father, but there was no time that day.",
    ),
    (
        'Then {friend} sat down beside {him}. "{advice}," said {friend}. "I will stay with you."',
        '{friend} had been watching. "I know that," said {friend}. "It was the same for me. '
        '{advice}, and it will work."',
        'In the end {he} asked {friend}. "{advice}," said {friend}. "That is the whole secret."',
    ),
    (
        "{hero} took a deep breath and tried once more. This time {he} {success}!",
        "{hero} nodded and did as {friend} had said. And look: {he} {success}!",
    ),
    (
        "{hero} was proud, and {friend} clapped loudly.",
        '"I can do it!" shouted {hero}, and {friend} was as happy as {he} was.',
        "Now {hero} knew that hard things grow easier when a friend is near.",
    ),
)

RESCUE = Plot(
    "to walk to the {goal}",
    tuple({"goal": goal} for goal in ("lake", "windmill", "old castle", "market", "lighthouse")),
    (
        {
            "animal": "kitten",
            "trouble": "was sitting high up in a tree and could not get down",
            "rescue": "{friend} held a ladder, and {hero} carried the kitten down",
        },
        {
            "animal": "lamb",
            "trouble": "had lost its mother",
            "rescue": "They followed the sound of a bell until they found the flock",
        },
        {
            "animal": "puppy",
            "trouble": "had a thorn in its paw",
            "rescue": "{friend} held the puppy, and {hero} pulled out the thorn",
        },
        {
            "animal": "duckling",
            "trouble": "was caught in the reeds",
            "rescue": "{friend} bent the reeds aside, and {hero} lifted the duckling out",
        },
        {
            "animal": "calf",
            "trouble": "was standing in deep mud and could not move",
            "rescue": "They laid planks on the mud and pulled until the calf was free",
        },
        {
            "animal": "pony",
            "trouble": "had its foot between two fence posts",
            "rescue": "{friend} pushed one post aside, and {hero} led the pony out",
        },
    ),
    (
        "But on the way {he} heard a sad cry. A {animal} {trouble}.",
        "But {he} did not get far, because a {animal} needed help. It {trouble}.",
    ),
    (
        "{hero} spoke to it softly, but it was too afraid.",
        "{hero} called for help, but nobody came.",
        "{hero} held out some bread, but it did not want any.",
        "{hero} looked for a rope, but could not find one.",
        "{hero} thought and thought, but had no idea.",
        "{hero} waited a little, but nothing changed.",
    ),
    (
        "So {hero} ran to fetch {friend}, and {friend} came at once.",
        'Luckily {friend} came down the road. "Together we can do it," said {friend}.',
        'Then {hero} remembered {friend}, who knew a lot about animals. "Of course I will help," '
        "said {friend}.",
    ),
    (
        "{rescue}.",
        "It took a while. {rescue}.",
        'They set to work. {rescue}. "Well done!" they said.',
    ),
    (
        "The {animal} was safe again. Then {hero} and {friend} walked to the {goal} side by side.",
        "The {animal} looked back once, as if it wanted to say thank you. After that, the way to "
        "the {goal} felt very short.",
    ),
)

PICNIC = Plot(
    "to have a picnic {where}",
    tuple(
        {"where": where}
        for where in (
            *("by the stream", "on the green hill", "in the forest", "on the beach"),
            *("in the meadow", "under the chestnut tree"),
        )
    ),
    tuple(
        {"indoors": indoors, "food": food}
        for indoors in ("in the barn", "under the big table", "in front of the fire")
        for food in ("bread and cheese", "sweet plums", "warm rolls", "cherry pie")
    ),
    (
        "But suddenly dark clouds came, and it began to rain.",
        "But as soon as everything was ready, the rain came down in buckets.",
    ),
    (
        "{He} waited at the window, but the rain did not stop.",
        "{He} put on a coat, but the wind was too strong.",
        "{He} took an umbrella, but it broke.",
        "{He} sang a song for the sun, but the sun did not come out.",
        "{He} counted to one hundred, but it was still raining.",
        "{He} told the clouds to go away, but they stayed.",
    ),
    (
        "Then there was a knock at the door. It was {friend}, wet from head to foot, with a basket "
        "full of {food}.",
        "Then {friend} came running through the rain and brought {food}.",
    ),
    (
        '"We can have our picnic {indoors}," said {friend}. So they spread a blanket there and ate '
        "{food}.",
        "{friend} had an idea. They put a blanket {indoors}, and soon they were eating {food}.",
    ),
    (
        "Outside it rained and rained, but {hero} did not mind at all.",
        '"This is better than any picnic in the sun," said {hero}, and {friend} agreed.',
    ),
)

PLOTS = {"lost": LOST, "make": MAKE, "learn": LEARN, "rescue": RESCUE, "picnic": PICNIC}
