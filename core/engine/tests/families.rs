//! The core knows no model family: no item, doc or comment of it names one.
//!
//! Tests may, since they need checkpoints to read. So `#[cfg(test)]` ends what is looked at in a file,
//! and modules that are declared under it are left out.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Found anywhere in a word.
const NAMES: [&str; 15] = [
    "llama", "qwen", "gemma", "phimoe", "phi3", "mistral", "mixtral", "deepseek", "smollm", "lfm2",
    "whisper", "minicpm", "granite", "parakeet", "siglip",
];
/// Found as a word of their own, with or without a number.
const WORDS: [&str; 3] = ["phi", "lfm", "glm"];

/// The family that a line names.
fn family(line: &str) -> Option<&'static str> {
    let line = line.to_lowercase();
    let within = NAMES.into_iter().find(|name| line.contains(name));
    let mut words = line.split(|c: char| !c.is_ascii_alphanumeric());
    within.or_else(|| {
        words.find_map(|word| {
            let word = word.trim_end_matches(|c: char| c.is_ascii_digit());
            WORDS.into_iter().find(|name| *name == word)
        })
    })
}

/// Adds the Rust files below a folder.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry of it").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The file of `mod name;` in `declaring`.
fn module(declaring: &Path, name: &str) -> PathBuf {
    let stem = declaring.file_stem().expect("a file has a name");
    let folder = declaring.parent().expect("a file has a folder");
    match stem.to_str() {
        Some("lib" | "mod") => folder.join(format!("{name}.rs")),
        _ => folder.join(stem).join(format!("{name}.rs")),
    }
}

#[test]
fn nothing_in_the_core_names_a_model_family() {
    let core = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in core");
    let mut files = Vec::new();
    for part in ["base", "types", "exec", "grammar", "qnn", "qnn/sys", "text", "engine"] {
        let before = files.len();
        collect(&core.join(part).join("src"), &mut files);
        assert!(files.len() > before, "no file in {part}");
    }
    assert!(files.len() > 90, "{} files", files.len());
    let (mut tests, mut named) = (HashSet::new(), Vec::new());
    for file in &files {
        let text = fs::read_to_string(file).unwrap();
        let lines: Vec<_> = text.lines().map(str::trim).collect();
        let mut looked_at = true;
        for (index, line) in lines.iter().enumerate() {
            if *line == "#[cfg(test)]" {
                let next = lines.get(index + 1).copied().unwrap_or_default();
                let declared = next.rsplit("mod ").next().and_then(|name| name.strip_suffix(';'));
                match declared {
                    Some(name) => drop(tests.insert(module(file, name))),
                    None => looked_at &= !next.starts_with("mod "),
                }
            }
            if let Some(name) = family(line).filter(|_| looked_at) {
                let place = file.strip_prefix(core).unwrap().display();
                named.push((file.clone(), format!("{place}:{}: {name}: {line}", index + 1)));
            }
        }
    }
    // What a module of tests declares is one, too.
    let of_tests = |file: &Path| {
        file.ancestors()
            .any(|part| tests.contains(part) || tests.contains(&part.with_extension("rs")))
    };
    named.retain(|(file, _)| !of_tests(file));
    let lines: Vec<_> = named.into_iter().map(|(_, line)| line).collect();
    assert!(lines.is_empty(), "the core names model families:\n{}", lines.join("\n"));
}

#[test]
fn families_are_distinguished_from_other_words() {
    assert_eq!(family("/// As `LlamaForCausalLM` does."), Some("llama"));
    assert_eq!(family("fn qwen3_5_rope() {"), Some("qwen"));
    assert_eq!(family("// the form of Phi-3"), Some("phi"));
    assert_eq!(family("LFM2.5"), Some("lfm2"));
    assert_eq!(family("/// a graph's philosophy, alphabetically; glmish"), None);
}
