use super::*;

const GOOD: &str = r#"{"format": 1, "date": "2026-11-30", "models": [
    {"name": "a-1.5b", "title": "A", "does": ["text"], "license": "mit",
     "checkpoint": {"repository": "o/a", "precision": "w4a16"},
     "bundles": [{"repository": "o/a_HNPU@main", "archs": ["v79", "v81"]}]}]}"#;

fn parse(text: &str) -> Result<Index> {
    Index::parse("i.json", text.as_bytes())
}

#[test]
fn the_builtin_index_has_thirty_names() {
    let index = Index::builtin();
    assert!(index.models.iter().filter(|entry| entry.missing.is_none()).count() >= 30);
    let text = serde_json::to_string(index).unwrap();
    assert_eq!(&parse(&text).unwrap(), index);
    assert!(index.entry("SmolLM2").unwrap().checkpoint.as_ref().unwrap().package.is_some());
}

#[test]
fn an_entry_says_what_is_behind_a_name() {
    let index = parse(GOOD).unwrap();
    let entry = index.entry("A-1.5B").unwrap();
    assert_eq!(entry.origins(), "o/a_HNPU@main, o/a");
    assert_eq!(entry.bundles[0].archs().collect::<Vec<_>>(), [79, 81]);
    assert!(!index.is_expired("2099-01-01"));
}

#[test]
fn faults_of_an_index_are_named() {
    let second = r#"}]}, {"name": "a-1.5b", "title": "B", "does": ["text"], "license": "mit",
        "bundles": [{"repository": "p/a"}]}]}"#;
    let two = GOOD.replace("}]}]}", second);
    for (text, expected) in [
        ("", "it is no index of models"),
        ("{}", "no format"),
        (&GOOD.replace("\"format\": 1", "\"format\": 2"), "format 2, this program reads 1"),
        (&GOOD.replace("\"format\": 1", "\"format\": 0"), "format 0, expected 1"),
        (&GOOD.replace("2026-11-30", "soon"), "date \"soon\", expected one such as"),
        (&two, "models[1] \"a-1.5b\": the name is o/a_HNPU@main, o/a and p/a"),
        (&GOOD.replace("a-1.5b", "../a"), "a name of lower-case letters"),
        (&GOOD.replace("a-1.5b", "nul"), "a name of lower-case letters"),
        (&GOOD.replace("[\"text\"]", "[]"), "does: at least one is expected"),
        (&GOOD.replace("[\"text\"]", "[\"dance\"]"), "unknown variant `dance`"),
        (&GOOD.replace("\"o/a\"", "\"o/../a\""), "is no name of a repository"),
        (&GOOD.replace("w4a16", "w2"), "precision \"w2\", expected fp16, w8a16 or w4a16"),
        (
            &GOOD.replace("\"w4a16\"", "\"w4a16\", \"task\": \"dance\""),
            "task \"dance\", expected generate, ",
        ),
        (&GOOD.replace("v79", "79"), "arch \"79\", expected one such as \"v81\""),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.message().contains(expected), "{text}: {error}");
        assert!(error.message().starts_with("i.json"), "{error}");
    }
}

#[test]
fn a_package_cannot_leave_its_folder() {
    let package = |file: &str, requirement: &str, part: &str| {
        let package = format!(
            r#"{{"file": "{file}", "wheels": [{{"requirement": "{requirement}", "file": "w.whl",
            "sha256": "{}", "megabytes": 1}}], "parts": ["{part}"]}}"#,
            "a".repeat(64)
        );
        parse(&GOOD.replace("\"repository\": \"o/a\"", &format!("\"package\": {package}")))
    };
    package("m.gguf", "m==1.0", "m/m.gguf").unwrap();
    for (file, requirement, part) in [
        ("../m", "m==1.0", "m"),
        (".m", "m==1.0", "m"),
        ("m", "--index-url=http://x", "m"),
        ("m", "m==1.0 --pre", "m"),
        ("m", "m", "m"),
        ("m", "m==1", "../m"),
        ("m", "m==1", "/m"),
    ] {
        package(file, requirement, part).unwrap_err();
    }
}
