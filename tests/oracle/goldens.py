"""Greedy decoding by `transformers` on the saved checkpoint, and the files that record it. Formats: README.md."""

import json

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer

import chatml
import corpus
import phimoe

# Two ways of computing the same logits may differ by rounding only.
DRIFT = 2e-3


@torch.no_grad()
def greedy(model, prompt, limit, ends):
    """One forward over the prompt, then one per token, with cache. Returns ids, logits per step, finish."""
    out, rows, past, feed = [], [], None, prompt
    while True:
        step = model(input_ids=torch.tensor([feed]), past_key_values=past, use_cache=True)
        past = step.past_key_values
        rows.append(step.logits[0, -1].float())
        out.append(int(rows[-1].argmax()))
        if out[-1] in ends:
            return out, torch.stack(rows), "eos"
        if len(out) == limit:
            return out, torch.stack(rows), "length"
        feed = [out[-1]]


@torch.no_grad()
def drift(model, prompt, out, rows):
    """Largest difference of `rows` from an uncached forward and from stepping through the prompt token by token."""
    ids = prompt + out[:-1]
    whole = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, len(prompt) - 1 :].float()
    past, stepped = None, []
    for token in ids:
        step = model(input_ids=torch.tensor([[token]]), past_key_values=past, use_cache=True)
        past = step.past_key_values
        stepped.append(step.logits[0, -1].float())
    stepped = torch.stack(stepped[len(prompt) - 1 :])
    for other in (whole, stepped):
        assert torch.equal(other.argmax(-1), rows.argmax(-1)), "greedy tokens depend on how the logits are computed"
    return max((whole - rows).abs().max().item(), (stepped - rows).abs().max().item())


def least_margin(rows):
    top = rows.topk(2, dim=-1).values
    return (top[:, 0] - top[:, 1]).min().item()


def common_prefix(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def dump(path, value):
    """JSON with one line per innermost list, so that diffs stay readable."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    lines, held = [], None
    for line in text.split("\n"):
        bare = line.strip()
        if held is None and bare.endswith("["):
            held = [line]
        elif held is not None and (bare.endswith("{") or bare.endswith("[")):
            lines += held
            held = [line] if bare.endswith("[") else None
            if held is None:
                lines.append(line)
        elif held is not None:
            held.append(bare)
            if bare.rstrip(",") == "]":
                lines.append(held[0] + " ".join(held[1:-1]) + held[-1])
                held = None
        else:
            lines.append(line)
    path.write_text("\n".join(lines + (held or [])) + "\n", encoding="utf-8")
    assert json.loads(path.read_text(encoding="utf-8")) == value


@torch.no_grad()
def scale_as_stored(model, out):
    """Gemma multiplies embedding rows with √hidden, rounded to the type that the weights are loaded in. The goldens are
    computed in f32, but with the factor of the type that the weights are stored in, in which the model was trained."""
    scale = getattr(model.get_input_embeddings(), "embed_scale", None)
    if scale is not None:
        config = json.loads((out / "config.json").read_text())
        stored = getattr(torch, config.get("dtype") or config["torch_dtype"])
        scale.copy_(scale.to(stored).to(scale.dtype))


def write(name, out, seed, style, model=None):
    """Goldens of text. `model` is the checkpoint as loaded, where its class is not found by `AutoModelForCausalLM`."""
    if model is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
        scale_as_stored(model, out)
    tok = Tokenizer.from_file(str(out / "tokenizer.json"))
    auto = transformers.AutoTokenizer.from_pretrained(out)
    ends = set(model.generation_config.eos_token_id)
    texts = corpus.paragraphs(seed)
    golden = corpus.cases(seed, style.composes)
    routed = model.config.model_type == "phimoe"
    if routed:
        model.config._experts_implementation = "eager"
        golden += phimoe.cases(tok, style, seed)
    for text in texts + [p for _, p, _ in golden]:
        assert style.encode(tok, text) == auto(text)["input_ids"], text
    missed, worst, where, apart, nearest = [], float("inf"), "", 0.0, float("inf")
    tensors, cases, suite = {}, [], []

    def note(id, rows, prompt, ids):
        nonlocal worst, where, apart
        apart = max(apart, drift(model, prompt, ids, rows))
        found = least_margin(rows)
        if found < worst:
            worst, where = found, id
        return round(found, 4)

    for id, prompt, limit in golden:
        prompt_ids = style.encode(tok, prompt)
        ids, rows, finish = greedy(model, prompt_ids, limit, ends)
        margin = note(id, rows, prompt_ids, ids)
        text = tok.decode(ids, skip_special_tokens=True)
        whole = style.plain(tok, prompt_ids + ids).replace("\ufffd", "")
        if not any((t + style.end_text).startswith(whole) for t in texts) or not (finish == "eos" or len(ids) >= 24):
            missed.append(id)
        steps = list(range(len(ids))) if id in corpus.FULL_LOGITS else [0]
        tensors[f"{id}.logits"] = rows[steps].contiguous()
        if routed:
            tensors[f"{id}.experts"], tensors[f"{id}.multipliers"], near = phimoe.routing(model, prompt_ids + ids[:-1])
            nearest = min(nearest, near)
        cases.append({
            "id": id, "prompt": prompt, "prompt_ids": prompt_ids, "output_ids": ids, "text": text, "finish": finish,
            "min_margin": margin, "logits_steps": steps,
        })
        suite.append({
            "id": id, "prompt": prompt, "prompt_ids": prompt_ids, "gold": [i for i in ids if i not in ends], "max_new": limit,
        })

    chats = []
    for chat in corpus.CHATS:
        for thinking in style.thinking:
            if chat["id"] != "cook" and thinking is False:
                continue
            id = chat["id"] if thinking is None else f"{chat['id']}-nothink"
            messages = [{"role": "system", "content": chat["system"]}] if chat.get("system") else []
            turns, before = [], None
            for user, answer in chat["turns"]:
                messages.append({"role": "user", "content": user})
                prompt_ids = style.encode_chat(tok, style.render(messages, thinking=thinking))
                ids, rows, finish = greedy(model, prompt_ids, 64, ends)
                margin = note(id, rows, prompt_ids, ids)
                text = tok.decode(ids, skip_special_tokens=True)
                if text != answer or finish != "eos":
                    missed.append(id)
                turn = {"user": user, "prompt_ids": prompt_ids, "output_ids": ids, "text": text, "finish": finish, "min_margin": margin}
                if before is not None:
                    shared = common_prefix(before, prompt_ids)
                    turn |= {"prefix_extends": shared == len(before), "common_prefix": shared}
                    assert id in missed or turn["prefix_extends"] == (thinking is None), id
                turns.append(turn)
                before = prompt_ids + ids
                messages.append({"role": "assistant", "content": text})
            chats.append({"id": id, "system": chat.get("system"), "enable_thinking": thinking, "turns": turns})

    templates = []
    sample = [
        chatml.conversation(corpus.CHATS[0], 1, last_answer=False),
        chatml.conversation(corpus.CHATS[1], 2, last_answer=False),
        [
            {"role": "user", "content": "  two\nlines, with  spaces "},
            {"role": "assistant", "content": "<think>\nfirst a thought\n</think>\n\nThen the answer: naïve 東京 🦀"},
            {"role": "user", "content": "<b>\"again\" & more</b>"},
        ],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nkept\n</think>\n\na"}],
        [{"role": "system", "content": "only a system line"}],
    ]
    for messages in sample:
        for generation in (True, False):
            for thinking in (None, True, False) if generation and False in style.thinking else (None,):
                rendered = style.render(messages, generation, thinking)
                extra = {} if thinking is None else {"enable_thinking": thinking}
                assert rendered == auto.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation, **extra)
                templates.append({
                    "messages": messages, "add_generation_prompt": generation, "enable_thinking": thinking, "rendered": rendered,
                    "ids": style.encode_chat(tok, rendered),
                })

    assert apart < DRIFT, f"cached and uncached logits differ by {apart}"
    dump(out / "goldens.json", {
        "schema": "qhx-goldens/1", "model": name, "transformers": transformers.__version__, "torch": torch.__version__.split("+")[0],
        "seed": seed, "eos_ids": sorted(ends), "min_margin": round(worst, 4), "cases": cases, "chat": chats, "templates": templates,
    })
    dump(out / "suite.json", {"schema": "npu_suite/v1", "model": name, "gate": "greedy_exact", "cases": suite})
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    found = {"margin": worst, "where": where, "drift": apart, "learned": not missed, "missed": missed}
    return found | {"routing": nearest} if routed else found
