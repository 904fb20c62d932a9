//! A program with two recipes for one model class. A file of its own: what it registers is in the whole program.

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_forge::recipe::{Recipe, RecipeOptions};
use qhx_forge::{ForgeOptions, RecipeEntry, Silent, architectures, forge, register_recipe};
use qhx_paths::fixture;

fn recipe(_: &Checkpoint, _: &RecipeOptions) -> Result<Recipe> {
    Err(Error::new(ErrorKind::Internal, "which of the two is applied must not be left to chance"))
}

register_recipe!(RecipeEntry::new(&["Qwen2ForCausalLM", "Qwen3_5ForCausalLM"], recipe));

#[test]
fn a_forge_says_that_a_class_has_two_recipes_and_makes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let options = ForgeOptions::new(dir.path().join("out"));
    let error = forge(&fixture("qwen35-tied"), &options, &mut Silent).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert!(error.message().contains("has two recipes, one of the crate qhx-forge"), "{error}");
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
    assert!(architectures().unwrap_err().message().contains("ForCausalLM"));
}
