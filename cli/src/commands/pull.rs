//! `qhx pull`: fetches a bundle or a checkpoint from a hub.

use clap::Args;
use qhx::Runtime;
use qhx::hub::index::Entry;
use qhx::hub::{self, Hub, HubOptions, Kind, Name, Pulled, Want};
use qhx_base::{Error, ErrorKind, Result};
use qhx_tools::models::{Models, Wanted};
use serde_json::json;

use crate::Status;
use crate::app::App;
use crate::args::{BackendArgs, IndexArgs, LibraryArgs, parse_arch};
use crate::commands::inspect::size;
use crate::commands::run::obtain;
use crate::progress::PullProgress;

const EXAMPLES: &str = "\
Examples:
  qhx pull smollm2                                       # a name of the index: qhx models
  qhx pull owner/qwen35_HNPU
  qhx pull owner/qwen35_HNPU@v1.2 --arch v81
  qhx pull owner/qwen35_HNPU --variant v81-w8
  qhx pull owner/qwen35_HNPU/v81-w8                      # the same
  qhx pull Qwen/Qwen3.5-0.8B && qhx forge Qwen/Qwen3.5-0.8B --out qwen35/v81
  qhx generate owner/qwen35_HNPU 'The capital of France is'";

/// Fetch a bundle from a hub, or a checkpoint
///
/// A name of the index is made ready as `qhx run` does: its bundle for this machine is fetched, or made of its
/// checkpoint. Of a repository it takes one bundle of the repository: that of --arch or --variant, by default that of
/// this device's architecture or the newest that it runs. It lands in the cache of the hub's own tools (HF_HOME), and
/// every command that takes a bundle takes its name. An interrupted download goes on where it ended; every file is
/// compared with its hash. Prints the folder.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PullArgs {
    /// A model of the index, or a repository: OWNER/NAME, with @REVISION for a branch, tag or commit, and /FOLDER for a
    /// bundle in it
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The bundle for this Hexagon architecture [default: that of the device]
    #[arg(long, value_name = "ARCH", value_parser = parse_arch)]
    pub arch: Option<u32>,
    /// The bundle in this folder, such as v81-w8
    #[arg(long, value_name = "FOLDER", conflicts_with = "arch")]
    pub variant: Option<String>,
    /// Of several manifests in the folder only this one
    #[arg(long, value_name = "NAME")]
    pub manifest: Option<String>,
    /// Only files of the folder whose path matches, and manifests. May be given several times
    #[arg(long, value_name = "GLOB")]
    pub include: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub index: IndexArgs,
    #[command(flatten)]
    pub libraries: LibraryArgs,
}

/// Runs the command.
pub(crate) fn run(args: &PullArgs, app: &mut App) -> Result<Status> {
    let name: Name = if args.name.contains('/') {
        args.name.parse()?
    } else {
        let models = args.index.models(&app.interrupts)?;
        match (models.find(&args.name)?, args.narrows()) {
            (Wanted::Repository(name), _) => name,
            // Of a certain architecture or folder only a published bundle can be.
            (Wanted::Entry(entry), true) => published(&entry)?,
            _ => return ready(args, &models, app),
        }
    };
    let hub = Hub::new(HubOptions::from_environment()?);
    let want = want(args, &name);
    let progress = PullProgress::new(&name);
    let working = app.interrupts.working();
    let cancel = app.interrupts.token();
    let pulled = hub::pull(&hub, &name, &want, &|step| progress.step(&step), cancel);
    progress.end();
    drop(working);
    let pulled = pulled?;
    say_result(&name, &pulled);
    if args.json {
        app.output.json(&json!({
            "name": name.clone().within(&pulled.folder).to_string(),
            "revision": name.revision_or_main(),
            "kind": pulled.kind,
            "commit": pulled.commit,
            "folder": pulled.folder,
            "path": pulled.path,
            "files": pulled.files,
            "bytes": pulled.bytes,
            "fetched_bytes": pulled.fetched_bytes,
            "left_out": pulled.left_out,
        }))?;
    } else {
        app.output.line(&pulled.path.display().to_string())?;
    }
    Ok(Status::Done)
}

impl PullArgs {
    /// True if the options ask for a certain bundle.
    fn narrows(&self) -> bool {
        self.arch.is_some()
            || self.variant.is_some()
            || self.manifest.is_some()
            || !self.include.is_empty()
    }
}

/// The repository of a model's published bundle.
fn published(entry: &Entry) -> Result<Name> {
    entry.bundles.first().map(|bundle| bundle.repository.clone()).ok_or_else(|| {
        let message = format!("{}: no bundle of it is published", entry.name);
        Error::new(ErrorKind::Usage, message)
            .hint(format!("qhx pull {} makes one for this machine", entry.name))
    })
}

/// Makes a model of the index ready.
fn ready(args: &PullArgs, models: &Models, app: &mut App) -> Result<Status> {
    let backend = BackendArgs { libraries: args.libraries.clone(), ..BackendArgs::default() };
    let path = obtain(&args.name, models, &backend, app)?;
    if args.json {
        let forms = models.forms(&args.name.to_ascii_lowercase());
        app.output.json(&json!({"name": args.name, "path": path, "forms": forms}))?;
    } else {
        app.output.line(&path.display().to_string())?;
    }
    Ok(Status::Done)
}

/// Which bundle is wanted. The libraries of a device are asked only where nothing is said.
fn want(args: &PullArgs, name: &Name) -> Want {
    let named = args.variant.is_some() || name.folder.is_some();
    let archs = match args.arch {
        Some(arch) => vec![arch],
        None if named => Vec::new(),
        None => {
            let runtime = Runtime::builder().libraries(args.libraries.files()).build();
            runtime.device_arch().map(hub::that_run_on).unwrap_or_default()
        }
    };
    let folder = args.variant.as_ref().map(|folder| folder.trim_end_matches('/').to_owned());
    Want { folder, archs, manifest: args.manifest.clone(), include: args.include.clone() }
}

/// Says what was fetched, and what to do with it.
pub(crate) fn say_result(name: &Name, pulled: &Pulled) {
    for path in &pulled.left_out {
        say!("note: {path} is a program and was not fetched");
    }
    let fetched = match pulled.fetched_bytes {
        0 => "it was there".to_owned(),
        bytes => format!("{} fetched", size(bytes)),
    };
    let name = name.clone().within(&pulled.folder);
    say!(
        "{name}: {} files, {}, {fetched}, commit {}",
        pulled.files,
        size(pulled.bytes),
        pulled.commit
    );
    if pulled.kind == Kind::Checkpoint {
        say!("it is a checkpoint: qhx forge {name} --out FOLDER makes a bundle of it");
    }
}
