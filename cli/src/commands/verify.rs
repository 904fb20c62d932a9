//! `qhx verify`: a bundle's files against their hashes, or its answers against a reference.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use qhx_core::dump::Dump;
use qhx_core::engine::{FinishReason, Request};
use qhx_core::hash::sha256;
use qhx_core::{CancelToken, Error, ErrorKind, Manifest, Result};
use serde::Serialize;

use super::reference::{self, ArrayReport};
use super::suite::{Gate, MIN_COSINE, Score, Suite, suite_passes};
use crate::Status;
use crate::app::App;
use crate::args::BackendArgs;
use crate::media;
use crate::session::{self, Opening, Stream};

const EXAMPLES: &str = "\
Examples:
  qhx verify qwen35/v81
  qhx verify qwen35/v81 suite.json --backend qnn
  qhx verify qwen35/v81-w8 suite.json --gate greedy_tol --json";

/// Check a bundle's files, or its answers against a suite
///
/// Without a suite: length and SHA-256 of every file that the manifest lists. With a suite
/// (schema npu_suite/v1): generates greedily for every case and compares the tokens with the
/// reference, and arrays that the host-op makes, such as what an image becomes, row by row. Exit
/// code 1 when a check fails.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct VerifyArgs {
    /// The bundle: its folder, its manifest, or a manifest's name in its folder
    pub bundle: PathBuf,
    /// Prompts with reference answers
    #[arg(value_name = "SUITE.json")]
    pub suite: Option<PathBuf>,
    /// How answers are judged [default: the suite's own, or greedy_exact]
    #[arg(long, value_enum, requires = "suite")]
    pub gate: Option<Gate>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// Runs the command.
pub(crate) fn run(args: &VerifyArgs, app: &mut App) -> Result<Status> {
    match &args.suite {
        Some(suite) => answers(args, suite, app),
        None => files(args, app),
    }
}

#[derive(Debug, Serialize)]
struct CaseReport {
    id: String,
    passed: bool,
    #[serde(flatten)]
    score: Score,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    arrays: Vec<ArrayReport>,
    tokens: Vec<u32>,
}

#[derive(Debug, Serialize)]
struct SuiteReport {
    suite: PathBuf,
    model: Option<String>,
    gate: Gate,
    backend: String,
    passed: bool,
    cases_passed: usize,
    cases: Vec<CaseReport>,
}

fn answers(args: &VerifyArgs, path: &Path, app: &mut App) -> Result<Status> {
    let suite = Suite::load(path)?;
    let gate = args.gate.or(suite.gate).unwrap_or_default();
    let folder = path.parent().unwrap_or(Path::new(""));
    let attachments: Vec<_> =
        suite.cases.iter().flat_map(|case| case.attachments(folder)).collect();
    let references = suite.cases.iter().enumerate().map(|(index, case)| {
        let read = reference::read(&case.arrays, folder);
        read.map_err(|e| e.context(format_args!("case {}", case.name(index))))
    });
    let references: Vec<_> = references.collect::<Result<_>>()?;
    let least = suite.min_cosine.unwrap_or(MIN_COSINE);
    let names: Vec<_> = suite.cases.iter().flat_map(|case| case.arrays.keys().cloned()).collect();
    let dump = (!names.is_empty()).then(|| Arc::new(Dump::keep(names)));
    let opening = Opening { dump: dump.clone(), attachments: &attachments, ..Opening::default() };
    let mut model = session::open_checked(app, &args.bundle, &args.backend, opening, |_| Ok(()))?;
    let ends = model.manifest().params.eos_token_id.clone();
    let mut cases = Vec::new();
    for (index, (case, expected)) in suite.cases.iter().zip(&references).enumerate() {
        let id = case.name(index);
        let of_case = |e: Error| e.context(format_args!("case {id}"));
        let attached = media::read(&case.attachments(folder), &model, case.fps).map_err(of_case)?;
        let prompt = match (&case.prompt_ids, &case.prompt) {
            (Some(ids), _) => qhx::media::tokens(ids.clone(), &attached),
            (None, text) => qhx::media::completion(text.clone().unwrap_or_default(), &attached)
                .map_err(of_case)?,
        };
        let is_end = |token: Option<&u32>| token.is_some_and(|t| ends.contains(t));
        let gold = match case.gold.split_last() {
            Some((last, rest)) if is_end(Some(last)) => rest,
            _ => &case.gold[..],
        };
        let max_new = case.max_new.unwrap_or(case.gold.len());
        model.reset()?;
        let request = Request::greedy(prompt, max_new);
        let generation = session::generate(app, &mut model, &request, &attached, Stream::Quiet)
            .map_err(of_case)?;
        // Also where the signal came with the last token, which ends a generation by itself.
        let cancelled = app.interrupts.token().is_cancelled();
        if cancelled || generation.finish_reason == FinishReason::Cancelled {
            return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
        }
        let mut answer = &generation.tokens[..];
        if generation.finish_reason == FinishReason::Eos {
            answer = answer.split_last().map_or(answer, |(_, rest)| rest);
        }
        let score = Score::of(answer, gold, gold.len() < max_new);
        let made = dump.as_ref().map(|dump| dump.take()).unwrap_or_default();
        let arrays = reference::compare(&made, expected, least);
        let passed = score.passes(gate) && arrays.iter().all(|array| array.passed);
        let report = CaseReport { id, passed, score, arrays, tokens: generation.tokens.clone() };
        if !args.json {
            app.output.line(&case_line(&report, least))?;
        }
        cases.push(report);
    }
    let cases_passed = cases.iter().filter(|case| case.passed).count();
    let arrays_pass = cases.iter().flat_map(|case| &case.arrays).all(|array| array.passed);
    let report = SuiteReport {
        suite: path.to_owned(),
        model: suite.model,
        gate,
        backend: model.backend().name.clone(),
        passed: suite_passes(gate, cases_passed, cases.len()) && arrays_pass,
        cases_passed,
        cases,
    };
    if args.json {
        app.output.json(&report)?;
    } else {
        app.output.line(&format!(
            "{}: {} of {} cases passed ({}, backend {})",
            if report.passed { "passed" } else { "FAILED" },
            report.cases_passed,
            report.cases.len(),
            gate.name(),
            report.backend
        ))?;
    }
    Ok(if report.passed { Status::Done } else { Status::Found })
}

fn case_line(case: &CaseReport, least: f64) -> String {
    let Score { first_difference, distance, repeats, .. } = case.score;
    let verdict = if case.passed { "ok  " } else { "FAIL" };
    let mut line = match first_difference {
        None => format!("{verdict} {}: exact", case.id),
        Some(at) => format!(
            "{verdict} {}: differs from token {at} on, distance {distance:.3}, repeats {repeats:.2}",
            case.id
        ),
    };
    for array in &case.arrays {
        line += "; ";
        line += &array.summary(least);
    }
    line
}

#[derive(Debug, Serialize)]
struct FileReport {
    path: String,
    passed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

#[derive(Debug, Serialize)]
struct FilesReport {
    manifest: PathBuf,
    passed: bool,
    files: Vec<FileReport>,
}

fn files(args: &VerifyArgs, app: &mut App) -> Result<Status> {
    let manifest = Manifest::load(&args.bundle)?;
    if manifest.artifacts.files.is_empty() {
        return Err(Error::new(
            ErrorKind::Manifest,
            format!(
                "{}: /artifacts/files: missing, so no file can be checked",
                manifest.path.display()
            ),
        )
        .hint("bundles made by `qhx forge` list their files; give a suite to check the answers"));
    }
    // Nothing is to be kept: a signal ends the process at once, also while a file is read that never ends.
    let mut reports = Vec::new();
    let left_out = left_out(&manifest);
    for path in manifest.artifacts.files.keys() {
        let optional = left_out.contains(path);
        let message = match optional {
            true => None,
            false => check_file(&manifest, path, app.interrupts.token())?,
        };
        let report = FileReport { path: path.clone(), passed: message.is_none(), message };
        if !args.json {
            app.output.line(&match &report.message {
                None if optional => format!("ok   {path}: left out, optional"),
                None => format!("ok   {path}"),
                Some(message) => format!("FAIL {path}: {message}"),
            })?;
        }
        reports.push(report);
    }
    let passed = reports.iter().all(|file| file.passed);
    let report = FilesReport { manifest: manifest.path, passed, files: reports };
    if args.json {
        app.output.json(&report)?;
    }
    if !passed {
        say!("files differ from the manifest: download or forge the bundle again");
    }
    Ok(if passed { Status::Done } else { Status::Found })
}

/// True when every file that the manifest lists is as it says.
pub(crate) fn is_intact(manifest: &Manifest, cancel: &CancelToken) -> Result<bool> {
    let left_out = left_out(manifest);
    for path in manifest.artifacts.files.keys().filter(|path| !left_out.contains(*path)) {
        if check_file(manifest, path, cancel)?.is_some() {
            return Ok(false);
        }
    }
    Ok(!manifest.artifacts.files.is_empty())
}

/// Files of optional sets of contexts of which nothing is there in that form, binaries or ONNX.
fn left_out(manifest: &Manifest) -> BTreeSet<String> {
    let mut sets: BTreeMap<(&str, bool), Vec<String>> = BTreeMap::new();
    for entry in &manifest.artifacts.contexts {
        let Some(set) = &entry.optional else { continue };
        sets.entry((set, true)).or_default().extend(entry.bin.clone());
        let onnx = entry.onnx.iter().flat_map(|(_, path)| [path.clone(), format!("{path}_data")]);
        sets.entry((set, false)).or_default().extend(onnx);
    }
    let root = manifest.open_artifacts().root().to_owned();
    sets.retain(|_, files| files.iter().all(|file| !root.join(file).exists()));
    sets.into_values().flatten().collect()
}

/// What is wrong with a file that the manifest lists.
fn check_file(manifest: &Manifest, path: &str, cancel: &CancelToken) -> Result<Option<String>> {
    let Some(expected) = manifest.artifacts.files.get(path) else { return Ok(None) };
    let artifacts = manifest.open_artifacts();
    let pointer = format!("/artifacts/files/{path}");
    let resolved = match artifacts.resolve(&pointer, path) {
        Ok(resolved) => resolved,
        Err(e) if e.kind() == ErrorKind::Artifact => return Ok(Some("missing".to_owned())),
        Err(e) => return Err(e),
    };
    let fail = |e: std::io::Error| Error::io(ErrorKind::Artifact, &resolved, e);
    let file = artifacts.open_file(&pointer, path)?;
    let found = file.metadata().map_err(fail)?.len();
    if let Some(bytes) = expected.bytes.filter(|bytes| *bytes != found) {
        return Ok(Some(format!("{found} bytes, expected {bytes}")));
    }
    let Some(expected) = &expected.sha256 else { return Ok(None) };
    let found = sha256(ErrorKind::Artifact, &resolved, file, |_| cancel.check())?;
    Ok((found != *expected).then(|| format!("sha256 {found}, expected {expected}")))
}
