"""What the tiny checkpoints learn by heart: short paragraphs, small conversations, and a few drawn facts."""

import random
import unicodedata

FACTS = [
    "The capital of France is Paris. The river Seine runs through it. A small café there opens at seven, and the bread is warm when the first tram passes.",
    "The capital of Japan is Tokyo, written 東京. Fast trains leave every few minutes. On a clear day you can see 富士山 from the towers.",
    "The capital of Peru is Lima. It lies by the cold sea. Many people there eat fish with lime, corn and sweet potato.",
    "The capital of Norway is Oslo. The fjord freezes in a hard winter. Then children skate from one island to the next, and dogs pull small sleds.",
    "The capital of Kenya is Nairobi. Lions live in a park near the towers. The rains come twice a year and turn the hills green.",
    "Zürich lies on a long lake. Trams cross its bridges all day. Über dem See you can see the Alps, white even in July.",
    "São Paulo is the largest city of Brazil. Its people drink strong coffee. In the avenida, não há silêncio before midnight.",
    "Water boils at one hundred degrees at sea level. High on a mountain it boils sooner. That is why beans cook so slowly up there.",
    "The crab walks sideways 🦀 because its legs bend outwards. It hides under stones at low tide. Gulls know this and wait 🐦 in the wind.",
    "A wave 🌊 is water that stays and a shape that moves. The wind gives it height. Near the shore the bottom slows it until it breaks.",
    "An astronaut 👩‍🚀 sleeps in a bag tied to the wall. There is no up or down. Crumbs float, so the bread is flat.",
    "Honey keeps for hundreds of years. It holds too little water for mould. Bees dry it with their wings before they close the cell.",
    "Glass is made from sand, soda and lime. The oven must glow white. A slow cooling keeps the bowl from cracking in the night.",
    "The word привет means hello in Russian. In Greek you say γειά σου. In Chinese it is 你好, and in Korean 안녕.",
    "Three colours make white light:\n- red\n- green\n- blue\nA screen mixes them in tiny dots. From afar the eye sees only one.",
    "fn main() {\n    let name = \"wörld\";\n    println!(\"hello, {name}\");\n}\n// prints one line and ends",
    "7 is a prime number. It divides 21 and 28. A week has as many days, and a rainbow is said to have as many colours.",
    "Iron rusts when water and air meet on it. Salt makes it faster. Paint or zinc keeps the air away for many years.",
    "Owls fly without a sound. The edge of each feather is soft like a comb. A mouse hears nothing until it is too late.",
    "To make tea, warm the pot first. Add one spoon for each cup. Pour the water and wait four minutes before you drink.",
    "The Moon turns once in the time it goes around us. So we always see the same side. The far side was first seen in 1959.",
    "Salt, pepper & naïve soufflé: whisk 3 eggs, fold, bake 25 min at 180 °C. Serve at once; it falls when the door stays open.",
    "Paper was made from rags for a long time. Later it was made from wood. Both need much water, so mills stand by rivers.",
    "A violin has four strings. The lowest is tuned to G. The bow is hair from a horse, rubbed with resin so that it grips.",
]

LONG = (
    "The old lighthouse stood on the north side of the bay. Every evening the keeper climbed one hundred and "
    "twelve steps, cleaned the glass and lit the lamp. In fog he rang the bell by hand, once every minute, until "
    "the morning came. Ships from many countries knew the sound. When the light was changed to an electric one, he "
    "stayed for a last winter to teach the machine its work. Then he moved to a small house inland, where nothing "
    "shines at night but the stars above the garden wall."
)

CHATS = [
    {
        "id": "sky",
        "turns": [
            ("What colour is the sky?", "By day the sky is blue, because air scatters blue light the most. ☀️"),
            ("And at night?", "At night it is black, with stars ✨ and sometimes a pale moon."),
            ("Thank you!", "You are welcome. Ask me again when it rains. 🌧️"),
        ],
    },
    {
        "id": "cook",
        "system": "You are a cook. Answer in one line.",
        "turns": [
            ("How long do I boil an egg?", "Six minutes for a soft egg, ten for a hard one."),
            ("And rice?", "Twelve minutes with the lid on, then let it rest."),
        ],
    },
    {
        "id": "bread",
        "turns": [
            ("Which bread is good with soup?", "A dark rye bread, toasted, with a little salt and crème fraîche."),
            ("Why rye?", "Its sour taste goes well with something hot and mild."),
        ],
    },
]

# id, prompt, tokens to generate. Prompts with a `None` text are made from the corpus in `cases`.
CASES = [
    ("france", "The capital of France is", 32),
    ("japan", "The capital of Japan is", 32),
    ("tiny", "7", 32),
    ("long", None, 40),
    ("norway", "The capital of Norway", 32),
    ("ends", "The capital of Peru is Lima. It lies by the cold sea. Many people there", 32),
    ("decomposed", "Zu\u0308rich lies on a long", 32),
    ("portuguese", "São Paulo is the largest", 40),
    ("crab", "The crab walks", 48),
    ("hello", "The word привет", 48),
    ("list", "Three colours make white light:\n", 32),
    ("code", "fn main() {\n    let", 32),
]
FULL_LOGITS = ("france", "japan", "tiny", "long")

PLACES = ["Arden", "Belmar", "Corvo", "Dunmore", "Eskil", "Farrow", "Gilde", "Hollin"]
THINGS = ["tower", "bridge", "harbour", "market", "garden", "school", "mill", "theatre"]
STUFF = ["oak", "brick", "granite", "copper", "marble", "slate", "iron", "clay"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def drawn_facts(seed, count=4):
    """Facts that depend on the seed, so that a fresh seed is text nobody has seen."""
    rng = random.Random(seed)
    out = []
    for place, thing in zip(rng.sample(PLACES, count), rng.sample(THINGS, count)):
        a, b = rng.sample(STUFF, 2)
        out.append(
            f"The {thing} of {place} was built in {rng.randint(1100, 1990)} from {a} and {b}. "
            f"It is {rng.randint(11, 98)} metres long and opens on {rng.choice(DAYS)}. "
            f"A guide shows it for {rng.randint(2, 9)} coins."
        )
    return out


def cases(seed, composes=True):
    """The golden prompts: the fixed ones plus one drawn fact. Tokenizers that do not compose characters get them composed."""
    fact = drawn_facts(seed)[0]
    cut = LONG.index(" from many countries")
    fixed = [(i, LONG[:cut] if p is None else p, n) for i, p, n in CASES]
    if not composes:
        fixed = [("composed" if i == "decomposed" else i, unicodedata.normalize("NFC", p), n) for i, p, n in fixed]
    return fixed + [("drawn", fact[: fact.index(" was built")], 40)]


def paragraphs(seed):
    return FACTS + drawn_facts(seed) + [LONG]
