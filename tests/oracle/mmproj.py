"""Vision towers in GGUF files of their own (mmproj) as llama.cpp's converter writes them, in `../fixtures/gguf`.

    python mmproj.py ../fixtures        # needs gguf==0.19.0 beside torch and transformers

`qwen25vl.gguf` and `mmproj-qwen25vl.gguf` are the checkpoint `../fixtures/qwen25vl-unseen`: its decoder with the
tokenizer, and its tower. `qwen2vl.gguf` and `mmproj-qwen2vl.gguf` are those of `../fixtures/vision/qwen2vl`, and
`mmproj-qwen2vl-old.gguf` is the tower with the names and numbers of llama.cpp's older `qwen2_vl_surgery.py`. `mmproj-qwen3vl.gguf` has a tower with random weights, those of `mmproj-qwen3vl.safetensors`,
whose metadata has the `vision_config`. Metadata and changes to tensors are those of `Qwen2VLVisionModel` and
`Qwen3VLVisionModel` of the converter, names those of the package's tables.
"""

import json
import re
import sys
from pathlib import Path

import gguf
import torch
import transformers
from safetensors.torch import load_file, save_file

import gguf_files

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
PATCH = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.V_ENC_EMBD_PATCH]


def add(writer, name, tensor):
    """Matrices as the checkpoint has them, vectors and positions as f32."""
    if tensor.dim() == 1 or ".position_embd." in name:
        writer.add_tensor(name, tensor.float().numpy())
    elif tensor.dtype == torch.bfloat16:
        raw = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.contiguous().numpy())


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tower(path, vision, tensors, projector, mean, std, old=False):
    """`tensors` are those of `visual.*`."""
    older = "embed_dim" in vision
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["depth"])
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(0 if old else vision["hidden_size"] if older else vision["out_hidden_size"])
    writer.add_vision_image_size(560)
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["embed_dim" if older else "hidden_size"])
    writer.add_vision_feed_forward_length(0 if old else vision["hidden_size" if older else "intermediate_size"])
    writer.add_vision_block_count(vision["depth"])
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_image_mean(mean)
    writer.add_vision_image_std(std)
    writer.add_clip_projector_type(projector)
    writer.add_vision_attention_layernorm_eps(1e-6)
    deepstack = vision.get("deepstack_visual_indexes")
    if older:
        pass
    elif deepstack is None:
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
    else:
        writer.add_vision_use_gelu(True)
        writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
        writer.add_vision_is_deepstack_layers([block in deepstack for block in range(vision["depth"])])
    for name, tensor in sorted(tensors.items()):
        stem, end = name.rsplit(".", 1)
        merger = re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)", stem)
        if name == "visual.patch_embed.proj.weight":
            add(writer, f"{PATCH}.weight", tensor[:, :, 0])
            add(writer, f"{PATCH}.weight.1", tensor[:, :, 1])
        elif merger:
            add(writer, f"v.deepstack.{deepstack[int(merger[1])]}.{merger[2]}.{end}", tensor)
        elif stem == "visual.merger.norm":
            add(writer, f"v.post_ln.{end}", tensor)
        elif stem.startswith("visual.merger.linear_fc"):
            add(writer, f"mm.{2 * int(stem[-1]) - 2}.{end}", tensor)
        elif ".qkv." in name and deepstack is None:
            for part, rows in zip("qkv", tensor.chunk(3)):
                add(writer, table.get_name(name.replace("qkv", part), try_suffixes=(".weight", ".bias")), rows)
        else:
            theirs = table.get_name(name, try_suffixes=(".weight", ".bias"))
            assert theirs, name
            if old:
                theirs = re.sub("ffn_(up|down)", lambda found: {"up": "ffn_down", "down": "ffn_up"}[found[1]], theirs)
            add(writer, theirs, tensor)
    finish(writer)


def decoder(path, folder, config, tensors):
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2VL, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "qwen2vl")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_sections([*config["rope_scaling"]["mrope_section"], 0])
    rows = tensors["model.embed_tokens.weight"].shape[0]
    tokens = len(transformers.AutoTokenizer.from_pretrained(folder))
    gguf_files.byte_level(folder, "qwen2", rows - tokens)(writer)
    for name, tensor in sorted(tensors.items()):
        theirs = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs, name
        add(writer, theirs, tensor)
    finish(writer)


@torch.no_grad()
def main(fixtures):
    out = fixtures / "gguf"
    kind = gguf.VisionProjectorType
    sees = lambda name: name.startswith("visual.")
    for name, fixture, projector in (("qwen25vl", "qwen25vl-unseen", kind.QWEN25VL), ("qwen2vl", "vision/qwen2vl", kind.QWEN2VL)):
        folder = fixtures / fixture
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        decoder(out / f"{name}.gguf", folder, config, {name: tensor for name, tensor in tensors.items() if not sees(name)})
        own = {name: tensor for name, tensor in tensors.items() if sees(name)}
        tower(out / f"mmproj-{name}.gguf", config["vision_config"], own, projector, MEAN, STD)
    tower(out / "mmproj-qwen2vl-old.gguf", config["vision_config"], own, projector, MEAN, STD, old=True)

    vision = {
        "depth": 4, "hidden_size": 24, "intermediate_size": 36, "num_heads": 2, "patch_size": 6, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": 28, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2],
        "hidden_act": "gelu_pytorch_tanh",
    }
    torch.manual_seed(7)
    config = transformers.Qwen3VLConfig(vision_config=vision).vision_config
    model = transformers.Qwen3VLVisionModel(config)
    for parameter in model.parameters():
        parameter.normal_()
    tensors = {f"visual.{name}": tensor.half() for name, tensor in model.state_dict().items()}
    save_file(tensors, out / "mmproj-qwen3vl.safetensors", metadata={"vision_config": json.dumps(vision)})
    tower(out / "mmproj-qwen3vl.gguf", vision, tensors, kind.QWEN3VL, [0.5] * 3, [0.5] * 3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
