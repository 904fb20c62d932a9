//! The action for GitHub, `action/action.yml`: its steps are run as GitHub runs them, each by bash with the inputs as
//! environment variables and the files of a step, in a folder outside of the repository.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use qhx_paths::{fixture, program, workspace};
use qhx_tests::{files, has, plugin_files};
use qhx_tiers::tier;
use serde_json::Value;
use yaml_rust2::{Yaml, YamlLoader};

use crate::run::folder;

/// A repository that uses the action.
struct Repository {
    folder: tempfile::TempDir,
    action: Yaml,
}

/// End of a run of the action.
#[derive(Debug)]
struct Ran {
    passed: bool,
    /// Outputs of the action.
    outputs: BTreeMap<String, String>,
    /// Summary of the job.
    summary: String,
    /// Everything that the steps printed.
    log: String,
}

impl Repository {
    fn new() -> Self {
        let text = fs::read_to_string(workspace().join("action/action.yml")).expect("the action");
        let action = YamlLoader::load_from_str(&text).expect("YAML").remove(0);
        Self { folder: folder(), action }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The text with each `${{ … }}` replaced.
    fn expanded(text: &str, value: impl Fn(&str) -> String) -> String {
        let mut parts = text.split("${{");
        let mut whole = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (name, rest) = part.split_once("}}").expect("the end of an expression");
            whole += &value(name.trim());
            whole += rest;
        }
        whole
    }

    /// Runs all steps, the last of them where none fails before.
    fn uses(&self, with: &[(&str, &str)]) -> Ran {
        let input = |name: &str| {
            let declared = &self.action["inputs"][name];
            assert!(!declared.is_badvalue(), "no input {name:?}");
            let given = with.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
            given.unwrap_or_else(|| declared["default"].as_str().expect("a default")).to_owned()
        };
        for (name, _) in with {
            input(name);
        }
        let value = |name: &str| match name.strip_prefix("inputs.") {
            Some(name) => input(name),
            None => {
                assert_eq!(name, "github.action_path");
                workspace().join("action").display().to_string()
            }
        };
        for file in ["output", "path", "summary"] {
            fs::write(self.path(file), "").expect("a file");
        }
        let mut ran = Ran {
            passed: true,
            outputs: BTreeMap::new(),
            summary: String::new(),
            log: String::new(),
        };
        for step in self.action["runs"]["steps"].as_vec().expect("steps") {
            assert_eq!(step["shell"].as_str(), Some("bash"));
            let env = step["env"].as_hash().expect("variables").iter();
            let env = env.map(|(name, text)| {
                let text = text.as_str().expect("a text");
                (name.as_str().expect("a name").to_owned(), Self::expanded(text, value))
            });
            let script = step["run"].as_str().expect("a script");
            assert!(!script.contains("${{"), "an input in a script would be run: {script}");
            let output = self.step(script, env);
            ran.log += &String::from_utf8_lossy(&output.stdout);
            ran.log += &String::from_utf8_lossy(&output.stderr);
            ran.passed = output.status.success();
            if !ran.passed {
                break;
            }
        }
        ran.summary = fs::read_to_string(self.path("summary")).expect("the summary");
        let lines = fs::read_to_string(self.path("output")).expect("the outputs");
        let steps: BTreeMap<&str, &str> = lines.lines().filter_map(|l| l.split_once('=')).collect();
        for (name, output) in self.action["outputs"].as_hash().expect("outputs") {
            let value = Self::expanded(output["value"].as_str().expect("a value"), |name| {
                let name =
                    name.strip_prefix("steps.check.outputs.").expect("an output of the step");
                (*steps.get(name).unwrap_or(&"")).to_owned()
            });
            ran.outputs.insert(name.as_str().expect("a name").to_owned(), value);
        }
        ran
    }

    fn step(&self, script: &str, env: impl Iterator<Item = (String, String)>) -> Output {
        let added = fs::read_to_string(self.path("path")).unwrap_or_default();
        let mut path: Vec<PathBuf> = added.lines().rev().map(PathBuf::from).collect();
        let others = std::env::var_os("PATH").unwrap_or_default();
        path.extend(std::env::split_paths(&others));
        let htp = qhx_tests::tiny::qnn_libraries().0;
        let mut command = Command::new("bash");
        command.args(["--noprofile", "--norc", "-eo", "pipefail", "-c", script]);
        command
            .current_dir(self.folder.path())
            .env("PATH", std::env::join_paths(path).expect("a search path"))
            .env("GITHUB_ACTIONS", "true")
            .env("GITHUB_OUTPUT", self.path("output"))
            .env("GITHUB_PATH", self.path("path"))
            .env("GITHUB_STEP_SUMMARY", self.path("summary"))
            .env("RUNNER_TEMP", self.folder.path())
            .env("HOME", self.folder.path())
            // The libraries are installed there, so that nothing is fetched.
            .env("QHX_CACHE_DIR", htp.ancestors().nth(4).expect("the cache folder"))
            .env_remove("QHX_QNN_HTP")
            .env_remove("QHX_QNN_SYSTEM")
            .envs(env);
        command.output().expect("bash runs")
    }
}

/// A family from outside: its own forge and its own plugin, and a checkpoint.
fn family(repository: &Repository) -> Vec<(&'static str, String)> {
    plugin_files::copy_folder(&fixture("smolvlm-tiny"), &repository.path("model"));
    let forge = plugin_files::build_program("smolvlm-forge").display().to_string();
    let plugin = plugin_files::build("qhx-ops-llama-plugin").display().to_string();
    let options = [("checkpoint", "model"), ("precision", "w8a16"), ("max-ctx", "200")];
    let mut with: Vec<_> = options.map(|(name, value)| (name, value.to_owned())).into();
    with.extend([("forge", forge), ("plugins", plugin), ("forge-args", "--prefill 0".into())]);
    with.push(("qhx", program("qhx").display().to_string()));
    with
}

#[tier(qnn)]
fn the_action_passes_and_then_fails_on_a_regression() {
    let repository = Repository::new();
    let mut with = family(&repository);
    with.push(("suite", "model/suite.json".into()));
    let uses = |with: &[(&'static str, String)]| {
        let with: Vec<_> = with.iter().map(|(name, value)| (*name, value.as_str())).collect();
        repository.uses(&with)
    };
    let ran = uses(&with);
    assert!(ran.passed, "{}", ran.log);
    has(&ran.summary, &["### model w8a16 for v81: passed", "| `kl.mean` |", "| `time.token` |"]);
    has(&ran.summary, &["passed: 1 of 1 cases passed (greedy_exact, backend qnn)"]);
    assert!(repository.path(&ran.outputs["bundle"]).join("model.json").is_file());
    let report: Value = files::json(&repository.path(&ran.outputs["report"]));
    assert_eq!((&report["passed"], &report["golden"]["backend"]), (&true.into(), &"qnn".into()));

    // The baseline of a bundle whose tokens took half of the time, without what takes long to make again.
    let mut baseline: Value = files::json(&repository.path(&ran.outputs["baseline"]));
    let figures = baseline["bundles"][0]["figures"].as_object_mut().expect("figures");
    figures.retain(|name, _| name.starts_with("time."));
    let token = figures["time.token"].as_f64().expect("a time");
    figures.insert("time.token".into(), (token / 2.0).into());
    fs::write(repository.path("baseline.json"), baseline.to_string()).expect("a file");
    with.retain(|(name, _)| !["suite", "forge-args"].contains(name));
    with.push(("forge-args", "--prefill 0 --no-golden --no-measure".into()));
    with.push(("baseline", "baseline.json".into()));
    let ran = uses(&with);
    assert!(!ran.passed, "{}", ran.log);
    has(&ran.log, &["::error::time.token is ", ": +100.0 %, and 5 % are allowed"]);
    has(&ran.summary, &["### model w8a16 for v81: failed", "| +100.0 % | **worse** |"]);
    assert_eq!(ran.outputs["summary"], "qhx-check/summary.md");
}

#[tier(qnn)]
fn the_action_takes_an_archive_with_its_hash_alone() {
    let repository = Repository::new();
    let bin = repository.path("qhx-0.1.0/bin");
    fs::create_dir_all(&bin).expect("a folder");
    // Stands in for the program: what is looked at is where it comes from.
    fs::write(bin.join("qhx"), "#!/bin/sh\necho \"ran: qhx $*\"\nexit 3\n").expect("a file");
    let make = "chmod +x qhx-0.1.0/bin/qhx && tar --create --gzip --file qhx.tar.gz qhx-0.1.0 && sha256sum qhx.tar.gz";
    let made = repository.step(make, std::iter::empty());
    let hash =
        String::from_utf8_lossy(&made.stdout).split(' ').next().unwrap_or_default().to_owned();
    let url = format!("file://{}", repository.path("qhx.tar.gz").display());
    let uses = |hash: &str| repository.uses(&[("qhx-url", &url), ("qhx-sha256", hash)]);
    has(&uses(&hash).log, &["ran: qhx libraries install"]);
    for wrong in [&"0".repeat(64), ""] {
        let ran = uses(wrong);
        assert!(!ran.passed && !ran.log.contains("ran: qhx"), "{}", ran.log);
        has(&ran.log, &["::error::the archive does not have the SHA-256 of the input qhx-sha256"]);
    }
}

/// Inputs and variables of the page, the action and the script are the same.
#[test]
fn the_page_lists_all_inputs_of_the_action() {
    let page = fs::read_to_string(workspace().join("docs/ci.md")).expect("the page");
    let script = fs::read_to_string(workspace().join("action/check.sh")).expect("the script");
    let action = Repository::new().action;
    for (name, _) in action["inputs"].as_hash().expect("inputs") {
        let name = name.as_str().expect("a name");
        let row = format!("| `{name}` |");
        let is_listed = page.lines().any(|line| line.starts_with(&row));
        assert!(is_listed, "docs/ci.md does not list {name}");
        let variable = name.to_uppercase().replace('-', "_");
        let gets = name.starts_with("qhx") || name == "libraries-wheel";
        assert!(gets || script.contains(&format!("${{{variable}:")), "check.sh lacks {variable}");
    }
    let image = fs::read_to_string(workspace().join("packaging/ci/Dockerfile")).expect("the image");
    assert!(image.contains("COPY action/check.sh "), "{image}");
}
