//! `qhx pull`: fetches a bundle or a checkpoint from a hub.

use clap::Args;
use qhx::Runtime;
use qhx::hub::{self, Hub, HubOptions, Kind, Name, Pulled, Want};
use qhx_base::Result;
use serde_json::json;

use crate::Status;
use crate::app::App;
use crate::args::{LibraryArgs, parse_arch};
use crate::commands::inspect::size;
use crate::progress::PullProgress;

const EXAMPLES: &str = "\
Examples:
  qhx pull owner/qwen35_HNPU
  qhx pull owner/qwen35_HNPU@v1.2 --arch v81
  qhx pull owner/qwen35_HNPU --variant v81-w8
  qhx pull owner/qwen35_HNPU/v81-w8                      # the same
  qhx pull Qwen/Qwen3.5-0.8B && qhx forge Qwen/Qwen3.5-0.8B --out qwen35/v81
  qhx generate owner/qwen35_HNPU 'The capital of France is'";

/// Fetch a bundle from a hub, or a checkpoint
///
/// Takes one bundle of the repository: that of --arch or --variant, by default that of this
/// device's architecture or the newest that it runs. It lands in the cache of the hub's own tools
/// (HF_HOME), and every command that takes a bundle takes its name. An interrupted download goes
/// on where it ended; every file is compared with its hash. Prints the folder.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PullArgs {
    /// The repository: OWNER/NAME, with @REVISION for a branch, tag or commit, and /FOLDER for a bundle in it
    #[arg(value_name = "NAME")]
    pub name: Name,
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
    pub libraries: LibraryArgs,
}

/// Runs the command.
pub(crate) fn run(args: &PullArgs, app: &mut App) -> Result<Status> {
    let hub = Hub::new(HubOptions::from_environment()?);
    let want = want(args);
    let progress = PullProgress::new(&args.name);
    let working = app.interrupts.working();
    let cancel = app.interrupts.token();
    let pulled = hub::pull(&hub, &args.name, &want, &|step| progress.step(&step), cancel);
    progress.end();
    drop(working);
    let pulled = pulled?;
    say_result(&args.name, &pulled);
    if args.json {
        app.output.json(&json!({
            "name": args.name.clone().within(&pulled.folder).to_string(),
            "revision": args.name.revision_or_main(),
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

/// Which bundle is wanted. The libraries of a device are asked only where nothing is said.
fn want(args: &PullArgs) -> Want {
    let named = args.variant.is_some() || args.name.folder.is_some();
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
