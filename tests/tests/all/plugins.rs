//! Plugins that misbehave, do not fit, or are none: one clear message, and the host goes on.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use qhx_base::{CancelToken, Error, ErrorKind};
use qhx_core::engine::{FinishReason, Prompt, Request};
use qhx_core::op::OpProvider;
use qhx_plugins::{LoadErrorKind, Plugin, PluginOptions, Plugins};
use qhx_tests::plugin_files::{self, only};
use qhx_tests::replay::{complete, try_generate};
use qhx_tests::{has, null_model, says};

fn misbehaving() -> &'static PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| plugin_files::build("qhx-test-misbehaving-plugin"))
}

/// Generates a few tokens with one of the misbehaving ops and returns the error.
fn failure(op: &str) -> Error {
    let plugins = only(&[misbehaving().clone()]);
    let mut model = match null_model::open(op, &plugins, &CancelToken::new()) {
        Ok(model) => model,
        Err(error) => return error,
    };
    complete(&mut model, &[1, 2], 4).unwrap_err()
}

#[test]
fn a_panic_becomes_an_error_that_names_op_file_and_call() {
    for (op, call, text) in [
        ("test_panic_in_open", "open", "open goes wrong"),
        ("test_panic_in_prefill", "prefill", "prefill goes wrong"),
        ("test_panic_in_decode", "decode", "token 0 goes wrong"),
    ] {
        says(&failure(op), ErrorKind::Panicked, &[op, "misbehaving_plugin", call, text]);
    }
}

#[test]
fn an_op_that_panicked_refuses_to_go_on_and_another_one_works() {
    let plugins = only(&[misbehaving().clone()]);
    let mut model =
        null_model::open("test_panic_in_decode", &plugins, &CancelToken::new()).unwrap();
    complete(&mut model, &[1, 2], 4).unwrap_err();
    let again = complete(&mut model, &[1, 2], 4).unwrap_err().report().to_string();
    assert!(again.contains("open it again"), "{again}");
    // Opened again it goes on, until it panics again: one token needs no decode step.
    model.reopen().unwrap();
    assert_eq!(complete(&mut model, &[1, 2], 1).unwrap().tokens, [0]);
    // A fresh one of the same plugin is not affected: one token needs no decode step.
    let mut fresh =
        null_model::open("test_panic_in_decode", &plugins, &CancelToken::new()).unwrap();
    assert_eq!(complete(&mut fresh, &[1, 2], 1).unwrap().tokens, [0]);
}

#[test]
fn nan_logits_are_named_not_sampled() {
    let message = failure("test_nan_logits").to_string();
    let place = "host-op \"test_nan_logits\", graph \"step\", tensor logits f32[1, 16], position 2";
    assert!(message.contains(place), "{message}");
    assert!(message.contains("the logit of token 0 is NaN"), "{message}");
}

#[test]
fn wrong_logits_are_refused_by_op_graph_and_tensor() {
    let place = ["graph \"step\"", "tensor logits f32[1, 16]"];
    for (op, found, expected) in [
        ("test_wrong_length", "15 f32 values", "a row of 16 f32 values"),
        ("test_wrong_dtype", "16 f16 values", "a row of 16 f32 values"),
        ("test_wrong_vocab", "OpenInfo.vocab is 17", "16 values"),
    ] {
        says(&failure(op), ErrorKind::Plugin, &[op, found, expected, place[0], place[1]]);
    }
    has(&failure("test_beyond_buffer").to_string(), &["buffer of 64 bytes"]);
}

#[test]
fn a_tensor_that_nothing_is_bound_to_may_be_the_ops_fault() {
    let message = failure("test_forgets_to_bind").report().to_string();
    has(
        &message,
        &["\"step\"", "nothing is bound to logits", "plan.params.tensors", "the op forgot"],
    );
}

#[test]
fn cancelling_stops_an_op_that_never_ends() {
    let plugins = only(&[misbehaving().clone()]);
    let mut model = null_model::open("test_endless_loop", &plugins, &CancelToken::new()).unwrap();
    let request = Request::greedy(Prompt::Tokens(vec![1, 2]), 4);
    let stopper = request.cancel.clone();
    let handle = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        stopper.cancel();
    });
    let start = Instant::now();
    let generation = try_generate(&mut model, &request).unwrap();
    handle.join().unwrap();
    assert_eq!(generation.finish_reason, FinishReason::Cancelled);
    assert_eq!(generation.tokens.len(), 1, "the first token came before the endless step");
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn files_that_are_no_plugin_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("libqhx_ops_text.so");
    std::fs::write(&text, "not a library").unwrap();
    let error = Plugin::load(&text).unwrap_err();
    assert_eq!(error.kind, LoadErrorKind::NotALibrary, "{error}");
    assert!(error.to_string().contains("libqhx_ops_text.so"), "{error}");

    let missing = folder.path().join("absent.so");
    assert_eq!(Plugin::load(&missing).unwrap_err().kind, LoadErrorKind::Missing);

    #[cfg(target_os = "linux")]
    {
        let error = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/libm.so.6", "/usr/lib/libm.so.6"]
            .iter()
            .find(|path| std::path::Path::new(path).exists())
            .map(|path| Plugin::load(std::path::Path::new(path)).unwrap_err());
        if let Some(error) = error {
            assert_eq!(error.kind, LoadErrorKind::NotAPlugin, "{error}");
        }
    }
}

#[test]
fn a_broken_file_in_a_folder_is_remembered_and_the_others_work() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(plugin_files::library_name("a_broken")), "?").unwrap();
    let good = plugin_files::library_name("b_good");
    std::fs::copy(misbehaving(), folder.path().join(good)).unwrap();
    let options = PluginOptions::default().dirs(vec![folder.path().to_owned()]).only_named(true);
    let plugins = Plugins::discover(&options).unwrap();
    assert!(plugins.find("test_nan_logits").is_ok());
    let error = plugins.find("no_such_op").unwrap_err().report().to_string();
    has(&error, &["no_such_op", "test_nan_logits", "a_broken", "--plugin"]);
}
