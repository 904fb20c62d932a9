"""Encoders and cross-encoders of further classes, that nobody trained: random weights in small shapes, in the layout in
which checkpoints of the class are published, and the vectors and scores that the class of `transformers` gives.

    pip install -r requirements.txt
    python text_encoders.py ../fixtures/encoders NAME…        # all without a name
    python text_encoders.py --unseen SEED /tmp/unseen NAME…   # other sizes, drawn from a seed

`goldens.json` has the texts with their ids and vectors, of one length of 1, or pairs of texts with their ids and scores.
Pooling and heads are repeated here in a few lines, so that nothing depends on how a library finds its modules.
"""

import json
import random
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from encoders import DOCUMENTS, QUERY, TEXTS, WORDS, bert_tokenizer, rounded
from goldens import dump

# Longer than the windows, and than the distances that have a bucket each.
LONG = " ".join(WORDS[:8] * 2)
SIZES = random.Random(0)


def drawn(least, most, default):
    """A size: the fixture's, or one drawn for an unseen model."""
    return SIZES.randint(least, most) if UNSEEN else default


UNSEEN = False


def sizes(vocab, **more):
    heads, dim = drawn(1, 4, 3), 2 * drawn(4, 9, 6)
    return {
        "vocab_size": vocab + drawn(0, 5, 3), "hidden_size": heads * dim, "num_hidden_layers": drawn(2, 5, 4),
        "num_attention_heads": heads, "intermediate_size": drawn(20, 60, 44), **more,
    }


def for_long_texts(out):
    path = out / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 320}, indent=2) + "\n")


def wordpiece(out):
    """Lower-cased, as of BERT."""
    vocab = bert_tokenizer(out, False, False)
    for_long_texts(out)
    return vocab


def sentencepiece(out):
    """As of XLM-RoBERTa."""
    vocab = bert_tokenizer(out, True, True)
    for_long_texts(out)
    return vocab


def mpnet_tokenizer(out):
    """Word pieces with the special tokens of RoBERTa; the unknown one is BERT's."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "<mask>"]
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.normalizer, tok.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tok.train_from_iterator(WORDS, trainers.WordPieceTrainer(vocab_size=160, special_tokens=special))
    fast = transformers.MPNetTokenizer(vocab=tok.get_vocab(), model_max_length=320)
    fast.save_pretrained(out)
    return tok.get_vocab_size()


def bytes_tokenizer(out):
    """Byte-level BPE with the special tokens of BERT, as of ModernBERT."""
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    tok = Tokenizer(models.BPE(unk_token="[UNK]"))
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet))
    ends = [(name, tok.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tok.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]",
        model_max_length=320, model_input_names=["input_ids", "attention_mask"],
    )
    fast.save_pretrained(out)
    return tok.get_vocab_size()


def save(model, out, config, rename=lambda name: name):
    """Tensors by the names, and a configuration with the keys, that published checkpoints have."""
    model.save_pretrained(out)
    tensors = load_file(out / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    saved = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config(saved), indent=2) + "\n")
    (out / "model.safetensors").chmod(0o644)


def modules(out, pooling, prompts=None):
    """The files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", "Normalize"]
    places = ["", "1_Pooling", "2_Normalize"]
    listed = [
        {"idx": i, "name": str(i), "path": places[i], "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)
    ]
    (out / "modules.json").write_text(json.dumps(listed, indent=2) + "\n")
    (out / "1_Pooling").mkdir()
    flags = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
    written = {key: way == pooling for way, key in flags.items()}
    (out / "1_Pooling/config.json").write_text(json.dumps(written, indent=2) + "\n")
    if prompts:
        (out / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}, indent=2) + "\n")


def rows(model, tok, text, pair=None):
    """The ids of a text or of a pair, and the last rows of the model."""
    inputs = tok(text, pair, return_tensors="pt")
    known = {"input_ids", "attention_mask", "token_type_ids"}
    inputs = {name: value for name, value in inputs.items() if name in known}
    with torch.no_grad():
        return inputs["input_ids"][0].tolist(), model(**inputs).last_hidden_state[0]


def vectors(model, out, pooling, prompts=None, **more):
    """The goldens of an encoder."""
    tok = transformers.AutoTokenizer.from_pretrained(out)
    texts = []
    for role, text in [*TEXTS, ("document", LONG)]:
        ids, last = rows(model, tok, (prompts or {}).get(role, "") + text)
        vector = last[0] if pooling == "cls" else last.mean(0)
        vector = torch.nn.functional.normalize(vector, dim=0)
        texts.append({"role": role, "text": text, "ids": ids, "vector": vector.tolist()})
    dump(out / "goldens.json", {"transformers": transformers.__version__, "texts": texts, **more})


def scores(model, out):
    """The goldens of a cross-encoder: what its head gives, which is no probability here."""
    tok = transformers.AutoTokenizer.from_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.1.0"}
    path.write_text(json.dumps(config, indent=2) + "\n")
    found = []
    for document in [*DOCUMENTS, LONG]:
        inputs = tok(QUERY, document, return_tensors="pt")
        with torch.no_grad():
            score = model(**inputs).logits[0, 0].item()
        found.append({"document": document, "ids": inputs["input_ids"][0].tolist(), "score": score})
    dump(out / "goldens.json", {"transformers": transformers.__version__, "query": QUERY, "pairs": found})


def modernbert_config(vocab):
    return transformers.ModernBertConfig(
        **sizes(vocab), max_position_embeddings=320, local_attention=2 * drawn(2, 9, 5), pad_token_id=3, bos_token_id=1,
        eos_token_id=2, cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=3, attn_implementation="eager",
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 2000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )


def modernbert_published(saved):
    """The keys of answerdotai/ModernBERT-base."""
    rope = saved.pop("rope_parameters")
    saved.pop("layer_types")
    return saved | {
        "global_attn_every_n_layers": 3, "global_rope_theta": rope["full_attention"]["rope_theta"],
        "local_rope_theta": rope["sliding_attention"]["rope_theta"], "reference_compile": True, "position_embedding_type": "absolute",
    }


def modernbert(out):
    """As gte-modernbert-base: the first row."""
    config = modernbert_config(bytes_tokenizer(out))
    model = rounded(transformers.ModernBertModel(config), 8.0)
    save(model, out, modernbert_published)
    modules(out, "cls")
    vectors(model, out, "cls")


def modernbert_reranker(out):
    """As gte-reranker-modernbert-base: the mean, and a head with a norm."""
    config = modernbert_config(bytes_tokenizer(out))
    config.num_labels, config.classifier_pooling = 1, "mean"
    model = rounded(transformers.ModernBertForSequenceClassification(config), 8.0)
    with torch.no_grad():
        model.classifier.weight.div_(64)
    save(model, out, modernbert_published)
    scores(model, out)


def mpnet(out):
    """As all-mpnet-base-v2, whose tensors have no prefix."""
    config = transformers.MPNetConfig(**sizes(mpnet_tokenizer(out)), max_position_embeddings=320 + 2)
    model = rounded(transformers.MPNetModel(config), 6.0)
    with torch.no_grad():
        model.encoder.relative_attention_bias.weight.mul_(4)
    save(model, out, lambda saved: saved | {"architectures": ["MPNetForMaskedLM"]})
    modules(out, "mean")
    vectors(model, out, "mean")


def mpnet_reranker(out):
    config = transformers.MPNetConfig(**sizes(mpnet_tokenizer(out)), max_position_embeddings=320 + 2, num_labels=1)
    model = rounded(transformers.MPNetForSequenceClassification(config), 6.0)
    # With the gain of heads the tangent's arguments reach 15, and f16 in transformers itself scores 0.023 off.
    with torch.no_grad():
        model.classifier.dense.weight.div_(8)
        model.classifier.out_proj.weight.div_(2)
    save(model, out, lambda saved: saved)
    scores(model, out)


def distilbert(out):
    """As msmarco-distilbert-base-v4 and multi-qa-distilbert-cos-v1."""
    common = sizes(wordpiece(out))
    config = transformers.DistilBertConfig(
        vocab_size=common["vocab_size"], dim=common["hidden_size"], n_layers=common["num_hidden_layers"],
        n_heads=common["num_attention_heads"], hidden_dim=common["intermediate_size"], max_position_embeddings=320,
    )
    model = rounded(transformers.DistilBertModel(config), 6.0)
    save(model, out, lambda saved: saved)
    modules(out, "mean")
    vectors(model, out, "mean")


NOMIC = {"query": "search_query: ", "document": "search_document: "}


def nomic(out):
    """As nomic-embed-text-v1.5, in the layout of its own code."""
    common = sizes(wordpiece(out), type_vocab_size=2)
    rope = {"rope_type": "default", "rope_theta": 300.0}
    config = transformers.NomicBertConfig(**common, max_position_embeddings=320, rope_parameters=rope)
    model = rounded(transformers.NomicBertModel(config), 6.0)

    def published(saved):
        return {
            "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu",
            "causal": False, "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False,
            "mlp_fc2_bias": False, "n_embd": common["hidden_size"], "n_head": common["num_attention_heads"],
            "n_inner": common["intermediate_size"], "n_layer": common["num_hidden_layers"], "n_positions": 320,
            "parallel_block": False, "prenorm": False, "qkv_proj_bias": False, "rotary_emb_base": 300,
            "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
            "rotary_scaling_factor": None, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True,
            "type_vocab_size": 2, "use_rms_norm": False, "vocab_size": common["vocab_size"], "torch_dtype": "float32",
        }

    save(model, out, published)
    modules(out, "mean", NOMIC)
    vectors(model, out, "mean", NOMIC)
    # The first values of a vector, as the card has it.
    goldens = json.loads((out / "goldens.json").read_text())
    tok = transformers.AutoTokenizer.from_pretrained(out)
    for text in goldens["texts"]:
        _, last = rows(model, tok, NOMIC[text["role"]] + text["text"])
        centred = torch.nn.functional.layer_norm(last.mean(0), (last.shape[1],))
        text["short"] = torch.nn.functional.normalize(centred[:16], dim=0).tolist()
    dump(out / "goldens.json", goldens)


def gte_config(vocab, types, factor=None):
    """The configuration, and the rotary keys of the layout. `ntk` is not known to `transformers`: what it comes to."""
    common = sizes(vocab, type_vocab_size=types)
    dim, theta = common["hidden_size"] // common["num_attention_heads"], 700.0
    rope = {"rope_type": "default", "rope_theta": theta}
    keys = {"rope_theta": theta, "rope_scaling": None}
    if factor:
        rope = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / dim)}
        keys["rope_scaling"] = {"type": "ntk", "factor": factor}
    config = transformers.GteConfig(**common, max_position_embeddings=320, rope_parameters=rope, pad_token_id=0, num_labels=1)
    return config, keys


def gte_published(name, keys):
    def published(saved):
        saved.pop("rope_parameters")
        return saved | keys | {
            "architectures": [name], "model_type": "new", "layer_norm_type": "layer_norm", "logn_attention_clip1": False,
            "logn_attention_scale": False, "pack_qkv": True, "position_embedding_type": "rope", "unpad_inputs": False,
            "use_memory_efficient_attention": False,
        }

    return published


def gte(out):
    """As gte-large-en-v1.5: scaled frequencies, two kinds of tokens."""
    config, keys = gte_config(wordpiece(out), 2, 2.0)
    model = rounded(transformers.GteModel(config), 6.0)
    save(model, out, gte_published("NewModel", keys))
    modules(out, "cls")
    vectors(model, out, "cls")


def gte_reranker(out):
    """As gte-multilingual-reranker-base."""
    config, keys = gte_config(sentencepiece(out), 1)
    config.pad_token_id = 1
    model = rounded(transformers.GteForSequenceClassification(config), 6.0)
    save(model, out, gte_published("NewForSequenceClassification", keys), lambda name: name.replace("gte.", "new."))
    scores(model, out)


TASKS = {"retrieval.query": "Represent the query: ", "retrieval.passage": "Represent the document: ", "separation": ""}


def jina(out):
    """As jina-embeddings-v3, in the layout of its own code: adapters stand beside each weight."""
    vocab = sentencepiece(out)
    common = sizes(vocab, type_vocab_size=1, pad_token_id=1, bos_token_id=0, eos_token_id=2, layer_norm_eps=1e-5)
    rope = {"rope_type": "default", "rope_theta": 400.0}
    config = transformers.JinaEmbeddingsV3Config(**common, max_position_embeddings=322, rope_parameters=rope)
    model = rounded(transformers.JinaEmbeddingsV3Model(config, add_pooling_layer=True), 6.0)
    keys = {
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "position_embedding_type": "rotary",
        "rotary_emb_base": 400.0, "lora_adaptations": list(TASKS), "lora_alpha": 3, "lora_rank": 4, "lora_dropout_p": 0.0,
        "task_instructions": TASKS, "load_trained_adapters": True, "matryoshka_dimensions": [8, 16], "truncate_dim": None,
        "use_flash_attn": True,
    }
    save(model, out, lambda saved: {key: value for key, value in (saved | keys).items() if key != "rope_parameters"})
    modules(out, "mean")
    vectors(model, out, "mean")
    goldens = json.loads((out / "goldens.json").read_text())
    # Adapters, and the vectors with that of passages.
    tensors, plain = {}, load_file(out / "model.safetensors")
    task = list(TASKS).index("retrieval.passage")
    for name, weight in plain.items():
        if weight.dim() != 2:
            tensors[f"roberta.{name}"] = weight
            continue
        (outputs, inputs), rank, place = weight.shape, 4, f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        table = "embeddings" in name
        first, second = ((outputs, rank), (rank, inputs)) if table else ((rank, inputs), (outputs, rank))
        a, b = [(0.3 * torch.randn(len(TASKS), *shape)).to(torch.bfloat16).float() for shape in (first, second)]
        tensors |= {f"{place}.original": weight, f"{place}.0.lora_A": a, f"{place}.0.lora_B": b}
        plain[name] = weight + (a[task] @ b[task] if table else b[task] @ a[task]) * (3 / 4)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    base = out / "base"
    model.save_pretrained(base)
    save_file(plain, base / "model.safetensors", {"format": "pt"})
    adapted = transformers.JinaEmbeddingsV3Model.from_pretrained(base).eval()
    tok = transformers.AutoTokenizer.from_pretrained(out)
    for text in goldens["texts"]:
        ids, last = rows(adapted, tok, TASKS["retrieval.passage"] + text["text"])
        text["passage_ids"], text["passage"] = ids, torch.nn.functional.normalize(last.mean(0), dim=0).tolist()
    shutil.rmtree(base)
    dump(out / "goldens.json", goldens)


def bge_m3(out):
    """As bge-m3: heads for the weights and the vectors of tokens beside the model, by the rules of FlagEmbedding."""
    sizes_of = sizes(sentencepiece(out), type_vocab_size=1, pad_token_id=1, bos_token_id=0, eos_token_id=2, layer_norm_eps=1e-5)
    config = transformers.XLMRobertaConfig(**sizes_of, max_position_embeddings=322)
    model = rounded(transformers.XLMRobertaModel(config), 6.0)
    save(model, out, lambda saved: saved)
    modules(out, "cls")
    vectors(model, out, "cls")
    width = config.hidden_size
    sparse, colbert = torch.nn.Linear(width, 1), torch.nn.Linear(width, drawn(8, 50, 20))
    for name, head in (("sparse_linear.pt", sparse), ("colbert_linear.pt", colbert)):
        torch.save(head.half().state_dict(), out / name)
        head.float()
    goldens = json.loads((out / "goldens.json").read_text())
    tok = transformers.AutoTokenizer.from_pretrained(out)
    unused = {tok.cls_token_id, tok.eos_token_id, tok.pad_token_id, tok.unk_token_id}
    for text in goldens["texts"]:
        ids, last = rows(model, tok, text["text"])
        with torch.no_grad():
            weights = torch.relu(sparse(last))[:, 0].tolist()
            multi = torch.nn.functional.normalize(colbert(last[1:]), dim=-1)
        found = {}
        for token, weight in zip(ids, weights):
            if token not in unused and weight > found.get(token, 0):
                found[token] = weight
        text["sparse"] = [list(item) for item in sorted(found.items())]
        text["multi"] = [len(multi), *multi[0].tolist(), *multi[-1].tolist()]
    dump(out / "goldens.json", goldens)


def ministral3(out):
    """As NeMo saves `Ministral3BidirectionalModel`: every token sees every other, the mean of rows."""
    common = sizes(bytes_tokenizer(out))
    rope = {
        "rope_type": "yarn", "rope_theta": 900.0, "factor": 5.0, "original_max_position_embeddings": 320,
        "beta_fast": 6.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4,
    }
    config = transformers.Ministral3Config(
        **common, num_key_value_heads=1, head_dim=2 * drawn(4, 9, 5), max_position_embeddings=320, rope_parameters=rope,
        sliding_window=None, rms_norm_eps=1e-5,
    )
    model = rounded(transformers.Ministral3Model(config), 6.0)
    names = {"architectures": ["Ministral3BidirectionalModel"], "model_type": "ministral3_bidirec"}
    save(model, out, lambda saved: {**saved, **names, "pooling": "avg", "temperature": 0.02})
    # A mask of four dimensions is taken as it is.
    forward = model.forward
    model.forward = lambda input_ids, **_: forward(
        input_ids=input_ids, attention_mask=torch.zeros(1, 1, input_ids.shape[1], input_ids.shape[1])
    )
    vectors(model, out, "mean")


MAKE = {
    "modernbert": modernbert,
    "modernbert-reranker": modernbert_reranker,
    "mpnet": mpnet,
    "mpnet-reranker": mpnet_reranker,
    "distilbert": distilbert,
    "nomic": nomic,
    "gte": gte,
    "gte-reranker": gte_reranker,
    "jina": jina,
    "bge-m3": bge_m3,
    "ministral3": ministral3,
}

if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    arguments = sys.argv[1:]
    seed = 31
    if arguments[0] == "--unseen":
        UNSEEN, seed, arguments = True, int(arguments[1]), arguments[2:]
    for name in arguments[1:] or MAKE:
        SIZES.seed(f"{seed} {name}")
        torch.manual_seed(seed)
        made = Path(arguments[0]) / name
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        MAKE[name](made)
