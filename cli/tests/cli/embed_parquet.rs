//! `qhx embed` with Parquet tables, against what it does with JSON lines.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int64Type};
use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;

use crate::embed::{embed, rows};
use crate::run::folder;

/// A table that pyarrow wrote; `texts.py` beside it says what it holds.
fn texts() -> PathBuf {
    qhx_paths::workspace().join("cli/tests/fixtures/texts.parquet")
}

/// The rows of `texts()` as JSON lines.
const LINES: &str = r#""text 0"
{"text": "def f1(n): return n", "role": "document"}
{"text": "text 0", "role": "query"}
"naïve café"
{"text": "text 4", "role": "document"}
"SELECT 1"
{"text": "text 4", "role": "query"}
"#;

type Rows = Vec<(i64, String, Vec<u32>)>;

/// Index, text and the bits of the vector of every row.
fn table(path: &Path) -> Rows {
    let file = File::open(path).expect("the table is there");
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).expect("a Parquet file");
    let mut found = Vec::new();
    for batch in reader.build().expect("readable") {
        let batch = batch.expect("readable");
        let column = |name: &str| batch.column_by_name(name).expect("a column").clone();
        let (index, text, vectors) = (column("index"), column("text"), column("embedding"));
        for row in 0..batch.num_rows() {
            let vector = vectors.as_list::<i32>().value(row);
            let bits = vector.as_primitive::<Float32Type>().values().iter().map(|v| v.to_bits());
            let index = index.as_primitive::<Int64Type>().value(row);
            found.push((index, text.as_string::<i32>().value(row).to_owned(), bits.collect()));
        }
    }
    found
}

fn lines(text: &str) -> Rows {
    let bits = |v: &Value| v.to_string().parse::<f32>().expect("a number").to_bits();
    rows(text)
        .iter()
        .map(|row| {
            let vector = row["embedding"].as_array().expect("a vector").iter().map(bits);
            let text = row["text"].as_str().expect("a text").to_owned();
            (row["index"].as_i64().expect("an index"), text, vector.collect())
        })
        .collect()
}

fn write(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    let batch = RecordBatch::try_from_iter(columns).expect("columns of one length");
    let file = File::create(path).expect("created");
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("a writer");
    writer.write(&batch).expect("written");
    writer.close().expect("written");
}

#[test]
fn a_table_gives_the_vectors_of_the_same_lines() {
    let folder = folder();
    std::fs::write(folder.path().join("in.jsonl"), LINES).expect("written");
    let expected =
        lines(&embed(folder.path(), &["--input", "in.jsonl", "--json", "--no-pack"]).ok().stdout);
    assert_eq!(expected.len(), 7);
    let input = texts();
    let input = input.to_str().expect("a path");
    let found = embed(folder.path(), &["--input", input, "--json", "--no-pack"]).ok();
    assert_eq!(lines(&found.stdout), expected);
    embed(folder.path(), &["--input", input, "--output", "out.parquet", "--no-pack"]).ok();
    assert_eq!(table(&folder.path().join("out.parquet")), expected);
    let mut joined = Vec::new();
    for shard in ["0/2", "1/2"] {
        let args = ["--input", input, "--output", "part.parquet", "--overwrite", "--shard", shard];
        let args = [&args[..], &["--no-pack"]].concat();
        embed(folder.path(), &args).ok();
        joined.extend(table(&folder.path().join("part.parquet")));
    }
    joined.sort();
    assert_eq!(joined, expected);
    let left: Vec<_> = std::fs::read_dir(folder.path())
        .expect("the folder")
        .map(|e| e.expect("an entry").file_name().into_string().expect("a name"))
        .filter(|name| name.contains("unfinished") || name.starts_with(".qhx-embed-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn an_interrupted_table_goes_on_where_it_ended() {
    let folder = folder();
    let input = texts();
    let files =
        ["--input", input.to_str().expect("a path"), "--output", "out.parquet", "--no-pack"];
    let resume = [&files[..], &["--resume"]].concat();
    let out = folder.path().join("out.parquet");
    let unfinished = folder.path().join("out.parquet.unfinished.jsonl");
    embed(folder.path(), &files).ok();
    let whole = table(&out);
    assert_eq!(embed(folder.path(), &files).code, 2, "the output is there");

    // Complete: nothing is computed again.
    let run = embed(folder.path(), &resume).ok();
    run.says(&["7 texts are in the output already", ", 0 texts"]);
    assert_eq!(table(&out), whole);

    // A run that fails leaves the table as it is, and so does one with other options.
    let run = embed(folder.path(), &[&files[..], &["--overwrite", "--plugin", "gone.so"]].concat());
    assert_ne!(run.code, 0);
    assert_eq!(table(&out), whole);
    embed(folder.path(), &[&resume[..], &["--prefix-doc", "new: "]].concat())
        .fails(2, &["\"new: \" now"]);
    assert_eq!(table(&out), whole);
    assert!(!unfinished.exists());

    // Stopped in the middle of a line.
    let args = ["--input", files[1], "--output", "lines.jsonl", "--no-pack"];
    embed(folder.path(), &args).ok();
    let text = std::fs::read_to_string(folder.path().join("lines.jsonl")).expect("written");
    std::fs::remove_file(&out).expect("removed");
    std::fs::write(&unfinished, &text[..text.len() / 2]).expect("written");
    // The record of the lines, as that of lines that are to become the table.
    let record = |name: &str| folder.path().join(format!(".{name}.qhx-embed.json"));
    let mut made: Value = qhx_tests::files::json(&record("lines.jsonl"));
    made["unfinished"] = made["output"].take();
    std::fs::write(record("out.parquet"), made.to_string()).expect("written");
    embed(folder.path(), &files).fails(2, &["--resume"]);
    embed(folder.path(), &resume).ok().says(&["texts are in the output already"]);
    assert_eq!(table(&out), whole);
    assert!(!unfinished.exists());
}

#[test]
fn tables_that_do_not_fit_are_named() {
    let folder = folder();
    let strings = |texts: Vec<Option<&str>>| Arc::new(StringArray::from(texts)) as ArrayRef;
    let numbers = || Arc::new(Int64Array::from(vec![1, 2])) as ArrayRef;
    let path = |name: &str| folder.path().join(name);
    write(&path("other.parquet"), vec![("body", strings(vec![Some("a"), Some("b")]))]);
    write(&path("numbers.parquet"), vec![("text", numbers())]);
    write(&path("null.parquet"), vec![("text", strings(vec![Some("a"), None]))]);
    let role = strings(vec![None, Some("title")]);
    let text = strings(vec![Some("a"), Some("b")]);
    write(&path("role.parquet"), vec![("text", text), ("role", role)]);
    let whole = std::fs::read(texts()).expect("the fixture");
    std::fs::write(path("cut.parquet"), &whole[..whole.len() - 9]).expect("written");
    for (name, words) in [
        ("other.parquet", "body"),
        ("numbers.parquet", "Int64"),
        ("null.parquet", "row 1"),
        ("role.parquet", "title"),
        ("cut.parquet", "Parquet"),
        ("missing.parquet", "missing.parquet"),
    ] {
        let run = embed(folder.path(), &["--input", name]);
        assert_ne!(run.code, 0, "{name}");
        assert!(run.stderr.contains(words), "{name}: {}", run.stderr);
    }
}
