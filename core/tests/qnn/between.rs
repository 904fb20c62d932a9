//! The backend over the provider of `tests/fake-device`, which counts, checks and fails calls.

use qhx_core::qnn::PerfMode;
use qhx_fake_device::{Control, Plan};

use crate::*;

/// The provider in between, with nothing planned, and the real library for compiling.
pub fn fake() -> Option<(Library, Control)> {
    let real = tier()?;
    let control = Control::open().unwrap();
    control.set(&Plan::default()).unwrap();
    Some((real, control))
}

/// The backend over the provider in between.
pub fn backend_over(control: &Control, real: &Library, options: QnnOptions) -> Arc<QnnBackend> {
    let library = Library::open(control.path(), Some(real.system().path())).unwrap();
    backend(&library, options)
}

#[test]
fn calls_are_handed_on_and_everything_is_freed() {
    let Some((real, control)) = fake() else { return };
    let binary = linear_binary(&real, Target::V81, 5);
    let (input, x) = f16s(&numbers(1, K));
    let options = QnnOptions { perf: PerfMode::Burst, ..QnnOptions::default() };
    let mut session = Session::open(backend_over(&control, &real, options), &binary);
    let y = read_f16s(&session.run(0, &input));
    assert!(error(&y, &product(&x, &weight(5).1)) < 5e-3);
    session.run(0, &input);
    let open = control.report().unwrap();
    assert_eq!((open.calls["graphExecute"], open.executions), (2, 2));
    assert_eq!(open.bytes.raw + open.bytes.registered, 2 * 2 * (K + N) as u64);
    for kind in ["log", "backend", "device", "context", "graph", "power"] {
        assert_eq!(open.alive.get(kind), Some(&1), "{kind}: {open:?}");
    }
    assert!(open.votes[0].contains("mode 0x10") && open.votes[0].contains("bus 0xa0"), "{open:?}");
    drop(session);
    let closed = control.report().unwrap();
    assert!(closed.alive.is_empty(), "{closed:?}");
    assert!(closed.violations.is_empty(), "{closed:?}");
}
