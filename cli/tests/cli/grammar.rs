//! `--json-schema`, `--grammar`, `--choice` and `--tools`.

use std::path::Path;

use serde_json::{Value, json};

use crate::run::{Program, bundle, folder};
use crate::templates::with_template;

const TOOLS: &str = r#"[{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"], "additionalProperties": false}}}]"#;

/// Writes a file, and returns its path.
fn file(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).expect("a file");
    path.to_str().expect("a plain path").to_owned()
}

fn generate(folder: &Path, bundle: &Path, more: &[&str]) -> crate::run::Run {
    let bundle = bundle.to_str().expect("a plain path");
    qhx!(folder, "generate", bundle, "Name a city.").args(more).run()
}

#[test]
fn an_answer_is_json_of_its_schema() {
    let folder = folder();
    let schema = r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"],
        "additionalProperties": false}"#;
    let schema = file(folder.path(), "schema.json", schema);
    for more in [&[][..], &["--temperature", "2", "--seed", "3"], &["--speculate", "3"]] {
        let args = [&["--json-schema", &schema, "-n", "120", "--json"], more].concat();
        let json = generate(folder.path(), bundle(), &args).ok().json();
        let text = json["text"].as_str().expect("a text");
        let answer: Value = serde_json::from_str(text).expect(text);
        assert!(answer["name"].is_string() && answer["age"].as_u64() <= Some(150), "{text}");
        assert!(json["timings"]["forced_tokens"].as_u64() > Some(3), "{json}");
        assert!(json.get("tool_calls").is_none());
    }
    let grammar = file(folder.path(), "date.lark", "start: /[0-9]{4}/ \"-\" /[0-9]{2}/");
    let run = generate(folder.path(), bundle(), &["--grammar", &grammar]).ok();
    let (year, month) = run.stdout.trim_end().split_once('-').expect("a date");
    assert_eq!((year.len(), month.len()), (4, 2), "{}", run.stdout);
    let run = generate(folder.path(), bundle(), &["--choice", "Oslo,Rome"]).ok();
    assert!(["Oslo\n", "Rome\n"].contains(&run.stdout.as_str()), "{}", run.stdout);
    assert!(run.stderr.contains("tokens forced") && run.stderr.contains("finish: eos"));
}

#[test]
fn an_impossible_answer_is_refused_before_anything_runs() {
    let folder = folder();
    let path = folder.path();
    let false_schema =
        file(path, "false.json", "{\"type\": \"integer\", \"minimum\": 2, \"maximum\": 1}");
    let broken = file(path, "broken.json", "{");
    let list = file(path, "list.json", "[{}]");
    let tools = file(path, "tools.json", TOOLS);
    for (args, words) in [
        (&["--json-schema", &false_schema][..], "the JSON schema: no value is of it"),
        (&["--json-schema", &broken], "broken.json: the JSON schema is no JSON"),
        (&["--json-schema", "missing.json"], "missing.json"),
        (&["--grammar", &broken], "the grammar: "),
        (&["--tools", &list, "--chat"], "list.json: the list of tools: tool 0 has no name"),
        (&["--tools", &tools], "option --tools: they are a chat template's"),
        (&["--json-schema", &broken, "--choice", "a"], "cannot be used with"),
    ] {
        let run = generate(path, bundle(), args);
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{args:?}: {run:?}");
        assert!(run.stderr.contains(words), "{args:?}: {run:?}");
    }
}

#[test]
fn tools_reach_the_template_and_calls_come_back() {
    let folder = folder();
    let tools = file(folder.path(), "tools.json", TOOLS);
    let template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}\
        {# <tool_call> #}{% for message in messages %}{{ message.content }}{% endfor %}";
    let bundle = with_template(folder.path(), template);
    let args = ["--chat", "--json", "-n", "100", "--tools", &tools, "--tool-choice", "required"];
    let json = generate(folder.path(), &bundle, &args).ok().json();
    let text = json["text"].as_str().expect("a text");
    assert!(
        text.starts_with("<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"days\": "),
        "{text}"
    );
    let calls = json["tool_calls"].as_array().expect("calls");
    assert!(!calls.is_empty(), "{text}");
    for call in calls {
        assert_eq!(call["name"], "weather");
        assert!((1..=9).contains(&call["arguments"]["days"].as_u64().expect("days")), "{text}");
    }
    // The model as it is calls nothing.
    let free =
        generate(folder.path(), &bundle, &["--chat", "--json", "-n", "4", "--tools", &tools]);
    assert_eq!(free.ok().json()["tool_calls"], json!([]));
    let talk = Program::qhx(folder.path())
        .args(["chat", "--json", "-n", "100", "--tools", &tools, "--tool-choice", "required"])
        .arg(&bundle)
        .stdin("Hi\n")
        .run()
        .ok();
    assert_eq!(talk.json()["tool_calls"][0]["name"], "weather", "{talk:?}");
}
