//! Record of a request under way.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::access_log::Record;
use crate::app::Shared;

/// A request under way. Once nobody needs it any more, it is over.
#[derive(Debug)]
pub(crate) struct Tally {
    shared: Shared,
    record: Mutex<Record>,
    start: Instant,
}

/// Status of a request whose client has left.
const LEFT: u16 = 499;

impl Tally {
    pub(crate) fn new(shared: Shared, id: String, route: String) -> Self {
        shared.activity.begin();
        let record = Record { id, route, status: LEFT, ..Record::default() };
        Self { shared, record: Mutex::new(record), start: Instant::now() }
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Record)) {
        change(&mut self.record.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Notes a text of the request, if such are asked for.
    pub(crate) fn prompt(&self, text: impl FnOnce() -> String) {
        if self.shared.options.log_prompts {
            let text = text();
            self.update(|record| record.prompt = Some(text));
        }
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        let record = self.record.get_mut().unwrap_or_else(PoisonError::into_inner);
        record.time = self.start.elapsed();
        self.shared.metrics.request(record);
        if let Some(on_request) = &self.shared.options.on_request {
            on_request(record);
        }
        self.shared.activity.end();
    }
}
