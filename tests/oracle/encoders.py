"""Encoders and rerankers that nobody trained: random weights in small shapes, and the vectors and scores that
`sentence-transformers` makes of texts.

    pip install -r requirements.txt sentence-transformers==6.2.0
    python encoders.py ../fixtures NAME…

Random weights make every part matter. `goldens.json` has the texts with their ids and their vectors, or pairs of texts
with their ids and scores.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from goldens import dump

FIXTURES = Path(__file__).parent / "../fixtures"
# Role and text. The third is longer than two windows.
TEXTS = [
    ("query", "Who wrote this?"),
    ("document", "a"),
    ("document", "Paris is the capital of France, and bread is baked of flour, water and salt by those who rise early."),
    ("query", "naïve café, 東京"),
    ("document", "Two short words."),
]


def rounded(model, gain=1.0):
    """Weights that bf16 and f16 hold, larger than a fresh model's, so that attention is sharp and mistakes show."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.mul_(gain * (8 if "classifier" in name else 1))
            else:
                p.add_(0.2 * torch.randn_like(p))
            p.copy_(p.to(torch.bfloat16))
            p[p.abs() < 1e-4] = 0
    return model.float().eval()


def tokenizer(source, out, max_length):
    """The tokenizer of another fixture."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(FIXTURES / source / name, out / name)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    config["model_max_length"] = max_length
    path.write_text(json.dumps(config, indent=2) + "\n")


def vectors(out):
    """The goldens of a saved model."""
    model = SentenceTransformer(str(out), device="cpu")
    texts = []
    for role, text in TEXTS:
        prompt = model.prompts.get(role) or ""
        ids = model.tokenizer(prompt + text)["input_ids"]
        vector = model.encode(text, prompt=prompt)
        texts.append({"role": role, "text": text, "ids": ids, "vector": [float(v) for v in vector]})
    dump(out / "goldens.json", {"transformers": transformers.__version__, "texts": texts})


def gemma(out):
    """As EmbeddingGemma: sliding layers that see both ways, two dense layers, prompts."""
    torch.manual_seed(7)
    config = transformers.Gemma3TextConfig(
        vocab_size=481, hidden_size=48, intermediate_size=56, num_hidden_layers=4, num_attention_heads=3,
        num_key_value_heads=1, head_dim=20, query_pre_attn_scalar=30, sliding_window=12, max_position_embeddings=128,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        use_bidirectional_attention=True, bos_token_id=2, eos_token_id=1, pad_token_id=0, dtype="float32",
    )
    model = rounded(transformers.Gemma3TextModel(config), 8.0)
    base = out / "base"
    model.save_pretrained(base)
    tokenizer("gemma3-tiny", base, 128)
    parts = [
        Transformer(str(base)),
        Pooling(48, pooling_mode="mean"),
        rounded(Dense(48, 64, bias=False, activation_function=torch.nn.Identity())),
        rounded(Dense(64, 40, bias=False, activation_function=torch.nn.Identity())),
        Normalize(),
    ]
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    SentenceTransformer(modules=parts, prompts=prompts, device="cpu").save(str(out), create_model_card=False)
    shutil.rmtree(base)


QUERY = "Who wrote this, and when?"
DOCUMENTS = [
    "a",
    "Paris is the capital of France.",
    "Bread is baked of flour, water and salt by those who rise early, and eaten by those who do not.",
    "naïve café, 東京",
    "Nobody knows who wrote this.",
]
# Tokens that pairs are cut to: the texts of one are longer each than half of it.
LIMIT = 30
# Text for the vocabularies.
WORDS = [QUERY, *DOCUMENTS, *(text for _, text in TEXTS), "the quick brown fox jumps over the lazy dog 0123456789"]


def bert_tokenizer(out, cased, roberta):
    """A tokenizer with the special tokens, and the layout of pairs, of BERT or of XLM-RoBERTa."""
    if roberta:
        tok, special = Tokenizer(models.Unigram()), ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        tok.pre_tokenizer, tok.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=special, unk_token="<unk>")
        cls, sep, pad, unk = "<s>", "</s>", "<pad>", "<unk>"
        single, pair = "<s> $A </s>", "<s> $A </s> </s> $B </s>"
    else:
        tok, special = Tokenizer(models.WordPiece(unk_token="[UNK]")), ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tok.normalizer, tok.pre_tokenizer = normalizers.BertNormalizer(lowercase=not cased), pre_tokenizers.BertPreTokenizer()
        tok.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=special)
        cls, sep, pad, unk = "[CLS]", "[SEP]", "[PAD]", "[UNK]"
        single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    tok.train_from_iterator(WORDS, trainer)
    ends = [(name, tok.token_to_id(name)) for name in (cls, sep)]
    tok.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok, cls_token=cls, sep_token=sep, pad_token=pad, unk_token=unk, model_max_length=96,
        bos_token=cls, eos_token=sep, model_input_names=["input_ids", "attention_mask"] + ([] if roberta else ["token_type_ids"]),
    )
    fast.save_pretrained(out)
    return tok.get_vocab_size()


def bert_sizes(vocab, **more):
    return {
        "vocab_size": vocab, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 44,
        "num_labels": 1, **more,
    }


def bert(out):
    """As all-MiniLM-L6-v2: the mean of all rows."""
    torch.manual_seed(11)
    vocab = bert_tokenizer(out, False, False)
    config = transformers.BertConfig(**bert_sizes(vocab, max_position_embeddings=96))
    base = out / "base"
    rounded(transformers.BertModel(config), 6.0).save_pretrained(base)
    for file in out.glob("*.json"):
        shutil.copy(file, base)
    parts = [Transformer(str(base)), Pooling(36, pooling_mode="mean"), Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(out), create_model_card=False)
    shutil.rmtree(base)


def bert_reranker(out):
    """As ms-marco-MiniLM: token types, scores that are logits."""
    torch.manual_seed(13)
    vocab = bert_tokenizer(out, True, False)
    config = transformers.BertConfig(**bert_sizes(vocab, max_position_embeddings=96))
    config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0.1"}
    rounded(transformers.BertForSequenceClassification(config), 6.0).save_pretrained(out)


def roberta_reranker(out):
    """As bge-reranker-v2-m3: positions behind the padding's, one token type."""
    torch.manual_seed(17)
    vocab = bert_tokenizer(out, True, True)
    sizes = bert_sizes(vocab, max_position_embeddings=98, type_vocab_size=1, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    config = transformers.XLMRobertaConfig(**sizes, layer_norm_eps=1e-5)
    rounded(transformers.XLMRobertaForSequenceClassification(config), 6.0).save_pretrained(out)


def pairs(out):
    """The goldens of a saved cross-encoder."""
    model = CrossEncoder(str(out), device="cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    found = []
    for document in DOCUMENTS:
        score = model.predict([(QUERY, document)])[0]
        found.append({"document": document, "ids": tokenizer(QUERY, document)["input_ids"], "score": float(score)})
    dump(out / "goldens.json", {"transformers": transformers.__version__, "query": QUERY, "pairs": found})


def truncated(out):
    """Pairs that are too long, of a saved cross-encoder: the longer text is cut."""
    goldens = json.loads((out / "goldens.json").read_text())
    model = CrossEncoder(str(out), device="cpu", max_length=LIMIT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    goldens["limit"], goldens["truncated"] = LIMIT, []
    for query, document in [(QUERY, DOCUMENTS[2]), (DOCUMENTS[2], QUERY), (DOCUMENTS[2], DOCUMENTS[2])]:
        ids = tokenizer(query, document, truncation="longest_first", max_length=LIMIT)["input_ids"]
        score = float(model.predict([(query, document)])[0])
        goldens["truncated"].append({"query": query, "document": document, "ids": ids, "score": score})
    dump(out / "goldens.json", goldens)


def decoder_sizes(vocab):
    return {
        "vocab_size": vocab, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12, "intermediate_size": 52, "max_position_embeddings": 192, "num_labels": 1,
    }


def llama_reranker(out):
    """As llama-3.2-nv-rerankqa-1b-v2, whose own code this repeats: both ways, the mean, a temperature."""
    torch.manual_seed(19)
    tokenizer("llama3-tiny", out, 192)
    tok = transformers.AutoTokenizer.from_pretrained(out)
    config = transformers.LlamaConfig(**decoder_sizes(len(tok) + 3), rope_theta=500.0, is_causal=False)
    model = rounded(transformers.LlamaForSequenceClassification(config), 8.0)
    model.save_pretrained(out)
    path = out / "config.json"
    saved = json.loads(path.read_text())
    saved |= {"architectures": ["LlamaBidirectionalForSequenceClassification"], "model_type": "llama_bidirec", "pooling": "avg",
              "temperature": 0.2}
    path.write_text(json.dumps(saved, indent=2) + "\n")
    found = []
    for document in DOCUMENTS:
        ids = tok(f"question:{QUERY} \n \n passage:{document}")["input_ids"]
        with torch.no_grad():
            rows = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
            logit = model.score(rows.mean(0)) / 0.2
        found.append({"document": document, "ids": ids, "score": torch.sigmoid(logit).item()})
    dump(out / "goldens.json", {"transformers": transformers.__version__, "query": QUERY, "pairs": found})


def qwen3_reranker(out):
    """A causal model that scores the last token of a pair."""
    torch.manual_seed(23)
    tokenizer("qwen3-tiny", out, 192)
    tok = transformers.AutoTokenizer.from_pretrained(out)
    config = transformers.Qwen3Config(**decoder_sizes(len(tok) + 3), pad_token_id=0)
    rounded(transformers.Qwen3ForSequenceClassification(config), 8.0).save_pretrained(out)


MAKE = {
    "embeddinggemma-tiny": (gemma, vectors),
    "embed-bert-tiny": (bert, vectors),
    "rerank-bert-tiny": (bert_reranker, pairs, truncated),
    "rerank-xlmr-tiny": (roberta_reranker, pairs, truncated),
    "rerank-llama-tiny": (llama_reranker,),
    "rerank-qwen3-tiny": (qwen3_reranker, pairs, truncated),
}

if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    for name in sys.argv[2:]:
        out = Path(sys.argv[1]) / name
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        for step in MAKE[name]:
            step(out)
