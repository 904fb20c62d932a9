//! The tier that needs the QNN libraries, for tests of this crate and of the forge.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use qhx_qnn::Library;

/// The opened libraries, or `None` after saying that the tier is skipped.
#[expect(clippy::print_stderr, reason = "a test says what it measured or why it is skipped")]
pub fn tier() -> Option<Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        let htp = PathBuf::from(std::env::var_os("QHX_QNN_HTP")?);
        let system = std::env::var_os("QHX_QNN_SYSTEM").map(PathBuf::from);
        Some(Library::open(&htp, system.as_deref()).unwrap())
    });
    if library.is_some() {
        take_turn();
    }
    if library.is_none() {
        eprintln!("skipped: qnn tier (QHX_QNN_HTP is not set)");
        let required = std::env::var("QHX_REQUIRE_TIERS").is_ok_and(|v| v == "1");
        assert!(!required, "QHX_REQUIRE_TIERS=1, but QHX_QNN_HTP is not set");
    }
    library.clone()
}

/// Waits until no other test uses the libraries, and keeps them until the thread of this one ends. Within the
/// process qhx itself keeps compiling, loading and executing apart. Before loading was kept apart, too, one run of
/// seven failed here; whether it was that alone is not known.
fn take_turn() {
    static TURN: Mutex<()> = Mutex::new(());
    thread_local! {
        static MINE: RefCell<Option<MutexGuard<'static, ()>>> = const { RefCell::new(None) };
    }
    MINE.with_borrow_mut(|mine| {
        mine.get_or_insert_with(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
    });
}
