//! `qhx verify`: a bundle's files against their hashes, or its answers against a reference.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{PossibleValue, TypedValueParser};
use qhx::golden::{self, Golden, GoldenReport};
use qhx::{BackendChoice, Bundle};
use qhx_base::{Error, ErrorKind, Result};
use qhx_tools::verify::{
    self, Baseline, CaseReport, Change, Comparison, Figures, FileReport, Gate, Score, Suite,
    ToleranceOf,
};
use serde_json::json;

use crate::Status;
use crate::app::App;
use crate::args::{BackendArgs, named};
use crate::session::{self, Opening, Stream};

const EXAMPLES: &str = "\
Examples:
  qhx verify qwen35/v81
  qhx verify qwen35/v81 suite.json --backend qnn
  qhx verify qwen35/v81-w8 suite.json --gate greedy_tol --json
  qhx verify qwen35/v81 --write-baseline baseline.json
  qhx verify qwen35/v81 --baseline baseline.json --tolerance time=3% --summary summary.md";

/// Check a bundle's files, or its answers against a suite
///
/// Without a suite: length and SHA-256 of every file that the manifest lists, of a bundle that was
/// fetched also the hashes that the hub gave, and then the golden steps of the bundle, if it has
/// some. With a suite
/// (schema npu_suite/v1): generates greedily for every case and compares the tokens with the
/// reference, and arrays that the host-op makes, such as what an image becomes, row by row. With a
/// baseline: compares the bundle's size, its receipt, its estimates and its golden steps with those of
/// an earlier one. Exit code 1 when a check fails.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct VerifyArgs {
    /// The bundle: its folder, its manifest, or a manifest's name in its folder
    pub bundle: PathBuf,
    /// Prompts with reference answers
    #[arg(value_name = "SUITE.json")]
    pub suite: Option<PathBuf>,
    /// How answers are judged [default: the suite's own, or greedy_exact]
    #[arg(long, value_parser = gate_parser(), requires = "suite")]
    pub gate: Option<Gate>,
    /// Compare the bundle's figures with those of this file, and fail where one is worse than its tolerance allows
    #[arg(long, value_name = "FILE", conflicts_with = "suite")]
    pub baseline: Option<PathBuf>,
    /// Tolerance of a figure, or of a kind of figures: a part of the baseline's value (time=3%), or an amount
    /// (kl.code=0.01). May be given several times
    #[arg(long = "tolerance", value_name = "NAME=VALUE", requires = "baseline")]
    pub tolerances: Vec<ToleranceOf>,
    /// Write the bundle's figures into this file, beside those of other models, targets and precisions
    #[arg(long, value_name = "FILE", conflicts_with = "suite")]
    pub write_baseline: Option<PathBuf>,
    /// Append a summary in Markdown to this file
    #[arg(long, value_name = "FILE", conflicts_with = "suite")]
    pub summary: Option<PathBuf>,
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

fn answers(args: &VerifyArgs, path: &Path, app: &mut App) -> Result<Status> {
    let suite = Suite::load(path)?;
    let gate = args.gate.unwrap_or(suite.gate());
    let attachments = suite.attachments();
    let dump = suite.dump().cloned();
    let opening = Opening { dump, attachments: &attachments, ..Opening::default() };
    let mut model = session::open_checked(app, &args.bundle, &args.backend, opening, |_| Ok(()))?;
    let mut cases = Vec::new();
    for index in 0..suite.cases().len() {
        let report = suite.check(&mut model, index, gate, |model, request, attached| {
            session::generate(app, model, request, attached, Stream::Quiet)
        })?;
        if !args.json {
            app.output.line(&case_line(&report, suite.min_cosine()))?;
        }
        cases.push(report);
    }
    let report = suite.report(&model, gate, cases);
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

fn files(args: &VerifyArgs, app: &mut App) -> Result<Status> {
    let bundle = Bundle::open(&args.bundle)?;
    let manifest = bundle.manifest();
    // Nothing is to be kept: a signal ends the process at once, also while a file is read that never ends.
    let token = app.interrupts.token().clone();
    let report =
        verify::files(manifest, &token, |FileReport { path, message, left_out, .. }| {
            if args.json {
                return Ok(());
            }
            app.output.line(&match message {
                None if *left_out => format!("ok   {path}: left out, optional"),
                None => format!("ok   {path}"),
                Some(message) => format!("FAIL {path}: {message}"),
            })
        })?;
    if !report.passed {
        say!("files differ from the manifest: pull or forge the bundle again");
    }
    // A file that is no baseline is named before anything takes long.
    let baseline = args.baseline.as_deref().map(Baseline::load).transpose()?;
    let golden = if report.passed { golden_steps(args, app)? } else { None };
    let intact = report.passed && golden.as_ref().is_none_or(|golden| golden.passed);
    let figures = match args.figures() {
        true => Some(Figures::of(manifest, golden.as_ref())?),
        false => None,
    };
    let compared = baseline.zip(figures.as_ref());
    let compared = compared.map(|(baseline, found)| baseline.compare(found, &args.tolerances));
    let passed = intact && compared.as_ref().is_none_or(|compared| compared.passed);
    if args.json {
        let mut json = json!(report);
        json["passed"] = json!(passed);
        for (key, value) in [
            ("golden", golden.as_ref().map(|it| json!(it))),
            ("figures", figures.as_ref().map(|it| json!(it))),
            ("baseline", compared.as_ref().map(|it| json!(it))),
        ] {
            if let Some(value) = value {
                json[key] = value;
            }
        }
        app.output.json(&json)?;
    } else if let Some(compared) = &compared {
        show(compared, app)?;
    }
    if let Some(figures) = &figures {
        let damaged = report
            .files
            .iter()
            .filter_map(|file| Some(format!("{}: {}", file.path, file.message.as_ref()?)));
        let steps = golden.iter().flat_map(|golden| &golden.steps).filter(|step| !step.passed);
        let wrong = steps.map(|step| {
            let answers = step.message.clone().unwrap_or_else(|| {
                format!("cosine {:.6}, difference {:.4} of the peak", step.cosine, step.relative)
            });
            format!("golden step {}: {answers}", step.name)
        });
        let faults: Vec<String> = damaged.chain(wrong).collect();
        if let Some(file) = &args.summary {
            append(file, &verify::markdown(figures, compared.as_ref(), &faults))?;
        }
        match &args.write_baseline {
            Some(file) if intact => Baseline::write(file, figures)?,
            Some(_) => say!("no baseline is written: the bundle is damaged or answers wrongly"),
            None => {}
        }
    }
    Ok(if passed { Status::Done } else { Status::Found })
}

impl VerifyArgs {
    /// True if figures are compared, written or summed up.
    const fn figures(&self) -> bool {
        self.baseline.is_some() || self.write_baseline.is_some() || self.summary.is_some()
    }
}

/// Prints what became worse, and how many figures are as they were.
fn show(compared: &Comparison, app: &mut App) -> Result<()> {
    for sentence in &compared.regressions {
        app.output.line(&format!("FAIL {sentence}"))?;
    }
    let count = |change| compared.figures.iter().filter(|figure| figure.change == change).count();
    let counts = [("better", count(Change::Better)), ("new", count(Change::New))];
    let mut line = format!("{} figures as in the baseline", count(Change::Same));
    for (word, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
        line += &format!(", {count} {word}");
    }
    if compared.passed { app.output.line(&format!("ok   {line}")) } else { Ok(()) }
}

/// Appends to a file, which is made where it is missing.
fn append(path: &Path, text: &str) -> Result<()> {
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|e| Error::io(ErrorKind::Io, path, e))
}

/// Runs the golden steps of a bundle, if it has some, and if something here can run them or was named to.
fn golden_steps(args: &VerifyArgs, app: &mut App) -> Result<Option<GoldenReport>> {
    let bundle = Bundle::open(&args.bundle)?;
    if Golden::load(bundle.manifest())?.is_none() {
        return Ok(None);
    }
    let runtime = app.runtime(&args.backend, None).unverified(true).build();
    let mut model = match runtime.load_checked(&bundle, |_| Ok(()), session::say_backend) {
        Err(error)
            if args.backend.backend == BackendChoice::Auto
                && matches!(error.kind(), ErrorKind::Plugin | ErrorKind::Runtime) =>
        {
            say!("note: the golden steps are not run: {error}");
            return Ok(None);
        }
        model => model?,
    };
    let threads = app.global.process.threads();
    let emulated = model.is_emulated();
    let report = golden::run(&mut model, || qhx::backends::cpu(threads), &mut |step| {
        if emulated {
            say!("golden step {step}");
        }
    })?;
    if let Some(report) = report.as_ref().filter(|_| !args.json) {
        for step in &report.steps {
            let found = step.message.clone().unwrap_or_else(|| {
                format!(
                    "cosine {:.6}, largest difference {:.4} ({:.4} of the peak)",
                    step.cosine, step.difference, step.relative
                )
            });
            let verdict = if step.passed { "ok  " } else { "FAIL" };
            app.output.line(&format!("{verdict} golden {}: {found}", step.name))?;
        }
        if let Some(comparison) = &report.comparison {
            app.output.line(&comparison.to_string())?;
        }
    }
    Ok(report)
}

fn gate_parser() -> impl TypedValueParser<Value = Gate> {
    let help = |gate| match gate {
        Gate::GreedyExact => "every token of every case is the reference's",
        Gate::GreedyTol => {
            "at least 0.6 of the cases are within an edit distance of 0.1 and do not repeat themselves"
        }
    };
    named(Gate::ALL.map(|gate| PossibleValue::new(gate.name()).help(help(gate))))
}
