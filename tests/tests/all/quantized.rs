//! Whole models that other programs quantized: greedy tokens are those of `transformers` with the values that these
//! programs read.

use std::path::Path;

use qhx_core::engine::{Prompt, Request};
use qhx_forge::{ForgeOptions, Precision, Silent, forge};
use qhx_tests::tiny::{self, fixture};
use qhx_tests::{backends, replay};
use serde_json::Value;

/// A copy of a fixture with the tokenizer that they have in common.
fn with_tokenizer(folder: &str, to: &Path) {
    let files = std::fs::read_dir(fixture(&format!("quantised/{folder}"))).expect("a fixture");
    for file in files.map(|file| file.expect("a file").path()) {
        std::fs::copy(&file, to.join(file.file_name().expect("a name"))).expect("a copy");
    }
    std::fs::copy(fixture("quantised/tokenizer.json"), to.join("tokenizer.json")).expect("a copy");
}

fn numbers(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("tokens")
}

/// In f16, with the integers that graphs keep, and with those that they round to int8; prompts token by token and four
/// tokens at a time.
#[test]
fn tokens_are_those_of_the_programs_own_values() {
    let read = std::fs::read(fixture("quantised/formats.json")).expect("formats.json");
    let formats: serde_json::Map<String, Value> = serde_json::from_slice(&read).expect("JSON");
    let whole = formats.iter().filter(|(_, record)| record.get("tokens").is_some());
    let mut seen = 0;
    for (folder, record) in whole {
        let checkpoint = tempfile::tempdir().expect("a folder");
        with_tokenizer(folder, checkpoint.path());
        let [prompt, output] = ["prompt", "output"].map(|key| numbers(&record["tokens"][key]));
        for (precision, prefill) in
            [(Precision::Fp16, vec![]), (Precision::W8A16, vec![4]), (Precision::W8A16, vec![])]
        {
            let out = checkpoint.path().join(format!("bundle-{seen}"));
            let options = ForgeOptions {
                max_ctx: Some(32),
                precision,
                prefill: Some(prefill),
                ignore_tensors: vec!["experts".to_owned()],
                ..ForgeOptions::new(&out)
            };
            let made = forge(checkpoint.path(), &options, &mut Silent);
            let made = made.unwrap_or_else(|e| panic!("{folder}: {e}"));
            let mut model = tiny::open(&made.manifest, backends::cpu()).expect("it opens");
            let request = Request::greedy(Prompt::Tokens(prompt.clone()), output.len());
            let found = replay::generate(&mut model, &request).tokens;
            assert_eq!(found, output, "{folder}, {precision:?}, {:?}", options.prefill);
            seen += 1;
        }
    }
    assert_eq!(seen, 7 * 3);
}
