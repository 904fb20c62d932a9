use std::path::Path;

use serde_json::{Value, json};

use super::*;

const MANIFEST: &str = r#"{"schema_version": 1, "host_only": true, "plan": {"steps": [{"host": "x"}]},
    "artifacts": {"golden": "golden/m.json"}}"#;

fn valid() -> Value {
    json!({
        "schema": SCHEMA,
        "tolerance": {"cosine": 0.99, "difference": 0.1},
        "steps": [{"name": "a", "task": "generate", "tokens": [1, 2], "then": [3], "expected": [
            {"size": 2, "values": [0.5, 1.0]}, {"size": 2, "values": [0.5, 1.0]},
        ]}],
    })
}

fn with_media(media: Value) -> String {
    let mut document = valid();
    document["steps"][0]["media"] = media;
    document.to_string()
}

fn load(folder: &Path, text: &str) -> Result<Option<Golden>> {
    std::fs::create_dir_all(folder.join("golden")).unwrap();
    std::fs::write(folder.join("golden/m.json"), text).unwrap();
    Golden::load(&Manifest::load(&folder.join("m.json")).unwrap())
}

#[test]
fn damaged_golden_steps_are_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("m.json"), MANIFEST).unwrap();
    let manifest = Manifest::load(&dir.path().join("m.json")).unwrap();
    assert_eq!(Golden::load(&manifest).unwrap(), None, "a file that is left out");
    let text = valid().to_string();
    assert_eq!(load(dir.path(), &text).unwrap().unwrap().steps.len(), 1);

    let at = |pointer: &str, value: Value| {
        let mut document = valid();
        *document.pointer_mut(pointer).unwrap() = value;
        document.to_string()
    };
    for (damaged, message) in [
        (text[..text.len() / 2].to_owned(), "EOF"),
        (text.replace("0.5", "NaN"), "expected value"),
        (text.replace("0.5", "1e60"), "number out of range"),
        (text.replace("0.5", "null"), "invalid type: null"),
        (" ".repeat(10 << 20), "more than 1048576 bytes"),
        (String::new(), "EOF"),
        (at("/schema", json!("qhx_golden/v2")), "expected \"qhx_golden/v1\""),
        (at("/tolerance/cosine", json!(2)), "tolerance"),
        (at("/steps", json!([])), "0 steps"),
        (at("/steps/0/tokens", json!([])), "1 tokens, expected 1 to"),
        (at("/steps/0/then", json!([])), "2 answers, expected 1"),
        (at("/steps/0/then", json!(vec![1; 9000])), "9002 tokens"),
        (at("/steps/0/task", json!("paint")), "expected the task"),
        (with_media(json!({"type": "smell"})), "unknown variant"),
        (with_media(json!({"type": "image", "width": 2, "height": 1, "rgb": [1, 2, 3]})), "image"),
        (with_media(json!({"type": "image", "width": 1, "height": 1, "rgb": [1, 2, 256]})), "256"),
        (with_media(json!({"type": "audio", "rate": 0, "samples": [1]})), "audio has 1 samples"),
        (at("/steps/0/expected/1/values", json!([1])), "1 values, 0 ids"),
        (at("/steps/0/expected/1/size", json!(u64::MAX)), "2 values, 0 ids"),
        (
            at(
                "/steps/0/expected/1",
                json!({"size": 9, "values": [1], "ids": [9], "projections": vec![0; 64]}),
            ),
            "1 values, 1 ids",
        ),
    ] {
        let error = load(dir.path(), &damaged).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Artifact);
        let found = error.message();
        assert!(found.contains("golden steps: ") && found.contains(message), "{message}: {found}");
    }
}

#[test]
fn the_step_that_runs_first_shows_no_image() {
    let mut document = valid();
    let mut shown = document["steps"][0].clone();
    shown["media"] = json!({"type": "image", "width": 1, "height": 1, "rgb": [1, 2, 3]});
    (shown["name"], shown["tokens"]) = (json!("shown"), json!([1]));
    document["steps"].as_array_mut().unwrap().insert(0, shown);
    let golden: Golden = serde_json::from_value(document).unwrap();
    golden.validate().unwrap();
    assert_eq!(golden.shortest().unwrap().name, "a");
}

#[test]
fn projections_of_many_logits_tell_right_from_wrong() {
    let noise = |index: u64| (mixed(index) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let logits: Vec<f32> = (0..50_000).map(|index| noise(index) * 8.0 - 3.0).collect();
    let expected = Expected::of(&logits).unwrap();
    expected.validate().unwrap();
    assert!(serde_json::to_string(&expected).unwrap().len() < 8 << 10);
    let (cosine, difference, _) = expected.distance(&logits);
    assert!(cosine > 0.999_999 && difference < 0.004, "{cosine} {difference}");
    let near: Vec<f32> = (0u64..).zip(&logits).map(|(i, v)| v + 0.02 * noise(i + 7)).collect();
    assert!(expected.distance(&near).0 > 0.9999);
    // Those of another prompt have the same mean and size.
    let other: Vec<f32> = (0..50_000).map(|index| noise(index + 99_999) * 8.0 - 3.0).collect();
    assert!(expected.distance(&other).0 < 0.6, "{:?}", expected.distance(&other));
    let mut nan = logits;
    nan[40_000] = f32::NAN;
    assert_eq!(expected.distance(&nan).0, 0.0);
    assert!(Expected::of(&nan).is_err());
}
