//! `qhx bench --table` and `--join`: rates by context length, of this machine and of others.

use std::path::Path;

use serde_json::{Value, json};

use crate::embed;
use crate::run::{Run, bundle, copy_of_bundle, edit_manifest, folder};

fn bench(folder: &Path, args: &[&str]) -> Run {
    qhx!(folder, "bench").args(args).run()
}

/// Table of the tiny bundle, once, with four tokens behind each prompt.
fn table(folder: &Path, args: &[&str]) -> Run {
    let bundle = bundle().to_string_lossy();
    let fixed = [&*bundle, "--backend", "cpu", "--table", "--tokens", "4", "--repeat", "1"];
    bench(folder, &[&fixed[..], args].concat())
}

fn published() -> Value {
    json!({
        "schema": "qhx-bench-table-1", "model": "a|b <c>", "backend": "other", "device": "phone", "source": "a page",
        "rows": [{"context": 4096, "decode": {"tokens_per_second": 64.0, "joules_per_token": 0.25}}],
    })
}

#[test]
fn rates_are_measured_up_to_the_whole_context() {
    let folder = folder();
    let run = table(folder.path(), &["--json"]).ok();
    let report = run.json();
    assert_eq!(report["schema"], "qhx-bench-table-1");
    assert_eq!((&report["model"], &report["backend"]), (&"tiny".into(), &"cpu".into()));
    assert_eq!(report["precision"], "fp16");
    assert_eq!(report["manifest_sha256"].as_str().map(str::len), Some(64));
    // A quarter, a half and all of 192 positions, four of which are tokens of the answer.
    let rows = report["rows"].as_array().expect("rows");
    let lengths: Vec<_> = rows.iter().map(|row| row["context"].as_u64()).collect();
    assert_eq!(lengths, [Some(48), Some(96), Some(192)]);
    for row in rows {
        let context = row["context"].as_u64().expect("a length");
        assert_eq!(row["prefill"]["tokens"], context - 4, "{row}");
        assert_eq!(row["decode"]["tokens"], 4, "{row}");
        for part in ["prefill", "decode"] {
            assert!(row[part]["tokens_per_second"].as_f64() > Some(0.0), "{row}");
        }
        assert!(row.get("hand_over_ms").is_none(), "{row}");
    }
    // What executed is no device, and its graphs have times, decoder and head together, too.
    assert!(report.get("chip").is_none(), "{report}");
    let parts = report["parts"].as_array().expect("parts");
    for name in ["decoder", "head", "decoder and head"] {
        let part = parts.iter().find(|part| part["part"] == name).expect("a part");
        assert!(part["ms"].as_f64() > Some(0.0) && part.get("estimate_ms").is_none(), "{part}");
    }
    // Where nothing measures energy, that is said once.
    let said = run.stderr.matches("energy: found no package").count();
    assert_eq!(said, usize::from(report.get("energy").is_none()), "{run:?}");

    std::fs::write(folder.path().join("mine.json"), run.stdout).expect("a file");
    std::fs::write(
        folder.path().join("theirs.json"),
        json!([published(), published()]).to_string(),
    )
    .expect("a file");
    let args = ["--join", "mine.json", "theirs.json", "--svg", "rates.svg"];
    let joined = bench(folder.path(), &args).ok();
    let lines: Vec<_> = joined.stdout.lines().collect();
    // Behind the rates of both files come the parts of the one that has some.
    assert_eq!(lines.len(), 2 + 3 + 2 + 3 + parts.len(), "{joined:?}");
    assert_eq!(lines[8], "| | one execution | ms |", "{joined:?}");
    assert!(lines[0].ends_with("| prompt, J/token | decode, J/token |"), "{joined:?}");
    assert!(
        lines[2].starts_with("| tiny fp16, cpu, ") && lines[2].contains(" | 48 | "),
        "{joined:?}"
    );
    let theirs = r"| a\|b <c>, other, phone | 4096 |  | 64.00 |  | 0.2500 |";
    assert_eq!(lines[5], theirs);
    let svg = std::fs::read_to_string(folder.path().join("rates.svg")).expect("a drawing");
    assert!(roxmltree::Document::parse(&svg).is_ok(), "{svg}");
    assert!(svg.contains("a|b &lt;c&gt;, other, phone"), "{svg}");
    // A point for each rate: three rows with two, and two rows with one.
    assert_eq!(svg.matches("<circle ").count(), 3 * 2 + 2);

    // What was joined can be joined again.
    let both = bench(folder.path(), &["--join", "mine.json", "theirs.json", "--json"]).ok();
    std::fs::write(folder.path().join("all.json"), &both.stdout).expect("a file");
    assert_eq!(bench(folder.path(), &["--join", "all.json"]).ok().stdout, joined.stdout);
}

#[test]
fn lengths_of_a_table_are_those_asked_for() {
    let folder = folder();
    let report = table(folder.path(), &["--prompt", "20,1", "--json"]).ok().json();
    let contexts = |i: usize| report["rows"][i]["context"].as_u64();
    assert_eq!((contexts(0), contexts(1), contexts(2)), (Some(20), Some(1), None));
    // One position is a prompt, and nothing is left for an answer.
    assert!(report["rows"][1].get("decode").is_none(), "{report}");
    table(folder.path(), &["--prompt", "193"]).fails(2, &["expected at most 192 tokens"]);
    table(folder.path(), &["--decode-on", "npu"]).says(&["backend cpu runs the bundle"]);
    let encoder = embed::bundle().to_string_lossy();
    bench(folder.path(), &[&*encoder, "--svg", "a.svg"]).fails(2, &["expected --table"]);
}

/// A model without a context to fill has times of its graphs. Published figures stand beside those of this machine,
/// which is said to be no device; so do the estimates in a bundle.
#[test]
fn figures_stand_beside_published_ones() {
    let folder = folder();
    let small = ["--table", "--backend", "cpu", "--repeat", "1", "--tokens", "4", "--prompt", "20"];
    let encoder = embed::bundle().to_string_lossy();
    let run = bench(folder.path(), &[&[&*encoder], &small[..]].concat()).ok();
    assert!(run.stdout.contains("| | one execution | ms |"), "{run:?}");
    assert!(
        run.stdout.contains("This is not a device: ") && run.stdout.contains("No figures"),
        "{run:?}"
    );
    // The same bundle under a published name, with an estimate.
    let named = copy_of_bundle(folder.path());
    edit_manifest(&named, |document| {
        document["model"]["name"] = json!("Llama-3.2-1B-Instruct");
        document["artifacts"]["contexts"]["decode"]["us"] = json!({"decode": 12_500.0});
    });
    let run = bench(folder.path(), &[&["tiny"], &small[..]].concat()).ok();
    for words in [
        "| prompt of 16 tokens | ",
        "| prompt of 128 tokens |  | ",
        "74.39 tokens/s (Genie, Snapdragon 8 Elite Gen 5, w4a16); ",
        " ms |  | 12.500 ms |",
        "- AI Hub, github.com/qualcomm/ai-hub-models at ",
    ] {
        assert!(run.stdout.contains(words), "{words}: {run:?}");
    }
}

#[test]
fn files_that_are_no_tables_are_named() {
    let folder = folder();
    let whole = published().to_string();
    let changed = |key: &str, value: Value| {
        let mut table = published();
        table[key] = value;
        table.to_string()
    };
    let rate = |text: &str| whole.replace("64.0", text);
    let row = |context: Value| changed("rows", json!([{"context": context}]));
    for (text, words) in [
        (whole[..whole.len() / 2].to_owned(), "EOF while parsing"),
        (rate("NaN"), "expected value"),
        (rate("1e999"), "number out of range"),
        (rate("-1"), "-1 tokens a second"),
        (rate("1e10"), "expected more than 0 and at most"),
        (row(json!(0)), "context 0, expected 1 to"),
        (changed("parts", json!([{"part": "a", "ms": -1}])), "a part takes -1 ms"),
        (changed("parts", json!(vec![json!({"part": "a", "ms": 1}); 101])), "found 101 parts"),
        (row(json!(-4)), "invalid value"),
        (changed("rows", json!([])), "found 0 rows"),
        (changed("rows", json!(vec![json!({"context": 1}); 101])), "found 101 rows"),
        (changed("schema", json!("other")), "found schema \"other\""),
        (changed("model", json!("n".repeat(10 << 20))), "model has 10485760 bytes"),
        (changed("device", json!("n".repeat(17 << 20))), "larger than 16 MiB"),
        ("[]".to_owned(), "found 0 tables"),
        ("[".repeat(1000), "recursion limit"),
    ] {
        std::fs::write(folder.path().join("t.json"), text).expect("a file");
        let run = bench(folder.path(), &["--join", "t.json", "--svg", "t.svg"]);
        assert!(run.code != 0 && run.stderr.contains(words), "{words}: {run:?}");
        assert!(run.stderr.contains("t.json: ") && run.stderr.len() < 4000, "{words}: {run:?}");
        assert!(run.stdout.is_empty() && !folder.path().join("t.svg").exists(), "{words}");
    }
    let run = bench(folder.path(), &["--join", "absent.json"]);
    assert!(run.code != 0 && run.stderr.contains("absent.json"), "{run:?}");
}

#[cfg(unix)]
#[test]
fn a_fifo_in_the_place_of_a_table_is_refused() {
    let folder = folder();
    let fifo = folder.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo runs");
    assert!(made.success());
    let run = bench(folder.path(), &["--join", "fifo"]);
    assert!(run.code != 0 && run.stderr.contains("a FIFO, expected a regular file"), "{run:?}");
}
