"""A Llama with random weights, of which speed does not depend, as a GGUF file."""

#: A super-block of Q4_K: 256 weights, two f16, and sixteen times 8 bytes of scales and weights.
SUPER, SUPER_BYTES = 256, 144


def write(path, config, kind, context, add_tokenizer):
    """`config` is that of a checkpoint; `add_tokenizer` is called with the writer. The head is the embedding table."""
    import gguf
    import numpy

    hidden, inner, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(vocab)
    add_tokenizer(writer)
    kind = gguf.GGMLQuantizationType[kind.upper()]
    random = numpy.random.default_rng(1)

    def blocks(rows, columns):
        """Super-blocks of Q4_K: both factors, and whatever bits for the rest."""
        if columns % SUPER:
            raise SystemExit(f"q4_k takes rows of whole {SUPER} weights, these have {columns}")
        values = random.integers(0, 256, (rows, columns // SUPER, SUPER_BYTES), numpy.uint8)
        # Steps are up to 63 times the first factor, and what is taken away up to 63 times the second.
        factors = numpy.array([columns**-0.5 / 150, columns**-0.5 / 20], numpy.float16)
        values[..., :4] = factors.view(numpy.uint8)
        return values.reshape(rows, -1)

    def matrix(name, rows, columns):
        one = kind if columns % 32 == 0 else gguf.GGMLQuantizationType.F16
        if one == gguf.GGMLQuantizationType.Q4_K:
            values = blocks(rows, columns)
        else:
            wide = random.standard_normal((rows, columns), numpy.float32) * columns**-0.5
            values = gguf.quants.quantize(wide, one)
        writer.add_tensor(name, values, raw_dtype=one)

    def norm(name):
        writer.add_tensor(name, numpy.ones(hidden, numpy.float32))

    matrix("token_embd.weight", vocab, hidden)
    norm("output_norm.weight")
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        norm(block + "attn_norm.weight")
        matrix(block + "attn_q.weight", heads * width, hidden)
        matrix(block + "attn_k.weight", shared * width, hidden)
        matrix(block + "attn_v.weight", shared * width, hidden)
        matrix(block + "attn_output.weight", hidden, heads * width)
        norm(block + "ffn_norm.weight")
        matrix(block + "ffn_gate.weight", inner, hidden)
        matrix(block + "ffn_up.weight", inner, hidden)
        matrix(block + "ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
