//! First steps of somebody who does not know the program yet.

use std::path::PathBuf;

use qhx_paths::fixture;

use crate::embed;
use crate::run::{Program, bundle, contents, copy_of_bundle, folder};

#[test]
fn a_checkpoint_given_as_a_bundle_is_to_be_forged_first() {
    let folder = folder();
    std::fs::write(folder.path().join("model.gguf"), b"GGUF\x03\0\0\0").expect("written");
    for (path, what) in [
        (fixture("gemma4-tiny"), "the folder of a checkpoint"),
        (folder.path().join("model.gguf"), "a GGUF file"),
        (fixture("lora/plain"), "the folder of an adapter"),
    ] {
        for command in ["generate", "inspect"] {
            let mut program = qhx!(folder, command, path);
            if command == "generate" {
                program = program.args(["hello"]);
            }
            let run = program.run();
            assert_eq!(run.code, 3, "{run:?}");
            let adapter = what == "the folder of an adapter";
            let base = if adapter { "BASE --lora " } else { "" };
            let hint = format!("qhx forge {base}{} --out", path.display());
            assert!(run.stderr.contains(what) && run.stderr.contains(&hint), "{run:?}");
        }
    }
}

#[test]
fn hints_about_tokenizers_suggest_no_option_that_was_given() {
    let folder = folder();
    let forge = |checkpoint: &str, options: &[&str]| {
        let run = qhx!(folder, "forge", "--out", "out", "--cpu-only", fixture(checkpoint))
            .args(options)
            .run();
        assert_ne!(run.code, 0, "{run:?}");
        run.stderr
    };
    // A file with a tokenizer and nothing else.
    let said = forge("gguf/spm.gguf", &[]);
    let put = "put the config.json of the model's Hugging Face checkpoint";
    let hint = format!("{put} beside the file, or name its folder (`--tokenizer`)");
    assert!(said.contains(&hint), "{said}");
    let said = forge("gguf/spm.gguf", &["--tokenizer", "."]);
    assert!(said.contains(&format!("{put} into .\n")) && !said.contains("--tokenizer"), "{said}");
    let said = forge("qwen2-tiny", &["--tokenizer", "."]);
    assert!(said.contains("error: --tokenizer is for GGUF files"), "{said}");
    assert!(
        said.contains("hint: put the tokenizer's files into the checkpoint's folder"),
        "{said}"
    );
}

#[test]
fn help_and_version_are_commands() {
    let folder = folder();
    let run = |words: &[&str]| Program::qhx(folder.path()).args(words).run().ok().stdout;
    assert_eq!(run(&["version"]), run(&["--version"]));
    assert!(run(&["help", "generate"]).contains("Continue a prompt"));
}

#[test]
fn a_prompt_is_read_from_a_file() {
    let folder = folder();
    std::fs::write(folder.path().join("prompt.txt"), "\u{feff}The capital of\n").expect("written");
    let generate = |words: &[&str]| qhx!(folder, "generate", bundle()).args(words).run();
    let said = generate(&["The capital of", "--max-new", "4"]).ok().stdout;
    assert_eq!(generate(&["-f", "prompt.txt", "--max-new", "4"]).ok().stdout, said);
    assert_eq!(generate(&["-f", "prompt.txt", "text"]).code, 2);
    assert_eq!(generate(&["-f", "gone.txt"]).code, 11);
}

#[test]
fn a_draft_that_is_not_used_is_refused() {
    for command in ["generate", "chat"] {
        qhx!(folder(), command, bundle(), "--speculate", "off", "--draft", "nowhere")
            .stdin("Once")
            .run()
            .fails(2, &["--speculate off does not use it"]);
    }
}

#[test]
fn a_bundle_with_a_broken_file_fails_inspect() {
    let folder = folder();
    let broken = copy_of_bundle(folder.path());
    let is_graph = |file: &PathBuf| file.extension().is_some_and(|e| e == "onnx");
    let graphs: Vec<_> = contents(&broken).into_keys().filter(is_graph).collect();
    assert!(!graphs.is_empty());
    for graph in graphs.iter().map(|graph| broken.join(graph)) {
        std::fs::remove_file(&graph).expect("removed");
        std::fs::write(&graph, "garbage").expect("written");
    }
    let run = qhx!(folder, "inspect", broken).run();
    assert_ne!(run.code, 0, "{run:?}");
    assert!(
        run.stderr.contains("note: context") && run.stdout.contains("context \"decode\""),
        "{run:?}"
    );
}

#[test]
fn audio_alone_is_a_prompt() {
    let folder = folder();
    qhx_tests::multimodal::write(&folder.path().join("multimodal")).expect("the bundle is written");
    let tone: Vec<u8> = (0..800).map(|i| 128 + 100 * (i % 2) as u8).collect();
    let wav = crate::transcribe::wav(8_000, 1, 8, &tone);
    std::fs::write(folder.path().join("tone.wav"), wav).expect("written");
    let generate = |words: &[&str]| {
        qhx!(folder, "--plugin", crate::media::plugin())
            .args(["generate", "multimodal", "", "--max-new", "2"])
            .args(words)
            .run()
    };
    assert_eq!(generate(&["--audio", "tone.wav"]).ok().stdout, "ll\n");
    generate(&[]).fails(9, &["the prompt is empty"]);
}

#[test]
fn a_plugin_that_is_passed_over_is_named() {
    let folder = folder();
    let plugins = folder.path().join("found");
    std::fs::create_dir(&plugins).expect("made");
    let name = format!("{}bad{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    std::fs::write(plugins.join(&name), "no library").expect("written");
    let run = qhx!(folder, "generate", bundle())
        .args(["Once", "--max-new", "1", "--plugin-dir", "found"])
        .run()
        .ok();
    assert!(run.stderr.contains("passed over: ") && run.stderr.contains(&name), "{run:?}");
}

#[test]
fn a_conversation_is_saved_to_a_new_file() {
    let folder = folder();
    let chat = |input: &str| {
        qhx!(folder, "chat", bundle(), "--max-new", "4", "--system-prompt", "Be brief.")
            .stdin(input)
            .run()
    };
    chat("Hello\n/save talk.json\n").ok();
    let saved: serde_json::Value = qhx_tests::files::json(&folder.path().join("talk.json"));
    let roles: Vec<_> = saved.as_array().expect("a list").iter().map(|m| &m["role"]).collect();
    assert_eq!(roles, ["system", "user", "assistant"]);
    assert_eq!(saved[1]["content"], "Hello");
    let run = chat("/save talk.json\n");
    assert_eq!((run.code, run.stderr.contains("is not saved")), (11, true), "{run:?}");
}

#[test]
fn rows_of_another_width_or_packing_are_not_continued() {
    let folder = folder();
    let dir = folder.path();
    std::fs::write(dir.join("in.jsonl"), "\u{feff}\"a\"\n\"b\"\n\n").expect("written");
    let embed = |more: &[&str]| {
        let files = ["--input", "in.jsonl", "--output", "out.jsonl"];
        embed::embed(dir, &[&files[..], more].concat())
    };
    embed(&[]).ok();
    let written = std::fs::read_to_string(dir.join("out.jsonl")).expect("rows");
    assert_eq!(written.lines().count(), 2, "{written}");
    embed(&["--resume", "--no-pack"]).fails(2, &["texts packed together: yes then, no now"]);
    let mut row: serde_json::Value =
        serde_json::from_str(written.lines().next().expect("a row")).expect("JSON");
    row["embedding"] = serde_json::json!([1.0]);
    let second = written.lines().nth(1).expect("a row");
    std::fs::write(dir.join("out.jsonl"), format!("{row}\n{second}\n")).expect("written");
    embed(&["--resume"]).fails(2, &["line 1 has a vector of 1 values, the model makes"]);
}
