//! `qhx push`: copies a program, QNN libraries and a bundle to a phone, tries the bundle there, and writes a report.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValue;
use qhx_base::{Error, ErrorKind, Result};
use qhx_tools::push::{
    self, FOLDER, PROGRAM, PROMPT, Patience, PushEvent, PushOptions, PushReport, PushStep,
};

use crate::Status;
use crate::app::App;
use crate::args::{named, parse_seconds};

const EXAMPLES: &str = "\
Examples:
  cargo build --release --target aarch64-linux-android --package qhx-cli --features builtin-ops
  qhx push qwen35/v81 'The capital of France is' --libraries /opt/qairt/2.51.0
  qhx push qwen35/v81 'The capital of Italy is' --serial ab12cd34 --max-new 32
  qhx push qwen35/v81 --steps doctor,generate --report phone.json
  qhx push qwen35/v81 --no-steps

The report is made to be sent: it has the phone's model, chip and Android, the hashes of all files, and what each step
printed there. It has no serial number, no name of a user and no path of this machine; prompt and answer are in it.";

/// Try a bundle on a phone: copy it there by adb, run it, write a report
///
/// All that runs the bundle goes with it. Only files that differ are copied: their SHA-256 are compared there. Then the
/// program runs on the phone: doctor, verify with the golden steps, generate, bench; for a portable bundle prepare
/// first. A step that fails is in the report, and the others follow. A phone that disconnects or restarts is waited
/// for. Exit code 1 when a step failed.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PushArgs {
    /// The bundle's folder, or its manifest
    #[arg(value_name = "BUNDLE")]
    pub bundle: PathBuf,
    /// The text to continue there
    #[arg(default_value = PROMPT)]
    pub prompt: String,
    /// The device, where adb sees more than one
    #[arg(long, value_name = "SERIAL")]
    pub serial: Option<String>,
    /// The folder on the device
    #[arg(long, value_name = "DIR", default_value = FOLDER)]
    pub to: String,
    /// qhx for phones
    #[arg(long, value_name = "FILE", default_value = PROGRAM)]
    pub program: PathBuf,
    /// The QAIRT SDK, or a folder with its libraries for phones [default: QAIRT_SDK_ROOT, or else those that are on the
    /// phone]
    #[arg(long, value_name = "DIR")]
    pub libraries: Option<PathBuf>,
    /// Greatest number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_new: usize,
    /// Copy the graphs for the CPU, too: with them verify names the graph that computes something else
    #[arg(long)]
    pub onnx: bool,
    /// Steps to run there
    #[arg(
        long,
        value_name = "STEP,…",
        value_delimiter = ',',
        default_value = "prepare,doctor,verify,generate,bench"
    )]
    #[arg(value_parser = named::<PushStep>(PushStep::ALL.map(|step| PossibleValue::new(step.name()))))]
    pub steps: Vec<PushStep>,
    /// Copy alone: run nothing, and write no report
    #[arg(long, conflicts_with_all = ["steps", "report"])]
    pub no_steps: bool,
    /// File for the report; `-` is standard output [default: qhx-report-ID-TIME.json]
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Time for a short answer of adb
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_seconds)]
    pub answer_time: Duration,
    /// Time for which a phone that disconnects or restarts is waited for
    #[arg(long, value_name = "SECONDS", default_value = "180", value_parser = parse_seconds)]
    pub wait: Duration,
    /// Time for one step
    #[arg(long, value_name = "SECONDS", default_value = "900", value_parser = parse_seconds)]
    pub step_time: Duration,
}

/// Runs the command.
pub(crate) fn run(args: &PushArgs, app: &mut App) -> Result<Status> {
    let mut patience = Patience::default();
    (patience.answer, patience.wait) = (args.answer_time, args.wait);
    patience.step = args.step_time;
    let steps = if args.no_steps { Vec::new() } else { args.steps.clone() };
    let options = PushOptions::new(&args.bundle)
        .prompt(&args.prompt)
        .max_new(args.max_new)
        .serial(args.serial.clone())
        .to(&args.to)
        .program(&args.program)
        .libraries(args.libraries.clone())
        .plugins(app.global.plugins.clone())
        .onnx(args.onnx)
        .steps(steps)
        .patience(patience);
    let _working = app.interrupts.working();
    let cancel = app.interrupts.token().clone();
    let report = push::push(&options, &cancel, &mut |event| say_event(&event, &args.to))?;
    if args.no_steps {
        return report.failure.map_or(Ok(Status::Done), Err);
    }
    write(args, &report, app)?;
    match report.failure {
        Some(error) => Err(error),
        None if report.passed => Ok(Status::Done),
        None => Ok(Status::Found),
    }
}

fn say_event(event: &PushEvent<'_>, folder: &str) {
    match event {
        PushEvent::Copy { index, count, path, bytes } => {
            say!("{}/{count}: {path} ({:.1} MB)", index + 1, *bytes as f64 / 1e6);
        }
        PushEvent::Installed(done) => {
            say!("{} of {} files copied to {folder}", done.copied, done.files);
        }
        PushEvent::Lost(why) => say!("the phone disconnected: {why}; waiting for it"),
        PushEvent::Back => say!("the phone is back"),
        PushEvent::Step(step) => say!("running qhx {} there", step.name()),
        PushEvent::Stepped(step) => {
            if let Some(error) = &step.error {
                say!("  {}", error.message);
                error.hint.iter().for_each(|hint| say!("  hint: {hint}"));
            }
        }
        _ => {}
    }
}

/// Writes the report, and says what is in it.
fn write(args: &PushArgs, report: &PushReport, app: &mut App) -> Result<()> {
    let json = report.to_json()?;
    say!("");
    for line in report.summary() {
        say!("{line}");
    }
    let path = args.report.clone().unwrap_or_else(|| PathBuf::from(report.file_name()));
    if path == Path::new("-") {
        return app.output.json_pretty(&json);
    }
    let text = serde_json::to_string_pretty(&json)
        .map_err(|e| Error::caused(ErrorKind::Internal, "the report as JSON", e))?;
    std::fs::write(&path, text + "\n").map_err(|e| Error::io(ErrorKind::Io, &path, e))?;
    app.output.line(&path.display().to_string())
}
