//! Settings that decide a vector besides its text: rows that differ in them do not belong in one output.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use qhx::{Embedder, Role};
use qhx_core::Manifest;
use qhx_core::engine::Model;
use serde::{Deserialize, Serialize};

use super::row::RowOptions;

/// The setting that cuts long texts.
const TRUNCATE: &str = "--truncate";
/// Differences that a message names.
const NAMED: usize = 6;

/// Settings by their names, as people are shown both.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint(BTreeMap<String, String>);

impl Fingerprint {
    /// Fingerprint of a run: the model's files by their hashes in the manifest, its host-op, the backend, and the
    /// options. `pack` is that of [`embed`](super::embed).
    pub fn new(embedder: &Embedder, options: RowOptions, pack: bool) -> Self {
        let model = embedder.model();
        let mut settings = files(model);
        let mut set = |name: &str, value: String| settings.insert(name.to_owned(), value);
        let op = &model.op().description;
        set("host-op", format!("{} {}", op.name, op.version));
        // Backends agree to some digits only.
        set("backend", model.backend().name.clone());
        if let Some(activations) = model.backend().activations() {
            set("--cpu-activations", activations.to_owned());
        }
        if let Some(caches) = model.backend().caches() {
            set("--cpu-caches", caches.to_owned());
        }
        let packs = pack && model.batch_tokens() > 0;
        set("texts packed together", if packs { "yes" } else { "no" }.to_owned());
        set("longest text in tokens", model.info().max_ctx.to_string());
        set(TRUNCATE, if embedder.texts().truncates() { "yes" } else { "no" }.to_owned());
        set("--role", options.role.name().to_owned());
        set("prefix of queries", format!("{:?}", embedder.texts().prefix(Role::Query)));
        set("prefix of documents", format!("{:?}", embedder.texts().prefix(Role::Document)));
        let shard = options.shard.map(|shard| shard.to_string());
        set("--shard", shard.unwrap_or_else(|| "none".to_owned()));
        if let Some(params) = model.manifest().plan.params.as_object() {
            for (key, value) in params {
                set(&format!("plan.params.{key}"), value.to_string());
            }
        }
        Self(settings)
    }

    /// Differences from `now`, in words; `None` if there are none.
    pub(super) fn differences(&self, now: &Self) -> Option<String> {
        let names: BTreeSet<_> = self.0.keys().chain(now.0.keys()).collect();
        let differ = |name: &&String| match (self.0.get(*name), now.0.get(*name)) {
            // Without the option every text had fitted: its vector is the same with it.
            (Some(then), Some(now)) if *name == TRUNCATE && then == "no" && now == "yes" => false,
            (then, now) => then != now,
        };
        let differing: Vec<_> = names.into_iter().filter(differ).collect();
        let mut words = String::new();
        for name in differing.iter().take(NAMED) {
            let value = |of: &Self| of.0.get(*name).cloned().unwrap_or_else(|| "none".to_owned());
            let separator = if words.is_empty() { "" } else { "; " };
            // Writing to a string does not fail.
            let _ = write!(words, "{separator}{name}: {} then, {} now", value(self), value(now));
        }
        let more = differing.len().saturating_sub(NAMED);
        if more > 0 {
            let _ = write!(words, "; and {more} more");
        }
        (!words.is_empty()).then_some(words)
    }
}

/// The files that the backend reads, with the hashes that the manifest has, or else their lengths.
fn files(model: &Model) -> BTreeMap<String, String> {
    let manifest = model.manifest();
    let (used, other) = contexts(manifest, model.backend().name == "cpu");
    let table = &manifest.artifacts;
    let mut paths: BTreeSet<&str> = used.iter().map(String::as_str).collect();
    paths.extend(table.embed.as_ref().map(|embed| embed.path.as_str()));
    paths.extend(
        [&table.tokenizer, &table.tokenizer_config].into_iter().flatten().map(String::as_str),
    );
    paths.extend(table.files.keys().map(String::as_str).filter(|path| !other.contains(*path)));
    let mark = |path: &str| {
        let listed = table.files.get(path);
        if let Some(sha256) = listed.and_then(|file| file.sha256.as_ref()) {
            return Some(format!("sha256 {sha256}"));
        }
        let length = manifest.root.join(path).metadata().ok()?.len();
        Some(format!("{length} bytes"))
    };
    paths.into_iter().filter_map(|path| Some((path.to_owned(), mark(path)?))).collect()
}

/// Files of contexts in the form that the backend reads, and those in the other form.
fn contexts(manifest: &Manifest, onnx: bool) -> (BTreeSet<String>, BTreeSet<String>) {
    let entries = &manifest.artifacts.contexts;
    let binaries = entries.iter().filter_map(|entry| entry.bin.clone()).collect();
    let graphs = entries.iter().flat_map(|entry| &entry.onnx);
    let graphs = graphs.flat_map(|(_, path)| [path.clone(), format!("{path}_data")]).collect();
    if onnx { (graphs, binaries) } else { (binaries, graphs) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_named_with_both_values() {
        let print = |pairs: &[(&str, &str)]| {
            Fingerprint(pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
        };
        let then = print(&[("backend", "cpu"), ("--truncate", "no"), ("--role", "query")]);
        assert_eq!(then.differences(&then.clone()), None);
        let now = print(&[("backend", "qnn"), ("--role", "query"), ("plan.params.x", "1")]);
        let words = then.differences(&now).unwrap();
        assert_eq!(
            words,
            "--truncate: no then, none now; backend: cpu then, qnn now; plan.params.x: none then, 1 now"
        );
        let (cut, whole) = (print(&[(TRUNCATE, "yes")]), print(&[(TRUNCATE, "no")]));
        assert_eq!(cut.differences(&whole).as_deref(), Some("--truncate: yes then, no now"));
        assert_eq!(whole.differences(&cut), None, "what fitted is the same");
    }
}
