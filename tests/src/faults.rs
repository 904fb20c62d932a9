//! Models over the provider of `tests/fake-device`, with faults.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use qhx_base::{CancelToken, Error, Result};
use qhx_core::engine::Model;
use qhx_exec::backend::Backend;
use qhx_fake_device::{Control, Plan, Report, is_spared};
use qhx_qnn::codes::Code;
use qhx_qnn::{MemoryMode, PerfMode, QnnBackend, QnnOptions};

use crate::tiny;

/// The provider in between. One test at a time has it.
#[derive(Debug)]
pub struct Faults {
    control: Control,
    system: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

/// Codes that calls fail with: some mean much to qhx, others nothing.
const CODES: [u16; 7] = [1003, 1002, 1100, 1009, 4000, 5005, 6004];

impl Faults {
    /// For a test with `#[tier(qnn)]`.
    pub fn open() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let (_, system) = tiny::qnn_libraries();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let control = Control::open().unwrap_or_else(|e| panic!("{e}"));
        let faults = Self { control, system, _turn: turn };
        faults.plan(&Plan::default());
        faults
    }

    /// The backend over it.
    pub fn backend(&self) -> Result<Arc<dyn Backend>> {
        self.backend_with(MemoryMode::Auto)
    }

    /// The backend over it, with inputs and outputs in memory of this kind.
    pub fn backend_with(&self, memory: MemoryMode) -> Result<Arc<dyn Backend>> {
        let path = self.control.path().to_owned();
        let options = QnnOptions {
            cdsprpc: (memory != MemoryMode::Auto).then(|| path.clone()),
            htp: path,
            system: Some(self.system.clone()),
            perf: PerfMode::Burst,
            memory,
            ..QnnOptions::default()
        };
        Ok(Arc::new(QnnBackend::new(options)?))
    }

    /// A bundle over it, opened by the plugins of [`tiny::plugins`].
    pub fn model(&self, manifest: &Path) -> Result<Model> {
        tiny::open_by(manifest, self.backend()?, &tiny::plugins(), &CancelToken::new())
    }

    /// Sets what is to happen.
    pub fn plan(&self, plan: &Plan) {
        self.control.set(plan).unwrap_or_else(|e| panic!("{e}"));
    }

    /// Report of what happened.
    pub fn report(&self) -> Report {
        self.control.report().unwrap_or_else(|e| panic!("{e}"))
    }

    /// See [`Control::closed`].
    #[track_caller]
    pub fn closed(&self, label: &str) -> Report {
        self.control.closed(label)
    }

    /// Fails each call of a session in turn. Each time there is one error, or where the call can be done without none,
    /// and the same work succeeds afterwards: on the model where it is open, and in the next session. With
    /// `executions`, only that number of executions is failed, from the first to the last: a session of many takes
    /// long.
    pub fn walk<T: PartialEq + Debug>(
        &self,
        label: &str,
        executions: Option<usize>,
        manifest: &Path,
        mut work: impl FnMut(&mut Model) -> Result<T>,
    ) {
        self.plan(&Plan::default());
        let expected = {
            let mut model = self.model(manifest).unwrap_or_else(|e| panic!("{label}: {e}"));
            work(&mut model).unwrap_or_else(|e| panic!("{label}: {e}"))
        };
        let calls = self.closed(label).order;
        let (mut failed, mut errors) = (0, 0);
        for index in chosen(&calls, executions) {
            let call = &calls[index];
            let code = CODES[index % CODES.len()];
            let label =
                format!("{label}: call {} of {}, {call}, answers {code}", index + 1, calls.len());
            self.plan(&Plan::fail_nth(index as u64 + 1, code));
            let result = self.model(manifest).and_then(|mut model| {
                let first = work(&mut model);
                if first.is_err() {
                    let again =
                        work(&mut model).unwrap_or_else(|e| panic!("{label}, and then: {e}"));
                    assert_eq!(again, expected, "{label}, and then");
                }
                first
            });
            let report = self.closed(&label);
            assert_eq!(report.failed.len(), 1, "{label}: {:?}", report.failed);
            failed += 1;
            match result {
                Ok(found) => {
                    assert!(is_spared(call), "{label}: no error");
                    assert_eq!(found, expected, "{label}");
                }
                Err(error) => {
                    assert!(!is_spared(call), "{label}: {error}");
                    explains(&error, code, &label);
                    errors += 1;
                }
            }
        }
        self.plan(&Plan::fail_nth(calls.len() as u64 + 1, 1003));
        let last = self.model(manifest).and_then(|mut model| work(&mut model));
        assert_eq!(last.unwrap_or_else(|e| panic!("{label}: {e}")), expected);
        assert!(self.closed(label).failed.is_empty(), "{label}: a call more than before");
        let total = calls.len();
        let spared = failed - errors;
        eprintln!(
            "{label}: {failed} of {total} calls failed, all survived: {errors} errors, {spared} done without"
        );
        assert!(errors >= executions.unwrap_or(6) && failed <= total, "{label}: {calls:?}");
    }
}

/// Which calls are failed.
fn chosen(calls: &[String], executions: Option<usize>) -> Vec<usize> {
    let all = 0..calls.len();
    let Some(max) = executions else { return all.collect() };
    let all: Vec<usize> = all.filter(|&index| calls[index] == "graphExecute").collect();
    let last = all.len().saturating_sub(1);
    (0..max).map(|n| all[n * last / max.saturating_sub(1).max(1)]).collect()
}

/// The error of a call that answered with `code`: named, with a fix, on one line.
#[track_caller]
pub fn explains(error: &Error, code: u16, label: &str) {
    assert_eq!(error.code(), Some(code.into()), "{label}: {error}");
    assert!(error.message().contains(&Code(code).to_string()), "{label}: {error}");
    assert!(error.hint_text().is_some_and(|hint| hint.len() > 10), "{label}: no fix: {error}");
    assert!(!error.message().contains('\n') && error.message().len() < 1500, "{label}: {error}");
}
