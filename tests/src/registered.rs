//! Models whose inputs and outputs lie in memory that is registered with the NPU, over the provider of
//! `tests/fake-device`, which counts.

use std::path::Path;

use qhx_fake_device::{Plan, Then};
use qhx_qnn::MemoryMode;

use crate::faults::Faults;
use crate::replay::greedy_exact;
use crate::tiny::{self, Case};

/// Plays cases with memory on the heap and with registered memory. Both say what the reference says, both call nothing
/// but executions once everything was bound before, and with registered memory no byte is handed over to be copied. The
/// same holds after the DSP restarted.
pub fn copies_nothing(manifest: &Path, cases: &[&Case], label: &str) {
    let faults = Faults::open();
    let set = || faults.plan(&Plan::default());
    for memory in [MemoryMode::Raw, MemoryMode::Registered] {
        let label = format!("{label}, {}", memory.name());
        set();
        let backend = faults.backend_with(memory).unwrap_or_else(|e| panic!("{label}: {e}"));
        let mut model = tiny::open(manifest, backend).unwrap_or_else(|e| panic!("{label}: {e}"));
        greedy_exact(&mut model, cases, &label);
        let bound = faults.report();
        set();
        greedy_exact(&mut model, cases, &label);
        let again = faults.report();
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
        // Half way, everything is registered again with other contexts.
        faults.plan(&Plan::at("graphExecute", again.executions / 2, Then::Restart(1007)));
        greedy_exact(&mut model, cases, &format!("{label}, restarted"));
        let restarted = faults.report();
        assert_eq!(restarted.failed.len(), 1, "{label}: {:?}", restarted.failed);
        assert_eq!(restarted.alive, again.alive, "{label}, restarted");
        assert_eq!(
            (restarted.bytes.raw > 0, restarted.bytes.registered > 0),
            (copied > 0, shared > 0),
            "{label}"
        );
        drop(model);
        faults.closed(&label);
    }
}
