//! `qhx libraries`: fetches the QNN libraries ([`qhx_tools::install`]) and says where they are.

use std::path::PathBuf;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Args, Subcommand};
use qhx::libraries::{HTP_FILE, SYSTEM_FILE, folder, how_to_get, installed};
use qhx::machines::{Machine, VERSION};
use qhx_base::{Error, ErrorKind, Result};
use qhx_tools::install::{self, InstallOptions, InstalledVersion};

use crate::Status;
use crate::app::App;
use crate::args::{LibraryArgs, named};
use crate::progress::FetchProgress;

const EXAMPLES: &str = "\
Examples:
  qhx libraries install
  qhx libraries install --for linux-aarch64
  qhx libraries info
  export QHX_QNN_HTP=\"$(qhx libraries path --htp)\"";

/// The QNN libraries: install them, or say where they are
///
/// On x86-64 Linux the libraries compile graphs for every Hexagon architecture and execute them on
/// an emulator. On boards under Linux and on laptops they drive the NPU. On a phone they come with
/// the QAIRT SDK: give them with --htp and --qnn-system, or put them beside the program.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LibrariesArgs {
    #[command(subcommand)]
    command: LibrariesCommand,
}

#[derive(Debug, Subcommand)]
enum LibrariesCommand {
    /// Download the libraries into the cache folder, with pip
    ///
    /// They come from the wheel onnxruntime-qnn 2.7.0 (62 to 99 MB) of the Python package index and
    /// are under Qualcomm's licence, whose text is installed with them. pip's own configuration and
    /// environment variables apply. Does nothing when they are installed already.
    Install {
        /// The machine that the libraries are for; those of another one are for copying
        /// [default: this one]
        #[arg(long = "for", value_name = "MACHINE", value_parser = machine_parser())]
        machine: Option<Machine>,
        /// Install again
        #[arg(long)]
        force: bool,
        /// Take this copy of the wheel and download nothing
        #[arg(long, value_name = "FILE")]
        wheel: Option<PathBuf>,
    },
    /// Print the folder of the installed libraries
    Path {
        /// Print the path of libQnnHtp.so
        #[arg(long, conflicts_with = "system")]
        htp: bool,
        /// Print the path of libQnnSystem.so
        #[arg(long)]
        system: bool,
    },
    /// Print versions and builds of the libraries that would be used
    Info {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        libraries: LibraryArgs,
    },
}

impl LibrariesArgs {
    pub(crate) fn wants_json(&self) -> bool {
        matches!(self.command, LibrariesCommand::Info { json: true, .. })
    }
}

fn machine_parser() -> impl TypedValueParser<Value = Machine> {
    named(Machine::ALL.map(|m| PossibleValue::new(m.name()).help(m.what())))
}

/// Runs the command.
pub(crate) fn run(args: &LibrariesArgs, app: &mut App) -> Result<Status> {
    match &args.command {
        LibrariesCommand::Install { machine, force, wheel } => {
            let (wheel, cancel) = (wheel.clone(), app.interrupts.token().clone());
            install(&InstallOptions { machine: *machine, force: *force, wheel, cancel }, app)
        }
        LibrariesCommand::Path { htp, system } => {
            let folder = Machine::this().and_then(installed).ok_or_else(not_installed)?;
            let path = match (htp, system) {
                (true, _) => folder.join(HTP_FILE),
                (_, true) => folder.join(SYSTEM_FILE),
                _ => folder,
            };
            app.output.line(&path.display().to_string())?;
            Ok(Status::Done)
        }
        LibrariesCommand::Info { json, libraries } => info(*json, libraries, app),
    }
}

fn not_installed() -> Error {
    let place = Machine::this().and_then(|machine| folder(machine).ok());
    let place = place.map_or_else(|| "the cache folder".to_owned(), |f| f.display().to_string());
    Error::new(ErrorKind::Runtime, format!("no QNN libraries are installed in {place}"))
        .hint(how_to_get())
}

fn info(json: bool, libraries: &LibraryArgs, app: &mut App) -> Result<Status> {
    let report = libraries.files().require("qhx libraries info")?.info()?;
    if json {
        app.output.json_pretty(&report)?;
        return Ok(Status::Done);
    }
    let report = serde_json::to_value(&report)
        .map_err(|e| Error::caused(ErrorKind::Internal, "the report as JSON", e))?;
    for (key, value) in report.as_object().into_iter().flatten() {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        app.output.line(&format!("{key:11} {text}"))?;
    }
    Ok(Status::Done)
}

fn install(options: &InstallOptions, app: &mut App) -> Result<Status> {
    let _working = app.interrupts.working();
    let mut progress = FetchProgress::default();
    let installed = install::install(options, |step| progress.step(&step))?;
    drop(progress);
    let name = match Machine::this() {
        Some(this) if this == installed.machine => format!("QNN libraries {VERSION}"),
        _ => format!("QNN libraries {VERSION} for {}", installed.machine.name()),
    };
    let architectures: Vec<_> =
        installed.architectures().iter().map(|arch| format!("v{arch}")).collect();
    match &installed.version {
        _ if installed.already => say!("{name} are installed already"),
        Some(InstalledVersion { qairt, build, .. }) => {
            say!("installed {name}: QAIRT {}, build {build}", qairt.unwrap_or("unknown"));
        }
        None => say!(
            "installed {name}: copy the folder there, and give its files with --htp and --qnn-system"
        ),
    }
    if !architectures.is_empty() {
        say!("they have stubs and skels for {}", architectures.join(", "));
    }
    if let Some(refusal) = installed.refusal() {
        say!("note: the NPU does not work with them: {}", refusal.message());
        refusal.hint_text().iter().for_each(|hint| say!("  hint: {hint}"));
    }
    app.output.line(&installed.folder.display().to_string())?;
    Ok(Status::Done)
}
