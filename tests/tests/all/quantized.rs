//! Whole models that other programs quantized: greedy tokens are those of `transformers` with the values that these
//! programs read.

use std::path::Path;
use std::sync::Arc;

use qhx_core::engine::{Prompt, Request};
use qhx_exec::backend::Backend;
use qhx_forge::{ForgeOptions, Precision};
use qhx_tests::forged::Forged;
use qhx_tests::tiny::fixture;
use qhx_tests::{backends, files, replay};
use qhx_tiers::tier;
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

/// A model of the fixtures: the folder with its tokenizer, a prompt, and the tokens that follow.
struct Golden {
    folder: String,
    checkpoint: tempfile::TempDir,
    prompt: Vec<u32>,
    output: Vec<u32>,
}

/// All whole models.
fn goldens() -> Vec<Golden> {
    let formats: serde_json::Map<String, Value> = files::json(&fixture("quantised/formats.json"));
    let golden = |(folder, record): (String, Value)| {
        let tokens = record.get("tokens")?;
        let checkpoint = tempfile::tempdir().expect("a folder");
        with_tokenizer(&folder, checkpoint.path());
        let [prompt, output] = ["prompt", "output"].map(|key| numbers(&tokens[key]));
        Some(Golden { folder, checkpoint, prompt, output })
    };
    formats.into_iter().filter_map(golden).collect()
}

impl Golden {
    /// Forges a bundle, and compares the first `count` tokens.
    fn check(
        &self,
        backend: Arc<dyn Backend>,
        count: usize,
        change: impl FnOnce(&mut ForgeOptions),
    ) {
        let mut label = String::new();
        let bundle = Forged::of(self.checkpoint.path(), |options| {
            options.max_ctx = Some(32);
            options.ignore_tensors = vec!["experts".to_owned()];
            change(options);
            label = format!("{}, {options:?}", self.folder);
        });
        let mut model = bundle.open(backend);
        let request = Request::greedy(Prompt::Tokens(self.prompt.clone()), count);
        let found = replay::generate(&mut model, &request).tokens;
        assert_eq!(found, self.output[..count], "{label}");
    }
}

/// In f16, with the integers that graphs keep, and with those that they round to int8; prompts token by token and four
/// tokens at a time.
#[test]
fn tokens_are_those_of_the_programs_own_values() {
    let goldens = goldens();
    assert_eq!(goldens.len(), 7);
    for golden in goldens {
        let count = golden.output.len();
        for (precision, prefill) in
            [(Precision::Fp16, vec![]), (Precision::W8A16, vec![4]), (Precision::W8A16, vec![])]
        {
            golden.check(backends::cpu(), count, |options| {
                options.precision = precision;
                options.prefill = Some(prefill);
            });
        }
    }
}

/// The same integers on the NPU's library, and activations that are gathered in the order of their inputs.
#[tier(qnn)]
fn tokens_on_the_npu_are_those_of_the_programs_own_values() {
    for golden in goldens() {
        golden.check(backends::qnn(), 5, |options| {
            options.precision = Precision::W8A16;
            options.prefill = Some(vec![4]);
            options.compiler = Some(backends::compiler("v81"));
        });
    }
}
