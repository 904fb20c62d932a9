//! `qhx_generate` and its argument order.

use std::path::Path;

use crate::run::{Program, Run, bundle, folder};

fn classic(manifest: &Path, rest: &[&str]) -> Run {
    let folder = folder();
    Program::classic(folder.path())
        .args([manifest])
        .args(["cpu", "-"])
        .args([bundle()])
        .args(rest)
        .run()
}

#[test]
fn stdout_is_the_text_alone() {
    let run = classic(&bundle().join("tiny.json"), &["4", "The capital of France is"]).ok();
    assert_eq!(run.stdout, " Paris.\n");
}

#[test]
fn a_list_of_ids_is_taken_as_ids() {
    let run = classic(bundle(), &["4", "277,390,305,220,37,81,287,350,273"]).ok();
    assert_eq!(run.stdout, " Paris.\n");
}

#[test]
fn an_image_for_a_text_model_is_refused() {
    let image = qhx_paths::fixture("media/baseline.jpg");
    let image = image.to_str().expect("a path of letters");
    let run = classic(bundle(), &["4", "Describe this image.", image]);
    assert_eq!((run.code, &*run.stdout), (9, ""));
    run.says(&["this bundle takes text only"]);
}

#[test]
fn a_missing_library_is_named() {
    let folder = folder();
    Program::classic(folder.path())
        .args([bundle()])
        .args(["./libQnnHtp.so", "./libQnnSystem.so"])
        .args([bundle()])
        .args(["4", "The"])
        .run()
        .fails(5, &["libQnnSystem.so"]);
}

#[test]
fn too_few_arguments_are_a_usage_error() {
    let folder = folder();
    Program::classic(folder.path())
        .args(["tiny.json", "libQnnHtp.so"])
        .run()
        .fails(2, &["ARTIFACTS_ROOT"]);
}
