//! The log, for a callback of the caller.

#![expect(unsafe_code, reason = "calls a function of the caller, from any thread")]

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{OnceLock, PoisonError, RwLock};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::abi::LogCallback;
use crate::fault::{Fault, Result, c_text};

/// A callback with its argument.
struct Sink {
    callback: LogCallback,
    user: *mut c_void,
}

// SAFETY: the header says that the function is called from any thread; its argument is passed on and not looked at.
unsafe impl Send for Sink {}
// SAFETY: as above; threads may be in it at the same time.
unsafe impl Sync for Sink {}

static SINK: RwLock<Sink> = RwLock::new(Sink { callback: None, user: std::ptr::null_mut() });
static LEVEL: AtomicI32 = AtomicI32::new(0);

thread_local! {
    /// This thread is in the callback: what it does there is not logged.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}

/// Has `callback` called with messages up to `level`, or nobody.
pub(crate) fn set(callback: LogCallback, user: *mut c_void, level: c_int) -> Result<()> {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    if !(0..=5).contains(&level) {
        return Err(Fault::usage(format!("level is {level}, expected 1 (error) to 5 (trace)")));
    }
    if WITHIN.get() {
        return Err(Fault::busy("the log's callback cannot set the log".to_owned()));
    }
    if !INSTALLED.get_or_init(|| tracing::subscriber::set_global_default(Log).is_ok()) {
        return Err(Fault::busy("the program has a log of its own already".to_owned()));
    }
    // Waits for calls under way.
    let mut sink = SINK.write().unwrap_or_else(PoisonError::into_inner);
    *sink = Sink { callback, user };
    LEVEL.store(if callback.is_some() { level } else { 0 }, Ordering::Relaxed);
    drop(sink);
    tracing::callsite::rebuild_interest_cache();
    Ok(())
}

struct Log;

fn number(level: &Level) -> c_int {
    match *level {
        Level::ERROR => 1,
        Level::WARN => 2,
        Level::INFO => 3,
        Level::DEBUG => 4,
        Level::TRACE => 5,
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && number(metadata.level()) <= LEVEL.load(Ordering::Relaxed)
    }

    fn event(&self, event: &Event<'_>) {
        if WITHIN.get() {
            return;
        }
        let mut text = Message::default();
        event.record(&mut text);
        let level = number(event.metadata().level());
        let target = c_text(event.metadata().target());
        let message = c_text(&[text.message, text.fields].concat());
        let sink = SINK.read().unwrap_or_else(PoisonError::into_inner);
        let Some(callback) = sink.callback else { return };
        WITHIN.set(true);
        // SAFETY: the caller gave the function for this, with its argument; both texts outlive the call.
        unsafe { callback(sink.user, level, target.as_ptr(), message.as_ptr()) };
        WITHIN.set(false);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The text of an event: its message, and its fields behind it.
#[derive(Default)]
struct Message {
    message: String,
    fields: String,
}

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a text does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
