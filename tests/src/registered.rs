//! Models whose inputs and outputs lie in memory that is registered with the NPU, over the provider of
//! `tests/fake-device`, which counts.

use std::path::Path;

use qhx_core::qnn::MemoryMode;
use qhx_fake_device::{Control, Plan};

use crate::backends;
use crate::replay::greedy_exact;
use crate::toys::{self, Case};

/// Plays cases with memory on the heap and with registered memory. Both say what the reference says, both call nothing
/// but executions once everything was bound before, and with registered memory no byte is handed over to be copied.
#[expect(clippy::print_stderr, reason = "a test says what it measured or why it is skipped")]
pub fn copies_nothing(manifest: &Path, cases: &[&Case], label: &str) {
    let Some((_, system)) = toys::qnn_tier() else { return };
    let control = Control::open().unwrap_or_else(|e| panic!("{e}"));
    let set = || control.set(&Plan::default()).unwrap_or_else(|e| panic!("{e}"));
    let report = || control.report().unwrap_or_else(|e| panic!("{e}"));
    for memory in [MemoryMode::Raw, MemoryMode::Registered] {
        let label = format!("{label}, {}", memory.name());
        set();
        let backend = backends::between(&control, &system, memory);
        let mut model = toys::open(manifest, backend).unwrap_or_else(|e| panic!("{label}: {e}"));
        greedy_exact(&mut model, cases, &label);
        let bound = report();
        set();
        greedy_exact(&mut model, cases, &label);
        let again = report();
        let tokens: usize = cases.iter().map(|case| case.output_ids.len()).sum();
        eprintln!(
            "{label}: {tokens} tokens and their prompts: {} calls, of which {} executions; {} bytes raw, {} registered; \
             at first {} calls of memRegister for {} buffers",
            again.total,
            again.executions,
            again.bytes.raw,
            again.bytes.registered,
            bound.registered,
            bound.alive.get("rpcmem").unwrap_or(&0)
        );
        assert_eq!(again.total, again.executions, "{label}: {:?}", again.calls);
        let (copied, shared) = (again.bytes.raw, again.bytes.registered);
        match memory {
            MemoryMode::Raw => assert!(copied > 0 && shared == 0, "{label}: {again:?}"),
            _ => assert!(copied == 0 && shared > 0, "{label}: {again:?}"),
        }
        drop(model);
        let closed = report();
        assert!(closed.alive.is_empty(), "{label}: {:?}", closed.alive);
        assert!(closed.violations.is_empty(), "{label}: {:?}", closed.violations);
    }
}
