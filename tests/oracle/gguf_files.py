"""Tokenizers within GGUF files, and what their programs make of texts, in `../fixtures/gguf`.

    pip install gguf==0.19.0 sentencepiece==0.2.3 && python gguf_files.py ../fixtures

`NAME.gguf` of byte-level tokenizers is made of `../fixtures/NAME/tokenizer.json` as `convert_hf_to_gguf.py` does it
(`_set_vocab_gpt2`, with the package's `SpecialVocab`), and compared with that file. `spm.gguf` and `spm-plain.gguf` hold
tokenizers that sentencepiece trains here on the text of `corpus.py` (`_set_vocab_sentencepiece`), the first with a space
before each text and the second without and with symbols of its own, as Gemma's has. `spm.json` has the SHA-256 of the
ids that sentencepiece gives for texts of `pieces`: text N is drawn by a generator of numbers that is seeded with N.

`qwen3-moe.gguf` is the whole of `../fixtures/qwen3-moe` as `llama-quantize` stores it in Q8_0: experts of a layer in
one tensor, norms and routers in f32, the tokenizer inside.

`names.json` has the names that the package's tables give the tensors of tiny models.
"""

import hashlib
import io
import json
import re
import sys
from pathlib import Path

import gguf
import numpy as np

from corpus import CHATS, FACTS, LONG

PIECES = [
    "The", " capital", " of", " Fran", "ce", " is", " Paris", "  ", "   ", "\n", "\n\n", "\t", " ", "'s", "'LL", "n't",
    "7", "1234", "12,345.67", "é", "e\u0301", "Zürich", "富士山", "привет", "γειά", "안녕", "🦀", "👩‍🚀", "?!", "...", "->",
    "fn main() {", "}", "\r\n", "x=1;", "CamelCase", "a\u00a0b", "ſ", "ﬁ", "हिन्दी", "ไทย", "\u200d", "—", "“q”", "@#$", "_a_b",
    "bread", " warm", "SKY", " and", "ing", "<b>", "\u2581", "\x00\x01", "½", "Ⅷ", "٣",
]
TEXTS = 2000


def text(number):
    state = number

    def draw(below):
        nonlocal state
        state = (state * 1664525 + 1013904223) % 2**32
        return (state >> 16) % below

    return "".join(PIECES[draw(len(PIECES))] for _ in range(1 + draw(16)))


def write(path, add, architecture="llama", blocks=1):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(blocks)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_level(folder, pre, pad):
    def add(writer):
        document = json.loads((folder / "tokenizer.json").read_text())
        tokens = {id: token for token, id in document["model"]["vocab"].items()}
        types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
        for added in document["added_tokens"]:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        count = max(tokens) + 1 + pad
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([tokens.get(id, f"[PAD{id}]") for id in range(count)])
        writer.add_token_types([types.get(id, gguf.TokenType.UNUSED) for id in range(count)])
        gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer)

    return add


def sentence_pieces(prefix, symbols):
    import sentencepiece as spm

    lines = [line for line in "\n".join(FACTS + [LONG] + [t for c in CHATS for turn in c["turns"] for t in turn]).split("\n")]
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 4), model_writer=model, model_type="bpe", vocab_size=900, byte_fallback=True,
        character_coverage=0.999, normalization_rule_name="identity", add_dummy_prefix=prefix,
        remove_extra_whitespaces=False, user_defined_symbols=symbols, split_digits=True, allow_whitespace_only_pieces=True,
        num_threads=1, minloglevel=2,
    )
    processor = spm.SentencePieceProcessor(model_proto=model.getvalue())

    def add(writer):
        ids = range(processor.vocab_size())

        def kind(id):
            for found, test in [
                (gguf.TokenType.UNKNOWN, processor.is_unknown), (gguf.TokenType.CONTROL, processor.is_control),
                (gguf.TokenType.UNUSED, processor.is_unused), (gguf.TokenType.BYTE, processor.is_byte),
            ]:
                if test(id):
                    return found
            return gguf.TokenType.USER_DEFINED if processor.id_to_piece(id) in symbols else gguf.TokenType.NORMAL

        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([processor.id_to_piece(id).encode() for id in ids])
        writer.add_token_scores([processor.get_score(id) for id in ids])
        writer.add_token_types([kind(id) for id in ids])
        writer.add_add_space_prefix(prefix)
        writer.add_bos_token_id(processor.bos_id())
        writer.add_eos_token_id(processor.eos_id())
        writer.add_unk_token_id(processor.unk_id())
        writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")

    return processor, add


MODELS = {
    "llama3-tiny": "llama", "qwen2-tiny": "qwen2", "qwen3-tiny": "qwen3", "qwen3vl-tiny": "qwen3vl",
    "qwen35-blocks": "qwen35", "gemma3-tiny": "gemma3", "gemma4-tiny": "gemma4", "lfm2-tiny": "lfm2",
    "phimoe-blocks": "phimoe", "qwen3-moe": "qwen3moe", "lfm2-moe": "lfm2moe",
}


def tensors(folder):
    """What the files of a checkpoint say of each tensor, and its bytes."""
    found = {}
    for file in folder.glob("model*.safetensors"):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, value in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = value["data_offsets"]
                found[name] = (value, data[start + first : start + last])
    return found


def floats(value, data):
    """Values of a tensor in BF16 or F32."""
    bits = np.frombuffer(data, "<u2").astype("<u4") << 16 if value["dtype"] == "BF16" else np.frombuffer(data, "<u4")
    return bits.view("<f4").reshape(value["shape"])


def names(folder, architecture):
    """llama.cpp's names of the decoder's tensors, after the changes to names in `modify_tensors` of the converter."""
    found = tensors(folder)
    numbers = {name: id for id, name in gguf.MODEL_ARCH_NAMES.items()}
    # The tiny model has layers without experts, which those that llama.cpp knows do not have.
    kinds = [architecture, architecture.removesuffix("moe")] if architecture == "qwen3moe" else [architecture]
    tables = [gguf.get_tensor_name_map(numbers[kind], 64) for kind in kinds]
    named = {}
    for name in sorted(found):
        if any(part in name for part in ("visual", "vision", "audio")):
            continue
        plain = name.replace("model.language_model.", "model.")
        plain = re.sub(r"\.dt_bias$", ".dt_proj.bias", plain)
        plain = re.sub(r"\.layer_scalar$", ".layer_scalar.weight", plain)
        plain = re.sub(r"\.expert_bias$", ".expert_bias.bias", plain)
        plain = re.sub(r"((?:block_sparse_moe|mlp|feed_forward)\.experts)\.\d+\.", r"\1.", plain)
        # As `MOE_BLOCK_SPARSE` of the converter.
        plain = re.sub(r"^model\.(layers\.\d+\.feed_forward\.experts)", r"\1", plain)
        theirs = [table.get_name(plain, try_suffixes=(".weight", ".bias")) for table in tables]
        theirs = next(filter(None, theirs), None)
        assert theirs, plain
        named[re.sub(r"\b(layers|experts)\.\d+", r"\1.N", name)] = re.sub(r"^blk\.\d+", "blk.N", theirs)
    return named


def with_experts(folder, architecture):
    """All of a model, but its number of blocks, in Q8_0."""
    config = json.loads((folder / "config.json").read_text())
    named, found = names(folder, architecture), {}
    order = lambda item: [int(part) if part.isdigit() else part for part in item[0].split(".")]
    for name, tensor in sorted(tensors(folder).items(), key=order):
        layer = re.search(r"layers\.(\d+)", name)
        theirs = named[re.sub(r"\b(layers|experts)\.\d+", r"\1.N", name)].replace("blk.N", f"blk.{layer and layer[1]}")
        found.setdefault(theirs, []).append(floats(*tensor))

    def add(writer):
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        byte_level(folder, "qwen2", 0)(writer)
        for name, parts in found.items():
            values = np.stack(parts) if "_exps" in name else parts[0]
            kind = gguf.GGMLQuantizationType.Q8_0
            if "norm" in name or "_inp" in name:
                kind = gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    return add, config["num_hidden_layers"]


def main(fixtures):
    out = fixtures / "gguf"
    out.mkdir(exist_ok=True)
    for name, pre, pad in [("llama3-tiny", "llama-bpe", 0), ("qwen2-tiny", "qwen2", 5), ("qwen35-tied", "qwen35", 3)]:
        write(out / f"{name}.gguf", byte_level(fixtures / name, pre, pad))
    add, blocks = with_experts(fixtures / "qwen3-moe", "qwen3moe")
    write(out / "qwen3-moe.gguf", add, "qwen3moe", blocks)
    mapped = {folder: {"architecture": name, "names": names(fixtures / folder, name)} for folder, name in MODELS.items()}
    (out / "names.json").write_text(json.dumps(mapped, indent=0) + "\n")
    expected = {"pieces": PIECES, "texts": TEXTS}
    for name, prefix, symbols in [("spm", True, []), ("spm-plain", False, ["\n", "\n\n", "▁▁", "<b>", "<turn>"])]:
        processor, add = sentence_pieces(prefix, symbols)
        write(out / f"{name}.gguf", add)
        ids = [[processor.bos_id()] + processor.encode(text(number)) for number in range(TEXTS)]
        hashed = hashlib.sha256()
        for row in ids:
            hashed.update(b"".join(id.to_bytes(4, "little") for id in row + [2**32 - 1]))
        expected[name] = {"first": ids[:20], "sha256": hashed.hexdigest()}
    (out / "spm.json").write_text(json.dumps(expected, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
