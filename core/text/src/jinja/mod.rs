//! Chat templates in Jinja, as `transformers` renders them.
//!
//! `transformers/utils/chat_template_utils.py` sets the rules: blocks are trimmed, `break` and `continue` work,
//! Python's methods work, `raise_exception`, `strftime_now` and a `tojson` that is `json.dumps` are there, `tools`
//! and `documents` are none, and nothing can be changed but a namespace.
//!
//! | module | does |
//! |---|---|
//! | `source` | bounds a template and writes differently what the engine understands otherwise |
//! | `filters`, `checks`, `methods` | the filters, tests and methods of Jinja2 and Python |
//! | `python`, `json`, `time` | values, JSON and dates as Python writes them |
//! | `format` | `%` and `format`, within bounds |
//! | `helper` | renders in a process of its own |
//!
//! A template is untrusted input, and a program. What it may do is bounded here: steps, depth, what a variable holds,
//! what is written. It runs on a thread with a stack of its own, and a panic ends the thread alone. The engine itself
//! allocates beyond these bounds in places, so that a program that can do so renders in a child process with limits
//! of the operating system; see [`qhx_base::child`].

mod checks;
mod filters;
mod format;
mod helper;
mod json;
mod methods;
mod python;
mod source;
#[cfg(test)]
mod tests;
mod time;

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::thread;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Serde, Tuple, ValueKind};
use minijinja::{Environment, Error as JinjaError, ErrorKind as JinjaErrorKind, Value};
use serde::{Deserialize, Serialize};

pub use helper::TASK;
use helper::{Renderer, Request};
use qhx_base::{CancelToken, Error, ErrorKind, Result, error};

use super::message::{Message, RenderOptions};
use crate::CallFormat;
use crate::tools::{generic, results};

/// Instructions that one rendering may execute: a second or so.
const FUEL: u64 = 20_000_000;

/// Depth of macros and of loops that call themselves.
const DEPTH: usize = 64;

/// Bytes that one rendering may write, what it captures in blocks included.
const MAX_OUTPUT: usize = 64 << 20;

/// Bytes of template that are compiled.
pub(super) const MAX_SOURCE: usize = 1 << 20;

/// Stack for compiling and rendering: what `source` lets through needs a small part of it.
const STACK: usize = 64 << 20;

const NAME: &str = "chat_template";

/// Hint for a template that does not compile.
const HINT: &str =
    "set \"chat\": {\"style\": \"markers\"} in the manifest to do without the template";

thread_local! {
    /// Bytes that the rendering on this thread has written so far.
    static WRITTEN: Cell<usize> = const { Cell::new(0) };
}

/// A template that compiles.
pub(super) struct JinjaTemplate {
    template: Template,
    /// Origin of the template, for messages.
    origin: String,
    engine: Engine,
}

/// Renderer of a template.
enum Engine {
    /// This process, which compiled it.
    Here(Box<Environment<'static>>),
    /// A process of its own.
    Helper(Renderer),
}

/// A template with the special tokens that it may name.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Template {
    pub source: String,
    pub tokens: serde_json::Map<String, serde_json::Value>,
}

impl JinjaTemplate {
    /// Its text.
    pub(super) fn source(&self) -> &str {
        &self.template.source
    }

    /// Compiles a template in this process.
    pub(super) fn here(template: Template, origin: &str) -> Result<Self> {
        let environment =
            on_a_thread(|| compile(&template.source)).map_err(|e| artifact(&e, origin))?;
        let engine = Engine::Here(Box::new(environment));
        Ok(Self { template, origin: origin.to_owned(), engine })
    }

    /// Compiles a template in a child process where the program has one, and later renders it there.
    pub(super) fn open(template: Template, origin: &str) -> Result<Self> {
        match qhx_base::child::program() {
            None => Self::here(template, origin),
            Some(program) => {
                let renderer = Renderer::new(program);
                let check = Request { template: Cow::Borrowed(&template), context: None };
                renderer.ask(&check, origin, ErrorKind::Artifact, &CancelToken::new())?;
                Ok(Self { template, origin: origin.to_owned(), engine: Engine::Helper(renderer) })
            }
        }
    }

    pub(super) fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        let context = context(messages, options, &self.template)?;
        match &self.engine {
            Engine::Here(environment) => {
                on_a_thread(|| render(environment, &context)).map_err(|e| prompt(&e, &self.origin))
            }
            Engine::Helper(renderer) => {
                let template = Cow::Borrowed(&self.template);
                let request = Request { template, context: Some(context) };
                renderer.ask(&request, &self.origin, ErrorKind::Prompt, &options.cancel)
            }
        }
    }
}

/// A template that does not compile.
fn artifact(why: &str, origin: &str) -> Error {
    error!(Artifact, "{origin}: {why}").hint(HINT)
}

/// A template that cannot render this conversation.
fn prompt(why: &str, origin: &str) -> Error {
    error!(Prompt, "{origin}: {why}")
}

/// Variables of the template.
fn context(
    messages: &[Message],
    options: &RenderOptions,
    template: &Template,
) -> Result<serde_json::Map<String, serde_json::Value>> {
    let messages = serde_json::to_value(messages)
        .map_err(|e| Error::caused(ErrorKind::Internal, "the conversation as JSON", e))?;
    let mut context = template.tokens.clone();
    for (name, value) in [
        ("messages", messages),
        ("tools", serde_json::Value::Null),
        ("documents", serde_json::Value::Null),
        ("add_generation_prompt", options.add_generation_prompt.into()),
    ] {
        context.insert(name.to_owned(), value);
    }
    if let Some(thinking) = options.enable_thinking {
        context.insert("enable_thinking".to_owned(), thinking.into());
    }
    context.extend(options.arguments.clone());
    if CallFormat::of_template(&template.source).is_none() {
        generic::tell(&mut context);
    }
    if let Some(serde_json::Value::Array(messages)) = context.get_mut("messages") {
        if results::stand_within(&template.source) {
            results::put_within(messages);
        }
        messages.iter_mut().for_each(name_reasoning);
    }
    Ok(context)
}

/// Gives a message's reasoning the names under which templates look for it: `reasoning_content`, and `thinking` where
/// it has another one.
fn name_reasoning(message: &mut serde_json::Value) {
    let serde_json::Value::Object(message) = message else { return };
    let names = ["reasoning_content", "thinking", "reasoning"];
    let reasoning = names.iter().find_map(|name| message.get(*name).filter(|v| !v.is_null()));
    let Some(reasoning) = reasoning.cloned() else { return };
    let mut named = serde_json::Map::new();
    named.insert("thinking".to_owned(), reasoning.clone());
    named.append(message);
    named.insert("reasoning_content".to_owned(), reasoning);
    *message = named;
}

/// Does work on a thread with a large stack. A panic is returned as an error.
fn on_a_thread<T: Send>(work: impl FnOnce() -> Result<T, String> + Send) -> Result<T, String> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work);
        let thread = thread.map_err(|e| format!("no thread for rendering can start: {e}"))?;
        thread.join().unwrap_or_else(|_| Err("the template engine failed".to_owned()))
    })
}

fn compile(source: &str) -> Result<Environment<'static>, String> {
    if source.len() > MAX_SOURCE {
        return Err(format!("the template is larger than {} KiB", MAX_SOURCE >> 10));
    }
    let prepared = source::prepare(source)?;
    let mut environment = Environment::empty();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|e| describe(&e))?);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(DEPTH);
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(|out, _, value| {
        let text = python::str(value)?;
        let written = WRITTEN.get() + text.len();
        if written > MAX_OUTPUT {
            return Err(python::fail(format!("the prompt grows beyond {} MiB", MAX_OUTPUT >> 20)));
        }
        WRITTEN.set(written);
        out.write_str(&text).map_err(JinjaError::from)
    });
    filters::add(&mut environment);
    checks::add(&mut environment);
    environment.add_function("range", minijinja::functions::range);
    environment.add_function("dict", minijinja::functions::dict);
    environment.add_function("namespace", namespace);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", time::strftime_now);
    // What `source` writes.
    environment.add_function("__mod__", modulo);
    environment.add_function("__str__", |value: &Value| python::str(value).map(Value::from));
    environment.add_function("__iter__", iterated);
    environment.add_function("__set__", |values: Rest<Value>| kept(values, true));
    environment.add_function("__set_attr__", |values: Rest<Value>| kept(values, false));
    environment.add_template_owned(NAME, prepared).map_err(|e| describe(&e))?;
    Ok(environment)
}

fn render(
    environment: &Environment<'static>,
    context: &serde_json::Map<String, serde_json::Value>,
) -> Result<String, String> {
    WRITTEN.set(0);
    let template = environment.get_template(NAME).map_err(|e| describe(&e))?;
    let mut output = Bounded(Vec::new());
    template
        .render_captured_to(Value::from(Serde(context)), &mut output)
        .map_err(|e| describe(&e))?;
    String::from_utf8(output.0).map_err(|_| "the result is not UTF-8".to_owned())
}

/// The message with what caused it, on one line.
fn describe(error: &JinjaError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let _ = write!(text, ": {cause}");
        source = cause.source();
    }
    text.replace('\n', " ")
}

/// A buffer that refuses to grow without end.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
            let limit = MAX_OUTPUT >> 20;
            return Err(io::Error::other(format!("the prompt grows beyond {limit} MiB")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn raise_exception(message: &str) -> Result<Value, JinjaError> {
    Err(JinjaError::new(JinjaErrorKind::InvalidOperation, message.to_owned()))
}

/// `namespace(a=1)`: the one thing that a template may change.
fn namespace(first: Option<Value>, named: Kwargs) -> Result<Value, JinjaError> {
    let mut members = Vec::new();
    for [name, value] in first.as_ref().map(python::pairs).transpose()?.into_iter().flatten() {
        members.push((name, value));
    }
    for name in named.args() {
        members.push((name.into(), named.get::<Option<Value>>(name)?.unwrap_or(().into())));
    }
    for (_, value) in &members {
        python::check_kept(value, false)?;
    }
    minijinja::functions::namespace(Some(Value::from_pairs(members).into()))
}

/// One value, or several as a tuple.
fn one_or_tuple(values: Rest<Value>) -> Value {
    match values.0.len() {
        1 => values.0.into_iter().next().unwrap_or_default(),
        _ => python::tuple(values.0),
    }
}

/// Value that a loop iterates over.
fn iterated(values: Rest<Value>) -> Result<Value, JinjaError> {
    let value = one_or_tuple(values);
    match value.kind() {
        kind @ (ValueKind::None | ValueKind::Bool | ValueKind::Number) => {
            Err(python::fail(format!("a value of type {kind} is not iterable")))
        }
        _ => Ok(value),
    }
}

/// Value that `set` keeps.
fn kept(values: Rest<Value>, namespace_allowed: bool) -> Result<Value, JinjaError> {
    let value = one_or_tuple(values);
    python::check_kept(&value, namespace_allowed)?;
    Ok(value)
}

/// `left % right`: fills in a string's places, or the remainder with the sign of the divisor.
fn modulo(left: &Value, right: &Value) -> Result<Value, JinjaError> {
    if let Some(format) = left.as_str() {
        return match right.downcast_object_ref::<Tuple>() {
            Some(tuple) => format::percent(format, tuple),
            None => format::percent(format, std::slice::from_ref(right)),
        };
    }
    let unsupported = || {
        python::fail(format!(
            "unsupported operand types for %: {} and {}",
            left.kind(),
            right.kind()
        ))
    };
    let divided = || python::fail("modulo by zero");
    match (i128::try_from(left.clone()), i128::try_from(right.clone())) {
        (Ok(a), Ok(b)) if left.is_integer() && right.is_integer() => {
            let rest = a.checked_rem(b).ok_or_else(divided)?;
            Ok(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }.into())
        }
        _ => match (f64::try_from(left.clone()), f64::try_from(right.clone())) {
            (Ok(_), Ok(0.0)) => Err(divided()),
            (Ok(a), Ok(b)) => {
                let rest = a % b;
                Ok(if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }.into())
            }
            _ => Err(unsupported()),
        },
    }
}
