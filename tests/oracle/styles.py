"""Tokenizers and chat templates of the families: Qwen (chatml.py), Llama 3, and the SentencePiece-like ones of Mistral and Gemma."""

import collections
import json
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

import chatml


def entry(text, special=True):
    return {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": special}


class Style:
    """What differs between families in text. `bos` is None or the text that the tokenizer puts in front."""

    bos = None
    thinking = (None,)
    composes = False
    pads = False

    def encode(self, tok, text):
        """A prompt: with whatever the tokenizer adds."""
        return tok.encode(text).ids

    def encode_chat(self, tok, rendered):
        """A rendered conversation: the template has written BOS itself."""
        return tok.encode(rendered, add_special_tokens=False).ids

    def answer(self, text):
        """An answer as the template continues the generation prompt with it."""
        return text + self.end_turn

    def plain(self, tok, ids):
        """Text of a sequence, special tokens included but for BOS."""
        return tok.decode(ids[self.bos is not None :], skip_special_tokens=False)

    def ends(self, tok):
        return list(dict.fromkeys(tok.token_to_id(t) for t in (self.end_turn, self.end_text)))

    def render(self, messages, generation=True, thinking=None):
        from transformers.utils.chat_template_utils import render_jinja_template

        names = {"bos_token": self.bos, "eos_token": self.end_turn}
        rendered, _ = render_jinja_template(
            conversations=[messages], chat_template=self.template, add_generation_prompt=generation, **names
        )
        return rendered[0]

    def write(self, tok, out, max_length, **more):
        tok.save(str(out / "tokenizer.json"))
        config = {
            "added_tokens_decoder": {str(tok.token_to_id(t)): entry(t) for t in self.added},
            "bos_token": self.bos,
            "chat_template": self.template,
            "clean_up_tokenization_spaces": False,
            "eos_token": self.end_turn,
            "model_max_length": max_length,
            "tokenizer_class": "PreTrainedTokenizerFast",
            **more,
        }
        special = {"bos_token": self.bos, "eos_token": self.end_turn}
        special |= {k: v for k, v in more.items() if k in ("pad_token", "unk_token")}
        for name, value in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
            (out / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class Qwen(Style):
    end_text, end_turn = "<|endoftext|>", "<|im_end|>"
    thinking = (None, False)
    composes = True
    pads = True

    def train(self, texts, size, split):
        return chatml.train_tokenizer(texts, size, split)

    def write(self, tok, out, max_length):
        chatml.write_tokenizer(tok, out, max_length)

    def render(self, messages, generation=True, thinking=None):
        return chatml.render(messages, generation, thinking)


class Llama3(Style):
    """Byte-level BPE, digits in threes, no normaliser; BOS from the post-processor."""

    bos, end_text, end_turn = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
    added = [bos, end_text, "<|start_header_id|>", "<|end_header_id|>", end_turn]
    split = chatml.SPLIT["qwen2"].replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
    template = (
        "{%- for message in messages %}"
        "{%- if loop.first %}{{- bos_token }}{%- endif %}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
    )

    def train(self, texts, size, split=None):
        tok = Tokenizer(BPE(ignore_merges=True))
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(self.split), behavior="isolated"), level])
        tok.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=size - len(self.added), initial_alphabet=alphabet, show_progress=False)
        tok.train_from_iterator(texts, trainer)
        tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in self.added])
        front = processors.TemplateProcessing(
            single=f"{self.bos} $A", pair=f"{self.bos} $A {self.bos} $B:1", special_tokens=[(self.bos, tok.token_to_id(self.bos))]
        )
        tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), front])
        assert tok.get_vocab_size() == size, (tok.get_vocab_size(), size)
        return tok


class Mistral(Style):
    """SentencePiece-like BPE: spaces as ▁, one put in front, bytes for rare characters; BOS from the post-processor."""

    bos, end_text, end_turn = "<s>", "</s>", "</s>"
    added = ["<unk>", "<s>", "</s>"]
    template = (
        "{%- set ns = namespace(system='') %}{{- bos_token }}"
        "{%- for message in messages %}"
        "{%- if message['role'] == 'system' %}{%- set ns.system = message['content'] + '\\n\\n' %}"
        "{%- elif message['role'] == 'user' %}"
        "{{- '[INST] ' + ns.system + message['content'] + ' [/INST]' }}{%- set ns.system = '' %}"
        "{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}"
        "{%- else %}{{- raise_exception('unexpected role: ' + message['role']) }}{%- endif %}"
        "{%- endfor %}"
    )

    lead, marks_text = "▁", "[INST] [/INST]"

    def answer(self, text):
        return " " + text + self.end_turn

    def train(self, texts, size, split=None):
        marked = [self.lead + t.replace(" ", "▁") for t in [*texts, self.marks_text]]
        counts = collections.Counter(c for t in marked for c in t)
        common = {c for c, n in counts.items() if n >= 4} | set(self.marks_text.replace(" ", "▁"))
        rare = "[^" + "".join(re.escape(c) for c in sorted(common)) + "]+"
        words = [part for t in marked for word in re.findall("▁?[^▁]*", t) for part in re.split(rare, word) if part]
        fixed = self.added + [f"<0x{b:02X}>" for b in range(256)]
        learner = Tokenizer(BPE())
        learner.train_from_iterator(words, trainers.BpeTrainer(vocab_size=size - len(fixed), show_progress=False))
        learned = json.loads(learner.to_str())["model"]
        assert set(fixed).isdisjoint(learned["vocab"])
        vocab = {t: i for i, t in enumerate(fixed)} | {t: i + len(fixed) for t, i in learned["vocab"].items()}
        merges = [tuple(m) for m in learned["merges"]]
        tok = Tokenizer(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        self.surround(tok)
        tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in self.added])
        front = f"{self.bos} $A" if self.bos else "$A"
        tok.post_processor = processors.TemplateProcessing(
            single=front, pair=f"{front} {front.replace('$A', '$B:1')}", special_tokens=[(self.bos, tok.token_to_id(self.bos))] if self.bos else []
        )
        assert tok.get_vocab_size() == size, (tok.get_vocab_size(), size)
        return tok

    def surround(self, tok):
        """What goes before and after the vocabulary."""
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tok.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )

    def write(self, tok, out, max_length, **more):
        super().write(tok, out, max_length, add_bos_token=True, add_eos_token=False, unk_token="<unk>", **more)


class Phi3(Mistral):
    """The tokenizer of Mistral without BOS, with marks around each message; a mark takes the line end after it along."""

    bos, end_text, end_turn = None, "<|endoftext|>", "<|end|>"
    marks = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
    template = (
        "{%- for message in messages %}"
        "{%- if message['role'] in ('system', 'user', 'assistant') %}"
        "{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
        "{%- else %}{{- raise_exception('unexpected role: ' + message['role']) }}{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
    )

    def answer(self, text):
        return text + self.end_turn

    def train(self, texts, size, split=None):
        tok = super().train(texts, size - len(self.marks))
        tok.add_special_tokens([AddedToken(t, special=True, normalized=False, rstrip=True) for t in self.marks])
        assert tok.get_vocab_size() == size, (tok.get_vocab_size(), size)
        return tok

    def write(self, tok, out, max_length):
        super().write(tok, out, max_length)
        path = out / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["added_tokens_decoder"] |= {str(tok.token_to_id(t)): entry(t) | {"rstrip": True} for t in self.marks}
        config["add_bos_token"] = False
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class Gemma(Mistral):
    """The tokenizer of Mistral without a space in front; the template calls the assistant `model` and has no system turn."""

    bos, end_text, end_turn = "<bos>", "<eos>", "<end_of_turn>"
    added = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    lead, marks_text = "", "user\nmodel\n"
    template = (
        "{{ bos_token }}"
        "{%- if messages[0]['role'] == 'system' %}"
        "{%- set first_user_prefix = messages[0]['content'] + '\n\n' %}{%- set loop_messages = messages[1:] %}"
        "{%- else %}{%- set first_user_prefix = '' %}{%- set loop_messages = messages %}{%- endif %}"
        "{%- for message in loop_messages %}"
        "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
        "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}"
        "{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"
    )

    def answer(self, text):
        return text + self.end_turn

    def surround(self, tok):
        tok.normalizer = normalizers.Replace(" ", "▁")
        tok.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])

    def write(self, tok, out, max_length):
        super().write(tok, out, max_length, pad_token="<pad>")


class Gemma3(Gemma):
    """As Gemma, with marks around images, and lines that are empty as tokens."""

    added = [*Gemma.added, "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    marks_text = "user\nmodel\n" + "user\n\n\n" * 8
    template = Gemma.template.replace(
        "{{ message['content'] | trim }}",
        "{%- if message['content'] is string %}{{ message['content'] | trim }}"
        "{%- else %}{%- for item in message['content'] %}"
        "{%- if item['type'] == 'image' %}{{ '<start_of_image>' }}"
        "{%- elif item['type'] == 'text' %}{{ item['text'] | trim }}{%- endif %}"
        "{%- endfor %}{%- endif %}",
    )


class Gemma4(Gemma):
    """As Gemma, with turns of any role, thoughts in a channel, and marks for images, clips and films."""

    end_turn = "<turn|>"
    added = [
        "<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|image>", "<|audio>", "<|image|>",
        "<|audio|>", "<image|>", "<audio|>", "<|video|>",
    ]
    marks_text = "user\nmodel\nsystem\nthought\n"
    template = (
        "{{- bos_token }}"
        "{%- for message in messages %}"
        "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{- '<|turn>' + role + '\n' }}"
        "{%- if message['content'] is string %}"
        "{%- if role == 'model' and '<channel|>' in message['content'] %}{{- message['content'].split('<channel|>')[-1] | trim }}"
        "{%- else %}{{- message['content'] | trim }}{%- endif %}"
        "{%- else %}{%- for part in message['content'] %}"
        "{%- if part['type'] == 'text' %}{{- part['text'] | trim }}"
        "{%- elif part['type'] == 'image' %}{{- '<|image|>' }}"
        "{%- elif part['type'] == 'audio' %}{{- '<|audio|>' }}"
        "{%- elif part['type'] == 'video' %}{{- '<|video|>' }}{%- endif %}"
        "{%- endfor %}{%- endif %}"
        "{{- '<turn|>\n' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|turn>model\n' }}{%- endif %}"
    )


STYLES = {"qwen": Qwen(), "llama3": Llama3(), "mistral": Mistral(), "phi3": Phi3(), "gemma": Gemma(), "gemma3": Gemma3(), "gemma4": Gemma4()}
