//! Report of a phone, made to be sent.

use std::collections::BTreeMap;
use std::path::Path;

use qhx_base::{Error, ErrorKind, Result};
use serde::Serialize;
use serde_json::{Value, json};

use super::facts::{DeviceFacts, Warmth};
use super::install::Install;
use super::steps::{Outcome, PushStep, StepError, StepReport};

/// The schema of reports.
pub const SCHEMA: &str = "qhx_report/v1";

/// A bundle, by its hashes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BundleFacts {
    /// Name of its folder.
    pub name: String,
    /// Architecture that it was made for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arch: Option<u32>,
    /// SHA-256 of its files.
    pub files: BTreeMap<String, String>,
}

/// Results of all steps on a phone.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct PushReport {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// Time of the report, in UTC.
    pub time: String,
    /// Version of the qhx that made it.
    pub qhx: &'static str,
    /// All was copied, and no step failed.
    pub passed: bool,
    /// The phone.
    pub device: DeviceFacts,
    /// The bundle.
    pub bundle: BundleFacts,
    /// SHA-256 of the program.
    pub program: String,
    /// SHA-256 of the libraries.
    pub libraries: BTreeMap<String, String>,
    /// Origin of the libraries.
    pub libraries_from: String,
    /// The prompt.
    pub prompt: String,
    /// Files that were copied.
    pub install: Install,
    /// Failure of the copying, behind which no step was done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub install_error: Option<StepError>,
    /// Warmth and charge before the steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<Warmth>,
    /// Warmth and charge after the steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<Warmth>,
    /// The steps.
    pub steps: Vec<StepReport>,
    /// The error that ended the copying or the steps.
    #[serde(skip)]
    pub failure: Option<Error>,
    /// Serial number of the phone, which no report has.
    #[serde(skip)]
    pub serial: String,
}

impl PushReport {
    /// Report of a step.
    pub fn step(&self, step: PushStep) -> Option<&StepReport> {
        self.steps.iter().find(|report| report.step == step)
    }

    /// The report as it is sent: without serial number, names of users and paths of their folders.
    ///
    /// # Errors
    /// A number that JSON has no form for.
    pub fn to_json(&self) -> Result<Value> {
        let value = serde_json::to_value(self)
            .map_err(|e| Error::caused(ErrorKind::Internal, "the report as JSON", e))?;
        Ok(Scrubber::new(&self.serial).value(value))
    }

    /// Name for the file of the report.
    pub fn file_name(&self) -> String {
        let time: String = self.time.chars().filter(char::is_ascii_alphanumeric).collect();
        format!("qhx-report-{}-{time}.json", self.device.id)
    }

    /// The report for people, a line each.
    pub fn summary(&self) -> Vec<String> {
        let fact = |name: &str| self.device.facts.get(name).map_or("", String::as_str);
        let known =
            |text: &str| if text.is_empty() { "unknown".to_owned() } else { text.to_owned() };
        let name = format!("{} {}", fact("manufacturer"), fact("model"));
        let arch = self.device.arch.map_or_else(String::new, |arch| format!(" (v{arch})"));
        let mut lines = vec![
            format!(
                "phone     {}, {}{arch}, Android {}",
                known(name.trim()),
                known(fact("soc_model")),
                known(fact("android"))
            ),
            format!("bundle    {}, qhx {}", self.bundle.name, self.qhx),
        ];
        let Install { files, copied, bytes, ms, lost } = self.install;
        let lost = if lost > 0 { format!(", disconnected {lost} times") } else { String::new() };
        let copied = format!(
            "{copied} of {files} files copied, {:.1} MB in {:.1} s{lost}",
            bytes as f64 / 1e6,
            ms / 1e3
        );
        match &self.install_error {
            None => lines.push(format!("copying   {copied}")),
            Some(error) => lines.push(format!("copying   FAILED: {} ({copied})", error.message)),
        }
        lines.extend(self.steps.iter().map(StepReport::summary));
        let warmth: Vec<_> = [&self.before, &self.after]
            .into_iter()
            .flatten()
            .filter_map(|at| {
                let status = at.thermal_status.map(|status| format!(", thermal status {status}"));
                Some(format!("{:.1} °C{}", at.battery_celsius?, status.unwrap_or_default()))
            })
            .collect();
        if !warmth.is_empty() {
            lines.push(format!("battery   {}", warmth.join(", then ")));
        }
        lines
    }
}

impl StepReport {
    /// The step in one line.
    pub fn summary(&self) -> String {
        let outcome = match self.outcome {
            Outcome::Passed => "ok",
            Outcome::Failed => "FAILED",
            Outcome::Skipped => "skipped",
        };
        let found = match (&self.error, &self.result) {
            (Some(error), _) => error.message.clone(),
            (None, Some(result)) => self.figures(result),
            (None, None) => String::new(),
        };
        let colon = if found.is_empty() { "" } else { ": " };
        format!("{:<9} {outcome}{colon}{found}", self.step.name())
    }

    /// Figures of a result that people want to know first.
    fn figures(&self, result: &Value) -> String {
        let number = |pointer: &str| result.pointer(pointer).and_then(Value::as_f64);
        let text = |pointer: &str| result.pointer(pointer).and_then(Value::as_str).unwrap_or("");
        let list = |pointer: &str| result.pointer(pointer).and_then(Value::as_array);
        match self.step {
            PushStep::Doctor => {
                let checks = list("/checks").into_iter().flatten();
                let qnn = checks.filter(|check| check["name"] == "qnn backend");
                let found = qnn.filter_map(|check| check["found"].as_str());
                found.collect::<Vec<_>>().join("; ")
            }
            PushStep::Verify => {
                let files = list("/files").map_or(0, Vec::len);
                let steps = list("/golden/steps").map_or(0, Vec::len);
                format!("{files} files, {steps} golden steps")
            }
            PushStep::Generate => {
                let tokens = list("/tokens").map_or(0, Vec::len);
                let load = number("/timings/load_ms").unwrap_or_default();
                let rate = number("/timings/decode_tok_s").unwrap_or_default();
                let text = json!(text("/text"));
                format!("{tokens} tokens, {rate:.1} tokens/s, load {load:.0} ms, text {text}")
            }
            PushStep::Bench => {
                let results = list("/results").into_iter().flatten();
                let rates = results.filter_map(|one| {
                    let rate = one.pointer("/tokens_per_second/mean")?.as_f64()?;
                    Some(format!("{} {rate:.1} tokens/s", one["name"].as_str()?))
                });
                rates.collect::<Vec<_>>().join(", ")
            }
            PushStep::Prepare => text("/manifest").to_owned(),
        }
    }
}

/// Takes out of texts what names one person or one phone.
#[derive(Debug)]
struct Scrubber {
    serial: String,
    home: String,
}

/// Folders of users of other systems.
const HOMES: [&str; 3] = ["/home/", "/Users/", "\\Users\\"];

impl Scrubber {
    fn new(serial: &str) -> Self {
        let home =
            std::env::home_dir().filter(|home| home.parent().is_some_and(|up| up != Path::new("")));
        let home = home.map(|home| home.to_string_lossy().into_owned()).unwrap_or_default();
        Self { serial: serial.to_owned(), home: if home.len() > 1 { home } else { String::new() } }
    }

    fn text(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (found, name) in [(&self.serial, "SERIAL"), (&self.home, "~")] {
            if !found.is_empty() {
                text = text.replace(found.as_str(), name);
            }
        }
        for start in HOMES {
            let mut rest = text.as_str();
            let mut clean = String::new();
            while let Some((before, after)) = rest.split_once(start) {
                clean.push_str(before);
                clean.push_str(start);
                let end =
                    after.find(['/', '\\', '"', '\'', ' ', ':', ',', '\n']).unwrap_or(after.len());
                clean.push_str(if end > 0 { "USER" } else { "" });
                rest = after.get(end..).unwrap_or_default();
            }
            clean.push_str(rest);
            text = clean;
        }
        text
    }

    fn value(&self, value: Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(&text)),
            Value::Array(values) => values.into_iter().map(|value| self.value(value)).collect(),
            Value::Object(map) => {
                let entries = map.into_iter();
                entries.map(|(key, value)| (self.text(&key), self.value(value))).collect()
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_serial_number_and_no_user_is_left() {
        let home = "/srv/ada".to_owned();
        let scrubber = Scrubber { serial: "ab12".to_owned(), home };
        for (text, expected) in [
            ("device 'ab12' not found", "device 'SERIAL' not found"),
            ("/srv/ada/qwen35/v81: is a folder", "~/qwen35/v81: is a folder"),
            ("copying /home/bob/a: /home/eve", "copying /home/USER/a: /home/USER"),
            ("C:\\Users\\Eve\\qwen", "C:\\Users\\USER\\qwen"),
            ("/home//", "/home//"),
        ] {
            assert_eq!(scrubber.text(text), expected);
        }
        let found = scrubber.value(json!({"ab12": [{"a": "ab12 1"}, 2]}));
        assert_eq!(found, json!({"SERIAL": [{"a": "SERIAL 1"}, 2]}));
    }
}
