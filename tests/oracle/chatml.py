"""The tokenizer of the tiny models (Qwen-like byte-level BPE) and their ChatML template."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

# The published split expressions of the two tokenizer generations.
SPLIT = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen3_5": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# Added after the BPE vocabulary, in this order; the think marks are not special, as published.
ADDED = [("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<think>", False), ("</think>", False)]

TEMPLATE = r"""{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last_user = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if thought and loop.index0 > ns.last_user %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('unexpected role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""


def train_tokenizer(texts, size, split, added=ADDED):
    """Byte-level BPE of exactly `size` ids, the added tokens included."""
    tok = Tokenizer(BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT[split]), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    for text, special in added:
        tok.add_tokens([AddedToken(text, special=special, normalized=False)])
    assert tok.get_vocab_size() == size, (tok.get_vocab_size(), size)
    return tok


def write_tokenizer(tok, out, max_length, added=ADDED, template=TEMPLATE):
    tok.save(str(out / "tokenizer.json"))
    entry = lambda text, special: {
        "content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": special,
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(tok.token_to_id(t)): entry(t, s) for t, s in added},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": max_length,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    special = {
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "eos_token": entry("<|im_end|>", False),
        "pad_token": entry("<|endoftext|>", False),
    }
    for name, value in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        (out / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def render(messages, generation=True, thinking=None):
    """The template as `transformers` renders it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    extra = {} if thinking is None else {"enable_thinking": thinking}
    rendered, _ = render_jinja_template(
        conversations=[messages], chat_template=TEMPLATE, add_generation_prompt=generation, **extra
    )
    return rendered[0]


def conversation(chat, turns, last_answer=True):
    """Messages of a corpus chat up to turn `turns` (1-based)."""
    out = [{"role": "system", "content": chat["system"]}] if chat.get("system") else []
    for i, (user, answer) in enumerate(chat["turns"][:turns]):
        out.append({"role": "user", "content": user})
        if last_answer or i + 1 < turns:
            out.append({"role": "assistant", "content": answer})
    return out
