//! A row of NaN in the embedding table: one token that fails, in every family, and no word after it.

use qhx_tests::tiny::{self, CPU};
use qhx_tests::{backends, poison};

#[test]
fn nan_fails_the_step_that_meets_it_and_leaves_nothing_behind() {
    for checkpoint in ["qwen35-tied", "llama3-tiny", "phimoe-6"] {
        let (checkpoint, goldens) = tiny::model(checkpoint);
        let prompt = &goldens.cases[0].prompt_ids;
        let poisoned = (0..).find(|token| !prompt.contains(token)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let manifest = poison::bundle(&tiny::bundle(&checkpoint, CPU), folder.path(), poisoned);
        let mut model = tiny::open(&manifest, backends::cpu()).unwrap();
        poison::survives(&mut model, prompt, poisoned);
    }
}
