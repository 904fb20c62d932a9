//! Libraries that are odd as a whole, memory, and many sessions in one process.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says that it failed by panicking")]

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};

use qhx_base::CancelToken;
use qhx_core::op::{OpProvider, ProgressFn};
use qhx_plugins::{LoadErrorKind, Plugin};
use qhx_tests::null_model::{self, Setup};
use qhx_tests::outside::Outside;
use qhx_tests::plugin_files::{build_example, only};
use qhx_tests::replay::complete;
use qhx_tests::{has, letters, plugin_files};
use serde_json::json;

fn odd(name: &str) -> PathBuf {
    build_example("qhx-test-malformed-plugins", name)
}

#[test]
fn a_panic_in_describe_is_a_reason_not_a_crash() {
    let _alone = alone();
    let error = Plugin::load(&odd("panic_in_describe")).unwrap_err();
    assert_eq!(error.kind, LoadErrorKind::Misbehaved);
    let message = error.to_string();
    assert!(message.contains("panic_in_describe") && message.contains("panicked while describing"));
}

#[test]
fn libraries_that_are_odd_as_a_whole_are_refused() {
    let _alone = alone();
    for (name, kind, says) in [
        ("no_ops", LoadErrorKind::Misbehaved, "no host-op"),
        ("two_ops_of_one_name", LoadErrorKind::Misbehaved, "two host-ops named \"test_twice\""),
        ("bad_op_name", LoadErrorKind::Misbehaved, "\"../escape\""),
        ("wrong_magic", LoadErrorKind::Incompatible, "abi_stable"),
    ] {
        let error = Plugin::load(&odd(name)).unwrap_err();
        let message = error.to_string();
        assert_eq!(error.kind, kind, "{message}");
        assert!(message.contains(says) && message.contains(name), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[test]
fn writing_past_a_buffer_is_a_panic_that_is_caught() {
    let _alone = alone();
    let plugins = only(&[plugin_files::build("qhx-test-misbehaving-plugin")]);
    let mut model = null_model::open("test_write_past_end", &plugins, &CancelToken::new()).unwrap();
    let error = complete(&mut model, &[1], 2).unwrap_err();
    has(&error.report().to_string(), &["test_write_past_end", "range"]);
}

/// A log that throws for every line.
struct ThrowingLog;

impl tracing::Subscriber for ThrowingLog {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "qhx::op"
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        std::panic::panic_any(Bomb);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// Panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        THROWN.fetch_add(1, Ordering::Relaxed);
        panic!("the bomb goes off");
    }
}

static THROWN: AtomicUsize = AtomicUsize::new(0);

/// Every panic below throws what panics when it is dropped. One that crossed the interface would
/// abort this process.
#[test]
fn what_is_thrown_may_panic_when_it_is_dropped() {
    let _alone = alone();
    let plugins = only(&[plugin_files::build("qhx-test-misbehaving-plugin")]);
    let progress: ProgressFn = Arc::new(|_, _| std::panic::panic_any(Bomb));
    let open = || {
        let setup = Setup { progress: Some(progress.clone()), ..Setup::default() };
        null_model::open_with("test_throw_bombs", &plugins, setup)
    };
    let mut model = open().unwrap();
    let log = tracing::subscriber::with_default(ThrowingLog, || complete(&mut model, &[1], 1));
    assert_eq!(log.unwrap().tokens.len(), 1);
    assert_eq!(THROWN.load(Ordering::Relaxed), 2, "by the log and by the progress function");
    let error = complete(&mut model, &[1, 2], 1).unwrap_err().report().to_string();
    assert!(error.contains("a parallel part of the host-op panicked"), "{error}");
    drop(model);
    let error = complete(&mut open().unwrap(), &[1], 2).unwrap_err().report().to_string();
    assert!(error.contains("test_throw_bombs") && error.contains("panicked in decode"), "{error}");
}

/// Held by each test, because some look at the memory of the process: of another one's panic, they would see the
/// debug information that is read for its backtrace.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory of this process in bytes.
#[cfg(target_os = "linux")]
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[cfg(target_os = "linux")]
#[test]
fn what_an_op_allocates_is_freed_with_its_session() {
    const MIB: usize = 1 << 20;
    const SESSIONS: usize = 8;
    let _alone = alone();
    let plugins = only(&[odd("leaks")]);
    let before = resident();
    for _ in 0..SESSIONS {
        let mut model = null_model::open("test_leaks", &plugins, &CancelToken::new()).unwrap();
        assert_eq!(complete(&mut model, &[1], 200).unwrap().tokens.len(), 200);
        assert!(resident() > before + 150 * MIB, "the op did not allocate");
    }
    // Each took 200 MiB. The allocator may keep what one or two of them freed for the next one.
    let left = resident().saturating_sub(before);
    assert!(left < 500 * MIB, "{} MiB are left of {SESSIONS} sessions", left / MIB);
}

#[cfg(target_os = "linux")]
#[test]
fn opening_and_closing_a_thousand_times_leaves_nothing_behind() {
    let _alone = alone();
    let files = [odd("leaks"), plugin_files::build("qhx-test-misbehaving-plugin")];
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let round = || {
        let plugins = only(&files);
        // Two models of two plugins are open at once.
        for op in ["test_leaks", "test_panic_in_decode"] {
            let mut model = null_model::open(op, &plugins, &CancelToken::new()).unwrap();
            let mut again =
                null_model::open("test_endless_loop", &plugins, &CancelToken::new()).unwrap();
            for model in [&mut model, &mut again] {
                complete(model, &[1, 2], 1).unwrap();
            }
        }
    };
    for _ in 0..20 {
        round();
    }
    let (memory, files_before) = (resident(), open_files());
    for _ in 0..250 {
        round();
    }
    assert!(open_files() <= files_before + 8, "{} files are open", open_files());
    let grown = resident().saturating_sub(memory);
    assert!(grown < 32 << 20, "1,000 sessions left {grown} bytes");
}

#[test]
fn two_sessions_on_two_threads_do_not_meet() {
    let _alone = alone();
    let plugins = only(&[plugin_files::build("qhx-test-misbehaving-plugin"), odd("leaks")]);
    let together = Barrier::new(2);
    std::thread::scope(|scope| {
        for op in ["test_leaks", "test_panic_in_decode"] {
            let (plugins, together) = (&plugins, &together);
            scope.spawn(move || {
                let mut model = null_model::open(op, plugins, &CancelToken::new()).unwrap();
                together.wait();
                for round in 0..50 {
                    let generation = complete(&mut model, &[round % 16; 3], 1).unwrap();
                    assert_eq!((generation.prompt_tokens, generation.tokens.len()), (3, 1));
                }
                // One session's panic is that session's alone.
                assert_eq!(complete(&mut model, &[1], 3).is_ok(), op == "test_leaks");
            });
        }
    });
    assert!(plugins.find("test_leaks").is_ok());
}

/// The program with `--timeout`, over a bundle for the CPU whose first token comes and whose second
/// never does.
#[cfg(target_os = "linux")]
#[test]
fn a_time_limit_stops_an_op_or_the_program() {
    let _alone = alone();
    let place = Outside::new(&plugin_files::programs()[0]);
    let plugin = plugin_files::build("qhx-test-misbehaving-plugin");
    for (op, says) in
        [("test_endless_loop", "finish: cancelled"), ("test_never_returns", "did not stop within")]
    {
        let bundle = place.folder().join(op);
        letters::write(&bundle, |manifest| {
            manifest["plan"] = json!({"params": {"step": "decode"}, "steps": [{"host": op}]});
        })
        .unwrap();
        let (bundle, plugin) = (bundle.to_str().unwrap(), plugin.to_str().unwrap());
        let arguments = ["generate", bundle, "b", "--backend", "cpu", "--timeout", "0.5"];
        let (success, text) = place.qhx(&[&arguments[..], &["--plugin", plugin]].concat());
        assert!(!success && text.starts_with('a') && text.contains(says), "{op}: {text}");
    }
}
