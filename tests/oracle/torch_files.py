"""Files of `torch.save`: the weights of `../fixtures/lora/base` in two shards with their index, as `save_pretrained`
wrote them before safetensors, and a module of `../fixtures/embed-modules` as older sentence-transformers saved it.

    python torch_files.py

Needs torch and safetensors."""

import json
import pathlib

import torch
from safetensors.torch import load_file

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures"


class Holder(torch.nn.Module):
    """A module whose `state_dict` has these tensors, and the metadata that such a dictionary carries along."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            parent = self
            *folders, last = name.split(".")
            for folder in folders:
                if folder not in dict(parent.named_children()):
                    parent.add_module(folder, torch.nn.Module())
                parent = getattr(parent, folder)
            parent.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))


def shards(source, out):
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    out.mkdir(exist_ok=True)
    weight_map = {}
    for index, part in enumerate([names[: len(names) // 2], names[len(names) // 2 :]]):
        file = f"pytorch_model-0000{index + 1}-of-00002.bin"
        torch.save(Holder({name: tensors[name] for name in part}).state_dict(), out / file)
        weight_map.update({name: file for name in part})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=1) + "\n")


def module(folder, out):
    out.mkdir(exist_ok=True)
    torch.save(Holder(load_file(folder / "model.safetensors")).state_dict(), out / "dense.bin")


if __name__ == "__main__":
    out = FIXTURES / "torch-files"
    shards(FIXTURES / "lora" / "base", out)
    module(FIXTURES / "embed-modules" / "4_Dense", out)
