//! Does tasks that misbehave: the child of the tests of `qhx_base::child`.

#![expect(
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "tests what happens to a task that does so"
)]

use std::process::ExitCode;
use std::time::Duration;

use qhx_base::child::{Task, serve};
use qhx_base::{Error, ErrorKind};

const TASKS: [Task; 11] = [
    qhx_text::CHAT_TEMPLATE_TASK,
    ("reverse", |input| Ok(input.iter().rev().copied().collect())),
    ("replaced", |_| {
        // Another file takes the place of this program's, which goes on to be its own helper.
        let internal = |e: String| Error::new(ErrorKind::Internal, e);
        let program = qhx_base::child::ChildProgram::this([] as [&str; 0])
            .map_err(|e| internal(e.to_string()))?;
        let other = program.program.with_extension("other");
        std::fs::copy("/bin/false", &other).map_err(|e| internal(e.to_string()))?;
        std::fs::rename(&other, &program.program).map_err(|e| internal(e.to_string()))?;
        let limits =
            qhx_base::child::Limits { memory: None, time: Duration::from_secs(60), output: 100 };
        program.ask("reverse", b"abc".to_vec(), limits).map_err(|e| internal(e.to_string()))
    }),
    ("refuse", |_| Err(Error::new(ErrorKind::Artifact, "x.bin: empty").hint("copy it again"))),
    ("panic", |_| panic!("on purpose")),
    ("abort", |_| std::process::abort()),
    ("exit", |_| std::process::exit(3)),
    ("hang", |input| {
        // Where the test looks whether this process is still there.
        let file = String::from_utf8_lossy(input).into_owned();
        std::fs::write(file, std::process::id().to_string()).expect("a file");
        std::thread::sleep(Duration::from_secs(600));
        Ok(Vec::new())
    }),
    ("hoard", |_| {
        let mut hoard = Vec::new();
        loop {
            hoard.push(vec![1_u8; 1 << 20]);
            std::hint::black_box(&hoard);
        }
    }),
    ("chatter", |_| {
        println!("{}", "on standard output ".repeat(20_000));
        eprintln!("{}", "on standard error ".repeat(20_000));
        Ok(b"the answer".to_vec())
    }),
    ("orphan", |_| {
        // Asks another helper and is ended while it waits.
        let program = qhx_base::child::ChildProgram::this([] as [&str; 0]).expect("this program");
        let limits =
            qhx_base::child::Limits { memory: None, time: Duration::from_secs(600), output: 0 };
        let file = std::env::var("QHX_TEST_ORPHAN").expect("a file");
        program
            .ask("hang", file.into_bytes(), limits)
            .map_err(|e| Error::new(ErrorKind::Internal, e.to_string()))
    }),
];

fn main() -> ExitCode {
    serve(&std::env::args_os().skip(1).collect::<Vec<_>>(), &TASKS)
}
