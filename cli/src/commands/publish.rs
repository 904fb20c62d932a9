//! `qhx publish`: puts a bundle into a repository of a hub.

use std::cell::RefCell;
use std::path::PathBuf;

use clap::Args;
use indicatif::{HumanBytes, ProgressBar};
use qhx::hub::{Hub, HubOptions, Name, UploadProgress};
use qhx_base::Result;
use qhx_terminal::progress::{style, waiting};
use qhx_tools::publish::{PublishOptions, publication};

use crate::Status;
use crate::app::App;
use crate::commands::inspect::size;

const SENT: &str = "{msg} [{bar:30}] {bytes} / {total_bytes} {bytes_per_sec}, left {eta}";

const EXAMPLES: &str = "\
Examples:
  qhx publish qwen35/v81 owner/qwen35_HNPU --license apache-2.0 --base-model Qwen/Qwen3.5-0.8B
  qhx publish qwen35 owner/qwen35_HNPU               # v73, v79 and v81 in one commit
  qhx publish small/v81 owner/qwen35_HNPU --variant v81-w4
  qhx run owner/qwen35_HNPU";

/// Publish a bundle: files in a folder for each architecture, with a model card
///
/// HF_TOKEN has to be a token that may write. The repository is made if it is not there. Contents that the hub's
/// storage has are not sent again: after an interruption the same command goes on with the files that are missing. All
/// files become visible in one commit.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PublishArgs {
    /// The bundle, or a folder with bundles for several architectures
    #[arg(value_name = "BUNDLE")]
    pub bundle: PathBuf,
    /// The repository: OWNER/NAME, with @BRANCH for another branch than main
    #[arg(value_name = "NAME")]
    pub name: Name,
    /// Licence of the base model, by its SPDX identifier [default: that of the index]
    #[arg(long, value_name = "ID")]
    pub license: Option<String>,
    /// Repository of the checkpoint [default: the one that the bundle was made of]
    #[arg(long, value_name = "OWNER/NAME")]
    pub base_model: Option<String>,
    /// Folder of the bundle in the repository, such as v81-w4 [default: its architecture]
    #[arg(long, value_name = "FOLDER")]
    pub variant: Option<String>,
    /// Make a private repository, if it is not there
    #[arg(long)]
    pub private: bool,
    /// Print the model card and send nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &PublishArgs, app: &mut App) -> Result<Status> {
    let options = PublishOptions {
        license: args.license.clone(),
        base_model: args.base_model.clone(),
        variant: args.variant.clone(),
        private: args.private,
    };
    let working = app.interrupts.working();
    let cancel = app.interrupts.token().clone();
    let publication = publication(&args.bundle, &args.name, &options, &cancel)?;
    if args.dry_run {
        for text in publication.texts.values() {
            app.output.write(text)?;
        }
        return Ok(Status::Done);
    }
    let shown = RefCell::new(waiting("hashing"));
    let hub = Hub::new(HubOptions::from_environment()?);
    let published = hub.publish(&publication, &|step| show(&shown, &args.name, &step), &cancel);
    shown.borrow().finish_and_clear();
    drop(working);
    let published = published?;
    if args.json {
        app.output.json(&published)?;
    } else {
        say!(
            "{}: {} files, {}, {} sent, commit {}",
            published.repository,
            published.files,
            size(published.bytes),
            size(published.sent),
            published.commit
        );
        app.output.line(&published.url)?;
    }
    Ok(Status::Done)
}

fn show(shown: &RefCell<ProgressBar>, name: &Name, step: &UploadProgress<'_>) {
    let bar = shown.borrow().clone();
    match step {
        UploadProgress::Begin { files, bytes } => {
            bar.finish_and_clear();
            say!("publishing {name}: {files} files, {}", HumanBytes(*bytes));
            let bar = ProgressBar::new(*bytes).with_style(style(SENT));
            bar.set_message(name.to_string());
            shown.replace(bar);
        }
        UploadProgress::Kept(bytes) => {
            bar.inc(*bytes);
            bar.reset_eta();
        }
        UploadProgress::Sent(bytes) => bar.inc(*bytes),
        UploadProgress::Retry { path, error, wait } => bar.suspend(|| {
            say!("{path}: {error}; again in {:.1} s", wait.as_secs_f64());
        }),
        _ => {}
    }
}
