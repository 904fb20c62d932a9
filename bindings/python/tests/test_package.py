"""The package: programs, forge, errors, stubs, and the lines that pages show."""

import ast
import inspect
import pickle
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import FIXTURES, ROOT, case

import qhx


def test_the_wheel_carries_the_programs():
    folder = qhx.program().parent
    assert folder.samefile(sys.exec_prefix + "/bin")
    for name in ("qhx", "qhx_generate", "qhx_embed"):
        said = subprocess.run([folder / name, "--version"], capture_output=True, text=True, check=True)
        assert qhx.__version__ in said.stdout


def test_forge_fails_as_the_program_does(tmp_path):
    with pytest.raises(qhx.Error) as raised:
        qhx.forge(tmp_path / "nowhere", tmp_path / "out", cpu_only=True)
    assert raised.value.kind == "artifact" and "nowhere: not a folder" in raised.value.message
    with pytest.raises(qhx.UsageError, match="precision"):
        qhx.forge(FIXTURES / "llama3-tiny", tmp_path / "out", precision="w1")
    assert not (tmp_path / "out").exists()


def test_a_bundle_that_cannot_be_opened_says_why(language, tmp_path):
    with pytest.raises(qhx.BundleError) as raised:
        qhx.Model(FIXTURES / "llama3-tiny")
    assert raised.value.kind == "manifest" and raised.value.hint.startswith("make one of it: qhx forge")
    assert str(raised.value) == f"{raised.value.message}\n  hint: {raised.value.hint}"
    again = pickle.loads(pickle.dumps(raised.value))
    assert (type(again), str(again)) == (qhx.BundleError, str(raised.value))
    with pytest.raises(qhx.UsageError, match="options: backend \"gpu\": expected auto, cpu or qnn"):
        qhx.Model(language, backend="gpu")
    with pytest.raises(qhx.UsageError, match="options: decode_on \"gpu\": expected auto, cpu or npu"):
        qhx.Model(language, decode_on="gpu")
    with pytest.raises(qhx.UsageError, match="options: cpu_activations \"int4\": expected auto, int16 or int8"):
        qhx.Model(language, cpu_activations="int4")
    with pytest.raises(qhx.UsageError, match="options: cpu_caches \"int4\": expected f16 or f32"):
        qhx.Model(language, cpu_caches="int4")
    with pytest.raises(qhx.DeviceError) as raised:
        qhx.Model(language, backend="qnn", htp=tmp_path / "libQnnHtp.so")
    assert raised.value.kind == "runtime"
    with pytest.raises(TypeError):
        qhx.Model(7)


def test_a_model_says_what_it_is(model):
    assert (model.name, model.host_op, model.backend) == ("llama3-tiny", "llama_generate", "cpu")
    assert model.modalities == ["text"] and model.can_chat and model.max_ctx > 100
    assert repr(model) == "<qhx.Model 'llama3-tiny' on cpu>"


def test_the_stub_is_what_the_native_part_has(model):
    stub = ast.parse((ROOT / "bindings/python/python/qhx/_qhx.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    with model.generate("Hi", stream=True) as stream:
        for name, native in (("Model", model._native), ("Stream", stream._native)):
            methods = {node.name for node in classes[name].body if isinstance(node, ast.FunctionDef)}
            assert {name for name, value in vars(native).items() if callable(value)} == methods
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert {name for name in vars(qhx._qhx) if callable(getattr(qhx._qhx, name)) and name[0] != "_"} == functions


def test_all_that_is_public_is_described():
    for name in qhx.__all__:
        value = getattr(qhx, name)
        if name.startswith("__") or not hasattr(value, "__module__") or value.__module__ != "qhx":
            continue
        assert inspect.getdoc(value), name
        for member, what in vars(value).items() if inspect.isclass(value) else ():
            if not member.startswith("_") and inspect.isfunction(what):
                assert inspect.getdoc(what), f"{name}.{member}"


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_lines_of_the_readme_give_text_and_vectors(language, encoder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(language, "qwen35/v81")
    shutil.copytree(encoder, "embedcode/v81")
    (lines,) = blocks("README.md")
    assert len(lines.splitlines()) == 6
    exec(compile(lines, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert case("llama3-tiny", "france")["text"].strip()[:20] in printed and "(2, " in printed


def test_the_drop_ins_work(language, encoder):
    programs = {}
    for name in ("text_generation", "sentence_transformer"):
        source = (ROOT / "examples" / "python" / f"{name}.py").read_text(encoding="utf-8")
        exec(compile(source, name, "exec"), programs)
    pipeline = programs["TextGenerationPipeline"](language)
    france = case("llama3-tiny", "france")
    made = pipeline(france["prompt"], max_new_tokens=len(france["output_ids"]))
    assert made == [{"generated_text": france["prompt"] + france["text"]}]
    talk = pipeline([{"role": "user", "content": "What colour is the sky?"}])[0]["generated_text"]
    assert talk[1]["role"] == "assistant" and talk[1]["content"].startswith("By day the sky is blue")
    encoder = programs["SentenceTransformer"](encoder)
    one, several = encoder.encode("def fib(n):", prompt_name="query"), encoder.encode(["a", "b"])
    assert one.ndim == 1 and several.shape[0] == 2
    assert np.allclose(encoder.similarity(several, several).diagonal(), 1, atol=1e-3)
