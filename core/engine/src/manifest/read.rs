//! From a JSON document to the typed manifest.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::reader::Node;
use super::{
    AnswerHead, ArtifactTable, ContextEntry, EmbedEntry, FileEntry, Manifest, Model, Params, Plan,
    Rerank, SCHEMA_VERSION, Script, Speech, Spelling, Step, TimeTokens, Transcription, Verdict,
};
use crate::sampling::SamplingParams;
use qhx_base::{Result, error, snapshot};
use qhx_types::DType;

pub(super) fn manifest(path: &Path, document: Value, root: Option<&Path>) -> Result<Manifest> {
    let node = Node::root(&document);
    schema_version(&node)?;
    let artifacts = node.require("artifacts")?;
    let host_only = node.get("host_only")?;
    let table = artifact_table(&artifacts)?;
    if table.contexts.is_empty() && host_only.is_none() {
        return Err(error!(Manifest, "/artifacts/contexts: missing or empty")
            .hint("expected \"contexts\": {\"decode\": {\"bin\": \"decode.bin\"}}"));
    }
    let fixture_dir = match node.get("fixture_dir")? {
        Some(dir) => Some(dir),
        None => artifacts.get("fixture_dir")?,
    };
    let (root, bounds) = resolve_root(&node, path, root)?;
    Ok(Manifest {
        path: path.to_owned(),
        root,
        bounds,
        model: model(&node, path)?,
        params: params(&node)?,
        artifacts: table,
        plan: plan(&node)?,
        chat: node.get("chat")?.map(|n| super::chat::read(&n)).transpose()?,
        fixture_dir: fixture_dir.map(|n| n.text()).transpose()?,
        host_only: host_only.is_some_and(|n| n.value() == &Value::Bool(true)),
        raw: document,
    })
}

fn schema_version(node: &Node<'_>) -> Result<()> {
    let version = node
        .require("schema_version")
        .map_err(|e| e.hint("a manifest begins with \"schema_version\": 1; is this file one?"))?;
    if version.u64()? == SCHEMA_VERSION {
        return Ok(());
    }
    Err(version
        .error(format_args!("expected {SCHEMA_VERSION}, found {}", version.value()))
        .hint("this bundle is written for another version of the runtime"))
}

/// The folder for relative paths, and the one that no file may lie outside of. Only the caller may
/// name one outside the manifest's folder.
fn resolve_root(node: &Node<'_>, path: &Path, given: Option<&Path>) -> Result<(PathBuf, PathBuf)> {
    if let Some(root) = given {
        return Ok((root.to_owned(), root.to_owned()));
    }
    let folder = match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_owned(),
        _ => PathBuf::from("."),
    };
    let bounds = bounds(&folder);
    let Some(node) = node.get("artifacts_root")? else { return Ok((folder, bounds)) };
    let root = node.text()?;
    let relative = Path::new(&root);
    if relative.components().any(|c| !matches!(c, Component::Normal(_) | Component::CurDir)) {
        return Err(node
            .error(format_args!("{root:?} leaves the manifest's folder"))
            .hint("give the folder on the command line as ARTIFACTS_ROOT instead"));
    }
    Ok((folder.join(relative), bounds))
}

/// The folder that files of a bundle in `folder` may lie in: that, or in a cache of a hub, where they are links, the
/// repository's.
fn bounds(folder: &Path) -> PathBuf {
    snapshot::locate(folder).map_or_else(|| folder.to_owned(), |place| place.repository)
}

fn model(node: &Node<'_>, path: &Path) -> Result<Model> {
    let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let Some(node) = node.get("model")? else {
        return Ok(Model { name: stem, ..Model::default() });
    };
    Ok(Model {
        name: node.get("name")?.map(|n| n.text()).transpose()?.unwrap_or(stem),
        family: node.get("family")?.map(|n| n.text()).transpose()?,
        dsp_arch: node.get("dsp_arch")?.map(|n| dsp_arch(&n)).transpose()?,
        rest: rest(&node, &["name", "family", "dsp_arch"])?,
    })
}

fn dsp_arch(node: &Node<'_>) -> Result<u32> {
    let parsed = match node.value() {
        Value::String(s) => s.strip_prefix(['v', 'V']).unwrap_or(s).parse().ok(),
        Value::Number(n) => n.as_u64().and_then(|n| u32::try_from(n).ok()),
        _ => None,
    };
    parsed.filter(|arch| (1..1000).contains(arch)).ok_or_else(|| {
        node.error(format_args!("expected \"v81\", 81 or null, found {}", node.value()))
    })
}

fn params(node: &Node<'_>) -> Result<Params> {
    let Some(node) = node.get("params")? else { return Ok(Params::default()) };
    let size = |key: &str| node.get(key)?.map(|n| n.size()).transpose();
    Ok(Params {
        hidden: size("hidden")?,
        vocab: size("vocab")?,
        n_layers: size("n_layers")?,
        max_ctx: size("max_ctx")?,
        eos_token_id: match node.get("eos_token_id")? {
            None => Vec::new(),
            Some(n) if n.value().is_array() => {
                n.elements()?.map(|e| e.u32()).collect::<Result<_>>()?
            }
            Some(n) => vec![n.u32()?],
        },
        bos_token_id: node.get("bos_token_id")?.map(|n| n.u32()).transpose()?,
        transcription: node.get("transcription")?.map(|n| transcription(&n)).transpose()?,
        rerank: node.get("rerank")?.map(|n| rerank(&n)).transpose()?,
        speech: node.get("speech")?.map(|n| speech(&n)).transpose()?,
        sampling: node.get("sampling")?.map(|n| sampling(&n)).transpose()?,
        rest: rest(
            &node,
            &[
                "hidden",
                "vocab",
                "n_layers",
                "max_ctx",
                "eos_token_id",
                "bos_token_id",
                "transcription",
                "rerank",
                "speech",
                "sampling",
            ],
        )?,
    })
}

fn transcription(node: &Node<'_>) -> Result<Transcription> {
    let spellings = |key: &str| -> Result<BTreeMap<String, Spelling>> {
        let Some(members) = node.get(key)? else { return Ok(BTreeMap::new()) };
        let spelling = |node: &Node<'_>| match node.value() {
            Value::String(text) => Ok(Spelling::Text(text.clone())),
            _ => node.u32().map(Spelling::Token),
        };
        let members = members.members()?;
        members.map(|(name, node)| Ok((name.to_owned(), spelling(&node)?))).collect()
    };
    let languages = spellings("languages")?;
    let language = match node.get("language")? {
        None => None,
        Some(node) => match node.string()? {
            code if languages.contains_key(&code) => Some(code),
            code => {
                return Err(node.error(format_args!("expected one of languages, found {code:?}")));
            }
        },
    };
    let punctuation = match node.get("punctuation")? {
        None => None,
        Some(node) => Some([node.require("on")?.string()?, node.require("off")?.string()?]),
    };
    let answer = match node.get("answer")? {
        None => None,
        Some(node) => Some(AnswerHead {
            before: node.require("before")?.string()?,
            behind: node.require("behind")?.string()?,
            token: node.require("token")?.u32()?,
        }),
    };
    let rate = node.get("tokens_per_second")?.map(|n| match n.value().as_f64() {
        Some(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err(n.error(format_args!("expected a positive number, found {}", n.value()))),
    });
    let token = |key: &str| node.get(key)?.map(|n| n.u32()).transpose();
    let seconds = |node: &Node<'_>| match node.value().as_f64() {
        Some(seconds) if seconds.is_finite() && seconds > 0.0 => Ok(seconds),
        _ => Err(node
            .error(format_args!("expected a positive number of seconds, found {}", node.value()))),
    };
    let times = match node.get("times")? {
        None => None,
        Some(times) => Some(TimeTokens {
            first: times.require("first")?.u32()?,
            none: times.require("none")?.u32()?,
            end: times.require("end")?.u32()?,
            step: seconds(&times.require("step")?)?,
        }),
    };
    let window = node.get("window")?.map(|n| seconds(&n)).transpose()?;
    let context = node.get("context")?.map(|n| {
        let list = n.value().as_array().map_or(&[][..], Vec::as_slice);
        let list: Vec<_> = list.iter().map(Value::as_f64).collect();
        match list[..] {
            [Some(left), Some(right)] if left >= 0.0 && right >= 0.0 => Ok([left, right]),
            _ => Err(n.error(format_args!("expected two numbers of seconds, found {}", n.value()))),
        }
    });
    // Where tokens or the host-op itself ask for the words, no text need.
    let prompt = match node.get("prompt")? {
        Some(prompt) => prompt.string()?,
        None if times.is_some() || window.is_some() || node.get("tasks")?.is_some() => {
            String::new()
        }
        None => node.require("prompt")?.string()?,
    };
    Ok(Transcription {
        prompt,
        chat: node.get("chat")?.map(|n| n.bool()).transpose()?.unwrap_or(false),
        languages,
        language,
        tasks: spellings("tasks")?,
        punctuation,
        tokens_per_second: rate.transpose()?,
        answer,
        times,
        no_speech: token("no_speech")?,
        previous: token("previous")?,
        window,
        context: context.transpose()?,
    })
}

fn speech(node: &Node<'_>) -> Result<Speech> {
    let voices = node.require("voices")?;
    let names = voices.elements()?.map(|n| n.text()).collect::<Result<Vec<_>>>()?;
    if names.is_empty() {
        return Err(voices.error("expected the name of one voice at least"));
    }
    let symbols = node.require("symbols")?;
    let numbers = symbols.members()?;
    let limit = node.require("limit")?;
    let size = limit.size()?;
    if size == 0 {
        return Err(limit.error("expected 1 or more"));
    }
    let scripts = match node.get("script")? {
        None => vec![Script::default(); names.len()],
        Some(one) if one.value().is_array() => {
            let scripts = one.elements()?.map(|n| script(&n)).collect::<Result<Vec<_>>>()?;
            if scripts.len() != names.len() {
                return Err(one.error("expected one for each of the voices"));
            }
            scripts
        }
        Some(one) => vec![script(&one)?; names.len()],
    };
    let deviation = |n: Node<'_>| {
        let value = n.value().as_f64().filter(|value| (0.0..=4.0).contains(value));
        value.map(|value| value as f32).ok_or_else(|| n.error("expected a number from 0 to 4"))
    };
    let noise = match node.get("noise")? {
        None => None,
        Some(noise) => {
            let both = noise.elements()?.map(deviation).collect::<Result<Vec<_>>>()?;
            Some(both.try_into().map_err(|_| noise.error("expected two numbers"))?)
        }
    };
    let factor = |n: Node<'_>| {
        let value = n.value().as_f64().filter(|value| (0.25..=4.0).contains(value));
        value.map(|value| value as f32).ok_or_else(|| n.error("expected a number from 0.25 to 4"))
    };
    let speeds = match node.get("speeds")? {
        None => Vec::new(),
        Some(speeds) => {
            let found = speeds.elements()?.map(factor).collect::<Result<Vec<_>>>()?;
            if found.len() != names.len() {
                return Err(speeds.error("expected one for each of the voices"));
            }
            found
        }
    };
    Ok(Speech {
        voices: names,
        symbols: numbers.map(|(name, n)| Ok((name.to_owned(), n.u32()?))).collect::<Result<_>>()?,
        limit: size,
        scripts,
        noise,
        speeds,
        counted: node.get("counted")?.map_or(Ok(false), |n| n.bool())?,
    })
}

fn script(node: &Node<'_>) -> Result<Script> {
    if node.value().is_null() {
        return Ok(Script::default());
    }
    let flag = |key: &str| node.get(key)?.map_or(Ok(false), |n| n.bool());
    let by = node.require("by")?;
    Ok(match by.text()?.as_str() {
        "lexicon" => Script::Lexicon,
        "espeak" => {
            let voice = node.require("voice")?;
            let name = voice.text()?;
            let legal = |c: char| c.is_ascii_alphanumeric() || "-_+".contains(c);
            if name.is_empty()
                || name.len() > 32
                || name.starts_with('-')
                || !name.chars().all(legal)
            {
                return Err(
                    voice.error("expected the name of a voice of espeak-ng, such as \"en-us\"")
                );
            }
            Script::Espeak { voice: name, joined: flag("joined")?, spaced: flag("spaced")? }
        }
        "letters" => Script::Letters { lower: flag("lower")?, roman: flag("roman")? },
        "phonemes" => Script::Phonemes { of: node.require("of")?.text()? },
        _ => return Err(by.error("expected \"lexicon\", \"espeak\", \"letters\" or \"phonemes\"")),
    })
}

/// Keys as [`SamplingParams`] has them. The temperature is 1 where the others stand alone.
fn sampling(node: &Node<'_>) -> Result<SamplingParams> {
    let given = node.object()?;
    let sampling = SamplingParams::default().temperature(1.0).with(given);
    sampling.map_err(|e| node.error(e.message()))
}

fn rerank(node: &Node<'_>) -> Result<Rerank> {
    let verdict = match node.get("activation")? {
        None => {
            Verdict::Tokens { yes: node.require("yes")?.text()?, no: node.require("no")?.text()? }
        }
        Some(activation) => match activation.text()?.as_str() {
            "sigmoid" => Verdict::Head { sigmoid: true },
            "identity" => Verdict::Head { sigmoid: false },
            _ => return Err(activation.error("expected \"sigmoid\" or \"identity\"")),
        },
    };
    let prompt = match verdict {
        Verdict::Tokens { .. } => Some(node.require("prompt")?),
        Verdict::Head { .. } => node.get("prompt")?,
    };
    let text = prompt.as_ref().map(|n| n.string()).transpose()?;
    for place in ["{query}", "{document}"] {
        if let (Some(prompt), Some(text)) = (&prompt, &text)
            && !text.contains(place)
        {
            return Err(prompt.error(format_args!("expected a text with {place}")));
        }
    }
    let instruction = node.get("instruction")?.map(|n| n.string()).transpose()?;
    Ok(Rerank {
        prompt: text.unwrap_or_default(),
        instruction: instruction.unwrap_or_default(),
        verdict,
    })
}

fn artifact_table(node: &Node<'_>) -> Result<ArtifactTable> {
    let path = |key: &str| node.get(key)?.map(|n| n.path()).transpose();
    let mut table = ArtifactTable {
        embed: node.get("embed")?.map(|n| embed(&n)).transpose()?,
        tokenizer: path("tokenizer")?,
        tokenizer_config: path("tokenizer_config")?,
        golden: path("golden")?,
        rest: rest(
            node,
            &["contexts", "embed", "tokenizer", "tokenizer_config", "golden", "files"],
        )?,
        ..ArtifactTable::default()
    };
    if let Some(contexts) = node.get("contexts")? {
        for (key, entry) in contexts.members()? {
            table.contexts.push(context(key, &entry)?);
        }
    }
    if let Some(files) = node.get("files")? {
        for (path, entry) in files.members()? {
            table.files.insert(path.to_owned(), file(&entry)?);
        }
    }
    Ok(table)
}

fn context(key: &str, node: &Node<'_>) -> Result<ContextEntry> {
    let mut entry = ContextEntry {
        key: key.to_owned(),
        bin: node.get("bin")?.map(|n| n.text()).transpose()?,
        onnx: Vec::new(),
        optional: node.get("optional")?.map(|n| n.text()).transpose()?,
        us: Vec::new(),
        rest: rest(node, &["bin", "onnx", "optional", "us"])?,
    };
    if let Some(us) = node.get("us")? {
        for (graph, time) in us.members()? {
            entry.us.push((graph.to_owned(), time.positive()?));
        }
    }
    if let Some(onnx) = node.get("onnx")? {
        if onnx.value().is_object() {
            for (graph, path) in onnx.members()? {
                entry.onnx.push((graph.to_owned(), path.text()?));
            }
        } else {
            entry.onnx.push((key.to_owned(), onnx.text()?));
        }
    }
    if entry.bin.is_none() && entry.onnx.is_empty() {
        return Err(node
            .error("neither \"bin\" nor \"onnx\"")
            .hint("a context names a context binary (\"bin\"), ONNX files (\"onnx\"), or both"));
    }
    Ok(entry)
}

fn embed(node: &Node<'_>) -> Result<EmbedEntry> {
    let path = node.path()?;
    let mut dtype = DType::F16;
    if node.value().is_object()
        && let Some(name) = node.get("dtype")?
    {
        let known = DType::deserialize(name.value()).ok().filter(|dtype| *dtype != DType::Other);
        dtype = known.ok_or_else(|| {
            name.error(format_args!("expected a dtype such as \"f16\", found {}", name.value()))
        })?;
    }
    Ok(EmbedEntry { path, dtype })
}

fn file(node: &Node<'_>) -> Result<FileEntry> {
    let sha256 = match node.get("sha256")? {
        None => None,
        Some(n) => {
            let text = n.string()?.to_ascii_lowercase();
            if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(n.error(format_args!(
                    "expected a SHA-256 of 64 hexadecimal digits, found {text:?}"
                )));
            }
            Some(text)
        }
    };
    Ok(FileEntry { sha256, bytes: node.get("bytes")?.map(|n| n.u64()).transpose()? })
}

fn plan(node: &Node<'_>) -> Result<Plan> {
    let Some(node) = node.get("plan")? else { return Ok(Plan::default()) };
    let params = match node.get("params")? {
        None => Value::Object(Map::new()),
        Some(n) => Value::Object(n.object()?.clone()),
    };
    let mut steps = Vec::new();
    if let Some(list) = node.get("steps")? {
        for step in list.elements()? {
            let host = step.get("host")?.map(|n| host(&n)).transpose()?;
            steps.push(Step { host, rest: rest(&step, &["host"])? });
        }
    }
    Ok(Plan { params, steps })
}

/// The name of a host-op is an identifier: it is looked up in plugins and never part of a path.
fn host(node: &Node<'_>) -> Result<String> {
    let name = node.text()?;
    let identifier = name.len() <= 64
        && name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    if identifier {
        return Ok(name);
    }
    Err(node.error(format_args!(
        "expected the name of a host-op (a letter, then letters, digits, - or _), found {name:?}"
    )))
}

fn rest(node: &Node<'_>, known: &[&str]) -> Result<Map<String, Value>> {
    let members = node.object()?.iter();
    Ok(members
        .filter(|(key, _)| !known.contains(&key.as_str()))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect())
}
