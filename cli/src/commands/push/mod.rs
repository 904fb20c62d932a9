//! `qhx push`: copies a program, QNN libraries and a bundle to a phone, and generates there.

mod adb;

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use clap::Args;

use self::adb::{Device, Item, quoted};
use crate::Status;
use crate::app::App;
use qhx::npu_files::{ANDROID, NpuFile};
use qhx::{folders, hub};
use qhx_base::hash::sha256;
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_core::Manifest;

/// Path at which cargo puts the program for phones.
const PROGRAM: &str = "target/aarch64-linux-android/release/qhx_generate";
/// Its name on the device.
const NAME: &str = "qhx_generate";
/// The folder of a bundle's graphs for the CPU, which a phone does not need.
const ONNX: &str = "onnx";

const EXAMPLES: &str = "\
Examples:
  cargo build --release --target aarch64-linux-android --package qhx-cli --features builtin-ops
  qhx push qwen35/v81 'The capital of France is' --libraries /opt/qairt/2.51.0
  qhx push qwen35/v81 'The capital of Italy is' --serial ab12cd34 --max-new 32";

/// Copy a bundle to a phone by adb, with all that runs it, and generate there
///
/// Only files that differ are copied: their SHA-256 are compared there. Without a prompt nothing is
/// generated.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PushArgs {
    /// The bundle's folder, or its manifest
    #[arg(value_name = "BUNDLE")]
    pub bundle: PathBuf,
    /// The text to continue there
    pub prompt: Option<String>,
    /// The device, where adb sees more than one
    #[arg(long, value_name = "SERIAL")]
    pub serial: Option<String>,
    /// The folder on the device
    #[arg(long, value_name = "DIR", default_value = "/data/local/tmp/qhx")]
    pub to: String,
    /// qhx_generate for phones
    #[arg(long, value_name = "FILE", default_value = PROGRAM)]
    pub program: PathBuf,
    /// The QAIRT SDK, or a folder with its libraries for phones [default: those that are there]
    #[arg(long, value_name = "DIR")]
    pub libraries: Option<PathBuf>,
    /// Greatest number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_new: usize,
}

/// Runs the command.
pub(crate) fn run(args: &PushArgs, app: &mut App) -> Result<Status> {
    // A bundle that is none is named before a phone is looked for.
    let path = hub::resolve(&args.bundle)?;
    let targets = folders::targets(&path);
    let one = if targets.is_empty() { Some(Manifest::load(&path)?) } else { None };
    let program = program(&args.program)?;
    let device = Device::find(args.serial.as_deref())?;
    let phone = device.target().map(|target| target.arch);
    let manifest = match one {
        Some(manifest) => manifest,
        None => Manifest::load(&folders::choose(&targets, phone)?.path)?,
    };
    // The libraries are the phone's, also where the bundle is for an older one.
    let files = NpuFile::all(ANDROID, phone.or(manifest.model.dsp_arch));
    let bundle = Bundle::of(&manifest)?;
    let mut copies = vec![Item { from: program, to: NAME.to_owned() }];
    for plugin in &app.global.plugins {
        let name = plugin.file_name().unwrap_or_default().to_string_lossy();
        copies.push(Item { from: plugin.clone(), to: format!("plugins/{name}") });
    }
    if let Some(folder) = &args.libraries {
        copies.extend(libraries(folder, &files)?);
    }
    copies.extend(bundle.copies.iter().cloned());
    let _working = app.interrupts.working();
    let cancel = app.interrupts.token().clone();
    let there = device.hashes(&args.to)?;
    if args.libraries.is_none() {
        let lacks = |file: &&NpuFile| !there.keys().any(|name| file.is(name));
        let missing: Vec<_> = files.iter().filter(lacks).map(NpuFile::to_string).collect();
        if !missing.is_empty() {
            return Err(Error::new(
                ErrorKind::Runtime,
                format!("{} on {} lacks {}", args.to, device.serial(), missing.join(", ")),
            )
            .hint("give the folder of the QAIRT SDK: --libraries DIR"));
        }
    }
    let mut changed = Vec::new();
    for copy in &copies {
        let hash = hash(&copy.from, &cancel)?;
        if there.get(&copy.to) != Some(&hash) {
            changed.push((copy, hash));
        }
    }
    transfer(&device, &args.to, &changed, &cancel)?;
    say!(
        "{} of {} files copied to {} on {}",
        changed.len(),
        copies.len(),
        args.to,
        device.serial()
    );
    let Some(prompt) = &args.prompt else { return Ok(Status::Done) };
    let plugins = app.global.plugins.iter().filter_map(|plugin| plugin.file_name());
    let plugins: String = plugins
        .map(|name| format!(" --plugin {}", quoted(&format!("plugins/{}", name.to_string_lossy()))))
        .collect();
    let line = format!(
        "cd {} && LD_LIBRARY_PATH=. ./{NAME} {} libQnnHtp.so libQnnSystem.so {} {} {}{plugins}",
        quoted(&args.to),
        quoted(&bundle.manifest),
        quoted(&bundle.name),
        args.max_new,
        quoted(prompt)
    );
    generate(&device, &line, app)
}

/// The files of a bundle, in a folder of its name.
struct Bundle {
    name: String,
    /// The manifest there.
    manifest: String,
    copies: Vec<Item>,
}

impl Bundle {
    fn of(manifest: &Manifest) -> Result<Self> {
        let io = |e: std::io::Error| Error::io(ErrorKind::Artifact, &manifest.root, e);
        let root = manifest.root.canonicalize().map_err(io)?;
        let name = root.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut copies = Vec::new();
        collect(&root, &name, &mut copies)?;
        let file = manifest.path.file_name().unwrap_or_default().to_string_lossy();
        let path = format!("{name}/{file}");
        if !copies.iter().any(|copy| copy.to == path) {
            copies.push(Item { from: manifest.path.clone(), to: path.clone() });
        }
        Ok(Self { name, manifest: path, copies })
    }
}

/// Adds the files of a folder, but for those of the CPU.
fn collect(folder: &Path, to: &str, copies: &mut Vec<Item>) -> Result<()> {
    let io = |e: std::io::Error| Error::io(ErrorKind::Artifact, folder, e);
    let mut entries: Vec<_> =
        std::fs::read_dir(folder).and_then(Iterator::collect::<std::io::Result<_>>).map_err(io)?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let (path, name) = (entry.path(), entry.file_name());
        let to = format!("{to}/{}", name.to_string_lossy());
        if path.is_file() {
            copies.push(Item { from: path, to });
        } else if path.is_dir() && name != ONNX {
            collect(&path, &to, copies)?;
        }
    }
    Ok(())
}

fn program(path: &Path) -> Result<PathBuf> {
    if path.is_file() {
        return Ok(path.to_owned());
    }
    Err(Error::new(ErrorKind::Usage, format!("{}: there is no such program", path.display())).hint(
        "build it: cargo build --release --target aarch64-linux-android --package qhx-cli --features builtin-ops, or \
         give it with --program FILE",
    ))
}

/// The libraries of a folder; those that are missing are named one by one.
fn libraries(folder: &Path, files: &[NpuFile]) -> Result<Vec<Item>> {
    let mut copies = Vec::new();
    let mut missing = Vec::new();
    for file in files {
        match file.find(folder) {
            Some(from) => {
                let name = from.file_name().unwrap_or_default().to_string_lossy().into_owned();
                copies.push(Item { from, to: name });
            }
            None => missing.push(file.to_string()),
        }
    }
    if missing.is_empty() {
        return Ok(copies);
    }
    Err(Error::new(
        ErrorKind::Runtime,
        format!("{} lacks {}", folder.display(), missing.join(", ")),
    )
    .hint("give the root of the QAIRT SDK, or a folder with these files"))
}

fn hash(path: &Path, cancel: &CancelToken) -> Result<String> {
    let file = File::open(path).map_err(|e| Error::io(ErrorKind::Io, path, e))?;
    sha256(ErrorKind::Artifact, path, file, |_| cancel.check())
}

/// Copies files, and compares what has arrived.
fn transfer(
    device: &Device,
    folder: &str,
    changed: &[(&Item, String)],
    cancel: &CancelToken,
) -> Result<()> {
    let path = |copy: &Item| format!("{folder}/{}", copy.to);
    let mut folders: Vec<_> = changed
        .iter()
        .filter_map(|(copy, _)| Some(quoted(path(copy).rsplit_once('/')?.0)))
        .collect();
    folders.dedup();
    if folders.is_empty() {
        return Ok(());
    }
    device.shell(&format!("mkdir -p {}", folders.join(" ")))?;
    for (index, (copy, _)) in changed.iter().enumerate() {
        if cancel.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "cancelled; call it again to go on"));
        }
        say!("{}/{}: {}", index + 1, changed.len(), copy.to);
        device.push(&copy.from, &path(copy))?;
    }
    device.shell(&format!("chmod 755 {}", quoted(&format!("{folder}/{NAME}"))))?;
    let there = device.hashes(folder)?;
    match changed.iter().find(|(copy, hash)| there.get(&copy.to) != Some(hash)) {
        None => Ok(()),
        Some((copy, hash)) => {
            let found = there.get(&copy.to).map_or("nothing", String::as_str);
            Err(Error::new(
                ErrorKind::Io,
                format!("{}: arrived as {found}, expected sha256 {hash}", path(copy)),
            )
            .hint("the connection may be bad, or the device full: try again"))
        }
    }
}

/// Runs the line there. What it prints on standard output is the result, line by line.
fn generate(device: &Device, line: &str, app: &mut App) -> Result<Status> {
    let io = |e: std::io::Error| Error::caused(ErrorKind::Io, "adb shell", e);
    let mut command = device.shell_command(line);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(io)?;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            app.output.line(&line.map_err(io)?)?;
        }
    }
    let status = child.wait().map_err(io)?;
    if status.success() {
        return Ok(Status::Done);
    }
    let code = status.code().unwrap_or(1);
    Err(Error::new(ErrorKind::Execute, format!("{NAME} on {} ended with {code}", device.serial()))
        .hint("its own message stands above; docs/devices.md explains those about the NPU"))
}
