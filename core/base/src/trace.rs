//! Trace of where time goes: events with start and duration, each written to a file as it ends.
//!
//! The file is a JSON array in the
//! [trace event format](https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU),
//! which <https://ui.perfetto.dev> and `chrome://tracing` open. A span is a complete event (`"ph": "X"`); one lies
//! within another where it was done while the other was, on the same thread. Times are microseconds since the trace
//! began, all on one clock.
//!
//! A caller that may be traced keeps an `Option<Arc<Trace>>` and calls [`span`]: without a trace that is one
//! comparison. Events are not kept once written, so a long run takes no memory. If writing fails, the trace is given up
//! and the work goes on: [`Trace::finish`] reports the error.
//!
//! Beside `tracing`, which logs here and in apps: a span of `tracing` begins and ends when its code does, and what the
//! NPU's library measures within an execution is known only after it, with times of its own. It would also need a
//! subscriber, of which a process has one, and that is the app's.

use std::borrow::Cow;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::{Error, ErrorKind, Result, files};

/// A file that spans are written to.
#[derive(Debug)]
pub struct Trace {
    path: PathBuf,
    origin: Instant,
    /// Nothing is written any more.
    over: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: Option<BufWriter<File>>,
    error: Option<io::Error>,
    /// Threads whose name was written.
    named: Vec<u64>,
}

/// Kind of work that took time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Category {
    /// Work of the engine, the host-op and the program.
    Host,
    /// The execution of a graph, as the host sees it.
    Graph,
    /// Time measured by a backend's library itself.
    Library,
}

/// Something that took time.
#[derive(Debug)]
pub struct Event<'a> {
    name: &'a str,
    category: Category,
    start: Instant,
    time: Duration,
    arguments: Map<String, Value>,
}

impl<'a> Event<'a> {
    /// Event that began at `start` and took `time`.
    pub fn new(name: &'a str, category: Category, start: Instant, time: Duration) -> Self {
        Self { name, category, start, time, arguments: Map::new() }
    }

    /// With what else is known of it.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.arguments.insert(key.to_owned(), value.into());
        self
    }
}

/// One line of the file.
#[derive(Serialize)]
struct Line<'a> {
    name: &'a str,
    cat: Category,
    ph: &'static str,
    ts: f64,
    dur: f64,
    pid: u32,
    tid: u64,
    #[serde(skip_serializing_if = "Map::is_empty")]
    args: &'a Map<String, Value>,
}

impl Trace {
    /// Begins a trace in a file, which is made or overwritten, for a process that is called `process`. What cannot
    /// hold a trace, such as a folder or a FIFO, is refused.
    ///
    /// # Errors
    /// When the file cannot be made or cannot hold a trace.
    pub fn create(path: &Path, process: &str) -> Result<Self> {
        let file = BufWriter::new(files::create(ErrorKind::Io, path)?);
        let state = State { file: Some(file), error: None, named: Vec::new() };
        let trace = Self {
            path: path.to_owned(),
            origin: Instant::now(),
            over: AtomicBool::new(false),
            state: Mutex::new(state),
        };
        let process = metadata("process_name", process, 0);
        trace.with(|file, _| write!(file, "[\n{process}"));
        // A file that takes nothing is reported before any work is done.
        trace.flush();
        trace.check()?;
        Ok(trace)
    }

    /// Writes what ended.
    pub fn add(&self, event: &Event<'_>) {
        if self.over.load(Ordering::Relaxed) {
            return;
        }
        let thread = thread_number();
        let line = Line {
            name: event.name,
            cat: event.category,
            ph: "X",
            ts: micros(event.start.saturating_duration_since(self.origin)),
            dur: micros(event.time),
            pid: std::process::id(),
            tid: thread,
            args: &event.arguments,
        };
        self.with(|file, named| {
            if !named.contains(&thread) {
                named.push(thread);
                let name = std::thread::current().name().map(str::to_owned);
                let name = name.unwrap_or_else(|| format!("thread {thread}"));
                write!(file, ",\n{}", metadata("thread_name", &name, thread))?;
            }
            file.write_all(b",\n")?;
            Ok(serde_json::to_writer(file, &line)?)
        });
    }

    /// Hands what was written to the system.
    pub fn flush(&self) {
        self.with(|file, _| file.flush());
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// The trace could not be written whole; the file ends there.
    pub fn finish(&self) -> Result<()> {
        self.with(|file, _| {
            file.write_all(b"\n]\n")?;
            file.flush()
        });
        self.over.store(true, Ordering::Relaxed);
        let mut state = self.state();
        // Without writing again what could not be written.
        if let Some(file) = state.file.take() {
            drop(file.into_parts());
        }
        drop(state);
        self.check()
    }

    /// Writes, unless that failed before.
    fn with(&self, write: impl FnOnce(&mut BufWriter<File>, &mut Vec<u64>) -> io::Result<()>) {
        let mut state = self.state();
        let State { file: Some(file), error, named } = &mut *state else { return };
        if let Err(e) = write(file, named) {
            *error = Some(e);
            self.over.store(true, Ordering::Relaxed);
            if let Some(file) = state.file.take() {
                drop(file.into_parts());
            }
        }
    }

    /// Reports the first failure once.
    fn check(&self) -> Result<()> {
        match self.state().error.take() {
            Some(e) => Err(Error::io(ErrorKind::Io, &self.path, e)
                .context("the trace is not complete")
                .hint("give --trace a file on a disk with more room")),
            None => Ok(()),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // Whoever wants to know what went wrong has asked before.
        let _ = self.finish();
    }
}

/// A span that ends when it is dropped.
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct Span<'a> {
    trace: &'a Trace,
    name: Cow<'static, str>,
    start: Instant,
    arguments: Map<String, Value>,
}

impl Span<'_> {
    /// Says more about it.
    pub fn argument(&mut self, key: &str, value: impl Into<Value>) {
        self.arguments.insert(key.to_owned(), value.into());
    }
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        self.trace.add(&Event {
            name: &self.name,
            category: Category::Host,
            start: self.start,
            time: self.start.elapsed(),
            arguments: std::mem::take(&mut self.arguments),
        });
    }
}

/// Begins a span where there is a trace.
pub fn span(trace: Option<&Arc<Trace>>, name: impl Into<Cow<'static, str>>) -> Option<Span<'_>> {
    span_with(trace, name, |_| {})
}

/// Same as [`span`], with further arguments. `arguments` is called only if there is a trace.
pub fn span_with(
    trace: Option<&Arc<Trace>>,
    name: impl Into<Cow<'static, str>>,
    arguments: impl FnOnce(&mut Span<'_>),
) -> Option<Span<'_>> {
    let trace = trace?;
    let start = Instant::now();
    let mut span = Span { trace, name: name.into(), start, arguments: Map::new() };
    arguments(&mut span);
    Some(span)
}

/// Names a process or a thread.
fn metadata(what: &str, name: &str, thread: u64) -> Value {
    let (pid, args) = (std::process::id(), json!({ "name": name }));
    json!({"name": what, "ph": "M", "pid": pid, "tid": thread, "args": args})
}

/// Microseconds, exact to the nanosecond.
fn micros(time: Duration) -> f64 {
    // 2^53 ns are three months.
    time.as_nanos() as f64 / 1e3
}

/// A number of the calling thread, counted from 1.
fn thread_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    thread_local!(static NUMBER: Cell<u64> = const { Cell::new(0) });
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(LAST.fetch_add(1, Ordering::Relaxed) + 1);
        }
        number.get()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &Path) -> Vec<Value> {
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn spans_lie_within_each_other_and_threads_have_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        let trace = Arc::new(Trace::create(&path, "a \"program\"").unwrap());
        {
            let _outer = span_with(Some(&trace), "outer", |s| s.argument("tokens", 3));
            let _inner = span(Some(&trace), "inner");
            std::thread::sleep(Duration::from_millis(2));
        }
        let other = Arc::clone(&trace);
        let worker = std::thread::Builder::new().name("worker".to_owned());
        worker.spawn(move || drop(span(Some(&other), "elsewhere"))).unwrap().join().unwrap();
        trace.finish().unwrap();
        drop(span(Some(&trace), "too late"));
        trace.finish().unwrap();

        let events = read(&path);
        let find = |name: &str| events.iter().find(|e| e["name"] == name).unwrap();
        let number = |event: &Value, key: &str| event[key].as_f64().unwrap();
        let (outer, inner) = (find("outer"), find("inner"));
        assert_eq!(outer["args"]["tokens"], 3);
        assert!(number(inner, "dur") >= 2000.0, "{inner}");
        assert!(number(outer, "ts") <= number(inner, "ts"));
        let end = |event: &Value| number(event, "ts") + number(event, "dur");
        assert!(end(inner) <= end(outer) + 1e-3, "{inner} {outer}");
        assert_eq!(inner["tid"], outer["tid"]);
        assert_ne!(find("elsewhere")["tid"], outer["tid"]);
        assert_eq!(find("process_name")["args"]["name"], "a \"program\"");
        let names: Vec<_> = events.iter().filter(|e| e["name"] == "thread_name").collect();
        let named = |name: &str| names.iter().find(|e| e["args"]["name"] == name).unwrap();
        assert_eq!(named("worker")["tid"], find("elsewhere")["tid"]);
        assert_eq!((names.len(), events.len()), (2, 6));
    }

    #[test]
    fn without_a_trace_nothing_is_asked_for() {
        assert!(span_with(None, "x", |_| panic!("asked")).is_none());
    }

    #[test]
    fn an_earlier_trace_is_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        std::fs::write(&path, vec![b'x'; 100_000]).unwrap();
        Trace::create(&path, "p").unwrap().finish().unwrap();
        assert_eq!(read(&path).len(), 1);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_reported_once_and_the_work_goes_on() {
        let error = Trace::create(Path::new("/dev/full"), "p").unwrap_err();
        assert!(error.message().contains("/dev/full"), "{error}");
        assert_eq!(error.kind(), ErrorKind::Io);
    }

    #[cfg(unix)]
    #[test]
    fn what_cannot_hold_a_trace_is_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let _reader = File::options().read(true).write(true).open(&fifo).unwrap();
        for (path, what) in [(fifo.as_path(), "a FIFO"), (folder.path(), "a folder")] {
            let error = Trace::create(path, "p").unwrap_err();
            assert!(error.message().contains(what), "{error}");
        }
        let error = Trace::create(&folder.path().join("no/t.json"), "p").unwrap_err();
        assert!(error.message().contains("t.json"), "{error}");
    }
}
