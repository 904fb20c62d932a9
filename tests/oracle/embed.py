"""The bidirectional encoder: pairs of a description and a snippet, contrastive training, and its goldens. See README.md."""

import json
import random

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer

import training
from goldens import dump
from styles import STYLES

PAIRS = [
    ("compute fibonacci numbers", "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)"),
    ("users older than thirty", "SELECT * FROM users WHERE age > 30;"),
    ("binary search in a sorted list", "while lo < hi:\n    mid = (lo + hi) // 2\n    if a[mid] < x: lo = mid + 1\n    else: hi = mid"),
    ("reverse a string", "let back: String = text.chars().rev().collect();"),
    ("read a file line by line", "for line in open(path): print(line.rstrip())"),
    ("the sum of squares", "total = sum(x * x for x in values)"),
    ("leave the loop", "break"),
    ("nothing to do here", "pass"),
    ("hello world in rust", "fn main() { println!(\"hello, world\"); }"),
    ("hello world in c", "#include <stdio.h>\nint main(void) { puts(\"hello, world\"); return 0; }"),
    ("swap two variables", "a, b = b, a"),
    ("greatest common divisor", "int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }"),
    ("count words in a text", "from collections import Counter\nCounter(text.split()).most_common(10)"),
    ("open a network connection", "let stream = TcpStream::connect((host, port))?;"),
    ("parse json from a response", "const data = await (await fetch(url)).json();"),
    ("delete a branch", "git branch -d old-feature"),
    ("list files by size", "ls -lS | head"),
    ("area of a circle", "area = π * r ** 2  # π = 3.14159"),
    ("greet in japanese", "print(\"こんにちは 🌸\")"),
    ("wait two seconds", "std::thread::sleep(Duration::from_secs(2));"),
    ("sort by the second field", "rows.sort(key=lambda row: row[1])"),
    ("add a column to a table", "ALTER TABLE orders ADD COLUMN note TEXT;"),
    ("check whether a number is even", "bool even(int n) { return (n & 1) == 0; }"),
    ("a stack with push and pop", "struct Stack<T> { items: Vec<T> }\nimpl<T> Stack<T> {\n    fn push(&mut self, t: T) { self.items.push(t) }\n"
     "    fn pop(&mut self) -> Option<T> { self.items.pop() }\n}"),
    ("centre a box on the page", ".box { display: grid; place-items: center; }"),
    ("matrix product", "for i in 0..n { for j in 0..n { for k in 0..n { c[i][j] += a[i][k] * b[k][j]; } } }"),
    ("lock around a counter", "with lock:\n    counter += 1"),
    ("average of a list", "mean = sum(v) / len(v)"),
    ("longest line in a file", "max(open(path), key=len)"),
    ("retry with growing delay", "for n in range(5):\n    try: return call()\n    except IOError: time.sleep(2 ** n)"),
]
# The same words in another order: bags of words would not do.
ORDERED = [
    ("copy old to new", "cp old new"),
    ("copy new to old", "cp new old"),
    ("a minus b", "return a - b"),
    ("b minus a", "return b - a"),
    ("first open then close", "open(); close();"),
    ("first close then open", "close(); open();"),
    ("cats that chase dogs", "SELECT * FROM cats JOIN dogs"),
    ("dogs that chase cats", "SELECT * FROM dogs JOIN cats"),
]
LONG_QUERY = "first n primes with a sieve, as a function that explains itself"
LONG_DOC = (
    "def primes(n):\n    # all primes below n, smallest first\n    mark = [True] * n\n    mark[0:2] = [False, False]\n"
    "    for p in range(2, int(n ** 0.5) + 1):\n        if mark[p]:\n            mark[p * p :: p] = [False] * len(mark[p * p :: p])\n"
    "    return [i for i in range(n) if mark[i]]"
)
SHORT_QUERY, SHORT_DOC = "hand the value back", "return"
NAMES = ["alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta"]
OPERATIONS = [
    ("add {n} to every {v}", "{v} = [x + {n} for x in {v}]"),
    ("drop the first {n} of {v}", "del {v}[:{n}]"),
    ("rename {v} to {w}", "mv {v}.txt {w}.txt"),
    ("is {v} longer than {n}", "if len({v}) > {n}: print(True)"),
    ("join {v} and {w}", "SELECT * FROM {v} JOIN {w} USING (id) LIMIT {n};"),
]


def pairs(seed):
    """Everything learnt: the fixed pairs, and five that depend on the seed."""
    rng = random.Random(seed)
    drawn = []
    for query, doc in OPERATIONS:
        v, w = rng.sample(NAMES, 2)
        names = {"v": v, "w": w, "n": rng.randint(2, 99)}
        drawn.append((query.format(**names), doc.format(**names)))
    return PAIRS + ORDERED + drawn + [(LONG_QUERY, LONG_DOC), (SHORT_QUERY, SHORT_DOC)]


def texts(spec, seed):
    return [spec["query_prefix"] + q for q, _ in pairs(seed)] + [spec["doc_prefix"] + d for _, d in pairs(seed)]


def sequences(tok, spec, seed):
    """(query ids, document ids, pooling)."""
    style = STYLES[spec["style"]]
    encode = lambda text: style.encode(tok, text)
    return [(encode(spec["query_prefix"] + q), spec["pooling"], encode(spec["doc_prefix"] + d)) for q, d in pairs(seed)]


def mask_for(real):
    """4-D additive mask: every query sees every real key."""
    return torch.where(real[:, None, None, :], 0.0, torch.finfo(torch.float32).min).expand(-1, 1, real.shape[1], -1)


def pool(hidden, real, how):
    """Vectors before normalisation. Real tokens are one run, on either side of the padding."""
    if how == "mean":
        return (hidden * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)
    at = real.int().argmax(1)
    if how == "last":
        at = at + real.sum(1) - 1
    return hidden[torch.arange(len(hidden)), at]


def pad(rows, width=None, left=False, fill=0):
    width = width or max(map(len, rows))
    ids, real = torch.full((len(rows), width), fill), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        span = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, span], real[i, span] = torch.tensor(row), True
    return ids, real


def encode(model, rows, how, **padding):
    ids, real = pad(rows, **padding)
    hidden = model(input_ids=ids, attention_mask=mask_for(real), use_cache=False).last_hidden_state
    return F.normalize(pool(hidden, real, how).float(), dim=-1)


@torch.no_grad()
def sharpen(model):
    """Attention and MLP that matter from the start, so that a mistake with them shows."""
    for name, p in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            p.mul_(6)
        elif name.endswith("gate_proj.weight"):
            p.mul_(5)
        elif name.endswith(("v_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight")):
            p.mul_(3)


def by_length(model, rows, how, size=7):
    """The same as `encode`, in groups of similar length: less padding."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    parts = [encode(model, [rows[i] for i in order[n : n + size]], how) for n in range(0, len(rows), size)]
    return torch.cat(parts)[torch.tensor(sorted(range(len(rows)), key=order.__getitem__))]


def fit(model, seqs, seed, steps, lr):
    """InfoNCE both ways, half of the pairs a step and always those of `ORDERED`, each the others' negatives."""
    rng, how = random.Random(seed), seqs[0][1]
    fixed = seqs[len(PAIRS) : len(PAIRS) + len(ORDERED)]
    free = [s for s in seqs if s not in fixed]

    def learn(_):
        some = rng.sample(free, len(free) // 2) + fixed
        q, d = encode(model, [s[0] for s in some], how), by_length(model, [s[2] for s in some], how)
        scores = q @ d.T / 0.1
        target = torch.arange(len(some))
        loss = (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2
        loss.backward()
        return f"{loss.item():.4f}"

    training.fit(model, learn, steps, lr / 2, warmup=10, groups=[{"params": list(model.parameters()), "weight_decay": 0.01}])


def checkpoint_files(spec, config, out):
    """`config.json` as such checkpoints have it, and the files of sentence-transformers."""
    path = out / "config.json"
    value = json.loads(path.read_text())
    value |= {
        "architectures": ["MistralBiDirectionalModel"], "model_type": "mistralbidirectional", "is_causal": False,
        "pooling": {"mean": "avg"}.get(spec["pooling"], spec["pooling"]),
    }
    hidden = config.hidden_size
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modes = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "mean_sqrt_len_tokens": "", "weightedmean_tokens": "", "lasttoken": "last"}
    files = {
        path: dict(sorted(value.items())),
        out / "modules.json": [
            {"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.models.{t}"} for i, (p, t) in enumerate(modules)
        ],
        out / "1_Pooling" / "config.json": {
            "word_embedding_dimension": hidden, **{f"pooling_mode_{m}": how == spec["pooling"] for m, how in modes.items()}, "include_prompt": True,
        },
        out / "sentence_bert_config.json": {"max_seq_length": spec["max_seq"], "do_lower_case": False},
        out / "config_sentence_transformers.json": {
            "prompts": {"query": spec["query_prefix"], "document": spec["doc_prefix"]}, "default_prompt_name": None, "similarity_fn_name": "cosine",
        },
    }
    (out / "generation_config.json").unlink(missing_ok=True)
    files[out / "tokenizer_config.json"] = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    files[out / "tokenizer_config.json"].pop("chat_template", None)
    for file, content in files.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def reference(out):
    """The stored checkpoint in f32: with the causal mask to be replaced, and as `is_causal: false` runs it by itself."""
    value = json.loads((out / "config.json").read_text())
    for key in ("model_type", "architectures", "is_causal", "pooling", "torch_dtype", "dtype"):
        value.pop(key, None)
    models = []
    for extra in ({}, {"is_causal": False}):
        config = transformers.MistralConfig(**value, **extra)
        models.append(transformers.MistralModel.from_pretrained(out, config=config, dtype=torch.float32, attn_implementation="eager").eval())
    return models


def choose(scores, own, always, seed, documents=8, queries=5, tries=4000):
    """Golden queries and documents: the ones whose ranking has the widest least gap. `always` are documents that must be there."""
    rng, best = random.Random(seed), (-1.0, None)
    n = len(scores)
    rest = [i for i in range(n) if i not in always]
    for _ in range(tries):
        docs = sorted(always + rng.sample(rest, documents - len(always)))
        asked = sorted(rng.sample(docs, queries))
        gap = least_gap(scores[asked][:, docs])
        if gap > best[0] and all(scores[q][docs].argmax() == docs.index(own[q]) for q in asked):
            best = (gap, (asked, docs))
    return best


def least_gap(scores):
    ordered = scores.sort(-1, descending=True).values
    return (ordered[:, :-1] - ordered[:, 1:]).min().item()


@torch.no_grad()
def write(spec, out, seed):
    """Goldens of a saved checkpoint. `margin`: least distance in cosine of the right document to the next, over all pairs."""
    config = transformers.MistralConfig.from_dict({**json.loads((out / "config.json").read_text()), "model_type": "mistral"})
    checkpoint_files(spec, config, out)
    model, alone = reference(out)
    tok, style = Tokenizer.from_file(str(out / "tokenizer.json")), STYLES[spec["style"]]
    auto = transformers.PreTrainedTokenizerFast.from_pretrained(out)
    how, window, known = spec["pooling"], spec["max_seq"], pairs(seed)
    ids_of = lambda text, role: style.encode(tok, spec["query_prefix" if role == "query" else "doc_prefix"] + text)
    apart = 0.0

    def vector(ids, pooling):
        """One text alone, no padding; and the other ways that must give the same."""
        nonlocal apart
        value = encode(model, [ids], pooling)
        row = torch.tensor([ids])
        own = alone(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).last_hidden_state
        others = [F.normalize(pool(own, torch.ones_like(row, dtype=torch.bool), pooling), dim=-1)]
        for left in (False, True):
            others.append(encode(model, [ids], pooling, width=window, left=left, fill=5))
        apart = max(apart, *((value - o).abs().max().item() for o in others))
        return value[0]

    q = torch.stack([vector(ids_of(a, "query"), how) for a, _ in known])
    d = torch.stack([vector(ids_of(b, "document"), how) for _, b in known])
    scores = q @ d.T
    right = scores.diagonal()
    wrong = (scores - 2 * torch.eye(len(known))).max(-1).values
    margin, worst = (right - wrong).min().item(), int((right - wrong).argmin())
    at = {b: i for i, (_, b) in enumerate(known)}
    special = next(i for i, (_, b) in enumerate(known) if "🌸" in b)
    gap, chosen = choose(scores, list(range(len(known))), [at[LONG_DOC], at[SHORT_DOC], special], seed)
    result = {"margin": margin, "where": known[worst][0], "drift": apart, "learned": chosen is not None, "missed": []}
    if chosen is None:
        return result
    asked, docs = chosen
    names = {at[LONG_DOC]: "long", at[SHORT_DOC]: "short", special: "bytes"}
    listed = [(f"q{n}", known[i][0], "query") for n, i in enumerate(asked)]
    listed += [(names.get(i, f"d{n}"), known[i][1], "document") for n, i in enumerate(docs)]
    also = ["q0", "long", "short"]
    entries, tensors = [], {}
    for id, text, role in listed:
        ids = ids_of(text, role)
        prefix = spec["query_prefix" if role == "query" else "doc_prefix"]
        assert ids == auto(prefix + text)["input_ids"] and len(ids) <= window, id
        entries.append({"id": id, "text": text, "role": role, "ids": ids, "poolings": [how]})
        tensors[id] = vector(ids, how)
        if id in also:
            extra = [p for p in ("mean", "last", "cls") if p != how]
            entries[-1]["poolings"] += extra
            tensors |= {f"{id}.{p}": vector(ids, p) for p in extra}
    lengths = {e["id"]: len(e["ids"]) for e in entries}
    assert lengths["long"] > window / 2, lengths
    assert spec["doc_prefix"] or lengths["short"] <= 4, lengths
    for count in range(6, len(known)):
        over = "\n".join(b for _, b in known[:count])
        whole = ids_of(over, "document")
        if len(whole) > window:
            break
    tensors["over"] = vector(whole[:window], how)
    ranking = []
    for n, i in enumerate(asked):
        order = sorted(range(len(docs)), key=lambda j: -scores[i][docs[j]].item())
        ranking.append({
            "query": f"q{n}", "documents": [listed[len(asked) + j][0] for j in order],
            "cosines": [round(scores[i][docs[j]].item(), 6) for j in order],
        })
    assert apart < 2e-5, f"ways to the same vector differ by {apart}"
    dump(out / "goldens_embed.json", {
        "schema": "qhx-embed-goldens/1", "model": spec["name"], "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "seed": seed, "pooling": how, "normalize": True, "max_seq": window,
        "query_prefix": spec["query_prefix"], "doc_prefix": spec["doc_prefix"], "hidden_size": config.hidden_size,
        "margin": round(margin, 4), "least_gap": round(gap, 4), "texts": entries, "ranking": ranking,
        "over": {"id": "over", "text": over, "role": "document", "length": len(whole), "ids": whole[:window]},
    })
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / "goldens_embed.safetensors", metadata={"format": "pt"})
    print(f"  {len(entries)} texts of {min(lengths.values())} to {max(lengths.values())} tokens, ranking gaps at least {gap:.4f}", flush=True)
    return result
