"""Compares `../../forge/src/keys.json` with the classes of `transformers`: every key of a `config.json` is used, refused
or without influence.

    python config_keys.py        # needs transformers==5.24.0; says what is missing or gone

Keys of a class are the fields of its configuration class, and whatever its modeling file reads of a configuration, as do
the files that make masks and rotary tables. `Class.vision_config` are those of a part. Names that begin with a small
letter are lists that others have in common (`with`); classes that `transformers` does not have are not compared, nor
are lists whose names end in `-code`: keys of a layout that came with code of its own.
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
READS = [r"\bconfig\.([a-zA-Z_0-9]+)", r"getattr\((?:self\.)?(?:text_)?config, \"([a-z_0-9]+)\""]
# Methods, what follows from other keys, and parts.
NO_KEYS = {
    "get_text_config",
    "to_dict",
    "standardize_rope_params",
    "per_layer_config",
    "kv_sharing_modes",
    "n_positions",
    "num_labels",
    "update",
    "decoder_config",
    "subsampling_out_hidden_size",
}


def reads(module):
    text = inspect.getsource(module)
    found = {name for pattern in READS for name in re.findall(pattern, text)}
    return {name for name in found if not name.startswith("_")} - NO_KEYS


def fields(kind):
    return {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}


def of(keys, name, kinds=("used", "refused", "neutral")):
    """The keys of a list and of those that it goes with; what is nearer counts."""
    own = keys[name]
    found = {key: kind for kind in kinds for key in own.get(kind, [])}
    for other in own.get("with", []):
        found = of(keys, other) | found
    return found


def wanted(name, part):
    """The keys of a class, or of a part of it."""
    model = getattr(transformers, name)
    whole = model.config_class
    parts = whole.sub_configs
    kind = parts[part] if part else whole
    if not dataclasses.is_dataclass(kind):
        # Any class, of which the default is what checkpoints have.
        kind = type(getattr(whole(), part))
    module = inspect.getmodule(whole)
    configs = [kind for kind in vars(module).values() if dataclasses.is_dataclass(kind)]
    elsewhere = set(parts).union(*(fields(kind) | set(kind.attribute_map) for kind in configs))
    found = fields(kind) - set(parts)
    # What no part of a configuration has is its decoder's, or its encoder's.
    if part in ("text_config", "encoder_config") or not parts:
        found |= reads(inspect.getmodule(model)) - elsewhere
    return found


def main():
    keys = json.loads(KEYS.read_text())
    common = fields(transformers.PreTrainedConfig)
    masks = reads(masking_utils)
    # Some have no field for these and read them all the same, and a cache takes any decoder with a window for one that
    # slides.
    decoders = masks | {"head_dim", "rope_parameters", "sliding_window"}
    met = {"rope": set(RopeParameters.__annotations__), "*": common}
    wrong = count = 0

    def report(name, what, found):
        nonlocal wrong
        if found:
            wrong += 1
            print(f"{name}: {what}: {', '.join(sorted(found))}")

    def meet(name, found):
        met.setdefault(name, set()).update(found)
        for other in keys[name].get("with", []):
            meet(other, found)

    for name, own in keys.items():
        parts = [set(own.get(kind, [])) for kind in ("used", "refused", "neutral")]
        report(name, "in two lists", {key for key in set.union(*parts) if sum(key in part for part in parts) > 1})
        classes, _, part = name.partition(".")
        for model in classes.split() if name[0].isupper() else []:
            if not hasattr(transformers, model):
                continue
            count += 1
            listed = of(keys, name)
            found = wanted(model, part or None)
            if "is_causal" in listed:
                found |= decoders
            report(f"{model} {part}", "in no list", found - set(listed) - common)
            meet(name, found | common)
    for name, own in keys.items():
        if name.endswith("-code"):
            continue
        if name[0].isupper() and not any(hasattr(transformers, model) for model in name.partition(".")[0].split()):
            continue
        here = {key for kind in ("used", "refused", "neutral") for key in own.get(kind, [])}
        # A list may say more of a key than those that it goes with.
        further = set().union(*(of(keys, other) for other in own.get("with", [])))
        report(name, "of no class", here - met.get(name, set()) - further)
    report("rope", "in no list", met["rope"] - set(keys["rope"]["used"]))
    report("*", "in no list", common - set(of(keys, "*")))
    print(f"{count} classes and parts, {wrong} differences")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
