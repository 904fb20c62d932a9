//! The backend over the provider of `tests/fake-device`, which counts, checks and fails calls.

use qhx_base::{Error, ErrorKind};
use qhx_fake_device::{Control, Plan, Then, is_spared};
use qhx_qnn::codes::Code;
use qhx_qnn::{PerfMode, ProfileLevel};

use crate::*;

/// The provider in between, with nothing planned, and the real library for compiling.
pub fn fake() -> (Library, Control) {
    let real = opened();
    let control = Control::open().unwrap();
    control.set(&Plan::default()).unwrap();
    (real, control)
}

/// The backend over the provider in between.
pub fn backend_over(control: &Control, real: &Library, options: QnnOptions) -> Arc<QnnBackend> {
    let library = Library::open(control.path(), Some(real.system().path())).unwrap();
    backend(&library, options)
}

#[tier(qnn)]
fn calls_are_handed_on_and_everything_is_freed() {
    let (real, control) = fake();
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
    control.closed("a session");
}

/// All codes that the library is known to return.
const CODES: [u16; 93] = [
    1000, 1002, 1003, 1004, 1005, 1006, 1007, 1008, 1009, 1010, 1011, 1100, 2000, 4000, 4002, 4003,
    4004, 4011, 4012, 4013, 5000, 5001, 5002, 5003, 5004, 5005, 5006, 5007, 5008, 5009, 5010, 5011,
    5012, 5013, 5014, 6000, 6001, 6002, 6003, 6004, 6005, 6006, 6007, 6020, 6021, 6022, 6023, 6024,
    6025, 6030, 6031, 6032, 6033, 6034, 6035, 6036, 6037, 6038, 6039, 6040, 7001, 7002, 7003, 7004,
    7005, 7006, 7007, 8000, 8001, 8002, 8003, 8004, 8005, 9000, 9001, 9002, 9003, 9004, 9005,
    12000, 12001, 12002, 13001, 13002, 13004, 14000, 14001, 14002, 14003, 14004, 15000, 30001,
    30010,
];

/// Call where a code comes up.
fn call_of(code: u16) -> &'static str {
    match code {
        4000..5000 => "backendCreate",
        6000..8000 => "graphExecute",
        12000..13000 => "profileCreate",
        14000..15000 => "deviceCreate",
        _ => "contextCreateFromBinary",
    }
}

/// Opens everything, executes the graph `part` twice, and closes.
fn attempt(control: &Control, real: &Library, source: &ContextSource) -> qhx_base::Result<Vec<u8>> {
    let options = QnnOptions {
        htp: control.path().to_owned(),
        system: Some(real.system().path().to_owned()),
        profile: ProfileLevel::Basic,
        perf: PerfMode::Burst,
        ..QnnOptions::default()
    };
    let backend = Arc::new(QnnBackend::new(options)?);
    let context = backend.open_context(source)?;
    let mut workspace = Workspace::new(backend.clone(), CancelToken::new());
    workspace.add_context(&source.key, &context)?;
    let id = GraphId(0);
    let info = Arc::clone(workspace.graph(id)?.1);
    let x = workspace.allocate(info.inputs[0].try_byte_len().unwrap())?;
    let y = workspace.allocate(info.outputs[0].try_byte_len().unwrap())?;
    workspace.bind(id, Port::Input(0), x, 0)?;
    workspace.bind(id, Port::Output(0), y, 0)?;
    workspace.bytes_mut(x)?.copy_from_slice(&f16s(&numbers(1, K)).0);
    workspace.execute(id)?;
    workspace.execute(id)?;
    backend.library().message(Code(5005));
    Ok(workspace.bytes(y)?.to_vec())
}

#[track_caller]
fn explains(error: &Error, code: u16, label: &str) {
    let known = Code(code);
    assert!(known.meaning().is_some(), "{label}: code {code} has no meaning");
    assert_eq!(error.code(), Some(code.into()), "{label}: {error}");
    assert!(error.message().contains(&known.to_string()), "{label}: {error}");
    assert!(error.hint_text().is_some_and(|hint| hint.len() > 10), "{label}: no fix: {error}");
    assert!(!error.message().contains('\n') && error.message().len() < 1500, "{label}: {error}");
}

#[tier(qnn)]
fn every_code_of_the_library_is_explained() {
    let (real, control) = fake();
    let (_folder, source) = file(&linear_binary(&real, Target::V81, 5));
    let expected = attempt(&control, &real, &source).unwrap();
    for code in CODES {
        let call = call_of(code);
        control.set(&Plan::at(call, 1, Then::Fail(code))).unwrap();
        let error = attempt(&control, &real, &source).unwrap_err();
        let label = format!("{call} answers {code}");
        explains(&error, code, &label);
        assert_eq!(control.closed(&label).failed.len(), 1, "{label}");
    }
    control.set(&Plan::default()).unwrap();
    assert_eq!(attempt(&control, &real, &source).unwrap(), expected);
    println!("{} codes, each explained", CODES.len());
}

#[tier(qnn)]
fn whichever_call_fails_there_is_one_error_and_nothing_is_left() {
    let (real, control) = fake();
    let (_folder, source) = file(&linear_binary(&real, Target::V81, 5));
    let expected = attempt(&control, &real, &source).unwrap();
    let total = control.closed("nothing planned").total;
    let (mut errors, mut spared) = (0, 0);
    for nth in 1..=total {
        control.set(&Plan::fail_nth(nth, 1003)).unwrap();
        let result = attempt(&control, &real, &source);
        let report = control.closed(&format!("call {nth}"));
        let label = format!("call {nth} of {total}, {}", report.failed[0]);
        let call = report.failed[0].split(' ').next().unwrap();
        match result {
            Ok(bytes) => {
                assert!(is_spared(call), "{label}: no error");
                assert_eq!(bytes, expected, "{label}");
                spared += 1;
            }
            Err(error) => {
                assert!(!is_spared(call), "{label}: {error}");
                explains(&error, 1003, &label);
                errors += 1;
            }
        }
    }
    println!(
        "calls failed: {total}, each survived: {errors} with one error, {spared} without harm"
    );
    assert!(errors > 8 && spared > 12, "{errors} {spared}");
}

#[tier(qnn)]
fn contexts_beyond_what_the_device_takes_are_refused() {
    let (real, control) = fake();
    let binary = linear_binary(&real, Target::V81, 5);
    let (_folder, source) = file(&binary);
    let bytes = Some(8 * binary.len() as u64 + 100);
    let by_number = Plan { max_contexts: Some(8), ..Plan::default() };
    let by_bytes = Plan { max_context_bytes: bytes, ..Plan::default() };
    for plan in [by_number, by_bytes] {
        let backend = backend_over(&control, &real, QnnOptions::default());
        control.set(&plan).unwrap();
        let mut open: Vec<_> = (0..8).map(|_| backend.open_context(&source).unwrap()).collect();
        let error = backend.open_context(&source).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Context);
        explains(&error, 1002, "the ninth context");
        assert!(
            error.message().contains("part.bin")
                && error.hint_text().unwrap().contains("--max-contexts")
        );
        open.pop();
        open.push(backend.open_context(&source).unwrap());
        drop((open, backend));
        control.closed("contexts");
    }
}

#[tier(qnn)]
fn after_a_restart_a_context_fails_until_it_is_reopened() {
    let (real, control) = fake();
    let binary = linear_binary(&real, Target::V81, 5);
    control.set(&Plan::at("graphExecute", 2, Then::Restart(1007))).unwrap();
    let mut session = Session::open(backend_over(&control, &real, QnnOptions::default()), &binary);
    let (input, _) = f16s(&numbers(1, K));
    let before = session.run(0, &input);
    for _ in 0..2 {
        let error = session.workspace.execute(GraphId(0)).unwrap_err();
        explains(&error, 1007, "the context is of no use any more");
    }
    drop(session);
    let mut session = Session::open(backend_over(&control, &real, QnnOptions::default()), &binary);
    assert_eq!(session.run(0, &input), before, "a context made again");
    drop(session);
    control.closed("a restart");
}

#[tier(qnn)]
fn contexts_of_a_lost_device_close_before_the_next_one_opens() {
    let (real, control) = fake();
    let binary = linear_binary(&real, Target::V81, 5);
    let backend = backend_over(&control, &real, QnnOptions::default());
    let open = || Session::open(Arc::clone(&backend) as Arc<dyn Backend>, &binary);
    let (mut first, mut second) = (open(), open());
    control.set(&Plan::at("graphExecute", 1, Then::Restart(1007))).unwrap();
    let lost = first.workspace.execute(GraphId(0)).unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::DeviceLost, "{lost}");
    // Another model opens; the two that are there have not been closed by who has them.
    let mut third = open();
    let report = control.report().unwrap();
    let opened = report.order.iter().position(|call| call == "deviceCreate").unwrap();
    let freed = report.order[..opened].iter().filter(|call| *call == "contextFree").count();
    assert_eq!((freed, report.alive["context"]), (2, 1), "{:?}", report.order);
    let (input, _) = f16s(&numbers(1, K));
    third.run(0, &input);
    let error = second.workspace.execute(GraphId(0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
    drop((first, second, third, backend));
    control.closed("a lost device");
}

#[tier(qnn)]
fn a_slow_execution_is_reported_once_and_counted() {
    let (real, control) = fake();
    let binary = linear_binary(&real, Target::V81, 5);
    let (input, _) = f16s(&numbers(1, K));
    let options = QnnOptions { perf: PerfMode::Burst, ..QnnOptions::default() };
    let mut session = Session::open(backend_over(&control, &real, options), &binary);
    let (_, warnings) = crate::memory::listen(|| {
        for round in 0..3 {
            (0..9).for_each(|_| drop(session.run(0, &input)));
            if round > 0 {
                control.set(&Plan::at("graphExecute", 1, Then::DelayMs(2000))).unwrap();
                session.run(0, &input);
            }
        }
    });
    let slow: Vec<_> = warnings.iter().filter(|line| line.contains("median")).collect();
    assert_eq!(slow.len(), 1, "{warnings:?}");
    for known in ["graph \"linear\"", "an execution took 2", "power mode burst", "load average"] {
        assert!(slow[0].contains(known), "{known}: {slow:?}");
    }
    assert_eq!(session.workspace.stats()[0].slow, 2);
}
