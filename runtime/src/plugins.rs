//! The host-ops that there are, and the plugins that they come from.

use std::path::Path;

use qhx_base::Result;
use qhx_core::op::{OpDescription, OpEntry, OpProvider as _, OpSource};
use qhx_plugins::{Listed, PluginOptions, Plugins, interface_version, survey};
use serde::Serialize;

/// Host-ops and plugin files.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct PluginList {
    /// Version of the plugin interface that this program speaks.
    pub interface: &'static str,
    /// Host-ops that can be used, as far as is known without loading, by their names.
    pub ops: Vec<ListedOp>,
    /// Every plugin file, in the order in which they are searched.
    pub files: Vec<Listed>,
}

/// A host-op that can be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ListedOp {
    /// Its name.
    pub name: String,
    /// The plugin's file, or `builtin`.
    pub from: String,
}

/// Lists every host-op and every plugin file, without running any plugin's code.
///
/// ```
/// let list = qhx::plugins::list(&qhx::PluginOptions::default())?;
/// for file in &list.files {
///     println!("{}: {}", file.path.display(), file.status.name());
/// }
/// # Ok::<(), qhx::Error>(())
/// ```
///
/// # Errors
/// Errors of [`survey`].
pub fn list(options: &PluginOptions) -> Result<PluginList> {
    let builtin = Plugins::discover(&PluginOptions::default().no_plugins(true))?;
    let mut ops: Vec<_> = builtin
        .list()
        .into_iter()
        .map(|entry| ListedOp { name: entry.description.name, from: "builtin".to_owned() })
        .collect();
    let files = survey(options)?;
    for row in files.iter().filter(|row| row.status.is_usable()) {
        let own = row.ops.iter().filter(|op| !row.shadowed.contains(op));
        ops.retain(|op| !row.ops.contains(&op.name) || row.shadowed.contains(&op.name));
        ops.extend(
            own.map(|op| ListedOp { name: op.clone(), from: row.path.display().to_string() }),
        );
    }
    ops.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(PluginList { interface: interface_version(), ops, files })
}

/// A host-op, and where it comes from.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct DescribedOp {
    /// Description of the host-op.
    #[serde(flatten)]
    pub op: OpDescription,
    /// Origin of the host-op.
    pub source: OpSource,
}

/// The host-op of this name, or the host-ops of the plugin whose file has this name.
///
/// # Errors
/// When there is neither.
pub fn describe(plugins: &Plugins, name: &str) -> Result<Vec<DescribedOp>> {
    let by_file = |entry: &OpEntry| match &entry.source {
        OpSource::Plugin(path) => path.file_name().is_some_and(|file| file == name),
        OpSource::Builtin => false,
    };
    let mut entries: Vec<_> = plugins.list().into_iter().filter(by_file).collect();
    if entries.is_empty() {
        entries.push(plugins.find(name)?);
    }
    let described = |entry: OpEntry| DescribedOp { op: entry.description, source: entry.source };
    Ok(entries.into_iter().map(described).collect())
}

/// Sentence about other sources of a host-op whose plugin was just installed, and which of them is used. `None` if it
/// comes from nowhere else.
///
/// # Errors
/// Errors of [`survey`].
pub fn rivals(op: &str, installed: &Path, options: &PluginOptions) -> Result<Option<String>> {
    let mut options = options.clone();
    // Those of this call alone decide nothing for later ones.
    options.files.clear();
    options.dirs.clear();
    let with: Vec<_> =
        survey(&options)?.into_iter().filter(|row| row.ops.iter().any(|o| o == op)).collect();
    let used = with.iter().find(|row| !row.shadowed.iter().any(|o| o == op)).map(|row| &row.path);
    let used = match used {
        Some(path) if path == installed => {
            let others = with.iter().filter(|row| row.path != installed && row.status.is_usable());
            let others: Vec<_> = others.map(|row| row.path.display().to_string()).collect();
            let note = format!(
                "host-op {op} comes from this plugin now, and no longer from {}; qhx plugins list \
                 shows the order",
                others.join(", ")
            );
            return Ok((!others.is_empty()).then_some(note));
        }
        Some(path) => path.display().to_string(),
        None => "the program, in which it is linked".to_owned(),
    };
    Ok(Some(format!(
        "host-op {op} still comes from {used}, which is searched before this plugin; qhx plugins \
         list shows the order"
    )))
}
