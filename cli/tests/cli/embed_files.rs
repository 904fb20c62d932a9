//! Outputs of `qhx embed`: what is replaced when, what a run may continue, and who writes.

use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use qhx_tests::files;
use qhx_tests::plugin_files::copy_folder;

use crate::embed::{bundle, embed, read, rows};
use crate::run::folder;

/// Outputs are compared bit by bit, whatever was done before.
const FILES: [&str; 5] = ["--input", "in.jsonl", "--output", "out.jsonl", "--no-pack"];
const RECORD: &str = ".out.jsonl.qhx-embed.json";

fn write(folder: &Path, name: &str, text: &str) {
    std::fs::write(folder.join(name), text).expect("written");
}

fn with<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&FILES[..], args].concat()
}

/// Names of the files in a folder; what plugins are remembered by lies in one of its own.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("the folder").map(|e| e.expect("an entry"));
    let files = entries.filter(|e| e.path().is_file());
    let mut names: Vec<_> = files.map(|e| e.file_name().into_string().expect("a name")).collect();
    names.sort();
    names
}

#[test]
fn an_output_stays_until_another_one_is_whole() {
    let folder = folder();
    let dir = folder.path();
    write(dir, "out.jsonl", "precious\n");
    write(dir, "in.jsonl", "\"a\"\n\"b\"\n");
    // Whatever does not open: nothing is touched and nothing is left.
    let before = names(dir);
    for args in [
        &["--input", "gone.jsonl", "--output", "out.jsonl", "--overwrite"][..],
        &with(&["--overwrite", "--backend", "qnn", "--htp", "gone.so"]),
        &with(&["--overwrite", "--plugin", "gone.so"]),
    ] {
        let run = qhx!(dir, "embed", bundle()).args(args).run();
        assert_ne!(run.code, 0, "{args:?}");
        assert_eq!((read(dir, "out.jsonl").as_str(), names(dir)), ("precious\n", before.clone()));
    }
    let run = qhx!(dir, "embed", "nowhere").args(with(&["--overwrite"])).run();
    assert_eq!((run.code, names(dir)), (3, before));

    // Nor by a text that does not fit.
    let long = "word ".repeat(60);
    write(dir, "in.jsonl", &format!("\"a\"\n\"{long}\"\n\"b\"\n"));
    let run = embed(dir, &with(&["--overwrite"]));
    assert_eq!(run.code, 9, "{run:?}");
    assert_eq!(read(dir, "out.jsonl"), "precious\n");
    run.says(&["out.jsonl.unfinished.jsonl"]);
    embed(dir, &with(&["--resume", "--truncate"])).ok();
    assert_eq!(rows(&read(dir, "out.jsonl")).len(), 3);
    assert_eq!(names(dir), [RECORD, "in.jsonl", "out.jsonl"]);

    write(dir, "in.jsonl", "\"c\"\n");
    embed(dir, &with(&["--overwrite"])).ok();
    assert_eq!(rows(&read(dir, "out.jsonl"))[0]["text"], "c");
    assert_eq!(names(dir), [RECORD, "in.jsonl", "out.jsonl"]);
}

#[test]
fn input_and_output_are_two_files() {
    let folder = folder();
    let dir = folder.path();
    let text = "\"a\"\n\"b\"\n";
    write(dir, "in.jsonl", text);
    std::fs::hard_link(dir.join("in.jsonl"), dir.join("hard.jsonl")).expect("linked");
    let mut outputs = vec!["in.jsonl", "./in.jsonl", "hard.jsonl"];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("in.jsonl", dir.join("soft.jsonl")).expect("linked");
        outputs.push("soft.jsonl");
    }
    let before = names(dir);
    for output in outputs {
        for how in ["--overwrite", "--resume"] {
            let run = embed(dir, &["--input", "in.jsonl", "--output", output, how]);
            run.fails(2, &["input and output are one file"]);
            assert_eq!((read(dir, "in.jsonl").as_str(), names(dir)), (text, before.clone()));
        }
    }
    #[cfg(unix)]
    {
        let run = std::process::Command::new("sh")
            .args(["-c", "\"$0\" embed \"$1\" --backend cpu --input - --output in.jsonl --overwrite < in.jsonl"])
            .arg(qhx_paths::program("qhx"))
            .arg(bundle())
            .current_dir(dir)
            .output()
            .expect("a shell");
        assert_eq!(run.status.code(), Some(2), "{}", String::from_utf8_lossy(&run.stderr));
        assert_eq!(read(dir, "in.jsonl"), text);
    }
    embed(dir, &["--input", "in.jsonl", "--output", ".", "--overwrite"])
        .fails(2, &["regular file"]);
}

#[test]
fn rows_that_were_made_otherwise_are_not_continued() {
    let folder = folder();
    let dir = folder.path();
    write(dir, "in.jsonl", "\"a\"\n\"b\"\n\"c\"\n");
    embed(dir, &with(&["--truncate", "--prefix-doc", "old: "])).ok();
    let whole = read(dir, "out.jsonl");
    let two = whole.split_inclusive('\n').take(2).collect::<String>();
    write(dir, "out.jsonl", &two);
    let same = ["--resume", "--truncate", "--prefix-doc", "old: "];
    for (args, words) in [
        (
            &["--resume", "--truncate", "--prefix-doc", "new: "][..],
            &["\"old: \" then", "\"new: \" now"][..],
        ),
        (&["--resume", "--prefix-doc", "old: "], &["--truncate: yes then, no now"]),
        (&[&same[..], &["--role", "query"]].concat(), &["--role: document then, query now"]),
        (&[&same[..], &["--shard", "0/2"]].concat(), &["--shard: none then, 0/2 now"]),
        (&["--resume"], &["--truncate", "prefix of documents"]),
    ] {
        embed(dir, &with(args)).fails(2, words);
        assert_eq!(read(dir, "out.jsonl"), two, "{args:?}");
    }

    // Another model: one file of other contents, or other parameters.
    let other = dir.join("other");
    copy_folder(bundle(), &other);
    let resume = || qhx!(dir, "embed", "other", "--backend", "cpu").args(with(&same)).run();
    let manifest = crate::embed::manifest(&other);
    let as_it_was = std::fs::read(&manifest).expect("the manifest");
    files::edit(&manifest, |m| m["plan"]["params"]["normalize"] = false.into());
    resume().fails(2, &["plan.params.normalize: ", "then, false now"]);
    std::fs::write(&manifest, &as_it_was).expect("written");
    files::edit(&manifest, |m| {
        m["artifacts"]["files"]["tokenizer.json"]["sha256"] = "0".repeat(64).into();
    });
    resume().fails(2, &["tokenizer.json: sha256 ", "now"]);
    std::fs::write(&manifest, &as_it_was).expect("written");
    assert_eq!(read(dir, "out.jsonl"), two);

    // The same one elsewhere.
    resume().ok();
    assert_eq!(read(dir, "out.jsonl"), whole);
}

#[test]
fn texts_that_fitted_go_on_when_longer_ones_are_cut() {
    let folder = folder();
    let dir = folder.path();
    write(dir, "in.jsonl", &format!("\"a\"\n\"{}\"\n", "word ".repeat(60)));
    assert_eq!(embed(dir, &FILES).code, 9);
    let first = read(dir, "out.jsonl");
    embed(dir, &with(&["--resume", "--truncate"])).ok();
    let whole = read(dir, "out.jsonl");
    assert!(whole.starts_with(&first) && rows(&whole).len() == 2, "{whole}");
}

#[test]
fn a_file_that_is_no_output_is_not_continued() {
    let folder = folder();
    let dir = folder.path();
    write(dir, "in.jsonl", "\"a\"\n\"b\"\n");
    let row = "{\"index\":0,\"text\":\"a\",\"embedding\":[1.0]}\n";
    for foreign in ["notes", "notes\n", "{\"a\": 1}\n", row] {
        write(dir, "out.jsonl", foreign);
        embed(dir, &with(&["--resume"])).fails(2, &["no record", RECORD, "--overwrite"]);
        assert_eq!(read(dir, "out.jsonl"), foreign);
        assert_eq!(names(dir), ["in.jsonl", "out.jsonl"]);
    }
}

#[test]
fn every_row_that_is_there_is_compared_with_the_input() {
    let folder = folder();
    let dir = folder.path();
    let input = |lines: &[&str]| write(dir, "in.jsonl", &(lines.join("\n") + "\n"));
    let query = "{\"text\": \"b\", \"role\": \"query\"}";
    input(&["\"a\"", query, "\"c\""]);
    embed(dir, &FILES).ok();
    let whole = read(dir, "out.jsonl");
    for (lines, words) in [
        (
            &["\"X\"", query, "\"c\"", "\"d\""][..],
            "line 1 is text 0 \"a\", the input has text 0 \"X\"",
        ),
        (&["\"a\"", query], "line 3 has no text in the input"),
        (&["\"a\"", "\"b\"", "\"c\"", "\"d\""], "a role in the input"),
    ] {
        input(lines);
        embed(dir, &with(&["--resume"])).fails(2, &[words]);
        assert_eq!(read(dir, "out.jsonl"), whole, "{words}");
    }
    input(&["\"a\"", query, "\"c\"", "\"d\""]);
    embed(dir, &with(&["--resume"])).ok().says(&["3 texts are in the output already"]);
    assert!(read(dir, "out.jsonl").starts_with(&whole));
    assert_eq!(rows(&read(dir, "out.jsonl")).len(), 4);
}

#[test]
fn one_run_writes_an_output_and_a_killed_one_blocks_nobody() {
    let folder = folder();
    let dir = folder.path();
    write(dir, "in.jsonl", "\"a\"\n\"b\"\n");
    let start = || {
        let child = qhx!(dir, "embed", bundle())
            .args(["--backend", "cpu", "--input", "-", "--output", "out.jsonl", "--overwrite"])
            .start_with_stdin();
        let begun = Instant::now();
        // The record is locked before the model is loaded, and written when it is.
        while !dir.join(RECORD).metadata().is_ok_and(|m| m.len() > 0) {
            assert!(begun.elapsed() < Duration::from_secs(120), "the run begins");
            std::thread::sleep(Duration::from_millis(20));
        }
        child
    };
    let mut first = start();
    for how in ["--overwrite", "--resume"] {
        embed(dir, &with(&[how])).fails(2, &["out.jsonl: another qhx embed is writing it"]);
    }
    let mut input = first.stdin.take().expect("a pipe");
    input.write_all(b"\"x\"\n").expect("written");
    drop(input);
    assert!(first.wait().expect("it ends").success());
    assert_eq!(rows(&read(dir, "out.jsonl")).len(), 1, "the first run's row");

    std::fs::remove_file(dir.join(RECORD)).expect("removed");
    let mut second = start();
    second.kill().expect("killed");
    second.wait().expect("it ends");
    embed(dir, &with(&["--overwrite"])).ok();
    assert_eq!(rows(&read(dir, "out.jsonl")).len(), 2);
}

#[test]
fn a_line_that_is_too_long_is_named() {
    let folder = folder();
    let dir = folder.path();
    write(dir, "in.jsonl", &format!("\"a\"\n\"{}\"\n", "x".repeat(5 << 20)));
    embed(dir, &FILES).fails(9, &["in.jsonl: line 2 is longer than 4 MiB"]);
    assert_eq!(rows(&read(dir, "out.jsonl")).len(), 1, "what is done stays");
}
