//! Table of a release: each artefact, and how far it was started on the machine that made it.

use std::path::Path;

use crate::cargo::Result;
use crate::files::write;
use crate::kotlinc::at;

/// The file of the table in the folder of the packages.
const FILE: &str = "STARTED.md";

/// Rows of the table, in the order in which the artefacts were made.
#[derive(Debug, Default)]
pub(super) struct Report {
    rows: Vec<[String; 4]>,
}

impl Report {
    /// Adds an artefact that was made, with how far it was started.
    ///
    /// # Errors
    /// The artefact is not there.
    pub(super) fn made(&mut self, machine: &str, artefact: &Path, started: &str) -> Result<()> {
        let size = size(artefact)?;
        let name = artefact.file_name().unwrap_or_default().to_string_lossy();
        self.row([machine, &name, &size, started]);
        Ok(())
    }

    /// Adds a row: machine, artefact, size in MiB, and how far it was started.
    pub(super) fn row(&mut self, cells: [&str; 4]) {
        self.rows.push(cells.map(str::to_owned));
    }

    /// Adds an artefact that was not made, with the reason.
    pub(super) fn skipped(&mut self, machine: &str, artefact: &str, why: &str) {
        eprintln!("skipped: {artefact}: {why}");
        self.row([machine, artefact, "", &format!("skipped: {why}")]);
    }

    /// The table in Markdown, with columns as wide as their cells.
    fn table(&self) -> String {
        let head = ["machine", "artefact", "MiB", "started here"].map(str::to_owned);
        let width = |column: usize| {
            let cells = self.rows.iter().chain([&head]).map(|row| row[column].chars().count());
            cells.max().unwrap_or_default()
        };
        let rule = [0, 1, 2, 3].map(|column| "-".repeat(width(column)));
        let line = |row: &[String; 4]| {
            let cells = [0, 1, 2, 3].map(|column| {
                let (cell, width) = (&row[column], width(column));
                if column == 2 { format!("{cell:>width$}") } else { format!("{cell:width$}") }
            });
            format!("| {} |\n", cells.join(" | "))
        };
        [&head, &rule].into_iter().chain(&self.rows).map(line).collect()
    }

    /// Writes the table into the folder of the packages, and returns it.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn write(&self, out: &Path) -> Result<String> {
        let table = self.table();
        write(&out.join(FILE), &table)?;
        Ok(table)
    }
}

/// Size of a file, or of all files in a folder, in MiB.
fn size(path: &Path) -> Result<String> {
    fn bytes(path: &Path) -> std::io::Result<u64> {
        if !path.is_dir() {
            return Ok(path.metadata()?.len());
        }
        std::fs::read_dir(path)?.map(|entry| bytes(&entry?.path())).sum()
    }
    let bytes = bytes(path).map_err(at(path))?;
    Ok(format!("{:.2}", bytes as f64 / f64::from(1 << 20)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_what_was_made_and_what_was_not() {
        let out = tempfile::tempdir().unwrap();
        let zip = out.path().join("qhx.zip");
        std::fs::write(&zip, vec![0; 3 << 20]).unwrap();
        let mut report = Report::default();
        report.made("windows-arm64", &zip, "header checked only").unwrap();
        report.skipped("android-arm64", "archive", "no NDK");
        let table = report.write(out.path()).unwrap();
        assert_eq!(
            table,
            "\
| machine       | artefact |  MiB | started here        |
| ------------- | -------- | ---- | ------------------- |
| windows-arm64 | qhx.zip  | 3.00 | header checked only |
| android-arm64 | archive  |      | skipped: no NDK     |
"
        );
        assert_eq!(std::fs::read_to_string(out.path().join(FILE)).unwrap(), table);
        assert!(report.made("amd64", &out.path().join("none"), "ran").is_err());
    }
}
