//! A model's functions.

use std::ffi::{CStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::IntoPyObjectExt as _;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyByteArray, PyCFunction, PyDict, PyTuple};
use qhx::{CancelToken, Error, ErrorKind, Times};
use qhx_bindings::{Given, Item, RequestJson, Result, Shared, Stream};
use serde::Serialize;
use serde_json::json;

use crate::fault::{Thread, raised, waited};

type Arguments<'a, 'py> = &'a Bound<'py, PyTuple>;

/// Kind, name or path, content, and two numbers: the fields of [`Given`].
type Medium = (String, OsString, Option<PyBackedBytes>, (u32, u32));

/// `open(bundle, options)`: loads a bundle, and returns an object with the functions of its model.
pub(crate) fn open(arguments: Arguments<'_, '_>) -> PyResult<Py<PyAny>> {
    let py = arguments.py();
    let (bundle, options): (PathBuf, String) = arguments.extract()?;
    let loaded = qhx_bindings::open(&Thread(py), bundle, options, &CancelToken::new());
    let loaded = waited(py, loaded)?;
    functions(py, &loaded.shared, &raised(py, json_text(&loaded.about))?)
}

fn json_text(value: &impl Serialize) -> Result<String> {
    let unwritten = |e| Error::caused(ErrorKind::Internal, "what is returned is no JSON", e);
    Ok(serde_json::to_string(value).map_err(unwritten)?)
}

/// The functions of a model. They share it, and it is freed with the last of them.
fn functions(py: Python<'_>, shared: &Arc<Shared>, about: &str) -> PyResult<Py<PyAny>> {
    let object = Object::new(py)?;
    object.0.setattr("about", about)?;
    let model = Arc::clone(shared);
    object.add(c"generate", move |arguments| {
        let (asked, items) = asked(arguments)?;
        let py = arguments.py();
        let answer = model.generate(&Thread(py), &CancelToken::new(), asked, items);
        raised(py, json_text(&waited(py, answer)?))
    })?;
    let model = Arc::clone(shared);
    object.add(c"stream", move |arguments| {
        let (asked, items) = asked(arguments)?;
        let py = arguments.py();
        let stream = Stream::open(&Thread(py), &model, &CancelToken::new(), asked, items);
        of_stream(py, waited(py, stream)?)
    })?;
    let model = Arc::clone(shared);
    object.add(c"embed", move |arguments| embed(&model, arguments))?;
    let model = Arc::clone(shared);
    object.add(c"transcribe", move |arguments| transcribe(&model, arguments))?;
    let model = Arc::clone(shared);
    object.add(c"busy", move |arguments| raised(arguments.py(), model.is_busy()))?;
    let model = Arc::clone(shared);
    object.add(c"cancel", move |arguments| raised(arguments.py(), model.cancel()))?;
    let model = Arc::clone(shared);
    object.add(c"close", move |arguments| {
        let py = arguments.py();
        waited(py, model.close(&Thread(py))).map(|()| py.None())
    })?;
    Ok(object.0.unbind())
}

/// The functions of a stream. It ends with the last of them.
fn of_stream(py: Python<'_>, stream: Stream) -> PyResult<Py<PyAny>> {
    let object = Object::new(py)?;
    let stream = Arc::new(stream);
    let one = Arc::clone(&stream);
    object.add(c"next", move |arguments| {
        let py = arguments.py();
        waited(py, one.next(&Thread(py)))
    })?;
    let one = Arc::clone(&stream);
    object.add(c"close", move |arguments| {
        let py = arguments.py();
        waited(py, one.close(&Thread(py))).map(|()| py.None())
    })?;
    object.add(c"result", move |arguments| {
        let answer = || stream.result()?.map(|answer| json_text(&answer)).transpose();
        raised(arguments.py(), answer())
    })?;
    Ok(object.0.unbind())
}

/// Request and media of a generation.
fn asked(arguments: Arguments<'_, '_>) -> PyResult<(RequestJson, Vec<Item>)> {
    let (json, media): (String, Vec<Medium>) = arguments.extract()?;
    let asked = || -> Result<_> {
        let items = media.into_iter().map(item).collect::<Result<_>>()?;
        Ok((RequestJson::parse(&json)?, items))
    };
    raised(arguments.py(), asked())
}

fn item((kind, name, content, numbers): Medium) -> Result<Item> {
    Item::new(Given { kind, name, content, numbers })
}

/// `embed(texts, role, truncate)`: the values of all vectors as bytes, and the length of one.
fn embed(shared: &Arc<Shared>, arguments: Arguments<'_, '_>) -> PyResult<(Py<PyByteArray>, usize)> {
    let py = arguments.py();
    let (texts, role, truncate): (Vec<String>, String, bool) = arguments.extract()?;
    let vectors = shared.embed(&Thread(py), &CancelToken::new(), texts, &role, truncate);
    let vectors = waited(py, vectors)?;
    let bytes = PyByteArray::new_with(py, vectors.values.len() * size_of::<f32>(), |bytes| {
        for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(&vectors.values) {
            *bytes = value.to_ne_bytes();
        }
        Ok(())
    })?;
    Ok((bytes.unbind(), vectors.dim))
}

/// `transcribe(audio, max_new_tokens, word_times, vad)`: the transcript as JSON. `vad` is JSON, too.
fn transcribe(shared: &Arc<Shared>, arguments: Arguments<'_, '_>) -> PyResult<String> {
    let py = arguments.py();
    let (medium, max_new, words, vad): (Medium, Option<usize>, bool, Option<String>) =
        arguments.extract()?;
    let audio = raised(py, item(medium))?;
    let times = if words { Times::Word } else { Times::default() };
    let ticket = CancelToken::new();
    let transcript = shared.transcribe(&Thread(py), &ticket, audio, max_new, times, vad);
    let transcript = waited(py, transcript)?;
    let chunk = |chunk: &qhx::Chunk| {
        json!({
            "start": chunk.start,
            "end": chunk.end,
            "text": chunk.text,
            "finish_reason": chunk.finish_reason.name(),
        })
    };
    let word = |word: &qhx::Chunk| json!({"start": word.start, "end": word.end, "text": word.text});
    Ok(json!({
        "text": transcript.text,
        "seconds": transcript.seconds,
        "chunks": transcript.chunks.iter().map(chunk).collect::<Vec<_>>(),
        "words": transcript.words.iter().map(word).collect::<Vec<_>>(),
        "cancelled": transcript.cancelled,
    })
    .to_string())
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
