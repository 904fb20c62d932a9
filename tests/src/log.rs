//! Log records of host-ops.

use std::cell::RefCell;
use std::fmt::Debug;
use std::sync::Once;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

thread_local! {
    /// The lines of this thread, while they are captured.
    static LINES: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

struct Lines;

impl Visit for Lines {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            LINES.with_borrow_mut(|lines| {
                if let Some(lines) = lines {
                    lines.push(format!("{value:?}"));
                }
            });
        }
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "qhx::op"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Self);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Listens to the log. To be called before anything is written to it.
pub fn listen() {
    static ONCE: Once = Once::new();
    // A test that listens by itself is left alone.
    ONCE.call_once(|| drop(tracing::subscriber::set_global_default(Lines)));
}

/// Runs `body` and returns its result and the lines that host-ops logged on this thread.
pub fn capture<T>(body: impl FnOnce() -> T) -> (T, Vec<String>) {
    LINES.set(Some(Vec::new()));
    let result = body();
    (result, LINES.take().unwrap_or_default())
}
