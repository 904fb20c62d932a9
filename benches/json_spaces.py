"""How the blanks that JSON of a schema may have change what a model writes: 50 schemas, each asked with its prompt.

    python3 benches/json_spaces.py qwen35/v81 --qhx target/release/qhx

For each way to write JSON: how many answers end before `--max-tokens`, how many are JSON of their schema (the others
were cut), how many of these have no empty list and no item twice, the tokens of all answers, and the seconds. Needs the package jsonschema.
"""

import argparse
import json
import subprocess
import time
import urllib.request

import jsonschema

WAYS = {
    "none": {"whitespace_flexible": False},
    "one after , and :": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "bounded": {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"},
    "any": {"whitespace_pattern": r"[ \n\r\t]+"},
}

RATING = ("bad", "fair", "good")

# A prompt, and what its answer has: types, (choices of an enum), [items], {properties}.
CASES = [
    ("Describe the river Rhine.", {"name": str, "length_km": int, "countries": [str]}),
    ("Describe the city of Rome.", {"name": str, "country": str, "population": int, "sights": [str]}),
    ("Name three fruits.", {"fruits": [str]}),
    ("Name three fruits with their colours.", {"fruits": [{"name": str, "color": str}]}),
    ("Who wrote Hamlet?", {"author": str}),
    ("Who wrote Hamlet, and when?", {"author": str, "year": int}),
    ("Is the sky blue?", {"answer": bool, "reason": str}),
    ("Rate this review: 'The food was cold and the waiter rude.'", {"rating": RATING, "reason": str}),
    ("Rate this review: 'Lovely rooms, we will come back.'", {"rating": RATING, "topics": [str]}),
    ("What is 12 times 12?", {"result": int}),
    ("What is half of 7?", {"result": float, "steps": [str]}),
    ("Extract: 'Anna Weber, 34, lives in Bonn.'", {"name": str, "age": int, "city": str}),
    ("Extract: 'Call Tom at 555-1234 after five.'", {"name": str, "phone": str, "time": str}),
    ("Extract the people: 'Ann met Bob and Carol in Paris.'", {"people": [str], "place": str}),
    ("Extract the dates: 'From May 3 to June 9 we are closed.'", {"from": str, "to": str, "closed": bool}),
    ("Translate 'good morning' to French and German.", {"french": str, "german": str}),
    ("Write a recipe for pancakes.", {"title": str, "ingredients": [{"name": str, "grams": int}], "steps": [str]}),
    ("Write a recipe for tea.", {"title": str, "minutes": int, "steps": [str]}),
    ("Plan a day in London.", {"morning": str, "afternoon": str, "evening": str}),
    ("Plan a week of meals.", {"days": [{"day": str, "meal": str}]}),
    ("Make a to-do list for moving house.", {"tasks": [{"task": str, "done": bool}]}),
    ("Make a shopping list for a party.", {"items": [str], "budget": float}),
    ("Describe a cat.", {"species": str, "legs": int, "sounds": [str]}),
    ("Describe a book you like.", {"title": str, "author": {"first": str, "last": str}, "year": int}),
    ("Describe a car.", {"brand": str, "model": str, "price": float, "colors": [str]}),
    ("Describe a computer.", {"cpu": {"cores": int, "ghz": float}, "memory_gb": int, "ports": [str]}),
    ("Describe the weather in spring.", {"season": ("spring", "summer"), "temperature": int, "rain": bool}),
    ("Describe the planet Mars.", {"name": str, "moons": [str], "radius_km": int, "habitable": bool}),
    ("List the planets.", {"planets": [{"name": str, "position": int}]}),
    ("List the primary colours.", {"colors": [{"name": str, "hex": str}]}),
    ("List three programming languages.", {"languages": [{"name": str, "year": int, "typed": bool}]}),
    ("List two oceans and their depths.", {"oceans": [{"name": str, "depth_m": float}]}),
    ("List three prime numbers.", {"primes": [int]}),
    ("Give the coordinates of Berlin.", {"latitude": float, "longitude": float}),
    ("Give a short biography of Marie Curie.", {"name": str, "born": int, "fields": [str], "summary": str}),
    ("Give a short biography of Mozart.", {"name": str, "born": int, "works": [{"title": str, "kind": str}]}),
    ("Summarize: 'The council voted to build a bridge. It costs two million.'", {"summary": str, "cost": int}),
    ("Which sport is this: 'He scored a goal in the last minute'?", {"sport": ("football", "tennis", "chess")}),
    ("Which language is this: 'Guten Tag'?", {"language": str, "confidence": float}),
    ("Is this spam: 'You won a prize, click here'?", {"spam": bool, "score": float, "words": [str]}),
    ("Write a title and tags for a blog about gardening.", {"title": str, "tags": [str]}),
    ("Write three quiz questions about history.", {"questions": [{"question": str, "answer": str}]}),
    ("Write an email that cancels a meeting.", {"subject": str, "body": str, "to": [str]}),
    ("Write a poem's title and its first line.", {"title": str, "line": str}),
    ("Create a character for a story.", {"name": str, "age": int, "traits": [str], "home": {"town": str, "old": bool}}),
    ("Create a user account.", {"user": {"name": str, "email": str, "roles": [str]}, "active": bool}),
    ("Create an invoice with two items.", {"number": int, "items": [{"text": str, "price": float}], "total": float}),
    ("Create a playlist of two songs.", {"name": str, "songs": [{"title": str, "artist": str, "seconds": int}]}),
    ("Compare cats and dogs.", {"cats": {"good": [str], "bad": [str]}, "dogs": {"good": [str], "bad": [str]}}),
    ("Order a pizza.", {"size": ("small", "large"), "toppings": [str], "address": {"street": str, "number": int}}),
]


def schema(of):
    """The JSON schema of a case's shorthand."""
    if isinstance(of, dict):
        properties = {name: schema(inner) for name, inner in of.items()}
        required = list(properties)
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if isinstance(of, list):
        return {"type": "array", "items": schema(of[0])}
    if isinstance(of, tuple):
        return {"enum": list(of)}
    return {"type": {str: "string", int: "integer", float: "number", bool: "boolean"}[of]}


def ask(address, prompt, form, options):
    """The answer to a prompt, why it ended, and its tokens."""
    text = f"{prompt} Answer in JSON with the keys {', '.join(form['properties'])}."
    form = {**form, "x-guidance": options}
    body = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": ARGUMENTS.max_tokens,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}},
    }
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    answer = json.load(urllib.request.urlopen(request))
    choice = answer["choices"][0]
    return choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]


def is_valid(text, form):
    try:
        jsonschema.validate(json.loads(text), form)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def is_full(value):
    """No list is empty or has an item twice."""
    if isinstance(value, dict):
        return all(map(is_full, value.values()))
    if not isinstance(value, list):
        return True
    items = [json.dumps(item) for item in value]
    return bool(items) and len(set(items)) == len(items) and all(map(is_full, value))


def main():
    serve = [ARGUMENTS.qhx, "serve", ARGUMENTS.bundle, "--port", "0", "--backend", ARGUMENTS.backend]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = server.stdout.readline().strip()
        print(f"| blanks | ended | valid | full | tokens | seconds |\n|---|---|---|---|---|---|")
        for way, options in WAYS.items():
            ended, valid, full, tokens, start = 0, 0, 0, 0, time.time()
            for prompt, shorthand in CASES:
                form = schema(shorthand)
                text, reason, count = ask(address, prompt, form, options)
                tokens += count
                ended += reason != "length"
                if is_valid(text, form):
                    valid += 1
                    full += is_full(json.loads(text))
                if ARGUMENTS.verbose:
                    print(f"{way}: {reason}, {count} tokens: {text}")
            print(f"| {way} | {ended} | {valid} | {full} | {tokens} | {time.time() - start:.0f} |", flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--qhx", default="qhx")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--verbose", action="store_true", help="print the answers")
    ARGUMENTS = parser.parse_args()
    main()
