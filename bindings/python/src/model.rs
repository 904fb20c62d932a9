//! A model's functions.

use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::IntoPyObjectExt as _;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyCFunction, PyDict, PyTuple};
use qhx::{
    CancelToken, Engine, Error, ErrorKind, Named, PluginOptions, Role, TranscribeEvent,
    TranscribeOptions, caught,
};
use serde::Deserialize;
use serde_json::json;

use crate::fault::{Fault, Result, raised};
use crate::media::{Given, Item};
use crate::request::Asked;
use crate::stream::Stream;
use crate::turns::{Shared, on_thread, receive};

type Arguments<'a, 'py> = &'a Bound<'py, PyTuple>;

/// What a model is opened with, as the package writes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OpenOptions {
    backend: Option<String>,
    device_arch: Option<String>,
    htp: Option<PathBuf>,
    system: Option<PathBuf>,
    plugins: Vec<PathBuf>,
    threads: Option<usize>,
}

/// An open model, and what it says of itself, as JSON.
struct Loaded {
    engine: Engine,
    about: String,
}

/// `open(bundle, options)`: loads a bundle, and returns an object with the functions of its model.
pub(crate) fn open(arguments: Arguments<'_, '_>) -> PyResult<Py<PyAny>> {
    let py = arguments.py();
    let (bundle, options): (PathBuf, String) = arguments.extract()?;
    let ticket = CancelToken::new();
    let loading = {
        let ticket = ticket.clone();
        on_thread(move |_| caught(|| load(bundle, &options, ticket)))
    };
    let loaded = receive(py, &mut raised(py, loading)?, &ticket, |_| true)?;
    let Loaded { engine, about } = raised(py, loaded)?;
    functions(py, &Shared::new(engine), &about)
}

fn load(bundle: PathBuf, options: &str, cancel: CancelToken) -> Result<Loaded> {
    let wrong = |e| Error::caused(ErrorKind::Usage, "the options", e);
    let options: OpenOptions = serde_json::from_str(options).map_err(wrong)?;
    let named = Named {
        backend: options.backend,
        device_arch: options.device_arch,
        htp: options.htp,
        system: options.system,
    };
    let mut plugins = PluginOptions::default();
    plugins.dirs.extend(options.plugins);
    let mut builder = named.decide()?.builder().plugins(plugins).cancel(cancel);
    if let Some(threads) = options.threads {
        builder = builder.threads(threads);
    }
    let runtime = builder.build();
    let bundle = runtime.bundle(bundle, None)?;
    let mut why = String::new();
    let model =
        runtime.load_checked(&bundle, |_| Ok(()), |_, reason| reason.clone_into(&mut why))?;
    let (info, op) = (model.info(), &model.op().description);
    let about = json!({
        "name": model.manifest().model.name,
        "manifest": model.manifest().path,
        "host_op": op.name,
        "modalities": op.modalities,
        "backend": model.backend().name,
        "backend_reason": why,
        "max_ctx": info.max_ctx,
        "embedding_dim": info.embedding_dim,
        "can_chat": model.can_chat(),
    })
    .to_string();
    Ok(Loaded { engine: Engine::new(model)?, about })
}

/// The functions of a model. They share it, and it is freed with the last of them.
fn functions(py: Python<'_>, shared: &Arc<Shared>, about: &str) -> PyResult<Py<PyAny>> {
    let object = Object::new(py)?;
    object.0.setattr("about", about)?;
    let model = Arc::clone(shared);
    object.add(c"generate", move |arguments| {
        let (asked, items) = asked(arguments)?;
        model.turn(arguments.py(), false)?.finish(arguments.py(), move |engine, ticket| {
            let model = engine.model_mut();
            let question = asked.question(model, &items, ticket)?;
            let generation = model.start(&question.request)?.finish()?;
            Ok(question.answer(&model.texts(), &generation)?)
        })
    })?;
    let model = Arc::clone(shared);
    object.add(c"stream", move |arguments| {
        let (asked, items) = asked(arguments)?;
        of_stream(arguments.py(), Stream::open(arguments.py(), &model, asked, items)?)
    })?;
    let model = Arc::clone(shared);
    object.add(c"embed", move |arguments| embed(&model, arguments))?;
    let model = Arc::clone(shared);
    object.add(c"transcribe", move |arguments| transcribe(&model, arguments))?;
    let model = Arc::clone(shared);
    object.add(c"busy", move |_| Ok(model.is_busy()))?;
    let model = Arc::clone(shared);
    object.add(c"cancel", move |_| Ok(model.cancel()))?;
    let model = Arc::clone(shared);
    object.add(c"close", move |arguments| none(arguments, model.close(arguments.py())))?;
    Ok(object.0.unbind())
}

/// The functions of a stream. It ends with the last of them.
fn of_stream(py: Python<'_>, stream: Stream) -> PyResult<Py<PyAny>> {
    let object = Object::new(py)?;
    let stream = Arc::new(stream);
    let one = Arc::clone(&stream);
    object.add(c"next", move |arguments| one.next(arguments.py()))?;
    let one = Arc::clone(&stream);
    object.add(c"close", move |arguments| none(arguments, one.close(arguments.py())))?;
    object.add(c"result", move |_| Ok(stream.result()))?;
    Ok(object.0.unbind())
}

/// Request and media of a generation.
fn asked(arguments: Arguments<'_, '_>) -> PyResult<(Asked, Vec<Item>)> {
    let (json, given): (String, Vec<Given>) = arguments.extract()?;
    let asked = || -> Result<_> {
        let items = given.into_iter().map(Item::new).collect::<Result<_>>()?;
        Ok((Asked::parse(&json)?, items))
    };
    raised(arguments.py(), asked())
}

/// `embed(texts, role, truncate)`: the values of all vectors as bytes, and the length of one.
fn embed(shared: &Arc<Shared>, arguments: Arguments<'_, '_>) -> PyResult<(Py<PyByteArray>, usize)> {
    let py = arguments.py();
    let (texts, role, truncate): (Vec<String>, String, bool) = arguments.extract()?;
    let role: std::result::Result<Role, _> = role.parse();
    let role = role.map_err(|e| Fault::usage(format!("option role: {e}")));
    let role = raised(py, role)?;
    let (values, dim) = shared.turn(py, false)?.finish(py, move |engine, ticket| {
        let embedder = engine.embedder_mut()?;
        let (prefixed, dim) =
            (embedder.texts().clone().truncating(truncate), embedder.dimensions());
        let mut values = Vec::with_capacity(texts.len().saturating_mul(dim));
        let done = |_: usize, vector: &[f32]| {
            values.extend_from_slice(vector);
            Ok(())
        };
        embedder.model_mut().cancellable(ticket, |model| {
            let tokens = |(index, text): (usize, &String)| {
                let tokens = prefixed.tokens(text, role);
                tokens.map_err(|e| too_long(e, truncate).context(format_args!("text {index}")))
            };
            let tokens = texts.iter().enumerate().map(tokens).collect::<qhx::Result<Vec<_>>>()?;
            model.embed_each(&tokens, done)
        })?;
        Ok((values, dim))
    })?;
    let bytes = PyByteArray::new_with(py, values.len() * size_of::<f32>(), |bytes| {
        for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(&values) {
            *bytes = value.to_ne_bytes();
        }
        Ok(())
    })?;
    Ok((bytes.unbind(), dim))
}

/// The hint of a text that is too long, in words of Python.
fn too_long(error: Error, truncate: bool) -> Error {
    match error.kind() {
        ErrorKind::Prompt if !truncate => error.hint("split the text, or give truncate=True"),
        _ => error,
    }
}

/// `transcribe(audio, max_new_tokens)`: the transcript as JSON.
fn transcribe(shared: &Arc<Shared>, arguments: Arguments<'_, '_>) -> PyResult<String> {
    let py = arguments.py();
    let (given, max_new): (Given, Option<usize>) = arguments.extract()?;
    let Item::File(audio) = raised(py, Item::new(given))? else {
        return raised(py, Err(Fault::usage("expected audio")));
    };
    shared.turn(py, false)?.finish(py, move |engine, ticket| {
        let transcriber = engine.transcriber_mut().map_err(|e| {
            e.hint("ask with chat(…, audio=[…]), or declare params.transcription in the manifest")
        })?;
        transcriber.set_max_new(max_new.unwrap_or(TranscribeOptions::default().max_new));
        let on_event = |_: TranscribeEvent<'_>| {};
        let transcript = transcriber.transcribe_with(&audio.source, ticket, on_event)?;
        let chunk = |chunk: &qhx::Chunk| {
            json!({
                "start": chunk.start,
                "end": chunk.end,
                "text": chunk.text,
                "finish_reason": chunk.finish_reason.name(),
            })
        };
        Ok(json!({
            "text": transcript.text,
            "seconds": transcript.seconds,
            "chunks": transcript.chunks.iter().map(chunk).collect::<Vec<_>>(),
            "cancelled": transcript.cancelled,
        })
        .to_string())
    })
}

/// An object of Python whose attributes are functions.
struct Object<'py>(Bound<'py, PyAny>);

impl<'py> Object<'py> {
    fn new(py: Python<'py>) -> PyResult<Self> {
        py.import("types")?.getattr("SimpleNamespace")?.call0().map(Self)
    }

    fn add<T: for<'p> IntoPyObject<'p>>(
        &self,
        name: &'static CStr,
        function: impl Fn(Arguments<'_, '_>) -> PyResult<T> + Send + Sync + 'static,
    ) -> PyResult<()> {
        let function = callable(self.0.py(), name, function)?;
        self.0.setattr(name, function)
    }
}

/// A function of Python.
pub(crate) fn callable<'py, T: for<'p> IntoPyObject<'p>>(
    py: Python<'py>,
    name: &'static CStr,
    function: impl Fn(Arguments<'_, '_>) -> PyResult<T> + Send + Sync + 'static,
) -> PyResult<Bound<'py, PyCFunction>> {
    let function = move |arguments: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| {
        function(arguments)?.into_py_any(arguments.py())
    };
    PyCFunction::new_closure(py, Some(name), None, function)
}

fn none(arguments: Arguments<'_, '_>, result: PyResult<()>) -> PyResult<Py<PyAny>> {
    result.map(|()| arguments.py().None())
}
