//! A phone at the other end of adb: copies a program, QNN libraries and a bundle there, tries the bundle step by step,
//! and makes a report to send.

mod adb;
mod facts;
mod files;
mod install;
mod process;
mod report;
mod steps;

use std::path::PathBuf;

use qhx::{folders, hub};
use qhx_base::hash::hex;
use qhx_base::{CancelToken, Error, Result, setters};
use qhx_core::Manifest;
use sha2::{Digest as _, Sha256};

use self::adb::Device;
use self::files::{Files, NAME, PLUGINS};
use self::install::once_more;

pub use adb::Patience;
pub use facts::{DeviceFacts, Warmth};
pub use install::Install;
pub use report::{BundleFacts, PushReport, SCHEMA};
pub use steps::{Outcome, PushStep, StepError, StepReport};

/// Path at which cargo puts the program for phones.
pub const PROGRAM: &str = "target/aarch64-linux-android/release/qhx";
/// Folder on the phone.
pub const FOLDER: &str = "/data/local/tmp/qhx";
/// Prompt where none is given.
pub const PROMPT: &str = "The capital of France is";
/// Digits of a phone's id.
const ID: usize = 8;

/// Bundle, phone and steps.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PushOptions {
    /// The bundle, or a folder with bundles for several architectures.
    pub bundle: PathBuf,
    /// Text to continue there.
    pub prompt: String,
    /// Greatest number of tokens to generate.
    pub max_new: usize,
    /// Serial number of the phone; not needed where adb sees one.
    pub serial: Option<String>,
    /// Folder on the phone.
    pub to: String,
    /// The program for phones, with host-ops linked in.
    pub program: PathBuf,
    /// The QAIRT SDK, or a folder with its libraries for phones.
    pub libraries: Option<PathBuf>,
    /// Plugins that go with the program.
    pub plugins: Vec<PathBuf>,
    /// The graphs for the CPU are copied, too, which say where a wrong answer begins.
    pub onnx: bool,
    /// Steps to do.
    pub steps: Vec<PushStep>,
    /// Times that the phone may take.
    pub patience: Patience,
}

impl PushOptions {
    /// All steps with a bundle on the only phone.
    pub fn new(bundle: impl Into<PathBuf>) -> Self {
        Self {
            bundle: bundle.into(),
            prompt: PROMPT.to_owned(),
            max_new: 64,
            serial: None,
            to: FOLDER.to_owned(),
            program: PathBuf::from(PROGRAM),
            libraries: None,
            plugins: Vec::new(),
            onnx: false,
            steps: PushStep::ALL.to_vec(),
            patience: Patience::default(),
        }
    }

    setters! {
        /// Text to continue there.
        prompt(prompt: impl Into<String>) => prompt = prompt.into(),
        /// Greatest number of tokens to generate.
        max_new: usize,
        /// Serial number of the phone.
        serial: Option<String>,
        /// Folder on the phone.
        to(to: impl Into<String>) => to = to.into(),
        /// The program for phones.
        program(program: impl Into<PathBuf>) => program = program.into(),
        /// The QAIRT SDK, or a folder with its libraries for phones.
        libraries: Option<PathBuf>,
        /// Plugins that go with the program.
        plugins: Vec<PathBuf>,
        /// Sets whether the graphs for the CPU are copied, too.
        onnx: bool,
        /// Steps to do.
        steps: Vec<PushStep>,
        /// Times that the phone may take.
        patience: Patience,
    }
}

/// Progress of the work.
#[derive(Debug)]
#[non_exhaustive]
pub enum PushEvent<'a> {
    /// A file is copied.
    Copy {
        /// Number of the file, from 0 on.
        index: usize,
        /// Number of all files that are copied.
        count: usize,
        /// Its path on the phone.
        path: &'a str,
        /// Its size.
        bytes: u64,
    },
    /// All files are there.
    Installed(&'a Install),
    /// The phone disconnected, and is waited for.
    Lost(&'a Error),
    /// It is there again.
    Back,
    /// A step begins.
    Step(PushStep),
    /// A step ended.
    Stepped(&'a StepReport),
}

/// Copies a bundle to a phone with all that runs it, does the steps there, and reports. A step that fails is part of
/// the report, and the others follow.
///
/// ```no_run
/// use qhx_tools::push::{PushOptions, push};
///
/// let report = push(&PushOptions::new("qwen35/v81"), &qhx::CancelToken::new(), &mut |_| ())?;
/// for line in report.summary() {
///     println!("{line}");
/// }
/// # Ok::<(), qhx::Error>(())
/// ```
///
/// # Errors
/// When bundle, program, libraries or phone are not there, or the phone cannot be asked. What fails from the first
/// copied file on is in [`PushReport::failure`].
pub fn push(
    options: &PushOptions,
    cancel: &CancelToken,
    on_event: &mut dyn FnMut(PushEvent<'_>),
) -> Result<PushReport> {
    // A bundle that is none is named before a phone is looked for.
    let path = hub::resolve(&options.bundle)?;
    let targets = folders::targets(&path);
    let one = if targets.is_empty() { Some(Manifest::load(&path)?) } else { None };
    files::check_program(&options.program)?;
    let device = Device::find(options.serial.as_deref(), options.patience, cancel)?;
    let phone = device.target()?.map(|target| target.arch);
    let manifest = match one {
        Some(manifest) => manifest,
        None => Manifest::load(&folders::choose(&targets, phone)?.path)?,
    };
    let bundle = files::folder_name(&manifest)?;
    let bytes = files::size(&manifest.root);
    let below = [PLUGINS, &bundle];
    let there = once_more(&device, || device.hashes(&options.to, &below, bytes), on_event)?;
    let files = Files::new(options, &manifest, phone, &there, cancel)?;
    let mut report = begin(options, &manifest, &files, &device, phone);
    if report.libraries.is_empty() {
        let of_qnn = there.iter().filter(|(path, _)| path.starts_with("libQnn"));
        report.libraries = of_qnn.map(|(path, hash)| (path.clone(), hash.clone())).collect();
    }
    let installed =
        install::install(&device, &options.to, &files, there, &mut report.install, on_event);
    if let Err(error) = installed {
        report.install_error = Some(StepError::from(&error));
        report.failure = Some(error);
    } else {
        on_event(PushEvent::Installed(&report.install));
        // A phone that does not say it has none of these facts.
        let warmth = || device.shell(facts::WARMTH).ok().map(|text| facts::warmth(&text));
        report.before = warmth();
        steps(options, &files, &device, &mut report, on_event);
        report.after = warmth();
    }
    let failed = report.steps.iter().any(|step| step.outcome == Outcome::Failed);
    report.passed = report.failure.is_none() && !failed;
    Ok(report)
}

/// Does the steps. Behind one that is cancelled the others are skipped.
fn steps(
    options: &PushOptions,
    files: &Files,
    device: &Device,
    report: &mut PushReport,
    on_event: &mut dyn FnMut(PushEvent<'_>),
) {
    for step in PushStep::ALL.into_iter().filter(|step| options.steps.contains(step)) {
        if step == PushStep::Prepare && !files.portable {
            continue;
        }
        let done = match &report.failure {
            Some(error) => StepReport::skipped(step, error),
            None => {
                on_event(PushEvent::Step(step));
                steps::run(step, options, files, device, on_event).unwrap_or_else(|error| {
                    let skipped = StepReport::skipped(step, &error);
                    report.failure = Some(error);
                    skipped
                })
            }
        };
        on_event(PushEvent::Stepped(&done));
        report.steps.push(done);
    }
}

/// The report before anything was copied.
fn begin(
    options: &PushOptions,
    manifest: &Manifest,
    files: &Files,
    device: &Device,
    phone: Option<u32>,
) -> PushReport {
    let id: String = hex(Sha256::digest(device.serial())).chars().take(ID).collect();
    let printed = device.shell(&facts::line()).unwrap_or_default();
    let below = format!("{}/", files.bundle);
    let program = files.hashes(|path| path == NAME).into_values().next().unwrap_or_default();
    PushReport {
        schema: SCHEMA,
        time: jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        qhx: env!("CARGO_PKG_VERSION"),
        passed: false,
        device: DeviceFacts { id, arch: phone, facts: facts::read(&printed) },
        bundle: BundleFacts {
            name: files.bundle.clone(),
            arch: manifest.model.dsp_arch,
            files: files.hashes(|path| path.starts_with(&below)),
        },
        program,
        libraries: files.hashes(|path| path != NAME && !path.contains('/')),
        libraries_from: files.libraries.clone(),
        prompt: options.prompt.clone(),
        install: Install::default(),
        install_error: None,
        before: None,
        after: None,
        steps: Vec::new(),
        failure: None,
        serial: device.serial().to_owned(),
    }
}
