//! Effects of the library on the process: its output, its log, its callers' memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write as _;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use qhx_base::stdout;
use qhx_exec::GraphId;
use qhx_qnn::{Device, LogLevel, QnnOptions, Target};
use qhx_types::Port;

use crate::*;

/// Counts what the current thread allocates while it asks for it.
struct Counting;

thread_local! {
    static COUNT: Cell<Option<usize>> = const { Cell::new(None) };
}

fn count() {
    let _ = COUNT.try_with(|count| count.set(count.get().map(|n| n + 1)));
}

#[expect(unsafe_code, reason = "wraps the system's allocator")]
// SAFETY: every call is handed to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is handed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise is handed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> usize {
    COUNT.set(Some(0));
    work();
    COUNT.take().unwrap()
}

#[tier(qnn)]
fn executing_and_binding_allocate_nothing() {
    let library = opened();
    assert!(allocations(|| drop(vec![1u8; 9])) > 0);
    let binary = linear_binary(&library, Target::V81, 40);
    let mut session = Session::open(backend(&library, QnnOptions::default()), &binary);
    session.run(0, &f16s(&numbers(41, K)).0);
    let other = session.workspace.allocate(2 * K).unwrap();
    let found = allocations(|| {
        for _ in 0..5 {
            session.workspace.bind(GraphId(0), Port::Input(0), other, 0).unwrap();
            session.workspace.execute(GraphId(0)).unwrap();
            session.workspace.bind(GraphId(0), Port::Input(0), session.inputs[0], 0).unwrap();
            session.workspace.execute(GraphId(0)).unwrap();
        }
    });
    assert_eq!(found, 0);
}

/// Set in the processes that [`graph_runner`] starts: some tests do their work only there.
const CHILD: &str = "QHX_TEST_CHILD";

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs the test `name` in a process of its own and returns its standard output and error.
fn alone(name: &str) -> (String, String) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, name)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    (out, err)
}

#[test]
fn prints_a_result() {
    if !is_child() {
        return;
    }
    let mut results = stdout::redirect_to_stderr().unwrap();
    let binary = linear_binary(&opened(), Target::V81, 42);
    println!("a print: {}", binary.len());
    writeln!(results, "the result").unwrap();
    writeln!(results.file().unwrap(), "and more").unwrap();
    drop(results);
    println!("back again");
}

#[tier(qnn)]
fn results_are_not_mixed_with_what_the_library_prints() {
    let (out, err) = alone("process::prints_a_result");
    assert!(out.contains("the result\nand more\nback again\n"), "{out}");
    assert!(!out.contains("LIBNATIVE") && !out.contains("a print"), "{out}");
    assert!(err.contains("LIBNATIVE") && err.contains("a print"), "{err}");
}

/// Subscriber to the log of the libraries.
fn of_the_libraries(event: fn(&tracing::Event<'_>)) -> Heard {
    Heard { enabled: |metadata| metadata.target() == "qnn", event }
}

#[test]
fn prints_into_the_log() {
    if !is_child() {
        return;
    }
    let printing = of_the_libraries(|event| {
        let _ = writeln!(std::io::stderr(), "log: {}", message(event));
    });
    tracing::subscriber::set_global_default(printing).unwrap();
    let mut results = stdout::redirect_to_log().unwrap();
    println!("a print");
    println!("a print of a second line");
    writeln!(results, "the result").unwrap();
    drop(results);
    println!("back again");
    // The thread that logs has the pipe's end now, and is through when it has read it.
    std::thread::sleep(std::time::Duration::from_millis(500));
}

#[test]
fn what_is_printed_goes_to_the_log() {
    let (out, err) = alone("process::prints_into_the_log");
    assert!(out.contains("the result\nback again\n") && !out.contains("a print"), "{out}");
    for line in ["log: a print", "log: a print of a second line"] {
        assert!(err.lines().any(|found| found == line), "{line}: {err}");
    }
}

static LOGGED: AtomicUsize = AtomicUsize::new(0);

/// Counts an event if its text is formatted, and panics.
#[expect(clippy::panic, reason = "this is what is tested")]
fn hostile(event: &tracing::Event<'_>) {
    let text = message(event);
    if !text.contains("%s") && !text.contains("%d") && !text.is_empty() {
        LOGGED.fetch_add(1, Ordering::Relaxed);
    }
    panic!("a subscriber that panics");
}

#[test]
fn logs_a_lot() {
    if !is_child() {
        return;
    }
    tracing::subscriber::set_global_default(of_the_libraries(hostile)).unwrap();
    std::panic::set_hook(Box::new(|_| {}));
    let library = opened();
    let device = Device::open(&library, LogLevel::Debug, Some(Target::V81)).unwrap();
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let device = &device;
            scope.spawn(move || {
                let mut context = Composer::on(device, Target::V81, &[]).unwrap();
                let mut graph = context.graph("linear", &[]).unwrap();
                linear(&mut graph, &weight(seed).0);
                graph.finalize().unwrap();
                assert!(!context.binary().unwrap().is_empty());
            });
        }
    });
    drop(device);
    println!("logged {}", LOGGED.load(Ordering::Relaxed));
}

#[tier(qnn)]
fn the_log_reaches_tracing_from_every_thread() {
    let (out, _) = alone("process::logs_a_lot");
    let count = out.split("logged ").nth(1).and_then(|rest| rest.lines().next()).unwrap();
    assert!(count.parse::<usize>().unwrap() > 10, "{out}");
}
