"""Compares `../../forge/src/keys.json` with the classes of `transformers`: every key of a `config.json` is used, refused
or without influence.

    python config_keys.py        # needs transformers==5.24.0; says what is missing or gone

Keys of a class are the fields of its configuration class, and whatever its modeling file reads of a configuration, as do
the files that make masks and rotary tables.
"""

import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path

import transformers
from transformers import masking_utils
from transformers.modeling_rope_utils import RopeParameters

KEYS = Path(__file__).parent / "../../forge/src/keys.json"
READS = [r"\bconfig\.([a-z_0-9]+)", r"getattr\((?:self\.)?(?:text_)?config, \"([a-z_0-9]+)\""]
# Methods.
NO_KEYS = {"get_text_config", "to_dict", "standardize_rope_params", "per_layer_config"}


def reads(module):
    text = inspect.getsource(module)
    found = {name for pattern in READS for name in re.findall(pattern, text)}
    return {name for name in found if not name.startswith("_")} - NO_KEYS


def fields(kind):
    return {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}


def main():
    keys = json.loads(KEYS.read_text())
    shared, wrong = keys.pop("*"), 0
    rope = keys.pop("rope")
    common = fields(transformers.PreTrainedConfig) | reads(masking_utils) - {"sliding_window"}
    every = set.intersection(*(fields(getattr(transformers, name).config_class) for name in keys))
    # Some have no field for it, and read it all the same; files of models without one have the latter two.
    common |= every | {"head_dim", "use_bidirectional_attention", "rope_parameters"}
    listed = {"*": (shared, common), "rope": (rope, set(RopeParameters.__annotations__))}
    for name, own in keys.items():
        model = getattr(transformers, name)
        kind = model.config_class
        wanted = fields(kind) | reads(inspect.getmodule(model))
        # A cache takes any model with this key for one that slides.
        wanted |= {"sliding_window"}
        listed[name] = (own, wanted - common)
    for name, (own, wanted) in listed.items():
        parts = [set(own.get("used", [])), set(own.get("refused", {})), set(own.get("neutral", []))]
        twice = [key for key in set.union(*parts) if sum(key in part for part in parts) > 1]
        missing = wanted - set.union(*parts)
        gone = set.union(*parts) - wanted
        for what, found in [("in two lists", twice), ("in no list", missing), ("of no class", gone)]:
            if found:
                wrong += 1
                print(f"{name}: {what}: {', '.join(sorted(found))}")
    print(f"{len(keys)} classes, {wrong} differences")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
