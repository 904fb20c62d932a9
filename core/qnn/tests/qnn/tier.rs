//! The tier that needs the QNN libraries, for tests of this crate and of the forge.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use qhx_qnn::Library;

/// The opened libraries, for a test with `#[tier(qnn)]`.
pub fn opened() -> Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        let htp = std::env::var_os("QHX_QNN_HTP").map(PathBuf::from);
        let system = std::env::var_os("QHX_QNN_SYSTEM").map(PathBuf::from);
        let htp = htp.expect("qnn tier: QHX_QNN_HTP is not set");
        Library::open(&htp, system.as_deref()).unwrap()
    });
    take_turn();
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
