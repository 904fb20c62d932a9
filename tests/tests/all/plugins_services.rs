//! Services through a plugin: arrays written to files, and errors of the host that
//! come back whole.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use qhx_base::{Error, ErrorKind, Result};
use qhx_core::dump::Dump;
use qhx_core::engine::Generation;
use qhx_plugins::Plugins;
use qhx_tests::null_model::{self, Setup, VOCAB};
use qhx_tests::replay::complete;
use qhx_tests::{files, has, plugin_files, says, tiny};

fn plugins() -> Plugins {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    let file = FILE.get_or_init(|| plugin_files::build("qhx-test-services-plugin"));
    plugin_files::only(std::slice::from_ref(file))
}

/// One token after a prompt, with one of the plugin's ops.
fn run(op: &str, prompt: &[u32], setup: Setup) -> Result<Generation> {
    let mut model = null_model::open_with(op, &plugins(), setup)?;
    complete(&mut model, prompt, 1)
}

/// Shape and values of a `.npy` file of f32, as the format's description says.
fn read(path: &Path) -> (String, Vec<f32>) {
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert_eq!(bytes[..8], *b"\x93NUMPY\x01\x00");
    let end = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    assert!(end.is_multiple_of(64) && bytes[end - 1] == b'\n');
    let header = std::str::from_utf8(&bytes[10..end]).unwrap();
    let shape = header.strip_prefix("{'descr': '<f4', 'fortran_order': False, 'shape': (");
    let shape = shape.and_then(|rest| rest.trim_end().strip_suffix("), }")).unwrap();
    (shape.to_owned(), files::floats(&bytes[end..]))
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

/// The program writes the logits after the prompt, which are those of the reference.
#[test]
fn the_program_dumps_the_logits_of_the_reference() {
    let checkpoint = tiny::fixture("qwen35-tied");
    let bundle = tiny::bundle(&checkpoint, tiny::CPU);
    let goldens = tiny::goldens(&checkpoint);
    let case = goldens.cases.iter().find(|case| case.logits_steps.contains(&0)).unwrap();
    let place = tempfile::tempdir().unwrap();
    let dump = place.path().join("new/arrays");
    let qhx = &plugin_files::programs()[0];
    let ids: Vec<_> = case.prompt_ids.iter().map(u32::to_string).collect();
    let generate = || {
        let mut command = Command::new(qhx);
        command.arg("generate").arg(&bundle).args(["--ids", &ids.join(","), "--backend", "cpu"]);
        command.args(["--max-new", "2", "--dump"]).arg(&dump).output().unwrap()
    };
    let output = generate();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(names(&dump), ["logits.npy"]);
    let (shape, found) = read(&dump.join("logits.npy"));
    let expected = &goldens.logits(case)[0];
    assert_eq!(shape, format!("{},", expected.len()));
    assert!(found.len() == expected.len() && found.iter().all(|v| v.is_finite()));
    let farthest = found.iter().zip(expected).map(|(f, e)| (f - e).abs()).fold(0.0, f32::max);
    assert!(farthest <= 1e-3, "{farthest}");

    // A second run would mix with the first.
    let output = generate();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("logits.npy: there already"), "{error}");
}

#[test]
fn an_op_dumps_what_lies_in_buffers_and_what_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let dump = || Some(Arc::new(Dump::create(&folder.path().join("a")).unwrap()));
    let mut model =
        null_model::open_with("test_dump", &plugins(), Setup { dump: dump(), ..Setup::default() })
            .unwrap();
    for prompt in [[5, 6, 7], [8, 9, 10]] {
        complete(&mut model, &prompt, 1).unwrap();
    }
    let folder = folder.path().join("a");
    let expected =
        ["halves-2.npy", "halves.npy", "logits-2.npy", "logits.npy", "tokens-2.npy", "tokens.npy"];
    assert_eq!(names(&folder), expected);
    assert_eq!(read(&folder.join("tokens.npy")), ("3,".to_owned(), vec![5.0, 6.0, 7.0]));
    assert_eq!(read(&folder.join("tokens-2.npy")), ("3,".to_owned(), vec![8.0, 9.0, 10.0]));
    assert_eq!(read(&folder.join("halves.npy")), ("2, 2".to_owned(), vec![2.0, -0.5, 0.25, 6.0]));
    assert_eq!(read(&folder.join("logits.npy")), (format!("{VOCAB},"), vec![0.0; VOCAB]));
}

#[test]
fn a_wrong_dump_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for (token, expected) in [
        (0, "dump \"../halves\": expected a name"),
        (1, "dump \"halves\": 4 values, expected the shape [5]"),
        (2, "dump \"halves\": 5 f16 values at byte 4 do not lie in a buffer of 12 bytes"),
    ] {
        let dump = Dump::create(&folder.path().join(token.to_string())).unwrap();
        let setup = Setup { dump: Some(Arc::new(dump)), ..Setup::default() };
        has(run("test_dump", &[token], setup).unwrap_err().message(), &[expected]);
        run("test_dump", &[token], Setup::default()).unwrap();
    }
    // A folder that goes away is named with the file.
    let gone = folder.path().join("gone");
    let setup = Setup { dump: Some(Arc::new(Dump::create(&gone).unwrap())), ..Setup::default() };
    fs::remove_dir(&gone).unwrap();
    says(&run("test_dump", &[9], setup).unwrap_err(), ErrorKind::Io, &["tokens.npy"]);
}

#[test]
fn errors_of_the_host_come_back_through_an_op() {
    let cause = Error::new(ErrorKind::Runtime, "the device is gone").hint("plug it in");
    let cause = cause.with_code(1003);
    let fail = |token| {
        let setup = Setup { failure: Some(cause.clone()), ..Setup::default() };
        run("test_fail", &[token], setup).unwrap_err()
    };
    let parts = |error: &Error| (error.kind(), error.hint_text().map(str::to_owned), error.code());
    for (token, context) in [(0, ""), (1, "the prompt: layer 3: "), (2, "")] {
        let error = fail(token);
        let message = error.message();
        assert_eq!(parts(&error), parts(&cause), "{token}: {error}");
        let expected = format!("{context}graph \"step\": {}", cause.message());
        assert!(message.ends_with(&expected), "{message}");
        assert_eq!(message.matches("plug it in").count(), 0, "{message}");
    }
    // What the op makes up itself is its own, also when it says the same.
    let error = fail(3);
    assert_eq!(parts(&error), (ErrorKind::Prompt, None, None), "{error}");
    assert!(error.message().ends_with("given up"), "{error}");
    let error = fail(4);
    assert_eq!(parts(&error), (ErrorKind::Plugin, None, None), "{error}");
}
