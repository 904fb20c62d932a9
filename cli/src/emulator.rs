//! Progress of an emulator of the NPU, on standard error: it takes minutes for what a device does at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use qhx_exec::backend::Backend;
use qhx_exec::workspace::Tap;

/// Time without a line after which the next execution is reported.
const QUIET: Duration = Duration::from_secs(10);

/// Set once a model is opened on an emulator.
static EMULATED: AtomicBool = AtomicBool::new(false);

/// Advises on an emulator, and has executions on it reported from now on.
pub(crate) fn advise(backend: &dyn Backend) {
    if backend.emulates() && !EMULATED.swap(true, Ordering::Relaxed) {
        say!(
            "note: the NPU is emulated here, which takes minutes a token of a model of usual size; --backend cpu runs \
             the bundle's ONNX graphs in much less"
        );
    }
}

/// Reports executions on an emulator: the graph, how many there were, and for how long.
pub(crate) fn tap() -> Tap {
    let begun = Instant::now();
    let state = Mutex::new((0_u64, begun));
    Arc::new(move |executed| {
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let (count, said) = &mut *state;
        *count += 1;
        if EMULATED.load(Ordering::Relaxed) && said.elapsed() > QUIET {
            let (graph, seconds) = (&executed.info().name, begun.elapsed().as_secs());
            say!("emulator: graph {graph} done, the {count}th execution in {seconds} s");
            *said = Instant::now();
        }
    })
}
